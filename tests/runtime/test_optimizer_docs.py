"""docs/optimizers.md: its factories make what the page says, and its example of state runs."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from split_optimizers import EVERY, Plain, Split, require_same

DOCS = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def defined(name: str) -> Any:
    """What a block of the page defines under this name."""
    (block,) = (block for block in BLOCKS if re.match(rf"(def|class) {name}\b", block))
    scope: dict[str, Any] = {"torch": torch}
    exec(block, scope)
    return scope[name]


@pytest.mark.parametrize(("name", "sizes"), [("decayed", [2, 3]), ("muon", [2, 3])])
def test_the_factories_work(name: str, sizes: list[int]) -> None:
    split, plain = Split(defined(name), 2), Plain(defined(name))
    assert [len(group["params"]) for group in split.optimizer.param_groups] == sizes
    for number in range(3):
        split.step(number)
        plain.step(number)
    require_same(split, plain)


def test_the_example_of_state_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.startswith("state = "))
    split = Split(EVERY["AdamW"], 2)
    split.step(0)
    model = SimpleNamespace(named_parameters=split.parameters.items)
    scope: dict[str, Any] = {"torch": torch, "model": model, "pipe": split}
    monkeypatch.chdir(tmp_path)
    exec(block, scope)
    assert (
        scope["plain"].state_dict()["state"].keys() == split.optimizer.state_dict()["state"].keys() != set()
    )
