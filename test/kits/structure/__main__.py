"""Run every rule over the repository: `python -m kits.structure`. Exit code 1 if one is broken."""
import sys
from collections.abc import Callable

from kits.structure.budgets import check_budgets
from kits.structure.floors import check_floors, check_planner_is_light
from kits.structure.habits import check_fallbacks, check_habits
from kits.structure.source import Violation, all_sources, engine_sources
from kits.structure.words import check_words, repository_texts
from kits.structure.writers import check_one_writer
from sglane.utils.fallback import DECLARED

RULES: dict[str, Callable[[], list[Violation]]] = {
    "floors": lambda: check_floors(engine_sources()),
    "planner without torch": lambda: check_planner_is_light(engine_sources()),
    "budgets": lambda: check_budgets(all_sources()),
    "one writer": lambda: check_one_writer(engine_sources()),
    "habits": lambda: check_habits(engine_sources()),
    "fallbacks": lambda: check_fallbacks(engine_sources(), DECLARED),
    "words": lambda: check_words(repository_texts()),
}


def main() -> int:
    num_broken = 0
    for name, rule in RULES.items():
        violations = sorted(rule())
        num_broken += len(violations)
        print(f"{name}: {'ok' if not violations else f'{len(violations)} broken'}")
        for violation in violations:
            print(f"  {violation}")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
