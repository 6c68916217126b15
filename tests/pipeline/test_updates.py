"""Steps that end with an update, fail or are not finite. All ranks decide alike what becomes of them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_gradients import batches as async_batches
from delayed_gradients import pipeline, with_norms
from equality_rows import CLASSES, Row, batch_of, piped
from forward_modules import model as module
from optimizer_reference import ADAMW, SAME, difference, pair, untied
from optimizer_reference import batches as words
from slow_params import slow
from torch import Tensor, nn, optim

import pipec
from pipec.errors import ExecutionError, InputError, NonFiniteError

PLAN = {"devices": 2, "stages": 2}
REPLICATED = {"devices": 3, "replicas": (2, 1)}
DATA_PARALLEL = {"devices": 2, "stages": 1}


@pytest.mark.parametrize("shard", [None, "gradients", "parameters"])
def test_a_step_that_fails_changes_nothing(shard: str | None) -> None:
    """A replica fails when the other one has begun to sum gradients and to average buffers."""
    row = Row(model="norms", layout="1x2", update="clipped", shard=shard)
    pipe, straight = piped(row).pipe, piped(row).pipe
    for number in range(3):
        x, y = batch_of(row, number, 8)
        with pytest.raises(ExecutionError, match="out of bounds"):
            pipe.step(x, target=torch.cat([y[:-1], torch.tensor([CLASSES])]))
        assert all(parameter.grad is None for parameter in pipe.parameters())
        own, expected = (each.state_dict() for each in (pipe, straight))
        assert all(torch.equal(own[name], value) for name, value in expected.items())
        assert torch.equal(pipe.step(x, target=y), straight.step(x, target=y))
    with pytest.raises(InputError, match="there are no gradients"):
        pipe.optimizer.step()


def sparse_and_dense(named: Any) -> list[optim.Optimizer]:
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named:
        groups[name.startswith("words")].append((name, parameter))
    return [optim.SparseAdam(groups[True], lr=0.01), optim.AdamW(groups[False], lr=0.01)]


SGD = partial(optim.SGD, lr=0.1)
SPARSE = partial(untied, nn.Identity(), is_sparse=True)


@pytest.mark.parametrize("factory", [SGD, sparse_and_dense])
def test_sparse_gradients_are_summed_over_replicas(factory: Callable[[Any], Any]) -> None:
    pipe, plain = pair(SPARSE, factory, **DATA_PARALLEL)
    for batch in words(4):
        pipe.step(**batch)
        plain.step(**batch)
    assert difference(pipe, plain) < SAME


def test_sparse_gradients_are_not_shared_out() -> None:
    pipe, _ = pair(SPARSE, SGD, shard="optimizer", **DATA_PARALLEL)
    with pytest.raises(InputError, match=r"words.weight has sparse gradients, which shard="):
        pipe.step(**next(words(1)))


def test_clipped_steps_have_the_same_bits_on_any_ranks() -> None:
    """Squares are added by tensor, which Adafactor needs whole. Two microbatches have one sum anywhere."""
    states = []
    for layout, shard in (("1", None), ("3", None), ("2x2", None), ("1x2", "gradients")):
        script = piped(Row(layout=layout, update="adafactor", shard=shard), microbatches=2)
        for number in range(8):
            script.step(*batch_of(script.row, number, 4))
        states.append(script.state())
    assert all(torch.equal(each[name], value) for each in states for name, value in states[0].items())


# losses and gradients that are not finite

GOOD, NAN_LOSS, NAN_GRADIENT = "good", "loss", "gradient"


@module(
    first=lambda norm: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Tanh()),
    gain=lambda norm: nn.Parameter(torch.ones(6)),
    last=lambda norm: nn.Sequential(nn.Tanh(), nn.Linear(6, 3)),
)
def Net(self: Any, x: Tensor, flag: Tensor) -> Tensor:
    """Where ``flag`` is 0 the loss is finite, and the gradient of ``gain`` is 0 times infinity."""
    found: Tensor = self.last(self.first(x) + (self.gain * flag).sqrt())
    return found.square().mean()


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Net(norm).double()


def batches(*kinds: str) -> Iterator[dict[str, Tensor]]:
    """A batch of each kind. What is wrong is in row 5, of microbatch 2 of four."""
    generator = torch.Generator().manual_seed(1)
    for kind in kinds:
        x, flag = torch.randn(8, 6, generator=generator).double(), torch.ones(8, 6).double()
        if kind is NAN_LOSS:
            x[5] = float("nan")
        if kind is NAN_GRADIENT:
            flag[5] = 0.0
        yield {"x": x, "flag": flag}


KINDS = (GOOD, NAN_LOSS, GOOD, NAN_GRADIENT, GOOD)


def copies(tensors: Any) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


def same(before: list[Tensor], now: Any) -> bool:
    return all(map(torch.equal, before, now))


@pytest.mark.parametrize(
    "options",
    [
        {**PLAN, "clip_grad_norm": 0.5},
        {**REPLICATED, "shard": None},
        {**REPLICATED, "shard": "optimizer", "clip_grad_norm": 0.5},
        {**DATA_PARALLEL, "shard": "gradients"},
        {**REPLICATED, "shard": "parameters"},
        *({**plan, "optimizer": None} for plan in (PLAN, REPLICATED, DATA_PARALLEL)),
    ],
)
def test_skipped_steps_leave_no_trace(options: dict[str, Any]) -> None:
    """Training is as if those batches had not been there. Without an optimizer ``.grad`` is what it was."""
    pipe, plain = pair(model, on_nan="skip", **{"optimizer": ADAMW, **options})
    for kind, batch in zip(KINDS, batches(*KINDS), strict=True):
        loss = pipe.step(**batch)
        assert bool(loss.isnan()) == (kind is NAN_LOSS)
        if kind is GOOD:
            plain.step(**batch)
    assert difference(pipe, plain) < SAME
    for found, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)
    assert (pipe.num_steps, pipe.num_skipped) == (5, 2)


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_what_is_not_finite_is_raised_and_nothing_has_changed(optimizer: Any) -> None:
    """Parameters, gradients, optimizer state and BatchNorm's statistics; the next step is right."""
    pipe = pipec.compile(model(norm=True), 2, microbatches=4, on_nan="raise", optimizer=optimizer)
    straight = pipec.compile(model(norm=True), 2, microbatches=4, optimizer=optimizer)
    first, second, third = batches(GOOD, GOOD, GOOD)
    pipe.step(**first)
    held = copies(pipe.state_dict().values())
    gradients = copies(p.grad for p in pipe.parameters()) if optimizer is None else []
    bad_loss, bad_gradient = batches(NAN_LOSS, NAN_GRADIENT)
    with pytest.raises(NonFiniteError, match=r"step 1 .*the loss of microbatch 2 is NaN \(rank 1, stage 1\)"):
        pipe.step(**bad_loss)
    with pytest.raises(NonFiniteError, match=r"step 1 .*the gradient of gain, .* is not finite \(rank \d"):
        pipe.step(**bad_gradient)
    assert same(held, pipe.state_dict().values())
    assert same(gradients, [p.grad for p in pipe.parameters()] if optimizer is None else [])
    pipe.step(**second)
    pipe.step(**third)
    for batch in (first, second, third):
        straight.step(**batch)
    assert same(list(straight.state_dict().values()), pipe.state_dict().values())
    assert pipe.num_steps == 3


def test_gradients_that_are_finite_may_have_a_norm_that_is_not() -> None:
    """Their squares are more than a number can be."""
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    pipe = pipec.compile(layers, 2, loss_fn=lambda found, _: found.mean() * 1e25, on_nan="raise")
    pipe.step(torch.randn(8, 6), target=torch.zeros(8))
    assert all(torch.linalg.vector_norm(p.grad).isinf() for p in pipe.parameters() if p.grad is not None)


def test_a_bad_step_that_accumulates_spoils_the_update_it_is_for() -> None:
    """As where a script checks the sum: the whole update is left out, and the next one is right."""
    pipe, plain = pair(model, on_nan="skip", **REPLICATED)
    bad, *good = batches(NAN_LOSS, GOOD, GOOD)
    with pipe.accumulate():
        pipe.step(**bad)
    assert pipe.num_skipped == 0
    pipe.step(**good[0])
    assert pipe.num_skipped == 1
    with pipe.accumulate():
        pipe.step(**bad)
    pipe.optimizer.step()
    assert pipe.num_skipped == 2
    pipe.step(**good[1])
    plain.step(**good[1])
    assert difference(pipe, plain) < SAME


def test_saved_artifacts_have_the_check(tmp_path: Any) -> None:
    pipe = pipec.compile(model(), 2, microbatches=4, on_nan="raise")
    good, bad = batches(GOOD, NAN_LOSS)
    pipe.step(**good)
    pipe.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    with pytest.raises(NonFiniteError, match="microbatch 2 is NaN"):
        loaded.step(**bad)
    assert all(p.grad is None for p in loaded.parameters())
    assert loaded.step(**good) == pipe.eval_step(**good)


@pytest.mark.parametrize(("schedule", "stages"), [slow("pipedream", 3), ("pipedream-2bw", 2)])
def test_a_stream_without_a_flush_ends_before_a_loss_that_is_nan(schedule: str, stages: int) -> None:
    """Stages that are ahead have made no update that others lack. BatchNorm's statistics are as before."""
    given, losses = list(async_batches(12)), list[Tensor]()
    given[5][0][0] = float("nan")
    options = {"schedule": schedule, "on_nan": "raise"}
    pipe, straight = (pipeline(stages, model=with_norms(), **options) for _ in range(2))
    with pytest.raises(NonFiniteError, match=rf"step 5 .*of microbatch 0 is NaN \(rank {stages - 1}"):
        losses.extend(pipe.stream(given))
    assert losses == list(straight.stream(given[:5]))
    assert same(list(straight.state_dict().values()), pipe.state_dict().values())
    assert pipe.num_steps == 5
    assert list(pipe.stream(given[6:])) == list(straight.stream(given[6:]))
    with pytest.raises(NonFiniteError, match=r"step 11 .*the loss"):
        pipe.step(given[5][0], target=given[5][1])
    assert same(list(straight.state_dict().values()), pipe.state_dict().values())


def test_a_stage_of_a_stream_refuses_a_gradient_that_is_not_finite() -> None:
    pipe = pipec.compile(model(), 2, schedule="pipedream", optimizer=torch.optim.AdamW, on_nan="raise")
    with pytest.raises(ExecutionError, match=r"check: NonFiniteError: the gradient of gain, .* not finite"):
        list(pipe.stream(batches(GOOD, GOOD, NAN_GRADIENT, GOOD, GOOD, GOOD)))
    assert not any(parameter.isnan().any() for parameter in pipe.parameters())


def test_a_checkpoint_in_a_stream_does_not_count_what_nothing_came_of(tmp_path: Path) -> None:
    """The third of those that were begun has a loss that is NaN, which saving sees first, then both loops."""
    given = list(async_batches(8))
    given[2][0][0] = float("nan")
    pipe, other = (pipeline(3, on_nan="raise") for _ in range(2))
    stream = pipe.stream(given)
    losses = [next(stream)]
    pipe.save_checkpoint(tmp_path / "saved")
    other.load_checkpoint(tmp_path / "saved")
    with pytest.raises(NonFiniteError, match="the loss of microbatch 0 is NaN"):
        losses.extend(stream)
    assert len(losses) == 2
    gone_on: list[Tensor] = []
    with pytest.raises(NonFiniteError, match="the loss of microbatch 0 is NaN"):
        gone_on.extend(other.stream(given, resume=True))
    assert gone_on == losses[1:]
    assert same(list(pipe.state_dict().values()), other.state_dict().values())
