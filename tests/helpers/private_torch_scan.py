"""Finds the private symbols of torch that Python source uses, and what of torch it replaces.

Private is a dotted path of torch with a part that begins with one underscore. It is cut after the first part
that is not a module, unless a later one is private. A module counts by what is used of it::

    from torch.utils._pytree import tree_map      torch.utils._pytree.tree_map
    Unsupported.msg                               torch._dynamo.exc.Unsupported
    storage._cdata                                *._cdata, of an object whose class the source does not say
    getattr(module, f"_global_{kind}")            torch.nn.modules.module._global_*

Replaced is whatever of torch is assigned, public or not, at its whole path; ``setattr(Tensor, name, ...)``
replaces ``torch.Tensor.*``.

Not private, by decision:

* ``torch._dynamo.config``, ``torch._dynamo.mark_dynamic``, ``torch._functorch.config``,
  ``torch._inductor.config`` and ``torch._check``, which torch documents or tells users to set;
* the Python names of operators, such as ``torch._foreach_add_``, ``tensor._version`` or
  ``torch.ops.aten._softmax``: graphs are made of them;
* ``_modules``, ``_parameters`` and ``_buffers`` of a module, which every library reads that saves models;
* names inside files that torch writes, and those that ``mark_dynamic`` leaves in ``vars(tensor)``.

``python tests/helpers/private_torch_scan.py [folder]`` prints what it finds.
"""

import ast
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

PUBLIC = (
    *("torch._dynamo.config", "torch._dynamo.mark_dynamic", "torch._functorch.config"),
    *("torch._inductor.config", "torch._check"),
)
PUBLIC_FIELDS = frozenset({"_modules", "_parameters", "_buffers"})
_READERS = frozenset({"getattr", "hasattr"})
_WRITERS = frozenset({"setattr", "delattr", "object", "_replaced"})


class Use(NamedTuple):
    symbol: str
    line: int
    is_replaced: bool = False


def uses(source: str) -> Iterator[Use]:
    """The private symbols of torch in a file, each with its line, and whether the file assigns it."""
    nodes = [*ast.walk(ast.parse(source))]
    names = _torch_names(nodes)
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    inner: set[ast.AST] = set()
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as module) if _is_torch(module):
                for alias in node.names:
                    yield from _of_path(f"{module}.{alias.name}", node.lineno)
            case ast.Attribute() if node not in inner:
                root, parts, within = _chain(node)
                inner |= within
                if isinstance(root, ast.Name) and root.id in names:
                    path = ".".join([names[root.id], *parts])
                    yield from _of_path(path, node.lineno)
                    if not isinstance(node.ctx, ast.Load):
                        yield Use(path, node.lineno, is_replaced=True)
                    continue
                if isinstance(root, ast.Name) and root.id in ("self", "cls"):
                    parts = parts[1:]
                is_inherited = isinstance(root, ast.Call) and _last_name(root.func) == "super"
                for part in parts:
                    if part not in own or is_inherited:
                        yield from _of_field(part, node.lineno)
            case ast.Call(func=called, args=[first, second, *_]) if _last_name(called) in _READERS | _WRITERS:
                root, parts, _ = _chain(first)
                if isinstance(root, ast.Name) and root.id in names:
                    path = ".".join([names[root.id], *parts, _text(second)])
                    yield from _of_path(path, node.lineno)
                    if _last_name(called) in _WRITERS:
                        yield Use(path, node.lineno, is_replaced=True)
            case ast.Constant(value=str() as text) if re.fullmatch(r"torch(\.\w+)*\.\w*[a-zA-Z]", text):
                yield from _of_path(text, node.lineno)
            case ast.Constant(value=str() as text):
                yield from _of_field(text, node.lineno)


def _torch_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What of torch the names of a file refer to: imported, or assigned from a dotted name."""
    names = dict[str, str]()
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    if _is_torch(alias.name):
                        names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str() as module) if _is_torch(module):
                names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Attribute() as value)
            ):
                root, parts, _ = _chain(value)
                if isinstance(root, ast.Name) and root.id in names:
                    names.setdefault(name, ".".join([names[root.id], *parts]))
    return names


def _chain(node: ast.expr) -> tuple[ast.expr, list[str], set[ast.AST]]:
    """``a.b.c`` as the node of ``a``, ["b", "c"], and the inner attributes, here that of ``a.b``."""
    parts, inner = list[str](), set[ast.AST]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
        inner.add(node)
    return node, parts[::-1], inner


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """A string; or how it begins and a star: ``f"_global_{kind}"`` is ``_global_*``, a name ``*``."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str() as beginning), *_]):
            return f"{beginning}*"
    return "*"


def _is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


@functools.cache
def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and not hasattr(torch.ops.aten, part)


def _of_path(path: str, line: int) -> Iterator[Use]:
    path = shortened(path.removesuffix(".*"))
    if path and not is_public(path):
        yield Use(path, line)


def is_public(path: str) -> bool:
    """Whether no part of a dotted path is private."""
    named = any(path == each or path.startswith(f"{each}.") for each in PUBLIC)
    return named or not any(map(_is_private, path.split(".")))


def _of_field(name: str, line: int) -> Iterator[Use]:
    if _is_private(name) and name in fields() - PUBLIC_FIELDS:
        yield Use(f"*.{name}", line)


@functools.cache
def shortened(path: str) -> str:
    """A path up to the first part that is no module, or to the last that is private; empty for a module."""
    parts = path.split(".")
    if is_public(path):
        return ""
    current: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 1):
        try:
            current = _member(current, part)
        except (AttributeError, ImportError):
            return path
        if not isinstance(current, types.ModuleType):
            last = max([place, *(k for k, each in enumerate(parts) if _is_private(each))])
            return "" if part.startswith("__") else ".".join(parts[: last + 1])
    return ""


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, types.ModuleType) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


@functools.cache
def fields() -> frozenset[str]:
    """The private attributes of the objects of torch that scripts meet."""
    module = nn.Linear(1, 1)
    parameter = module.weight
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(node)
    function = (parameter * 2).grad_fn
    optimizer = torch.optim.SGD([parameter], 0.1)
    operator = torch.ops.aten.add.Tensor
    objects: list[Any] = [
        *(module, parameter, parameter.untyped_storage(), function, optimizer, graph, node),
        *(fx.GraphModule(module, graph), operator, operator.overloadpacket, torch.Generator()),
        *(torch.distributed.ProcessGroup, torch.SymInt, torch.jit.ScriptModule, torch.utils.data.DataLoader),
        *(SymNode, ShapeEnv()),
    ]
    return frozenset(name for each in objects for name in dir(each) if _is_private(name))


if __name__ == "__main__":
    found = dict[str, list[str]]()
    for path in sorted(Path(*sys.argv[1:] or ["pipec"]).rglob("*.py")):
        for use in uses(path.read_text()):
            found.setdefault(use.symbol, []).append(f"{path}:{use.line}{' replaced' * use.is_replaced}")
    for symbol, places in sorted(found.items()):
        print(symbol, *places, sep="\n    ")
    print(len(found), "symbols")
