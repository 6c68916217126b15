"""What was found of a call holds for calls of the same form, and for no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipec.capture.call import Call
from pipec.capture.known_calls import MOST_KNOWN, Form, KnownCalls

Given = tuple[tuple[Any, ...], dict[str, Any], Any]


class Net(nn.Module):
    def forward(self, x: Tensor, mask: Any = None, **more: Any) -> Tensor:
        return x


def form(given: Given, model: nn.Module | None = None, asked: object = False) -> Form | None:
    return Form.of(model or Net(), *given, asked)[0]


X = torch.zeros(4, 2)
GIVEN: Given = ((X,), {"mask": [torch.ones(4), 2]}, torch.zeros(4, dtype=torch.int64))
OTHERS: dict[str, Given] = {
    "another type": ((X.double(),), *GIVEN[1:]),
    "other rows": ((torch.zeros(6, 2),), *GIVEN[1:]),
    "another layout": ((torch.zeros(2, 4).t(),), *GIVEN[1:]),
    "another number": (GIVEN[0], {"mask": [torch.ones(4), 3]}, GIVEN[2]),
    "a number of another type": (GIVEN[0], {"mask": [torch.ones(4), 2.0]}, GIVEN[2]),
    "another structure": (GIVEN[0], {"mask": (torch.ones(4), 2)}, GIVEN[2]),
    "another name": (GIVEN[0], {"other": GIVEN[1]["mask"]}, GIVEN[2]),
    "one more": ((X, 1), *GIVEN[1:]),
    "no target": (*GIVEN[:2], None),
}


def test_values_of_tensors_do_not_matter() -> None:
    assert form(GIVEN) == form(((X + 1,), {"mask": [torch.zeros(4), 2]}, GIVEN[2] + 1))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_all_else_matters(other: Given) -> None:
    assert form(other) is not None
    assert form(GIVEN) != form(other)


def _hooked(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: args)


def _another_forward(model: nn.Module) -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    model.forward = forward


@pytest.mark.parametrize("change", [_hooked, _another_forward])
def test_what_forward_takes_matters(change: Callable[[nn.Module], None]) -> None:
    model = Net()
    before = form(GIVEN, model)
    change(model)
    assert form(GIVEN, model) != before


def test_what_the_pipeline_makes_of_it_matters() -> None:
    assert form(GIVEN, asked=True) != form(GIVEN)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(4, 2).to_sparse(), nn.Parameter(X)])
def test_what_cannot_be_compared_has_no_form(value: object) -> None:
    assert form(((X, value), {}, None)) is None


def test_a_call_of_a_known_form_has_its_own_values() -> None:
    known, found = KnownCalls(), form(GIVEN)
    assert found is not None
    args, kwargs, target = GIVEN
    first = Call(args, kwargs, target, split=(True, True, False, True), unsure={"kwargs['mask'][0]": "mask"})
    known.note(found, first)
    like = known.like(found)
    assert like is not None
    assert not like.args
    given = ((X + 1,), {"mask": [torch.zeros(4), 2]}, target)
    leaves = Form.of(Net(), *given, False)[1]
    call, plain = like.with_values(*given, leaves), Call(*given, first.split, first.unsure)
    assert call.leaves[0] is given[0][0]
    assert all(one is other for one, other in zip(call.leaves, plain.leaves, strict=True))
    assert (call.paths, call.batch_size, call.batched) == (plain.paths, plain.batch_size, plain.batched)
    assert call.signature() == plain.signature()
    assert (call.tree, call.unsure) == (plain.tree, plain.unsure)


def test_the_forms_that_came_last_are_known() -> None:
    known = KnownCalls()
    for number in range(MOST_KNOWN + 1):
        found = form(((X, number), {}, None))
        assert found is not None
        known.note(found, Call((X, number), {}, None, split=(True, False)))
    forms = [form(((X, number), {}, None)) for number in range(MOST_KNOWN + 1)]
    assert [known.like(each) is not None for each in forms if each] == [False, *[True] * MOST_KNOWN]
