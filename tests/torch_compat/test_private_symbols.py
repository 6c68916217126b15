"""The table of private symbols of torch: each is in the installed torch and in use, and no other is used."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from golden_files import compare_golden
from private_torch_scan import Use, is_public, uses

from pipec.errors import UnsupportedTorchError
from pipec.torch_compat import private_symbols
from pipec.torch_compat.private_symbols import GONE, SYMBOLS, PrivateSymbol, needs, require, resolve
from pipec.torch_compat.versions import OLDEST, parsed_version, version_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "private_torch.md"
HOME = ROOT / "pipec" / "torch_compat"

MOST_SYMBOLS, MOST_REPLACED = 81, 2
"""Whoever removes some lowers this."""

STILL_OUTSIDE = frozenset(
    {
        "capture/batch/analyse_batch.py",
        "capture/batch/dependence_tracker.py",
        "capture/batch/movement.py",
        "capture/batch/operator_call.py",
        "capture/call_cache.py",
        "capture/graph_calls.py",
        "capture/model_call.py",
        "capture/repeated_blocks.py",
    }
)
"""Files outside of torch_compat that use private symbols all the same. The aim is none."""


@pytest.fixture(scope="module")
def used() -> dict[Path, list[Use]]:
    """The private symbols that each file of pipec uses, without the table."""
    sources = sorted(set((ROOT / "pipec").rglob("*.py")) - {HOME / "private_symbols.py"})
    found = {path: list(uses(path.read_text(encoding="utf-8"))) for path in sources}
    return {path: symbols for path, symbols in found.items() if symbols}


def matches(use: Use, symbol: PrivateSymbol) -> bool:
    """Whether a use is of a symbol. Of an attribute of any object, only the name is known."""
    if use.symbol.startswith("*."):
        return use.symbol[2:] == symbol.name.rpartition(".")[2]
    return use.symbol == symbol.name or (is_later(symbol) and use.symbol.startswith(f"{symbol.name}."))


def is_later(symbol: PrivateSymbol) -> bool:
    """Whether the installed torch is too old to have it."""
    return parsed_version(torch.__version__) < symbol.since


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.name)
def test_the_installed_torch_has_it(symbol: PrivateSymbol) -> None:
    if is_later(symbol):
        pytest.skip(f"since torch {version_text(symbol.since)}")
    resolve(symbol.name)


def test_every_symbol_is_in_the_table_and_every_row_is_used(used: dict[Path, list[Use]]) -> None:
    of_home = [(path, use) for path, found in used.items() if HOME in path.parents for use in found]
    unlisted = [
        f"{path.relative_to(ROOT)}:{use.line} {use.symbol}"
        for path, use in of_home
        if not any(matches(use, symbol) for symbol in SYMBOLS)
    ]
    assert not unlisted, "\n".join(unlisted)
    unused = [symbol.name for symbol in SYMBOLS if not any(matches(use, symbol) for _, use in of_home)]
    assert not unused, "\n".join(unused)


def test_only_torch_compat_uses_private_symbols(used: dict[Path, list[Use]]) -> None:
    outside = {
        str(path.relative_to(ROOT / "pipec")): found
        for path, found in used.items()
        if HOME not in path.parents
    }
    assert outside.keys() == STILL_OUTSIDE, outside


def test_what_is_replaced_has_a_reason(used: dict[Path, list[Use]]) -> None:
    replaced = {use.symbol for found in used.values() for use in found if use.is_replaced}
    assert replaced == {symbol.name for symbol in SYMBOLS if symbol.replaced}


def test_symbols_are_few_and_listed_once() -> None:
    assert len(SYMBOLS) <= MOST_SYMBOLS
    assert sum(bool(symbol.replaced) for symbol in SYMBOLS) <= MOST_REPLACED
    assert len({symbol.name for symbol in SYMBOLS}) == len(SYMBOLS)
    assert not [symbol.name for symbol in SYMBOLS if is_public(symbol.name)]


def test_the_page_lists_them(request: pytest.FixtureRequest) -> None:
    compare_golden(page(), PAGE, request.config.getoption("--update-golden"))


def page() -> str:
    by_time = defaultdict[str, list[PrivateSymbol]](list)
    for symbol in SYMBOLS:
        by_time[symbol.needed].append(symbol)
    parts = [
        "# Private parts of torch\n",
        "pipec needs these parts of torch, which any version of torch may change. A test goes through the\n"
        "list. The page is written from `pipec/torch_compat/private_symbols.py`, which says what counts as\n"
        "private.\n",
    ]
    for needed, gone in GONE.items():
        parts += [f"## Needed at {needed}\n" if needed != "inductor" else "## Needed by inductor\n"]
        parts += [f"Without one of these, {gone}.\n"]
        rows = [f"| `{each.name}` | {each.purpose}{_notes(each)} |" for each in by_time[needed]]
        parts += ["\n".join(["| symbol | what for |", "|---|---|", *rows]) + "\n"]
    return "\n".join(parts)


def _notes(symbol: PrivateSymbol) -> str:
    since = f" Since torch {version_text(symbol.since)}." * (symbol.since > OLDEST)
    replaced = f" **Replaced**, because {symbol.replaced}." * bool(symbol.replaced)
    return f".{since}{replaced}" if since or replaced else ""


# errors


def test_what_is_gone_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [PrivateSymbol(f"torch._dynamo.no_such_{each}", f"purpose {each}") for each in "ab"]
    later = PrivateSymbol("torch._dynamo.no_such_c", "purpose c", since=(99, 0))
    monkeypatch.setattr(private_symbols, "SYMBOLS", (*gone, later))
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    with pytest.raises(
        UnsupportedTorchError, match=r"torch 9\.1\.0\+cpu .*\n  torch\._dynamo\.no_such_a: purp"
    ) as caught:
        require("capture")
    assert "no_such_b: purpose b\nInstall torch 2.11 to 2.15" in str(caught.value)
    assert "no_such_c" not in str(caught.value)
    with pytest.raises(UnsupportedTorchError, match="no_such_b: purpose b"):
        needs("torch._dynamo.no_such_b")


def test_what_is_there_is_returned() -> None:
    require("start")
    assert needs("torch._ops.OpOverload") is torch._ops.OpOverload


# the scan


@pytest.mark.parametrize(
    ("source", "symbol"),
    [
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.utils import _pytree as p\np.tree_map(f, x)", "torch.utils._pytree.tree_map"),
        ("import torch\ntorch._C._storage_Use_Count(1)", "torch._C._storage_Use_Count"),
        ("import torch\nflags = torch._C._autograd", ""),
        (
            "import torch\nget = torch._C._autograd\nget._top_saved_tensors_default_hooks()",
            "torch._C._autograd._top_saved_tensors_default_hooks",
        ),
        ("def f():\n    from torch._dynamo.exc import Unsupported", "torch._dynamo.exc.Unsupported"),
        ("import torch\nf = torch._dynamo.exc.Unsupported.msg", "torch._dynamo.exc.Unsupported"),
        ("x.storage()._cdata", "*._cdata"),
        ("self.storage._cdata", "*._cdata"),
        ("getattr(x, '_backward_hooks')", "*._backward_hooks"),
        ("operator.attrgetter('training', '_forward_hooks')", "*._forward_hooks"),
        ("super()._apply(f)", "*._apply"),
        ("import torch\ngetattr(torch._C, '_storage_Use_Count')", "torch._C._storage_Use_Count"),
        ("needs('torch._C._storage_Use_Count')", "torch._C._storage_Use_Count"),
        ("import torch\ntorch._no_such_thing", "torch._no_such_thing"),
        ("import torch._dynamo\ntorch._dynamo.config.patch(a=1)", ""),
        ("import torch\ntorch._foreach_add_(a, b); a._version; torch.ops.aten._softmax.default", ""),
        ("self._parameters, module._buffers, module._modules", ""),
        ("self._cdata, pipe._own", ""),
        ("'''Text on torch._dynamo.exc.'''", ""),
    ],
)
def test_uses_are_found(source: str, symbol: str) -> None:
    assert {use.symbol for use in uses(source)} == {symbol} - {""}


@pytest.mark.parametrize(
    "source",
    [
        "from torch._dynamo.exc import Unsupported\nUnsupported.msg = 1",
        "from torch._dynamo.exc import Unsupported\nsetattr(Unsupported, 'msg', 1)",
        "import torch\nmock.patch.object(torch._dynamo.exc.Unsupported, 'msg')",
    ],
)
def test_replacements_are_found(source: str) -> None:
    replaced = [use.symbol for use in uses(source) if use.is_replaced]
    assert replaced == ["torch._dynamo.exc.Unsupported.msg"]
