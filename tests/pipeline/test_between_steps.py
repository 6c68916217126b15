"""What a script changes between two steps, the next step does as the unsplit model does it."""

import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from unsplit_reference import unsplit_step

import pipec
from pipec.compiler import compile_cache

ROWS, SIZES = 8, (4, 4)
OFFSET = 0.0


class Net(nn.Module):
    """It reads numbers of every kind that a forward can read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(8, 4)
        self.scale = 1.0
        self.options = {"power": 1}
        self.shifts = [torch.zeros(8)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x)).tanh() * self.scale + self.shifts[0]
        return self.last(hidden ** self.options["power"]) + OFFSET


class ReadsTheClock(Net):
    """Dynamo cannot trace it, so that ``make_fx`` does, which has no guards."""

    def forward(self, x: Tensor) -> Tensor:
        time.perf_counter()
        return super().forward(x)


class Loss:
    """A loss with an attribute and with a closure."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.annealed = closure()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * (output - target).square().mean() + self.annealed(output)


def closure() -> Callable[..., Any]:
    factor = 0.0

    def penalty(output: Tensor | None, new: float | None = None) -> Any:
        nonlocal factor
        if new is not None:
            factor = new
            return None
        return factor * output.square().mean()  # type: ignore[union-attr]

    return penalty


class Pair:
    """A pipeline, and the unsplit model that goes through the same: losses and gradients are equal."""

    def __init__(self, make: type[Net] = Net) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
        self.models = make(), make()
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.losses = Loss(), Loss()
        self.pipe = pipec.compile(self.models[0], 2, loss_fn=self.losses[0], microbatches=len(SIZES))

    def unsplit_step(self) -> Tensor:
        inputs = {"x": self.x, "y": self.y}
        return unsplit_step(lambda x, y: self.losses[1](self.models[1](x), y), inputs, SIZES)

    def step(self) -> None:
        """One step of both."""
        for model in self.models:
            model.zero_grad()
        loss, expected = self.pipe.step(self.x, target=self.y), self.unsplit_step()
        torch.testing.assert_close(loss, expected, atol=0, rtol=1e-6)
        for mine, theirs in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)


Change = Callable[[Net, Loss], object]


def set_offset(value: float) -> None:
    globals()["OFFSET"] = value


def fresh(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def assigned(net: Net) -> dict[str, Tensor]:
    return {name: tensor * 0.5 for name, tensor in net.state_dict().items()}


def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


CHANGES: dict[str, tuple[Change, str]] = {
    "frozen": (lambda net, _: net.first.requires_grad_(False), "requires_grad of model.first.weight changed"),
    "attribute": (lambda net, _: setattr(net, "scale", 3.0), "model.scale changed from 1.0 to 3.0"),
    "dropout": (lambda net, _: setattr(net.drop, "p", 1.0), "model.drop.p changed from 0.0 to 1.0"),
    "dict": (lambda net, _: net.options.update(power=2), "model.options.power changed from 1 to 2"),
    "global": (lambda *_: set_offset(2.0), "OFFSET changed from 0.0 to 2.0"),
    "loss": (lambda _, loss: setattr(loss, "weight", 0.5), "loss_fn.weight changed from 1.0 to 0.5"),
    "closure": (lambda _, loss: loss.annealed(None, 0.7), "0.7"),
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
    make: type[Net], changes: Sequence[str], said: list[str]
) -> None:
    """One change after the other, none of which is undone."""
    pair = Pair(make)
    pair.step()
    try:
        for change in changes:
            apply, reason = CHANGES[change]
            for model, loss in zip(pair.models, pair.losses, strict=True):
                apply(model, loss)
            pair.step()
            assert reason in "".join(said), change
            said.clear()
            pair.step()
            assert not said, change
    finally:
        set_offset(0.0)


def test_autocast_may_be_entered_and_left() -> None:
    pair = Pair()
    pair.step()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pair.pipe.step(pair.x, target=pair.y), pair.unsplit_step())
        pair.step()


def test_freezing_and_unfreezing_again_compiles_once(said: list[str]) -> None:
    pair = Pair()
    for round_ in range(3):
        for frozen in (True, False):
            for model in pair.models:
                model.first.requires_grad_(not frozen)
            pair.step()
        assert ("recompiling" in "".join(said)) == (round_ == 0)
        said.clear()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sign = nn.Linear(4, 2), 0.0

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.layer(x).square() * factor


class Signed(Scaled):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        signs = torch.stack([torch.tensor(factor), torch.tensor(self.sign)])
        return self.layer(x) * torch.copysign(torch.ones(2), signs).prod()


@pytest.mark.parametrize(
    ("make", "factors"),
    [
        (Scaled, (1.0, 2.0, 3.0, 0.0, 0.0, 0.0, -0.0, -0.0, 0.0)),
        (Signed, (0.0, -0.0, 0.0, 1.0, -0.0, 2.0, 0.0, -0.0)),
    ],
)
def test_a_call_like_the_last_one_has_its_own_number(make: type[Scaled], factors: Sequence[float]) -> None:
    """Also a negative zero, which equals the other one: as a constant, a variable and an attribute."""
    model, x = make(), torch.randn(ROWS, 4)
    pipe = pipec.compile(model, 2, microbatches=len(SIZES)).eval()
    for sign, factor in (*((0.0, each) for each in factors), (-0.0, 2.0), (0.0, 2.0)):
        model.sign = sign
        found, expected = pipe(x, factor), model(x, factor).detach()
        torch.testing.assert_close(found, expected)
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
    pair, alive = Pair(), list[weakref.ref[Any]]()
    for number in range(5):
        for loss in pair.losses:
            loss.weight = 1.0 + number
        pair.step()
        alive.append(weakref.ref(pair.pipe._executions.execution(pair.pipe._artifact)))
    assert num_captures() <= before + 2
    assert [number for number, held in enumerate(alive) if held()] == [3, 4]
    assert "What changes often is better a tensor" in "".join(said)
    said.clear()
    for loss in pair.losses:
        loss.weight = 4.0
    pair.step()
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
    pair = Pair()
    looped = pair.pipe if of == "pipe" else pair.pipe.as_module()
    for _ in range(2):  # before the first call, and after it
        for each in (looped, pair.models[1]):
            torch.manual_seed(1)
            LOOPS[name](each)
        pair.step()


def test_groups_by_class_have_the_pipelines_parameters() -> None:
    pipe = Pair().pipe
    linears = [each for each in pipe.modules() if isinstance(each, nn.Linear)]
    assert {id(x) for each in linears for x in each.parameters()} == {id(x) for x in pipe.parameters()}
    assert [name for name, _ in pipe.named_children()] == ["first", "drop", "last"]


def test_the_models_own_train_decides_which_modules_train() -> None:
    class Frozen(Net):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.drop.eval()
            return self

    pipe = Pair(Frozen).pipe
    assert pipe.train() is pipe
    assert not pipe.drop.training
    assert pipe.last.training


# what is drawn


@pytest.fixture(scope="module")
def noisy() -> pipec.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    return pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=2)


def test_draws_follow_the_state_of_torchs_generator(noisy: pipec.Pipeline, tmp_path: Path) -> None:
    """Of a loaded artifact, too."""
    x = torch.randn(ROWS, 4)
    calls: list[Callable[[], Tensor]] = [
        lambda: noisy.step(x, target=x),
        lambda: noisy.eval_step(x, target=x),
        lambda: noisy(x),
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
    assert [loaded.step(x, target=x) for _ in range(2)] == first[:2]


def test_a_call_takes_one_number_of_the_generator_and_only_if_it_draws(noisy: pipec.Pipeline) -> None:
    x, state = torch.randn(ROWS, 4), torch.get_rng_state()
    noisy.step(x, target=x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)
    noisy.eval()
    noisy.eval_step(x, target=x)
    assert torch.equal(torch.get_rng_state(), after)
    noisy.train()


# what a script may do with the pipeline itself


def test_a_step_in_a_forked_child_is_refused(noisy: pipec.Pipeline) -> None:
    x = torch.randn(ROWS, 4)
    noisy.step(x, target=x)
    reader, writer = os.pipe()
    if not os.fork():
        try:
            noisy.step(x, target=x)
        except pipec.InputError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read().startswith("this process is a fork of the one that made the pipeline")
    os.wait()


class Unproven(Net):
    """Whether ``y`` is split along with ``x`` is found out by a capture."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) - y).square().mean()


def test_a_global_is_followed_where_it_was_found_out_which_arguments_are_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (x, y) = Unproven(), torch.randn(2, ROWS, 4)
    pipe = pipec.compile(model, 2, microbatches=2)
    for offset in (1.0, 3.0):
        monkeypatch.setitem(globals(), "OFFSET", offset)
        assert torch.allclose(pipe.step(x, y), model(x, y))


def test_parameters_that_inference_mode_places_can_be_trained() -> None:
    pair = Pair()
    with torch.inference_mode():
        found = pair.pipe.eval()(pair.x.clone())
    torch.testing.assert_close(found, pair.models[1](pair.x).detach())
    pair.pipe.train()
    pair.step()
    assert not any(each.is_inference() for each in pair.pipe.parameters())


# where the program updates


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
mse = nn.functional.mse_loss


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_stage_of_frozen_parameters_alone_may_have_replicas(shard: str | None) -> None:
    (own, plain), (x, y) = (layers(), layers()), torch.randn(2, ROWS, 4)
    for model in (own, plain):
        model[:4].requires_grad_(False)
    options: dict[str, Any] = {"devices": 4, "replicas": 2, "shard": shard, "optimizer": ADAMW}
    pipe, optimizer = pipec.compile(own, loss_fn=mse, microbatches=4, **options), ADAMW(plain.parameters())
    for _ in range(2):
        loss = mse(plain(x), y)
        loss.backward()
        torch.testing.assert_close(pipe.step(x, target=y), loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(own.state_dict(), plain.state_dict())
    assert {*pipe.plan.stages[0].parameters} <= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parameters_that_the_optimizer_does_not_know_are_refused() -> None:
    own, x = layers(), torch.randn(ROWS, 4)
    pipe = pipec.compile(own, 2, loss_fn=mse, microbatches=2, optimizer=ADAMW)
    pipe.step(x, target=x)
    before, own[4] = own[4], nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(pipec.InputError, match=r"other parameters than its optimizer.*4\.0\.bias"):
        pipe.step(x, target=x)
    own[4] = before
    pipe.step(x, target=x)


class Drawing(nn.Module):
    """If it ``tells_sizes`` apart, no one graph serves microbatches of three and of two rows."""

    def __init__(self, tells_sizes: bool) -> None:
        super().__init__()
        self.tells_sizes = tells_sizes

    def forward(self, x: Tensor) -> Tensor:
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
    x, net = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipec.compile(net, devices=2, loss_fn=nn.functional.mse_loss, microbatches=2)
    pipe.step(x, target=x)
    net[0].bias, net[1].bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    assert torch.equal(pipe.full_state_dict()["0.bias"], torch.ones(4))
    net[0].bias = nn.Parameter(torch.full((4,), 2.0))
    pipe.load_state_dict({name: torch.zeros_like(each) for name, each in pipe.state_dict().items()})
    assert not any(each.any() for each in (*net.parameters(), *pipe.full_state_dict().values()))
    net[0].bias = nn.Parameter(torch.ones(4))
    pipe.double()
    assert torch.equal(pipe.full_state_dict()["0.bias"], torch.ones(4).double())
    assert net[0].bias.dtype is torch.float64
