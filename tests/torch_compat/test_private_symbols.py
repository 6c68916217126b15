"""The table of private symbols of torch: each is in the installed torch and in use, and no other is used.

A path is cut after the first part that is not a module, unless a later one is private::

    from torch.utils._pytree import tree_map      torch.utils._pytree.tree_map
    storage._cdata                                *._cdata, of an object of any class
"""

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipec.errors import UnsupportedTorchError
from pipec.torch_compat import private_symbols
from pipec.torch_compat.private_symbols import REPLACED, SYMBOLS, Symbol, require, resolve

ROOT = Path(__file__).parents[2]
HOME = ROOT / "pipec" / "torch_compat"

PUBLIC = (
    *("torch._dynamo.config", "torch._dynamo.mark_dynamic", "torch._functorch.config"),
    *("torch._inductor.config", "torch._check"),
)


def uses(source: str) -> Iterator[tuple[str, int]]:
    """The private symbols of torch in a file, each with its line."""
    nodes = [*ast.walk(ast.parse(source))]
    names, own = torch_names(nodes), {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    yield from ((cut(path), each.lineno) for each, path in _imported(nodes) if cut(path))
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                root, _, path = ast.unparse(node).partition(".")
                if root in names:
                    found = cut(f"{names[root]}.{path}")
                else:
                    owner = ast.unparse(node.value)
                    is_own = owner in ("self", "cls") or (name in own and owner != "super()")
                    found = "" if is_own else _field(name)
            case ast.Constant(value=str() as text):
                found = cut(text) if re.fullmatch(r"torch(\.\w+)*\.\w*[a-zA-Z]", text) else _field(text)
            case _:
                continue
        if found:
            yield found, node.lineno


def replaced(source: str) -> Iterator[str]:
    """What of torch a file assigns, public or not."""
    nodes = [*ast.walk(ast.parse(source))]
    names = torch_names(nodes)
    for node in nodes:
        match node:
            case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
                name = node.attr
            case ast.Call(args=[owner, written, *_]) if _writes(node.func):
                name = str(written.value) if isinstance(written, ast.Constant) else "*"
            case _:
                continue
        root, _, path = ast.unparse(owner).partition(".")
        if root in names:
            yield ".".join(filter(None, (names[root], path, name)))


def _writes(called: ast.expr) -> bool:
    """Whether a function sets an attribute: ``mock.patch.object`` does, and ``_replaced`` of pipec."""
    return ast.unparse(called).rpartition(".")[2] in ("setattr", "delattr", "object", "_replaced")


def torch_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The paths in torch that names of a file stand for."""
    modules = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names = {each.asname: each.name for each in modules if each.asname and _is_torch(each.name)}
    return {"torch": "torch"} | names | {each.asname or each.name: path for each, path in _imported(nodes)}


def _imported(nodes: Sequence[ast.AST]) -> list[tuple[ast.alias, str]]:
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and _is_torch(node.module or "")]
    return [(each, f"{node.module}.{each.name}") for node in imports for each in node.names]


def _is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


@functools.cache
def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and not hasattr(torch.ops.aten, part)


def is_public(path: str) -> bool:
    """Whether no part of a dotted path is private."""
    named = any(path == each or path.startswith(f"{each}.") for each in PUBLIC)
    return named or not any(map(_is_private, path.split(".")))


def _field(name: str) -> str:
    return f"*.{name}" if _is_private(name) and name in fields() else ""


@functools.cache
def cut(path: str) -> str:
    """A path up to the first part that is no module, or to the last private one; empty if it is public."""
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
    operator = torch.ops.aten.add.Tensor
    objects: list[Any] = [
        *(module, parameter, parameter.untyped_storage(), (parameter * 2).grad_fn, graph, node),
        *(torch.optim.SGD([parameter], 0.1), fx.GraphModule(module, graph), operator),
        *(operator.overloadpacket, torch.Generator(), torch.SymInt, SymNode, ShapeEnv()),
        *(torch.distributed.ProcessGroup, torch.jit.ScriptModule, torch.utils.data.DataLoader),
    ]
    found = {name for each in objects for name in dir(each) if _is_private(name)}
    return frozenset(found - {"_modules", "_parameters", "_buffers"})


def sources() -> dict[Path, str]:
    """The files of pipec, without the table."""
    paths = set((ROOT / "pipec").rglob("*.py")) - {HOME / "private_symbols.py"}
    return {path: path.read_text(encoding="utf-8") for path in paths}


def private(in_home: bool) -> dict[str, str]:
    """The private symbols that torch_compat uses, or all else of pipec, each with a place."""
    return {
        symbol: f"{path.relative_to(ROOT)}:{line}"
        for path, source in sources().items()
        if (HOME in path.parents) == in_home
        for symbol, line in uses(source)
    }


def field_of(symbol: Symbol) -> str:
    return f"*.{symbol.name.rpartition('.')[2]}"


@pytest.mark.parametrize("symbol", [*SYMBOLS, *REPLACED], ids=lambda symbol: symbol.name)
def test_the_installed_torch_has_it(symbol: Symbol) -> None:
    resolve(symbol.name)


def test_every_symbol_is_in_the_table_and_every_row_is_used() -> None:
    used = private(in_home=True)
    listed = {name for symbol in SYMBOLS for name in (symbol.name, field_of(symbol))}
    assert not {symbol: place for symbol, place in used.items() if symbol not in listed}
    assert not [symbol.name for symbol in SYMBOLS if not {symbol.name, field_of(symbol)} & {*used}]


BY_OTHER_NAMES = {
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table",
    "torch.ops.aten.lstm.input.py_kernels",
    "torch.backends.cudnn.flags",
}


def test_every_replaced_function_is_in_the_table() -> None:
    found = {path for source in sources().values() for path in replaced(source)}
    assert found | BY_OTHER_NAMES == {each.name for each in REPLACED}


def test_only_torch_compat_uses_private_symbols() -> None:
    assert not private(in_home=False)


def test_symbols_are_private_and_listed_once() -> None:
    for table in (SYMBOLS, REPLACED):
        assert len({each.name for each in table}) == len(table)
    assert not [each.name for each in SYMBOLS if is_public(each.name)]


def test_what_is_gone_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [Symbol(f"torch._dynamo.no_such_{each}", f"purpose {each}") for each in "ab"]
    monkeypatch.setattr(private_symbols, "SYMBOLS", tuple(gone))
    monkeypatch.setattr(private_symbols, "REPLACED", ())
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    with pytest.raises(
        UnsupportedTorchError, match=r"torch 9\.1\.0\+cpu .*\n  torch\._dynamo\.no_such_a: purp"
    ) as caught:
        require("capture")
    assert "no_such_b: purpose b\nInstall torch 2.11 to 2.15" in str(caught.value)
