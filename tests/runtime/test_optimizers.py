"""The optimizer of a program, in one process: its updates of tensors and pieces, its groups, its norm."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_optimizers import (
    EVERY,
    Declared,
    Plain,
    Split,
    alone,
    by_group,
    model,
    require_same,
    two,
)
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import ProfilerActivity

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.optimizers import (
    PipelineOptimizer,
    StateShard,
    clip_factor,
    is_elementwise,
    sum_of_squares,
)
from pipec.runtime.optimizers.factory import Factory, Named
from pipec.runtime.optimizers.state_shards import cut, merge


def documented() -> dict[str, Factory]:
    """The factories that docs/optimizers.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"torch": torch}
    for block in re.findall(r"```python\n(def .*?)```", page, re.DOTALL):
        exec(block, scope)
    return {name: scope[name] for name in ("decayed", "muon")}


FACTORIES = EVERY | documented()


def run(*runs: Split | Plain, numbers: range) -> None:
    for number in numbers:
        for each in runs:
            each.step(number)


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_updates_have_the_bits_of_the_whole_optimizer(
    factory: Factory, num_replicas: int, dtype: torch.dtype
) -> None:
    split, plain = Split(factory, num_replicas, dtype=dtype), Plain(factory, dtype=dtype)
    run(split, plain, numbers=range(20))
    require_same(split, plain)


@pytest.mark.parametrize("factory", [EVERY["SGD"], EVERY["AdamW"], EVERY["Adafactor"], two])
def test_a_parameter_without_gradient_keeps_its_value_and_its_state(factory: Factory) -> None:
    split, plain = Split(factory, 2), Plain(factory)
    for number in range(6):
        without = ("a.weight", "b.bias") if number in (0, 3, 4) else ()
        split.step(number, without)
        plain.step(number, without)
    require_same(split, plain)
    assert all(parameter.grad is None for parameter in split.parameters.values())


def test_norms_take_little_memory() -> None:
    """A copy in float64 of the gradient of a head of Llama has 4.2 GB."""
    gradients = [torch.ones(1 << 22).view(2048, 2048).t(), torch.full((3, 5), 2.0), torch.zeros(0, 3)]
    with torch.profiler.profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profile:
        squares = sum_of_squares(gradients)
    assert 0 < max(event.self_cpu_memory_usage for event in profile.events()) <= 1 << 23
    assert squares == (1 << 22) + 60


def test_norms_of_sparse_complex_and_no_gradients() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1]], [3.0, 1.0], (4,), check_invariants=True)
    assert sum_of_squares([sparse, torch.tensor([3 + 4j])]) == 16 + 25
    assert clip_factor(sum_of_squares([]), 1.0) == 1
    assert sum_of_squares([torch.full((10,), 1e30)]).isfinite()


# groups and hyperparameters


def tensor_lr(named: Named) -> optim.Optimizer:
    return optim.Adam(named, lr=torch.tensor(0.1), foreach=False)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("factory", [EVERY["SGD"], by_group, tensor_lr], ids=["SGD", "groups", "tensor"])
def test_lr_schedulers_work_as_on_the_plain_optimizer(
    factory: Factory, make: Callable[[optim.Optimizer], LRScheduler]
) -> None:
    split, plain = Split(factory, 2), Plain(factory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(split.optimizer), make(plain.optimizers[0])]
        for number in range(10):
            split.step(number)
            plain.step(number)
            for each in schedulers:
                each.step(1.0) if isinstance(each, lr_scheduler.ReduceLROnPlateau) else each.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() != [0.1]
    require_same(split, plain)


def test_ranks_can_tell_whether_any_group_differs() -> None:
    one, other = (Split(by_group).optimizer for _ in range(2))
    assert one.call_description() == other.call_description()
    other.param_groups[1]["lr"] = 0.5
    assert one.call_description() != other.call_description()


def test_the_groups_are_those_of_the_whole_model() -> None:
    groups = Split(by_group, 3).optimizer.param_groups
    assert groups[1]["param_names"] == ["a.bias", "scale", "b.bias"]
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 0.01), (0.01, 0.02)]
    split = Split(two, 2)
    assert split.optimizer.param_groups[0]["params"][1] is split.parameters["b.weight"]
    assert split.optimizer.elementwise == {"a.bias", "scale", "b.bias"}


def test_a_factory_sees_the_whole_model_wherever_it_is_called() -> None:
    """It may count layers, look at shapes and at marks that the model has set on its parameters."""
    seen = []

    def make(named: Named) -> optim.Optimizer:
        seen.append([(name, each.shape, each.dtype, getattr(each, "mark", None)) for name, each in named])
        groups = [{"params": [(name, each)], "lr": 0.1 / (1 + i)} for i, (name, each) in enumerate(named)]
        return optim.SGD(groups, lr=1.0)

    split, plain = Split(EVERY["SGD"]), Plain(make)
    seen.clear()
    split.parameters["a.weight"].mark = "large"
    split.optimizer = PipelineOptimizer(make, split.parameters)
    split.divide(3)
    assert seen == [seen[0]] * len(seen)
    assert seen[0][0] == ("a.weight", (13, 79), torch.float32, "large")
    run(split, plain, numbers=range(2))
    require_same(split, plain)


@pytest.mark.parametrize("factory", [optim.SparseAdam, partial(optim.SGD, lr=0.1)], ids=["SparseAdam", "SGD"])
def test_sparse_gradients_of_whole_parameters(factory: Factory) -> None:
    table, plain = (nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    optimizer, expected = PipelineOptimizer(factory, {"table": table}), factory([("table", plain)])
    gradient = torch.sparse_coo_tensor([[1, 3]], [[3.0, 1.0], [1.0, 1.0]], (4, 2), check_invariants=True)
    plain.grad = gradient * 0.5
    expected.step()  # type: ignore[union-attr]
    optimizer.for_stage({ParameterShard("table", 0, 8): table}).update({"table": gradient}, torch.tensor(0.5))
    assert torch.equal(table, plain)
    assert not torch.equal(table, torch.ones(4, 2))


def test_hooks_after_the_step_run_once_per_step() -> None:
    split, calls = Split(EVERY["AdamW"], 3), []
    split.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    run(split, numbers=range(2))
    assert len(calls) == 2


# what is refused


class Coupled(optim.SGD):
    """Keeps a number for all parameters in its group, as Prodigy does."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["weight_decay"] += 1


class Global(optim.SGD):
    """Keeps state for no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["everything"] = {"calls": 1}


class Undeclared(optim.AdamW):
    """Might do anything."""


def changing() -> Factory:
    calls = []

    def make(named: Named) -> optim.Optimizer:
        calls.append(1)
        cut = len(calls)
        return optim.SGD([{"params": named[:cut]}, {"params": named[cut:]}])

    return make


FOREIGN = nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (optim.SGD([FOREIGN]), "takes a factory"),
        (lambda named: None, "returned None"),
        (lambda named: [optim.SGD(named), "AdamW"], "or a list"),
        (lambda named: optim.SGD([FOREIGN]), r"a tensor of shape \[3, 3\]"),
        (lambda named: optim.SGD(named[1:]), "left out a.weight"),
        (lambda named: [optim.SGD(named), optim.SGD(named[:1])], "a.weight to more than one"),
        (lambda named: optim.LBFGS([each for _, each in named]), "LBFGS"),
        (changing(), "groups of 2, 3 parameters instead of groups of 1, 4"),
    ],
)
def test_a_factory_that_does_not_serve_is_refused(factory: Factory, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Split(factory)


def test_a_frozen_parameter_may_be_left_out() -> None:
    parameters = model()
    parameters["a.weight"].requires_grad_(False)
    trained: Factory = lambda named: optim.SGD([pair for pair in named if pair[1].requires_grad])  # noqa: E731
    assert "a.weight" not in PipelineOptimizer(trained, parameters).param_groups[0]["param_names"]


def test_an_optimizer_that_is_not_known_gets_whole_tensors() -> None:
    """Unless it says that it is elementwise."""
    split = Split(Undeclared, 3)
    assert split.optimizer.elementwise == set()
    with pytest.raises(InputError, match=r"Undeclared would get part of a.weight.*pipec_elementwise = True"):
        split.optimizer.for_stage({ParameterShard("a.weight", 0, 64): torch.zeros(64)})
    assert not is_elementwise(optim.Adafactor([FOREIGN]))
    assert is_elementwise(Declared([FOREIGN]))


def test_numbers_and_state_of_no_one_parameter_are_refused() -> None:
    with pytest.raises(InputError, match="Coupled changes 'weight_decay' of its parameter groups"):
        Split(Coupled).step(0)
    split = Split(Global)
    split.step(0)
    with pytest.raises(InputError, match="state under 'everything' that belongs to no parameter"):
        split.optimizer.state_dict()


def test_what_the_program_does_by_itself_is_refused() -> None:
    optimizer = Split(EVERY["AdamW"]).optimizer
    with pytest.raises(InputError, match=r"pipe.step\(...\) has already updated the parameters"):
        optimizer.step()
    with pytest.raises(InputError, match="parameter groups cannot be added"):
        optimizer.add_param_group({"params": [FOREIGN]})
    with pytest.raises(InputError, match=r"clip, pass clip_grad_norm=..."):
        optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(InputError, match="before you pass it"):
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)


# state


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


@pytest.mark.parametrize("name", [name for name, factory in EVERY.items() if factory is not two])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_state_dict_is_that_of_the_plain_optimizer(name: str, num_replicas: int) -> None:
    factory = EVERY[name]
    split, plain = Split(factory, num_replicas), Plain(factory)
    run(split, plain, numbers=range(3))
    found, expected = split.optimizer.state_dict(), plain.optimizers[0].state_dict()
    for group in found["param_groups"] if factory is by_group else ():
        del group["param_names"]  # which the factory lost
    require_equal(found, expected)


@every
def test_the_state_of_plain_optimizers_can_be_loaded(factory: Factory) -> None:
    plain, split = Plain(factory), Split(factory, 3, seed=1)
    run(plain, numbers=range(5))
    copy_values(plain, split)
    states = [each.state_dict() for each in plain.optimizers]
    split.optimizer.load_state_dict(states if factory is two else states[0])
    run(plain, split, numbers=range(5, 10))
    require_same(split, plain)


@every
@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("has_stages", [True, False])
def test_a_checkpoint_knows_no_layout(factory: Factory, first: int, then: int, has_stages: bool) -> None:
    """Nor does it need stages: it is theirs once there are some."""
    plain, one, other = Plain(factory), Split(factory, first), Split(factory, then, seed=1, attach=has_stages)
    run(plain, one, numbers=range(5))
    one.optimizer.param_groups[0]["lr"] = plain.optimizers[0].param_groups[0]["lr"] = 0.03
    copy_values(one, other)
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    if not has_stages:
        require_equal(other.optimizer.state_dict(), one.optimizer.state_dict())
        other.optimizer.attach(other.stages, other.parameters, alone)
    run(plain, other, numbers=range(5, 10))
    require_same(other, plain)


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
