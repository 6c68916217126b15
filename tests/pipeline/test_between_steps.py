"""What a script changes between two steps, the next step does as the unsplit model does it."""

import copy
import gc
import itertools
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training_loops
import worker_processes
from awkward_modules import Pair, assert_near
from forward_modules import model as module
from slow_params import slow, slow_but
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from unsplit_reference import Plain
from worker_processes import run_ranks

import pipec
from pipec.compiler import compile_cache

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
OFFSET = 0.0
mse = nn.functional.mse_loss


@pytest.mark.parametrize("seed", slow_but(range(20), 12, 15))
def test_a_random_loop_trains_as_the_unsplit_model(seed: int) -> None:
    assert not training_loops.difference(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_loops_of_two_processes_train_as_the_unsplit_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 1500.0)
    for printed in run_ranks(Path(training_loops.__file__), 2, tmp_path, [*map(str, range(10))]):
        found = json.loads(printed.splitlines()[-1])
        assert not any(found.values()), found


@module(
    first=lambda: nn.Linear(4, 8),
    drop=lambda: nn.Dropout(0.0),
    last=lambda: nn.Linear(8, 4),
    scale=lambda: 1.0,
    options=lambda: {"power": 1},
    shifts=lambda: [torch.zeros(8)],
)
def Net(self: Any, x: Tensor) -> Tensor:
    """It reads numbers of every kind that a forward can read."""
    hidden = self.drop(self.first(x)).tanh() * self.scale + self.shifts[0]
    return self.last(hidden ** self.options["power"]) + OFFSET


class ReadsTheClock(Net):  # type: ignore[misc, valid-type]
    """Dynamo cannot trace it, so that ``make_fx`` does, which has no guards."""

    def forward(self, x: Tensor) -> Tensor:
        time.perf_counter()
        return super().forward(x)


class Loss:
    """A loss with an attribute and with a closure."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.penalty, self.anneal = closure()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * (output - target).square().mean() + self.penalty(output)


def closure() -> tuple[Callable[..., Any], Callable[..., Any]]:
    factor = 0.0

    def anneal(new: float) -> None:
        nonlocal factor
        factor = new

    return lambda output: factor * output.square().mean(), anneal


def pair_of(make: Any = Net) -> Pair:
    """A pipeline, and the unsplit model that goes through the same: losses and gradients are equal."""
    torch.manual_seed(0)
    return Pair(make(), Loss())


def step(pair: Pair) -> None:
    pair.step(X, target=Y)


Change = Callable[[Any, Loss], object]


def fresh(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def assigned(net: Any) -> dict[str, Tensor]:
    return {name: tensor * 0.5 for name, tensor in net.state_dict().items()}


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


CHANGES: dict[str, tuple[Change, str]] = {
    "frozen": (lambda net, _: net.first.requires_grad_(False), "requires_grad of model.first.weight changed"),
    "attribute": (lambda net, _: setattr(net, "scale", 3.0), "model.scale changed from 1.0 to 3.0"),
    "dropout": (lambda net, _: setattr(net.drop, "p", 1.0), "model.drop.p changed from 0.0 to 1.0"),
    "dict": (lambda net, _: net.options.update(power=2), "model.options.power changed from 1 to 2"),
    "global": (lambda *_: globals().update(OFFSET=2.0), "OFFSET changed from 0.0 to 2.0"),
    "loss": (lambda _, loss: setattr(loss, "weight", 0.5), "loss_fn.weight changed from 1.0 to 0.5"),
    "closure": (lambda _, loss: loss.anneal(0.7), "0.7"),
    "hook": (lambda net, _: net.last.register_forward_hook(doubled), "hooks of model.last changed from ()"),
    "tensor": (lambda net, _: net.shifts.__setitem__(0, torch.ones(8)), "model.shifts.0 changed"),
    "in place": (lambda net, _: net.shifts[0].fill_(1), "model.shifts.0 changed"),
    "class": (lambda net, _: setattr(net, "drop", nn.Tanh()), "model.drop changed from Dropout to Tanh"),
    "module": (lambda net, _: setattr(net, "last", fresh(lambda: nn.Linear(8, 4))), "last.weight, last.bias"),
    "layers": (
        lambda net, _: setattr(net, "last", fresh(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))),
        "class of model.last changed from Linear to Sequential, and",
    ),
    "assigned": (lambda net, _: net.load_state_dict(assigned(net), assign=True), "first.weight"),
    "parameter": (lambda net, _: setattr(net.first, "bias", nn.Parameter(torch.ones(8))), "first.bias"),
    "mode": (lambda net, _: net.eval(), "recompiling: training of model changed from True to False, and"),
}


UNGUARDED = ("attribute", "dropout", "dict", "global", "loss", "closure", "tensor", "in place")
"""Changes that guards see, where there are any."""


@pytest.mark.parametrize(("make", "changes"), [slow(Net, [*CHANGES]), (ReadsTheClock, UNGUARDED)])
def test_what_changed_since_the_last_step_is_done_and_said_once(
    make: Any, changes: Sequence[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One change after the other, none of which is undone."""
    monkeypatch.setitem(globals(), "OFFSET", OFFSET)
    pair = pair_of(make)
    step(pair)
    for change in changes:
        apply, reason = CHANGES[change]
        for model in (pair.model, pair.unsplit):
            apply(model, pair.loss_fn)
        step(pair)
        assert reason in "".join(said), change
        said.clear()
        step(pair)
        assert not said, change


def test_autocast_may_be_entered_and_left_again_and_compiles_once(said: list[str]) -> None:
    pair = pair_of()
    for round_ in range(3):
        step(pair)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = pair.loss(X, target=Y)
            assert_near(pair.pipe.step(X, target=Y), loss, "loss", 1e-6)
        assert ("recompiling" in "".join(said)) == (round_ == 0)
        said.clear()


@module(layer=lambda: nn.Linear(4, 2))
def Signed(self: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    signs = torch.stack([torch.tensor(factor), torch.tensor(self.sign)])
    return self.layer(x) * factor, self.layer(x) * torch.copysign(torch.ones(2), signs).prod()


@pytest.mark.parametrize(
    "factors",
    [
        (1.0, 2.0, 3.0, 0.0, 0.0, 0.0, -0.0, -0.0, 0.0),
        (0.0, -0.0, 0.0, 1.0, -0.0, 2.0, 0.0, -0.0),
    ],
)
def test_a_call_like_the_last_one_has_its_own_number(factors: Sequence[float]) -> None:
    """Also a negative zero, which equals the other one: as a constant, a variable and an attribute."""
    model = Signed()
    pipe = pipec.compile(model, 2, microbatches=2).eval()
    for sign, factor in (*((0.0, each) for each in factors), (-0.0, 2.0), (0.0, 2.0)):
        model.sign = sign
        for found, expected in zip(pipe(X, factor), model(X, factor), strict=True):
            torch.testing.assert_close(found, expected.detach())
            assert torch.equal(found.signbit(), expected.signbit()), (sign, factor)


@pytest.mark.slow
def test_what_changes_again_and_again_takes_no_more_and_more_memory(
    collect: Callable[[], int], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def num_captures() -> int:
        """What torch's symbols keep alive, in cycles that Python's garbage collector does not see."""
        collect()
        return sum(type(each) is ShapeEnv for each in gc.get_objects())

    monkeypatch.setattr(compile_cache, "MAX_SIGNATURES", 2)
    before = num_captures()
    pair, alive = pair_of(), list[weakref.ref[Any]]()
    loss: Any = pair.loss_fn
    for number in range(5):
        loss.weight = 1.0 + number
        step(pair)
        alive.append(weakref.ref(pair.pipe._executions.execution(pair.pipe._artifact)))
    assert num_captures() <= before + 2
    assert [number for number, held in enumerate(alive) if held()] == [3, 4]
    assert "What changes often is better a tensor" in "".join(said)
    said.clear()
    loss.weight = 4.0
    step(pair)
    assert not said


# loops over the modules of a pipeline


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
        nn.init.zeros_(module.bias)


LOOPS: dict[str, Callable[[Any], object]] = {
    "modules": lambda model: [setattr(x, "p", 1.0) for x in model.modules() if isinstance(x, nn.Dropout)],
    "mode": lambda model: [x.eval().__setattr__("p", 1.0) for x in model.modules() if type(x) is nn.Dropout],
    "apply": lambda model: model.apply(initialise),
    "named modules": lambda model: [initialise(x) for name, x in model.named_modules() if name == "last"],
    "children": lambda model: [initialise(x) for x in model.children()],
    "the root": lambda model: [setattr(x, "scale", 3.0) for x in model.modules() if hasattr(x, "scale")],
    "attribute": lambda model: setattr(model, "scale", 3.0),
    "submodule": lambda model: model.get_submodule("first").weight.requires_grad_(False),
    "hook": lambda model: [x.register_forward_hook(doubled) for x in model.children()],
    "replaced": lambda model: setattr(model, "drop", nn.Dropout(1.0)),
}


@pytest.mark.parametrize(
    ("name", "of"),
    [*((name, "pipe") for name in LOOPS), *((name, "module") for name in ("mode", "attribute", "replaced"))],
)
def test_a_loop_over_modules_acts_on_the_model(name: str, of: str) -> None:
    pair = pair_of()
    looped = pair.pipe if of == "pipe" else pair.pipe.as_module()
    for _ in range(2):  # before the first call, and after it
        for each in (looped, pair.unsplit):
            torch.manual_seed(1)
            LOOPS[name](each)
        step(pair)


def test_groups_by_class_have_the_pipelines_parameters() -> None:
    pipe = pair_of().pipe
    linears = [each for each in pipe.modules() if isinstance(each, nn.Linear)]
    assert {id(x) for each in linears for x in each.parameters()} == {id(x) for x in pipe.parameters()}
    assert [name for name, _ in pipe.named_children()] == ["first", "drop", "last"]


def test_the_models_own_train_decides_which_modules_train() -> None:
    class Frozen(Net):  # type: ignore[misc, valid-type]
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.drop.eval()
            return self

    pipe = pair_of(Frozen).pipe
    assert pipe.train() is pipe
    assert not pipe.drop.training
    assert pipe.last.training


# what is drawn


@pytest.fixture(scope="module")
def noisy() -> pipec.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    return pipec.compile(model, 2, loss_fn=mse, microbatches=2)


def test_draws_follow_the_state_of_torchs_generator(noisy: pipec.Pipeline, tmp_path: Path) -> None:
    """Of a loaded artifact, too."""
    calls: list[Callable[[], Tensor]] = [
        lambda: noisy.step(X, target=X),
        lambda: noisy.eval_step(X, target=X),
        lambda: noisy(X),
    ]
    state = torch.get_rng_state()
    first = [call() for call in calls for _ in range(2)]
    torch.set_rng_state(state)
    again = [call() for call in calls for _ in range(2)]
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first[::2], first[1::2]))
    noisy.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    torch.set_rng_state(state)
    assert [loaded.step(X, target=X) for _ in range(2)] == first[:2]


def test_a_call_takes_one_number_of_the_generator_and_only_if_it_draws(noisy: pipec.Pipeline) -> None:
    state = torch.get_rng_state()
    noisy.step(X, target=X)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)
    noisy.eval()
    noisy.eval_step(X, target=X)
    assert torch.equal(torch.get_rng_state(), after)
    noisy.train()


# what a script may do with the pipeline itself


def test_a_step_in_a_forked_child_is_refused(noisy: pipec.Pipeline) -> None:
    noisy.step(X, target=X)
    reader, writer = os.pipe()
    if not os.fork():
        try:
            noisy.step(X, target=X)
        except pipec.InputError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read().startswith("this process is a fork of the one that made the pipeline")
    os.wait()


class Unproven(Net):  # type: ignore[misc, valid-type]
    """Whether ``y`` is split along with ``x`` is found out by a capture."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().forward(x) - y).square().mean()


def test_a_global_is_followed_where_it_was_found_out_which_arguments_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(Unproven())
    for offset in (1.0, 3.0):
        monkeypatch.setitem(globals(), "OFFSET", offset)
        pair.step(X, Y)


def test_parameters_that_inference_mode_places_can_be_trained() -> None:
    pair = pair_of()
    with torch.inference_mode():
        found = pair.pipe.eval()(X.clone())
    torch.testing.assert_close(found, pair.unsplit(X).detach())
    pair.pipe.train()
    step(pair)
    assert not any(each.is_inference() for each in pair.pipe.parameters())


# where the program updates


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


UPDATING: dict[str, Any] = {"loss_fn": mse, "optimizer": partial(torch.optim.AdamW, lr=1e-2)}


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_stage_of_frozen_parameters_alone_may_have_replicas(shard: str | None) -> None:
    model = layers()
    model[:4].requires_grad_(False)
    plain = Plain(copy.deepcopy(model), **UPDATING)
    pipe = pipec.compile(model, 4, replicas=2, microbatches=4, shard=shard, **UPDATING)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(X, target=Y), plain.step(X, target=Y))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert {*pipe.plan.stages[0].parameters} <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parameters_that_the_optimizer_does_not_know_are_refused() -> None:
    own = layers()
    pipe = pipec.compile(own, 2, microbatches=2, **UPDATING)
    pipe.step(X, target=Y)
    before, own[4] = own[4], nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(pipec.InputError, match=r"other parameters than its optimizer.*4\.0\.bias"):
        pipe.step(X, target=Y)
    own[4] = before
    pipe.step(X, target=Y)


@module(tells_sizes=bool)
def Drawing(self: Any, x: Tensor) -> Tensor:
    """If it ``tells_sizes`` apart, no one graph serves microbatches of three and of two rows."""
    x = x + nn.functional.dropout(torch.ones_like(x), 0.5, training=True)
    return (x, x)[0 if self.tells_sizes and len(x) > 2 else 1]


@pytest.mark.parametrize("layout", [{"devices": 1}, {"devices": 2, "stages": 1}])
def test_draws_do_not_depend_on_how_microbatches_are_compiled(layout: dict[str, Any]) -> None:
    """Five microbatches of 3, 3, 3, 2 and 2 rows draw by their number: one group, or one of each size."""
    drawn = []
    for tells_sizes in (False, True):
        pipe = pipec.compile(Drawing(tells_sizes), microbatches=5, **layout)
        torch.manual_seed(3)
        drawn.append(pipe(torch.zeros(13, 16)))
        assert len(list(pipe._executions.compiler.cache.compiled)) == 1 + tells_sizes
    assert torch.equal(*drawn)
    masks = drawn[0].split([3, 3, 3, 2, 2])
    assert not any(torch.equal(one[:2], other[:2]) for one, other in itertools.combinations(masks, 2))


def test_a_replaced_parameter_is_read_loaded_and_converted_before_the_next_call() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipec.compile(net, devices=2, loss_fn=mse, microbatches=2)
    pipe.step(X, target=Y)
    net[0].bias, net[1].bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    assert torch.equal(pipe.full_state_dict()["0.bias"], torch.ones(4))
    net[0].bias = nn.Parameter(torch.full((4,), 2.0))
    pipe.load_state_dict({name: torch.zeros_like(each) for name, each in pipe.state_dict().items()})
    assert not any(each.any() for each in (*net.parameters(), *pipe.full_state_dict().values()))
    net[0].bias = nn.Parameter(torch.ones(4))
    pipe.double()
    assert torch.equal(pipe.full_state_dict()["0.bias"], torch.ones(4).double())
    assert net[0].bias.dtype is torch.float64
