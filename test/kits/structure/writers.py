"""One writer: a field is assigned only by its own class. Everybody else calls a verb.

Checked on every store and on calls that change a container in place:
    self.x = 1            fine
    request.x = 1         refused: somebody else's field
    self.request.x = 1    refused: still somebody else's
    request.x[0] = 1, request.x.append(1)    refused
A file may write the fields of classes that it defines itself: a tree and its nodes, a queue and its entries.
"""
import ast
from collections.abc import Iterator, Sequence

from kits.structure.budgets import attributes_of
from kits.structure.source import Source, Violation

MUTATORS = {"append", "extend", "insert", "remove", "pop", "popleft", "appendleft", "clear", "update", "add", "discard", "setdefault"}
#: (module, expression) -> why somebody else's field is written there.
ALLOWED: dict[tuple[str, str], str] = {
    ("sglane.entrypoints.http_server", "response.headers"): "the web framework's way to add a header",
}


def check_one_writer(sources: Sequence[Source], allowed: dict[tuple[str, str], str] | None = None) -> list[Violation]:
    """Stores to fields of other objects, unless the field belongs to a class of the same file or is on the allow list."""
    allowed = ALLOWED if allowed is None else allowed
    violations, used = [], set()
    for source in sources:
        own = set().union(*(attributes_of(node) | slots_of(node) for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)))
        foreign = imported_names(source.tree)
        for written in written_attributes(source.tree):
            if belongs_to_self(written) or written.attr in own or root_name(written) in foreign:
                continue
            expression = ast.unparse(written)
            if (source.module, expression) in allowed:
                used.add((source.module, expression))
                continue
            violations.append(Violation(source.path, written.lineno, f"{expression} is written from outside its class"))
    known = {source.module for source in sources}
    violations += [Violation(module, 0, f"{name} is on the allow list but is not written") for module, name in set(allowed) - used if module in known]
    return violations


def written_attributes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, deleted, assigned into by index, or changed by a mutating method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            holder = unsubscripted(node)
            if isinstance(holder, ast.Attribute):
                yield holder
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            holder = unsubscripted(node.func.value)
            if isinstance(holder, ast.Attribute):
                yield holder


def unsubscripted(node: ast.expr) -> ast.expr:
    """`a.b` of `a.b[0][1]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def belongs_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def root_name(node: ast.expr) -> str:
    """`a` of `a.b[0].c`; empty if it starts with a call or the like."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def imported_names(tree: ast.Module) -> set[str]:
    """Names bound by imports from outside the package: settings of libraries are not anybody's fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "sglane":
            names.update(alias.asname or alias.name for alias in node.names)
    return names - {"sglane"}


def slots_of(node: ast.ClassDef) -> set[str]:
    """Names in the class's `__slots__`."""
    for item in node.body:
        if isinstance(item, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__slots__" for target in item.targets):
            return {constant.value for constant in ast.walk(item.value) if isinstance(constant, ast.Constant) and isinstance(constant.value, str)}
    return set()
