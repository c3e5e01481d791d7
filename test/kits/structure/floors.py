"""Imports go down only, and the three towers never meet above `plan`.

    9            launch_server
    3..7  front: observability < entrypoints | planner: mem_cache < managers | executor: distributed < forward < layers < models < model_executor
    2            server_args
    1            plan, configs
    0            utils, environ

Typing-only imports, imports inside functions and `import_module("...")` count like any other.
"""
import ast
from collections import deque
from collections.abc import Iterator, Sequence

from kits.structure.source import Source, Violation

PACKAGE = "sglane"
FLOORS = {
    "environ": 0, "utils": 0,
    "plan": 1, "configs": 1,
    "server_args": 2,
    "observability": 3, "entrypoints": 4,
    "mem_cache": 3, "managers": 4,
    "distributed": 3, "forward": 4, "layers": 5, "models": 6, "speculative": 7, "model_executor": 8,
    "launch_server": 9,
}
TOWERS = {
    "observability": "front", "entrypoints": "front",
    "mem_cache": "planner", "managers": "planner",
    "distributed": "executor", "forward": "executor", "layers": "executor", "models": "executor", "speculative": "executor",
    "model_executor": "executor",
}
#: What the planner's processes must never load, directly or through another module of ours.
HEAVY = ("torch", "transformers")


def check_floors(sources: Sequence[Source]) -> list[Violation]:
    """Every import inside the package goes to a lower floor, or stays in its own folder and is free to."""
    violations = []
    for source in sources:
        unit = unit_of(source.module)
        if unit == "":
            continue
        if unit not in FLOORS:
            violations.append(Violation(source.path, 1, f"'{unit}' has no floor; give it one in {__name__}"))
            continue
        for line, target in imports(source):
            other = unit_of(target) if target.split(".")[0] == PACKAGE else ""
            if other in ("", unit):
                continue
            reason = refusal(unit, other)
            if reason:
                violations.append(Violation(source.path, line, f"{unit} imports {target}: {reason}"))
    return violations


def refusal(unit: str, other: str) -> str:
    """Why `unit` may not import `other`; empty if it may."""
    if other not in FLOORS:
        return f"'{other}' has no floor"
    tower, other_tower = TOWERS.get(unit), TOWERS.get(other)
    if tower and other_tower and tower != other_tower:
        return f"the {tower} and the {other_tower} meet only in plan"
    if FLOORS[other] >= FLOORS[unit]:
        return f"floor {FLOORS[other]} is not below floor {FLOORS[unit]}"
    return ""


def check_planner_is_light(sources: Sequence[Source]) -> list[Violation]:
    """Nothing that the planner tower reaches through our own modules imports torch or transformers."""
    by_module = {source.module: source for source in sources}
    queue = deque(source for source in sources if TOWERS.get(unit_of(source.module)) == "planner")
    seen = {source.module for source in queue}
    violations = []
    while queue:
        source = queue.popleft()
        for line, target in imports(source):
            if target.split(".")[0] in HEAVY:
                violations.append(Violation(source.path, line, f"the planner's processes would load {target}"))
            module = target if target in by_module else target.rpartition(".")[0]
            if module in by_module and module not in seen:
                seen.add(module)
                queue.append(by_module[module])
    return violations


def unit_of(module: str) -> str:
    """`sglane.mem_cache.radix_key` -> `mem_cache`; empty for the package itself and for anything outside it."""
    head, _, rest = module.partition(".")
    return rest.split(".")[0] if head == PACKAGE else ""


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, wherever in the file; `from a import b` gives `a.b`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(source, node)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value
            elif isinstance(first, ast.JoinedStr) and first.values and isinstance(first.values[0], ast.Constant):
                yield node.lineno, str(first.values[0].value).rstrip(".")


def absolute(source: Source, node: ast.ImportFrom) -> str:
    """The dotted name before `import` in a from-import, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    keep = len(parts) - node.level + (1 if source.is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def called_name(node: ast.Call) -> str:
    """`f` of `f(...)` and of `a.b.f(...)`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
