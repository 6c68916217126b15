"""The bytes of an optimizer's state: known before there is one, and those that an update leaves."""

from functools import partial
from typing import Any

import pytest
import torch
from split_optimizers import EVERY, Plain, model
from torch import Tensor, nn, optim

from pipec.runtime.optimizers import state_bytes
from pipec.runtime.optimizers.factory import Factory, Named


@pytest.mark.parametrize("factory", EVERY.values(), ids=EVERY.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_state_are_those_of_a_plain_update(factory: Factory, dtype: torch.dtype) -> None:
    plain = Plain(factory, dtype=dtype)
    plain.step(0)
    names = {id(each): name for name, each in plain.parameters.items()}
    expected = {
        names[id(parameter)]: sum(each.nbytes for each in entries.values() if isinstance(each, Tensor))
        for optimizer in plain.optimizers
        for parameter, entries in optimizer.state.items()
    }
    assert state_bytes(factory, model(dtype=dtype)) == {
        name: expected.get(name, 0) for name in names.values()
    }


def test_frozen_parameters_and_groups_may_keep_no_state() -> None:
    def make(named: Named) -> optim.Optimizer:
        return optim.SGD([{"params": named[:1], "momentum": 0.9}, {"params": named[1:]}])

    parameters = {name: nn.Parameter(torch.ones(4), name != "frozen") for name in ("frozen", "x", "y")}
    assert state_bytes(partial(optim.SGD, momentum=0.9), parameters) == {"frozen": 0, "x": 16, "y": 16}
    assert state_bytes(optim.AdamW, parameters)["frozen"] == 0  # type: ignore[index]
    del parameters["frozen"]
    assert state_bytes(make, parameters) == {"x": 16, "y": 0}


class Corners(optim.Optimizer):
    """Looks at values, and keeps matrices for each dimension of a parameter which has no dimension of 1."""

    def __init__(self, params: Any, extra: int = 0) -> None:
        super().__init__(params, {"extra": extra})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if 1 not in each.shape and each.sum().item() == 0:
                    sides = [torch.zeros(size, size) for size in each.shape]
                    self.state[each] = {"sides": sides, "extra": torch.zeros(group["extra"])}


def test_an_optimizer_that_looks_at_values_is_tried_on_small_tensors() -> None:
    parameters = {
        "a": nn.Parameter(torch.ones(100_000, 30, device="meta")),
        "b": nn.Parameter(torch.ones(1, 30, device="meta")),
    }
    assert state_bytes(Corners, parameters) == {"a": 4 * (100_000**2 + 30**2), "b": 0}


def test_what_cannot_be_tried_has_no_number() -> None:
    assert state_bytes(partial(optim.AdamW, capturable=True), model()) is None
    assert state_bytes(partial(Corners, extra=5), model()) is None
