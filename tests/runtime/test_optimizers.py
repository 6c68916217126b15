"""The optimizer of a program, in one process: its updates of tensors and pieces, its groups, its norm."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from split_optimizers import (
    EVERY,
    SHAPES,
    Anchored,
    Declared,
    Plain,
    Split,
    alone,
    by_group,
    model,
    require_same,
    two,
)
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import ProfilerActivity

from pipec.errors import InputError
from pipec.ir import ParameterShard
from pipec.runtime.optimizers import (
    PipelineOptimizer,
    clip_factor,
    is_elementwise,
    sum_of_squares,
)
from pipec.runtime.optimizers.factory import Factory, Named

every_factory = pytest.mark.parametrize("factory", EVERY.values(), ids=EVERY.keys())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@every_factory
@dtypes
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_updates_have_the_bits_of_the_whole_optimizer(
    factory: Factory, num_replicas: int, dtype: torch.dtype
) -> None:
    split, plain = Split(factory, num_replicas, dtype=dtype), Plain(factory, dtype=dtype)
    for number in range(20):
        split.step(number)
        plain.step(number)
    require_same(split, plain)


def test_pieces_are_cut_where_the_optimizer_allows_it() -> None:
    counts = {EVERY["AdamW"]: 3, Declared: 3, EVERY["Adafactor"]: 1, two: 1}
    for factory, count in counts.items():
        pieces = [p for stage in Split(factory, 3).stages for p in stage.pieces if p.name == "a.weight"]
        assert len(pieces) == count


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

SCHEDULERS: dict[str, Callable[[optim.Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("factory", [EVERY["SGD"], by_group], ids=["SGD", "groups"])
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


def test_a_learning_rate_that_is_a_tensor_is_followed() -> None:
    factories = [partial(optim.Adam, lr=torch.tensor(0.1), foreach=False) for _ in range(2)]
    split, plain = Split(factories[0], 2), Plain(factories[1])
    schedulers = [lr_scheduler.ExponentialLR(each, 0.5) for each in (split.optimizer, plain.optimizers[0])]
    for number in range(5):
        split.step(number)
        plain.step(number)
        for each in schedulers:
            each.step()
    assert split.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 32)
    require_same(split, plain)


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

    parameters = model()
    parameters["a.weight"].mark = "large"
    optimizer = PipelineOptimizer(make, parameters)
    sliced = parameters["a.weight"].detach().view(-1)[:64]
    stage = optimizer.for_stage(
        {ParameterShard("a.weight", 0, 64): sliced, ParameterShard("b.bias", 0, 5): parameters["b.bias"]}
    )
    assert seen[0] == seen[1]
    assert seen[0][0] == ("a.weight", (13, 79), torch.float32, "large")
    before = sliced.clone(), parameters["b.bias"].detach().clone()
    stage.update({"a.weight": torch.ones(64), "b.bias": torch.ones(5)})
    torch.testing.assert_close(sliced, before[0] - 0.1)
    torch.testing.assert_close(parameters["b.bias"].detach(), before[1] - 0.1 / 5)


@pytest.mark.parametrize("factory", [two, EVERY["Adafactor"], Anchored])
def test_whole_parameters_may_lie_in_a_flat_buffer(factory: Factory) -> None:
    split, plain = Split(factory), Plain(factory)
    buffer = torch.cat([each.detach().view(-1) for each in split.parameters.values()])
    parts = buffer.split([each.numel() for each in split.parameters.values()])
    owned = {ParameterShard(name, 0, part.numel()): part for name, part in zip(SHAPES, parts, strict=True)}
    split.stages = [split.optimizer.for_stage(owned)]
    split.optimizer.attach(split.stages, split.parameters, alone)
    for number in range(3):
        split.step(number)
        plain.step(number)
    for part, parameter in zip(parts, plain.parameters.values(), strict=True):
        assert torch.equal(part, parameter.view(-1))


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


def test_processes_can_tell_whether_they_have_the_same_optimizer() -> None:
    facts = [Split(each).optimizer.call_description() for each in (by_group, by_group, two, EVERY["SGD"])]
    assert facts[0] == facts[1]
    assert facts[2]["group 0 of the optimizer"].startswith("Muon, 2 parameters, adjust_lr_fn=None")
    other = Split(by_group).optimizer
    other.param_groups[1]["lr"] = 0.5
    assert len({str(each) for each in [*facts, other.call_description()]}) == 4


def test_hooks_after_the_step_run_once_per_step() -> None:
    split, calls = Split(EVERY["AdamW"], 3), []
    split.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    split.step(0)
    split.step(1)
    assert len(calls) == 2


# what is refused


class Coupled(optim.Optimizer):
    """Keeps a number for all parameters in its group, as Prodigy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1.0})

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["d"] *= 2


class Global(optim.Optimizer):
    """Keeps state for no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

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
    split = Split(Undeclared, 3)
    assert split.optimizer.elementwise == set()
    with pytest.raises(InputError, match=r"Undeclared would get part of a.weight.*pipec_elementwise = True"):
        split.optimizer.for_stage({ParameterShard("a.weight", 0, 64): torch.zeros(64)})
    assert not is_elementwise(optim.Adafactor([FOREIGN]))


def test_an_optimizer_with_numbers_for_all_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="Coupled changes 'd' of its parameter groups"):
        Split(Coupled).step(0)


def test_state_of_no_parameter_is_refused() -> None:
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
