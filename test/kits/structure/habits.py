"""Habits that hide faults: broad except, probing for attributes, mixins, ambient state, scattered environment reads, undeclared slower paths."""
import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from kits.structure.floors import called_name, imports
from kits.structure.source import Source, Violation

BROAD = {"Exception", "BaseException"}
PROBES = {"AttributeError", "ImportError", "ModuleNotFoundError"}
#: (module, function) -> why everything must be caught there.
ALLOWED_BROAD: dict[tuple[str, str], str] = {}
ENVIRONMENT_MODULE = "sglane.environ"

Finding = tuple[int, str]


def check_habits(sources: Sequence[Source]) -> list[Violation]:
    """All habit rules over every file."""
    rules: tuple[Callable[[Source], Iterator[Finding]], ...] = (broad_excepts, probes, mixins, ambient_state, environment_reads)
    return [Violation(source.path, line, what) for source in sources for rule in rules for line, what in rule(source)]


def broad_excepts(source: Source, allowed: Mapping[tuple[str, str], str] = ALLOWED_BROAD) -> Iterator[Finding]:
    """`except:`, `except Exception`, `suppress(Exception)`, and excepts that probe; fine if the handler ends with `raise`."""
    for function, node in with_function(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = names_in(node.type) if node.type else {"everything"}
            wrong = caught & (BROAD | PROBES | {"everything"})
            if wrong and not isinstance(node.body[-1], ast.Raise) and (source.module, function) not in allowed:
                yield node.lineno, f"except {', '.join(sorted(wrong))} without raising again (in {function})"
        elif isinstance(node, ast.Call) and called_name(node) == "suppress":
            wrong = set().union(*(names_in(argument) for argument in node.args)) & (BROAD | PROBES)
            if wrong:
                yield node.lineno, f"suppress({', '.join(sorted(wrong))})"


def probes(source: Source) -> Iterator[Finding]:
    """hasattr, getattr with a default, setattr, delattr, object.__setattr__, __dict__: a thing is there by construction, or it is a bug."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = called_name(node)
            plain = isinstance(node.func, ast.Name)
            if plain and (name in ("hasattr", "setattr", "delattr") or (name == "getattr" and len(node.args) > 2)):
                yield node.lineno, f"{name}() probes or writes an attribute by name"
            elif name == "__setattr__":
                yield node.lineno, "__setattr__ goes around the owner of a field"
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            yield node.lineno, "__dict__ goes around the owner of a field"


def mixins(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and "mixin" in node.name.lower():
            yield node.lineno, f"{node.name}: compose instead of mixing in"


def ambient_state(source: Source) -> Iterator[Finding]:
    """`global` statements, context variables, thread locals."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
    for line, target in imports(source):
        if target.split(".")[0] == "contextvars" or target == "threading.local":
            yield line, f"{target}: pass it instead"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.local":
            yield node.lineno, "threading.local: pass it instead"


def environment_reads(source: Source) -> Iterator[Finding]:
    """The environment is read in one module, once. (Handing a copy of it to a child process is no read.)"""
    if source.module == ENVIRONMENT_MODULE:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "os.environ":
            yield node.lineno, f"{ast.unparse(node)}: read it in {ENVIRONMENT_MODULE}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            yield node.lineno, f"{ast.unparse(node)}: read it in {ENVIRONMENT_MODULE}"


def check_fallbacks(sources: Sequence[Source], declared: Mapping[str, str]) -> list[Violation]:
    """Each counted fallback is declared and each declared one is counted somewhere; names are literals."""
    violations, used = [], set()
    for source in sources:
        direct = any(target == "sglane.utils.fallback.count" for _, target in imports(source))
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            if not (text.endswith("fallback.count") or (direct and text == "count")):
                continue
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if name is None:
                violations.append(Violation(source.path, node.lineno, "a fallback is counted under a name that is not a literal"))
            elif name not in declared:
                violations.append(Violation(source.path, node.lineno, f"fallback '{name}' is not declared"))
            used.add(name)
    violations += [Violation("python/sglane/utils/fallback.py", 1, f"fallback '{name}' is declared but never taken") for name in set(declared) - used]
    return violations


def with_function(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name of the innermost function around it (`<module>` outside)."""
    pending: list[tuple[str, ast.AST]] = [("<module>", tree)]
    while pending:
        function, node = pending.pop()
        yield function, node
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        pending.extend((inside, child) for child in ast.iter_child_nodes(node))


def names_in(node: ast.expr) -> set[str]:
    """Last parts of the exception names in an except clause."""
    return {item.attr if isinstance(item, ast.Attribute) else item.id for item in ast.walk(node) if isinstance(item, ast.Name | ast.Attribute)}
