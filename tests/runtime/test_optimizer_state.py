"""The state of a program's optimizer: merged as the plain optimizer keeps it, and cut for any layout."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_optimizers import EVERY, Plain, Split, alone, by_group, require_same, two
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.optimizers import StateShard
from pipec.runtime.optimizers.factory import Factory
from pipec.runtime.optimizers.state_shards import cut, merge

SINGLE = {name: factory for name, factory in EVERY.items() if factory is not two}
single = pytest.mark.parametrize("factory", SINGLE.values(), ids=SINGLE.keys())
every = pytest.mark.parametrize("factory", EVERY.values(), ids=EVERY.keys())


def require_equal(found: Any, expected: Any) -> None:
    """Equal to the last bit, types and shapes of tensors included."""
    assert type(found) is type(expected)
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key in expected:
            require_equal(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    else:
        assert found == expected


def copy_values(source: Split | Plain, target: Split | Plain) -> None:
    with torch.no_grad():
        for name, parameter in target.parameters.items():
            parameter.copy_(source.parameters[name])


def parts(process: Split) -> list[StateShard]:
    return [part for stage in process.stages for part in stage.parts()]


def run(*runs: Split | Plain, numbers: range) -> None:
    for number in numbers:
        for each in runs:
            each.step(number)


@single
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_state_dict_is_that_of_the_plain_optimizer(factory: Factory, num_replicas: int) -> None:
    split, plain = Split(factory, num_replicas), Plain(factory)
    run(split, plain, numbers=range(3))
    found, expected = split.optimizer.state_dict(), plain.optimizers[0].state_dict()
    for group in found["param_groups"] if factory is by_group else ():
        del group["param_names"]  # which the factory lost
    require_equal(found, expected)


@single
def test_the_state_of_the_plain_optimizer_can_be_loaded(factory: Factory) -> None:
    plain, split = Plain(factory), Split(factory, 3, seed=1)
    run(plain, numbers=range(5))
    copy_values(plain, split)
    split.optimizer.load_state_dict(plain.optimizers[0].state_dict())
    run(plain, split, numbers=range(5, 10))
    require_same(split, plain)


@every
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 2), (2, 1)])
def test_a_checkpoint_knows_no_layout(factory: Factory, first: int, then: int) -> None:
    plain, one, other = Plain(factory), Split(factory, first), Split(factory, then, seed=1)
    run(plain, one, numbers=range(5))
    one.optimizer.param_groups[0]["lr"] = plain.optimizers[0].param_groups[0]["lr"] = 0.03
    copy_values(one, other)
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    run(plain, other, numbers=range(5, 10))
    require_same(other, plain)


def test_states_of_several_plain_optimizers_can_be_loaded() -> None:
    plain, split = Plain(two), Split(two, 2, seed=1)
    run(plain, numbers=range(5))
    copy_values(plain, split)
    split.optimizer.load_state_dict([each.state_dict() for each in plain.optimizers])
    run(plain, split, numbers=range(5, 10))
    require_same(split, plain)


@every
def test_state_that_was_loaded_before_there_are_stages_is_theirs(factory: Factory) -> None:
    plain, split = Plain(factory), Split(factory, 2)
    run(plain, split, numbers=range(5))
    resumed = Split(factory, 3, seed=1, attach=False)
    copy_values(split, resumed)
    resumed.optimizer.load_state_dict(copy.deepcopy(split.optimizer.state_dict()))
    require_equal(resumed.optimizer.state_dict(), split.optimizer.state_dict())
    resumed.optimizer.attach(resumed.stages, resumed.parameters, alone)
    run(plain, resumed, numbers=range(5, 10))
    require_same(resumed, plain)


def test_stages_on_other_tensors_take_over_the_state() -> None:
    plain, split = Plain(EVERY["AdamW"]), Split(EVERY["AdamW"], 3)
    run(plain, split, numbers=range(5))
    split.parameters = {name: nn.Parameter(each.detach().clone()) for name, each in split.parameters.items()}
    split.divide(2)
    run(plain, split, numbers=range(5, 10))
    require_same(split, plain)
    assert split.optimizer.param_groups[0]["params"][-1] is split.parameters["b.bias"]


def test_each_process_may_hold_a_part() -> None:
    factory = EVERY["AdamW"]
    whole, processes = Split(factory, 3), [Split(factory, 3) for _ in range(4)]
    for rank, process in enumerate(processes):
        process.stages = process.stages[rank::3] if rank < 3 else []  # one of them has nothing to update
    for process in processes:
        process.optimizer.attach(
            process.stages,
            process.parameters,
            lambda own: [parts(each) for each in processes],
        )
    run(whole, *processes, numbers=range(5))
    saved = whole.optimizer.state_dict()
    for process in processes:
        require_equal(process.optimizer.state_dict(), saved)
        process.optimizer.load_state_dict(saved)
    run(whole, *processes, numbers=range(5, 8))
    require_equal(processes[1].optimizer.state_dict(), whole.optimizer.state_dict())


def test_replicas_that_update_the_same_have_one_state() -> None:
    factory = EVERY["AdamW"]
    first, second = (Split(factory) for _ in range(2))
    run(first, second, numbers=range(3))
    expected = copy.deepcopy(first.optimizer.state_dict())
    first.optimizer.attach(first.stages, first.parameters, lambda own: [own, parts(second)])
    require_equal(first.optimizer.state_dict(), expected)
    first.optimizer.attach([*first.stages, *second.stages], first.parameters, alone)
    require_equal(first.optimizer.state_dict(), expected)
    assert first.optimizer.param_groups[0]["params"][0] is first.parameters["a.weight"]


def test_what_is_loaded_shares_no_memory_with_the_state_dict() -> None:
    """Slices of a tensor would otherwise count the same ``step`` up, each of them."""
    plain, split = Plain(EVERY["AdamW"]), Split(EVERY["AdamW"], 3)
    run(plain, split, numbers=range(2))
    saved = plain.optimizers[0].state_dict()
    before = copy.deepcopy(saved)
    split.optimizer.load_state_dict(saved)
    run(split, numbers=range(2, 4))
    require_equal(saved, before)


@given(
    shape=st.lists(st.integers(1, 6), max_size=3).map(torch.Size),
    places=st.sets(st.integers(1, 215), max_size=5),
)
def test_state_that_was_cut_merges_into_what_it_was(shape: torch.Size, places: set[int]) -> None:
    whole = {"step": torch.tensor(3.0), "sum": torch.arange(shape.numel()).view(shape), "calls": 7}
    bounds = [0, *sorted(place for place in places if place < shape.numel()), shape.numel()]
    pieces = [ParameterShard("w", start, stop) for start, stop in itertools.pairwise(bounds)]
    parts = [StateShard(piece, cut(whole, shape, piece)) for piece in pieces]
    merged = merge([parts[1::2], parts[::2]], {"w": shape})
    require_equal(merged, {"w": whole})


def test_state_is_loaded_by_name_where_there_are_names() -> None:
    plain, split = Plain(EVERY["AdamW"]), Split(EVERY["AdamW"])
    run(plain, split, numbers=range(2))
    saved, backwards = split.optimizer.state_dict(), split.optimizer.state_dict()
    (group,) = backwards["param_groups"]
    group["param_names"] = group["param_names"][::-1]
    backwards["state"] = {number: saved["state"][4 - number] for number in range(5)}
    split.optimizer.load_state_dict(copy.deepcopy(backwards))
    require_equal(split.optimizer.state_dict(), saved)


def test_hyperparameters_that_a_state_dict_lacks_stay() -> None:
    split = Split(EVERY["AdamW"])
    saved = split.optimizer.state_dict()
    del saved["param_groups"][0]["maximize"]
    saved["param_groups"][0]["lr"] = 0.5
    split.optimizer.load_state_dict(saved)
    (group,) = split.optimizer.param_groups
    assert (group["maximize"], group["lr"]) == (False, 0.5)


# what is refused


def spoiled(change: Any) -> dict[str, Any]:
    split = Split(EVERY["AdamW"])
    split.step(0)
    saved = copy.deepcopy(split.optimizer.state_dict())
    change(saved)
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[4\] parameters.*groups of \[5\]"),
        (lambda s: s["param_groups"].append({"params": []}), r"groups of \[5, 0\] parameters"),
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "other"), "a.weight and 1 other names"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(4)), r"exp_avg of a.weight has shape \[4\]"),
        (lambda s: s["state"].update(extra={}), "state for parameter 'extra'"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    split = Split(EVERY["AdamW"], 2)
    split.step(0)
    before = copy.deepcopy(split.optimizer.state_dict())
    with pytest.raises(InputError, match=message):
        split.optimizer.load_state_dict(spoiled(change))
    require_equal(split.optimizer.state_dict(), before)


def test_a_part_that_no_process_has_is_missed() -> None:
    split = Split(EVERY["AdamW"], 3)
    split.step(0)
    split.optimizer.attach(split.stages, split.parameters, lambda own: [own[1:]])
    with pytest.raises(InputError, match=r"1027 elements of a.weight .* state for 448 to 896, 896 to 1027"):
        split.optimizer.state_dict()
