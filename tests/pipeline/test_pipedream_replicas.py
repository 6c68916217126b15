"""Stages with replicas that do not flush: the bits of a process that applies sums of delayed gradients."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_gradients import Delayed, Lag, double, round_robin, stashed
from slow_params import slow_but
from torch import Tensor, nn

import pipec
from pipec.errors import InputError
from tests.pipeline.test_pipedream import (
    ADAM,
    LOSS,
    SGD,
    assert_same,
    batches,
    delayed,
    losses_in,
    model,
    pipeline,
    restart,
)

PLANS: dict[tuple[int, ...], Lag] = {
    (2, 1): round_robin((2, 2), (1, 1)),
    (2, 2): round_robin((2, 2), (2, 1)),
    (3, 2, 1): round_robin((3, 4), (2, 2), (1, 1)),
}
"""What stages with so many replicas use: i // r - (w - 1) with a window w that is said here again."""


@functools.cache
def state() -> dict[str, Tensor]:
    return model(5).state_dict()


def replicated(replicas: tuple[int, ...], optimizer: Any = SGD, **options: Any) -> pipec.Pipeline:
    asked = replicas if len({*replicas}) > 1 else replicas[0]
    return pipeline(sum(replicas), optimizer, replicas=asked, model=model(5), **options)


def reference_of(pipe: pipec.Pipeline, factory: Any, replicas: tuple[int, ...], **options: Any) -> Delayed:
    return delayed(pipe, factory, options.pop("version", PLANS[replicas]), replicas=replicas, **options)


@pytest.mark.parametrize("replicas", slow_but(PLANS, (3, 2, 1)), ids=["2-1", "2-2", "3-2-1"])
def test_replicas_train_with_sums_of_delayed_gradients(replicas: tuple[int, ...]) -> None:
    """Streams of 50 mini-batches, which 3 does not divide, and of 11, which 2 does not."""
    pipe = replicated(replicas, ADAM)
    assert [len(ranks) for ranks in pipe.plan.placement] == [*replicas]
    reference = reference_of(pipe, ADAM, replicas)
    for count in (50, 11):
        losses = list(pipe.stream(batches(count)))
        assert losses == [reference.step(batch) for batch in batches(count)]
        reference.finish()
        restart(reference)
        assert_same(pipe, reference)
    assert_replicas_agree(pipe)


def assert_replicas_agree(pipe: pipec.Pipeline) -> None:
    """The copies that replicas in this process train have the bits of the model."""
    assert pipe._steps.updates is not None
    own = dict(pipe.named_parameters())
    updated = [pipe._steps.updates.updated_on(rank).items() for rank in range(pipe.plan.num_ranks)]
    copies = [(name, value) for each in updated for name, value in each if value is not own[name]]
    names = {name for name, _ in copies}
    replicated = [stage for stage in pipe.plan.stages if len(pipe.plan.placement[stage.index]) > 1]
    assert names == {name for stage in replicated for name in stage.parameters}
    assert all(torch.equal(value, own[name]) for name, value in copies)


@pytest.fixture(scope="module")
def uneven() -> pipec.Pipeline:
    """2-1 with momentum, for tests that begin with its first weights again."""
    return replicated((2, 1))


def fresh(pipe: pipec.Pipeline, **options: Any) -> Delayed:
    """Go back to the first weights, without momentum; returns the reference for them."""
    pipe.load_state_dict(state())
    blank = SGD([nn.Parameter(value) for value in state().values()]).state_dict()
    pipe.optimizer.load_state_dict(blank | {"param_groups": pipe.optimizer.state_dict()["param_groups"]})
    return reference_of(pipe, SGD, (2, 1), **options)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_streams_may_leave_replicas_without_a_mini_batch(uneven: pipec.Pipeline, count: int) -> None:
    reference = fresh(uneven)
    assert list(uneven.stream(batches(count))) == [reference.step(batch) for batch in batches(count)]
    reference.finish()
    assert_same(uneven, reference)
    assert_replicas_agree(uneven)


@pytest.mark.parametrize("last", [3, 4])
def test_a_loop_that_stops_early_drains_all_replicas(uneven: pipec.Pipeline, last: int) -> None:
    """Mini-batches that were begun are completed, on all stages the same ones."""
    reference = fresh(uneven)
    for number, _ in enumerate(uneven.stream(batches(20))):
        if number == last:
            break
    found = dict(uneven.named_parameters())
    for batch in list(batches(last + 1)):
        reference.step(batch)
    completed = []
    for begun, batch in enumerate(list(batches(last + 4))[last + 1 :], start=last + 2):
        reference.step(batch)
        ended = copy.deepcopy(reference)
        ended.finish()
        if all(torch.equal(value, ended.history[-1][name]) for name, value in found.items()):
            completed.append(begun)
    assert completed == [last + 3]
    assert_replicas_agree(uneven)


def test_schedulers_step_by_mini_batch_on_all_replicas(uneven: pipec.Pipeline) -> None:
    """An update has the rate of the last mini-batch of its round, also of a round that is not complete."""
    reference = fresh(uneven)
    makes = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    ours, theirs = makes(uneven.optimizer), makes(reference.optimizer)
    for number, (loss, batch) in enumerate(zip(uneven.stream(batches(9)), batches(9), strict=True)):
        assert torch.equal(loss, reference.step(batch))
        ours.step()
        if number < 8:
            theirs.step()
    reference.finish()
    for group in uneven.optimizer.param_groups:
        group["lr"] = 0.1
    assert_same(uneven, reference)


def test_evaluation_and_steps_drain_all_replicas(uneven: pipec.Pipeline) -> None:
    reference, (x, y) = fresh(uneven), next(batches(1))
    stream = uneven.stream(batches(6))
    next(stream)
    found = uneven.eval_step(x, target=y)
    assert torch.equal(uneven(x), uneven(x))
    for batch in batches(3):
        reference.step(batch)
    reference.finish()
    assert torch.equal(found, LOSS(copy.deepcopy(reference.model)(x), y).detach())
    assert len(list(stream)) == 5


def test_gradients_of_all_replicas_are_clipped_together() -> None:
    pipe = replicated((2, 1), clip_grad_norm=0.01)
    reference = reference_of(pipe, SGD, (2, 1), clip=0.01)
    losses = torch.stack(list(pipe.stream(batches(12))))
    expected = torch.stack([reference.step(batch) for batch in batches(12)])
    assert torch.allclose(losses, expected, rtol=1e-5, atol=0)
    assert_replicas_agree(pipe)


def test_double_buffering_sums_over_pipelines() -> None:
    """Microbatch j of a mini-batch is on replica j mod 2; both sums are added."""
    pipe = replicated((2, 2), ADAM, schedule="pipedream-2bw", microbatches=6)
    reference, other = (delayed(pipe, ADAM, version, losses_in(6)) for version in (double, stashed))
    losses = torch.stack(list(pipe.stream(batches(20, rows=12))))
    expected = torch.stack([reference.step(batch) for batch in batches(20, rows=12)])
    assert torch.allclose(losses, expected, rtol=1e-5, atol=0)
    wrong = torch.stack([other.step(batch) for batch in batches(20, rows=12)])
    assert not torch.allclose(losses, wrong, rtol=1e-3, atol=0)
    assert_replicas_agree(pipe)


def test_a_saved_artifact_of_replicas_trains_on(uneven: pipec.Pipeline, tmp_path: Path) -> None:
    reference = fresh(uneven)
    uneven.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved", optimizer=SGD)
    assert loaded.programs == uneven.programs
    assert list(loaded.stream(batches(7))) == [reference.step(batch) for batch in batches(7)]


def test_what_replicas_cannot_do_without_a_flush_is_refused() -> None:
    def refused(match: str, **options: Any) -> None:
        given: dict[str, Any] = {"schedule": "pipedream", "optimizer": SGD, "loss_fn": LOSS, **options}
        with pytest.raises(InputError, match=match):
            pipec.compile(given.pop("model", model()), given.pop("devices", 3), **given)

    refused(r"replicas are \(2, 1\); take pipedream", schedule="pipedream-vertical-sync", replicas=(2, 1))
    refused("needs the same number of replicas for every stage", schedule="pipedream-2bw", replicas=(2, 1))
    two = {"schedule": "pipedream-2bw", "devices": 4, "replicas": 2}
    refused("4 microbatches or more on 4 ranks, and a multiple of the 2 replicas", microbatches=5, **two)
    norms = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    pipe = pipec.compile(norms, 3, replicas=(2, 1), schedule="pipedream", optimizer=SGD, loss_fn=LOSS)
    with pytest.raises(
        InputError, match=r"change the buffer 1.num_batches_tracked; .* its 2 replicas would differ"
    ):
        list(pipe.stream(batches(2)))
