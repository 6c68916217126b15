"""Training without a flush: the bits of a process that applies delayed gradients as the versions say."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from delayed import Delayed, Lag, double, stages_of, stashed, vertical
from torch import Tensor, nn

import pipec
from pipec.ir.batch import split_sizes
from pipec.runtime.versions import WeightVersions

LOSS = nn.functional.cross_entropy
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)

Batch = tuple[Tensor, Tensor]


def model(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def batches(count: int, rows: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def pipeline(
    stages: int, optimizer: Any = SGD, schedule: str = "pipedream", **options: Any
) -> pipec.Pipeline:
    pipe = pipec.compile(
        options.pop("model", None) or model(),
        stages,
        loss_fn=LOSS,
        schedule=schedule,
        optimizer=optimizer,
        dynamic=False,
        **options,
    )
    x, y = next(batches(1))
    return pipe.prepare(x, target=y)


def losses_in(microbatches: int) -> Callable[[Callable[..., Tensor], Batch], Sequence[tuple[Tensor, float]]]:
    """The losses of the microbatches of a batch, and their shares."""

    def found(call: Callable[..., Tensor], batch: Batch) -> Sequence[tuple[Tensor, float]]:
        sizes = split_sizes(len(batch[0]), microbatches)
        parts = zip(batch[0].split(sizes), batch[1].split(sizes), sizes, strict=True)
        return [(LOSS(call(x), y), size / len(batch[0])) for x, y, size in parts]

    return found


def delayed(pipe: pipec.Pipeline, factory: Any, version: Lag = stashed, **options: Any) -> Delayed:
    plan = pipe.plan
    return Delayed(
        copy.deepcopy(pipe._compiler.model),
        factory,
        stages_of(plan),
        len(plan.stages),
        version,
        losses_in(plan.num_microbatches),
        **options,
    )


def assert_same(pipe: pipec.Pipeline, reference: Delayed) -> None:
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, reference.history[-1][name]), name


@pytest.mark.parametrize("factory", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stashing_is_training_with_delayed_gradients(stages: int, factory: Any) -> None:
    pipe = pipeline(stages, factory)
    reference = delayed(pipe, factory)
    losses = list(pipe.stream(batches(50)))
    assert losses == [reference.step(batch) for batch in batches(50)]
    assert_same(pipe, reference)


def test_without_stashing_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards that read the latest weights, as without versions, are told apart."""
    monkeypatch.setattr(WeightVersions, "of", lambda versions, number: versions._latest)
    pipe = pipeline(2)
    reference = delayed(pipe, SGD)
    losses = list(pipe.stream(batches(10)))
    assert losses != [reference.step(batch) for batch in batches(10)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "version"),
    [("pipedream-vertical-sync", vertical), ("pipedream-2bw", double)],
    ids=["vertical sync", "2bw"],
)
def test_other_versions_have_references_of_their_own(schedule: str, version: Lag, stages: int) -> None:
    pipe = pipeline(stages, ADAM, schedule)
    reference, other = delayed(pipe, ADAM, version), delayed(pipe, ADAM, stashed)
    losses = list(pipe.stream(batches(30)))
    assert losses == [reference.step(batch) for batch in batches(30)]
    assert losses != [other.step(batch) for batch in batches(30)]
    assert_same(pipe, reference)


def test_double_buffering_takes_more_microbatches_than_stages() -> None:
    pipe = pipeline(2, SGD, "pipedream-2bw", microbatches=4)
    reference = delayed(pipe, SGD, double)
    assert list(pipe.stream(batches(20))) == [reference.step(batch) for batch in batches(20)]
    assert_same(pipe, reference)


@pytest.mark.parametrize("count", range(6))
def test_streams_may_be_shorter_than_the_pipeline(count: int) -> None:
    pipe = pipeline(4)
    reference = delayed(pipe, SGD)
    assert list(pipe.stream(batches(count))) == [reference.step(batch) for batch in batches(count)]
    assert_same(pipe, reference)
