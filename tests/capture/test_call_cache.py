"""What was found of a call holds for calls of the same key, and for no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipec.capture.call_cache import CALL_CACHE_SIZE, CallCache, CallKey
from pipec.capture.model_call import ModelCall

Given = tuple[tuple[Any, ...], dict[str, Any], Any]


class Net(nn.Module):
    def forward(self, x: Tensor, mask: Any = None, **more: Any) -> Tensor:
        return x


def key(given: Given, model: nn.Module | None = None, request: object = False) -> CallKey | None:
    return CallKey.of(model or Net(), *given, request)[0]


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
    assert key(GIVEN) == key(((X + 1,), {"mask": [torch.zeros(4), 2]}, GIVEN[2] + 1))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_all_else_matters(other: Given) -> None:
    assert key(other) is not None
    assert key(GIVEN) != key(other)


def _hooked(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda module, args: args)


def _another_forward(model: nn.Module) -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    model.forward = forward


@pytest.mark.parametrize("change", [_hooked, _another_forward])
def test_what_forward_takes_matters(change: Callable[[nn.Module], None]) -> None:
    model = Net()
    before = key(GIVEN, model)
    change(model)
    assert key(GIVEN, model) != before


def test_what_the_pipeline_makes_of_it_matters() -> None:
    assert key(GIVEN, request=True) != key(GIVEN)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(4, 2).to_sparse(), nn.Parameter(X)])
def test_what_cannot_be_compared_has_no_form(value: object) -> None:
    assert key(((X, value), {}, None)) is None


def test_a_call_of_a_known_form_has_its_own_values() -> None:
    known, found = CallCache(), key(GIVEN)
    assert found is not None
    args, kwargs, target = GIVEN
    first = ModelCall(
        args, kwargs, target, split=(True, True, False, True), ambiguous_leaves={"kwargs['mask'][0]": "mask"}
    )
    known.put(found, first)
    like = known.get(found)
    assert like is not None
    assert not like.args
    given = ((X + 1,), {"mask": [torch.zeros(4), 2]}, target)
    leaves = CallKey.of(Net(), *given, False)[1]
    call, plain = like.with_arguments(*given, leaves), ModelCall(*given, first.split, first.ambiguous_leaves)
    assert call.leaves[0] is given[0][0]
    assert all(one is other for one, other in zip(call.leaves, plain.leaves, strict=True))
    assert (call.paths, call.batch_size, call.batched) == (plain.paths, plain.batch_size, plain.batched)
    assert call.signature() == plain.signature()
    assert (call.tree, call.ambiguous_leaves) == (plain.tree, plain.ambiguous_leaves)


def test_the_forms_that_came_last_are_known() -> None:
    known = CallCache()
    for number in range(CALL_CACHE_SIZE + 1):
        found = key(((X, number), {}, None))
        assert found is not None
        known.put(found, ModelCall((X, number), {}, None, split=(True, False)))
    forms = [key(((X, number), {}, None)) for number in range(CALL_CACHE_SIZE + 1)]
    assert [known.get(each) is not None for each in forms if each] == [False, *[True] * CALL_CACHE_SIZE]
