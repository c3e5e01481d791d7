"""Size limits: what does not fit has more than one job."""
import ast
from collections.abc import Iterator, Sequence

from kits.structure.floors import called_name
from kits.structure.source import Source, Violation

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_ARGUMENTS = 8
MAX_CLASS_ATTRIBUTES = 20
#: Classes that only carry data have as many fields as their data: not counted.
DATA_BASES = {"Struct", "BaseModel", "NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Protocol"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_budgets(sources: Sequence[Source]) -> list[Violation]:
    """Lines per file and function; arguments and attributes per class."""
    data_classes = names_of_data_classes(sources)
    violations = []
    for source in sources:
        num_lines = source.text.count("\n")
        if num_lines > MAX_FILE_LINES:
            violations.append(Violation(source.path, num_lines, f"{num_lines} lines, at most {MAX_FILE_LINES}"))
        for node in ast.walk(source.tree):
            if isinstance(node, Function):
                num_lines = function_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    violations.append(Violation(source.path, node.lineno, f"{node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"))
            elif isinstance(node, ast.ClassDef) and node.name not in data_classes:
                violations += [Violation(source.path, node.lineno, what) for what in class_excess(node)]
    return violations


def class_excess(node: ast.ClassDef) -> Iterator[str]:
    """What is too much about a class, in words."""
    for item in node.body:
        if isinstance(item, Function) and item.name == "__init__":
            num_arguments = len(argument_names(item)) - 1
            if num_arguments > MAX_CONSTRUCTOR_ARGUMENTS:
                yield f"{node.name}: constructor takes {num_arguments} arguments, at most {MAX_CONSTRUCTOR_ARGUMENTS}"
    num_attributes = len(attributes_of(node))
    if num_attributes > MAX_CLASS_ATTRIBUTES:
        yield f"{node.name}: {num_attributes} attributes, at most {MAX_CLASS_ATTRIBUTES}"


def function_lines(node: Function) -> int:
    """Lines from `def` to the end, docstring included, decorators not."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def argument_names(node: Function) -> list[str]:
    arguments = node.args
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
    return [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names declared in the class body or assigned to `self` in a method."""
    names = set()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names.update(target.id for target in item.targets if isinstance(target, ast.Name))
    for item in ast.walk(node):
        stored = isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if stored and isinstance(item.value, ast.Name) and item.value.id == "self":
            names.add(item.attr)
    return names - {"__slots__"}


def names_of_data_classes(sources: Sequence[Source]) -> set[str]:
    """Dataclasses, structs and their like, and everything that inherits from one of them."""
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    found = {node.name for node in classes if "dataclass" in map(decorator_name, node.decorator_list)}
    while True:
        more = {node.name for node in classes if DATA_BASES.union(found).intersection(map(base_name, node.bases))} - found
        if not more:
            return found
        found |= more


def decorator_name(node: ast.expr) -> str:
    return called_name(node) if isinstance(node, ast.Call) else base_name(node)


def base_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return base_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
