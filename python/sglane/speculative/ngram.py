class PromptLookup:
    def __init__(self, a, b, c): pass
