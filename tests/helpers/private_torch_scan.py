"""Finds the private symbols of torch that Python source uses, and what of torch it replaces.

``pipec.torch_compat.private_symbols`` says which symbols are private. A path is cut after the first part that
is not a module, unless a later one is private. A module counts by what is used of it::

    from torch.utils._pytree import tree_map      torch.utils._pytree.tree_map
    Unsupported.msg                               torch._dynamo.exc.Unsupported
    storage._cdata                                *._cdata, of an object whose class the source does not say
    getattr(module, f"_global_{kind}")            torch.nn.modules.module._global_*

Replaced is whatever of torch is assigned, public or not, at its whole path; ``setattr(Tensor, name, ...)``
replaces ``torch.Tensor.*``. Names inside files that torch writes, and those that ``mark_dynamic`` leaves in
``vars(tensor)``, do not count.
"""

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
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
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as module) if _is_torch(module):
                for alias in node.names:
                    yield from _of_path(f"{module}.{alias.name}", node.lineno)
            case ast.Attribute() if node not in inner:
                root, parts = _chain(node)
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
                root, parts = _chain(first)
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
                root, parts = _chain(value)
                if isinstance(root, ast.Name) and root.id in names:
                    names.setdefault(name, ".".join([names[root.id], *parts]))
    return names


def _chain(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """``a.b.c`` as the node of ``a``, and ["b", "c"]."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return node, parts


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


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
    count = len(parts)
    while not _is_module(".".join(parts[:count])):
        count -= 1
    if is_public(path) or count == len(parts) or parts[count].startswith("__"):
        return ""
    last = max([count, *(k for k, each in enumerate(parts) if _is_private(each))])
    return ".".join(parts[: last + 1])


def _is_module(name: str) -> bool:
    with contextlib.suppress(ImportError):
        return bool(importlib.import_module(name))
    return False


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
