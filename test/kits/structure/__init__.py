"""Rules of the house, checked on syntax trees: floors, budgets, one writer, habits, words.

Each rule is a function from sources to a list of violations, so that a test can feed it a bad snippet. All rules over the whole
repository: `python -m kits.structure`.
"""
