"""The table of private symbols of torch: each is in the installed torch and in use, and no other is used."""

from pathlib import Path

import pytest
import torch
from private_torch_scan import Use, is_public, uses

from pipec.errors import UnsupportedTorchError
from pipec.torch_compat import private_symbols
from pipec.torch_compat.private_symbols import REPLACED, SYMBOLS, Symbol, require, resolve

ROOT = Path(__file__).parents[2]
HOME = ROOT / "pipec" / "torch_compat"

UNSEEN = {
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.dispatch_table",
    "torch.ops.aten.lstm.input.py_kernels",
}
"""What is replaced by names that the scan cannot follow."""


@pytest.fixture(scope="module")
def used() -> dict[Path, list[Use]]:
    """The private symbols that each file of pipec uses, without the table."""
    sources = sorted(set((ROOT / "pipec").rglob("*.py")) - {HOME / "private_symbols.py"})
    found = {path: list(uses(path.read_text(encoding="utf-8"))) for path in sources}
    return {path: symbols for path, symbols in found.items() if symbols}


def private(used: dict[Path, list[Use]], in_home: bool) -> list[tuple[Path, Use]]:
    """The uses of private symbols in torch_compat, or outside of it."""
    return [
        (path, use)
        for path, found in used.items()
        for use in found
        if not use.is_replaced and (HOME in path.parents) == in_home
    ]


def matches(use: Use, symbol: Symbol) -> bool:
    """Whether a use is of a symbol. Of an attribute of any object, only the name is known."""
    if use.symbol.startswith("*."):
        return use.symbol[2:] == symbol.name.rpartition(".")[2]
    if use.symbol.endswith("*"):
        return symbol.name.startswith(use.symbol[:-1])
    return use.symbol == symbol.name


@pytest.mark.parametrize("symbol", [*SYMBOLS, *REPLACED], ids=lambda symbol: symbol.name)
def test_the_installed_torch_has_it(symbol: Symbol) -> None:
    resolve(symbol.name)


def test_every_symbol_is_in_the_table_and_every_row_is_used(used: dict[Path, list[Use]]) -> None:
    of_home = private(used, in_home=True)
    unlisted = [
        f"{path.relative_to(ROOT)}:{use.line} {use.symbol}"
        for path, use in of_home
        if not any(matches(use, symbol) for symbol in SYMBOLS)
    ]
    assert not unlisted, "\n".join(unlisted)
    unused = [symbol.name for symbol in SYMBOLS if not any(matches(use, symbol) for _, use in of_home)]
    assert not unused, "\n".join(unused)


def test_only_torch_compat_uses_private_symbols(used: dict[Path, list[Use]]) -> None:
    outside = [f"{path.relative_to(ROOT)}:{use.line}" for path, use in private(used, in_home=False)]
    assert not outside, "\n".join(outside)


def test_every_replaced_function_is_in_the_table(used: dict[Path, list[Use]]) -> None:
    replaced = {use.symbol for found in used.values() for use in found if use.is_replaced}
    assert replaced | UNSEEN == {each.name for each in REPLACED}


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
