"""Training without a flush: the bits of a process that applies delayed gradients as the versions say."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from delayed_gradients import Delayed, Lag, double, stages_of, stashed, vertical
from torch import Tensor, nn

import pipec
from pipec.ir.batch_split import split_sizes
from pipec.runtime.stages.bound_stage import WeightVersions

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


def delayed(
    pipe: pipec.Pipeline, factory: Any, version: Lag = stashed, losses: Any = None, **options: Any
) -> Delayed:
    plan = pipe.plan
    return Delayed(
        options.pop("model", pipe._executions.compiler.model),
        factory,
        stages_of(plan),
        len(plan.stages),
        version,
        losses or losses_in(plan.num_microbatches),
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


def test_schedulers_step_by_mini_batch() -> None:
    """Update i of every stage has the rate after i steps of the scheduler, whenever it is made."""
    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    makes = [partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)] * 2
    ours, theirs = (make(opt) for make, opt in zip(makes, (pipe.optimizer, reference.optimizer), strict=True))
    for loss, batch in zip(pipe.stream(batches(12)), batches(12), strict=True):
        assert torch.equal(loss, reference.step(batch))
        ours.step()
        theirs.step()
    assert_same(pipe, reference)
    assert pipe.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"] < 0.01


def test_gradients_are_clipped_stage_by_stage() -> None:
    pipe = pipeline(3, clip_grad_norm=0.01)
    reference = delayed(pipe, SGD, clip=0.01)
    losses = list(pipe.stream(batches(12)))
    expected = [reference.step(batch) for batch in batches(12)]
    assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=0)
    whole = delayed(pipeline(3), SGD)
    assert not torch.allclose(
        torch.stack(losses), torch.stack([whole.step(b) for b in batches(12)]), rtol=1e-3
    )


def test_a_loop_that_stops_early_drains() -> None:
    """What was begun is completed: after the loss of batch 4 of four stages that is batches 5 to 7."""
    pipe = pipeline(4)
    reference = delayed(pipe, SGD)
    for number, _ in enumerate(pipe.stream(batches(20))):
        if number == 4:
            break
    for batch in batches(8):
        reference.step(batch)
    assert_same(pipe, reference)


@pytest.mark.parametrize("how", ["break", "drain", "changed"])
def test_what_a_drain_completes_has_the_rate_of_then(how: str) -> None:
    """Batches 3 and 4 are completed before the loop asks for them, once the scheduler has made step 3."""
    pipe = pipeline(3)
    reference, losses = delayed(pipe, SGD), []
    makes = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    ours, theirs = makes(pipe.optimizer), makes(reference.optimizer)
    for number, loss in enumerate(pipe.stream(batches(5))):
        losses.append(loss)
        ours.step()
        if number == 2 and how == "break":
            break
        if number == 2:
            {"drain": pipe.drain, "changed": pipe.eval}[how]()
    pipe.train()
    for number, batch in enumerate(batches(5)):
        loss = reference.step(batch)
        assert number >= len(losses) or torch.equal(losses[number], loss)
        if number <= 2:
            theirs.step()
    assert_same(pipe, reference)


@pytest.mark.parametrize("how", ["eval_step", "forward", "state_dict", "drain", "step", "optimizer", "load"])
def test_what_looks_at_parameters_drains(how: str) -> None:
    """The losses of what was in flight come next; then the pipeline fills again, from version 0."""
    pipe = pipeline(3)
    reference, given = delayed(pipe, SGD), list(batches(9))
    x, y = given[0]
    calls: dict[str, Callable[[], object]] = {
        "eval_step": lambda: pipe.eval_step(x, target=y),
        "forward": lambda: pipe(x),
        "state_dict": pipe.full_state_dict,
        "drain": pipe.drain,
        "optimizer": pipe.optimizer.state_dict,
        "load": lambda: pipe.optimizer.load_state_dict(pipe.optimizer.state_dict()),
        "step": lambda: pipe.step(x, target=y),
    }
    losses = []
    for number, loss in enumerate(pipe.stream(given)):
        losses.append(loss)
        if number == 2:
            calls[how]()
    expected = [reference.step(batch) for batch in given[:5]]
    if how == "step":
        restart(reference)
        reference.step(given[0])
    restart(reference)
    expected += [reference.step(batch) for batch in given[5:]]
    assert losses == expected
    assert_same(pipe, reference)


def restart(reference: Delayed) -> None:
    """Count versions from here on: the pipeline is empty."""
    del reference.history[:-1]


def test_evaluation_sees_consistent_weights() -> None:
    pipe = pipeline(3)
    reference, (x, y) = delayed(pipe, SGD), next(batches(1))
    stream = pipe.stream(batches(6))
    next(stream)
    for batch in list(batches(3)):
        reference.step(batch)
    plain = copy.deepcopy(reference.model)
    assert torch.equal(pipe.eval_step(x, target=y), LOSS(plain(x), y).detach())


def test_a_step_is_a_stream_of_one_batch() -> None:
    pipe, plain = pipeline(3), model()
    optimizer = SGD(plain.parameters())
    for x, y in batches(4):
        loss = LOSS(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.equal(pipe.step(x, target=y), loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def test_buffers_are_updated_mini_batch_by_mini_batch() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    pipe = pipeline(2, partial(torch.optim.SGD, lr=0.0), model=own)
    plain = copy.deepcopy(own)
    list(pipe.stream(batches(7)))
    for x, _ in batches(7):
        plain(x)
    buffers = dict(pipe.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in plain.named_buffers())
    assert int(buffers["1.num_batches_tracked"]) == 7


def test_frozen_weights_are_shared_by_all_versions() -> None:
    """What an update does not change is not copied."""
    own = model()
    for parameter in own[0].parameters():
        parameter.requires_grad_(False)
    pipe = pipeline(2, lambda named: SGD([p for _, p in named if p.requires_grad]), model=own)
    shared = []
    stash = WeightVersions.stash

    def spy(versions: WeightVersions, changing: Any) -> None:
        stash(versions, changing)
        for weights in versions._stashed.values():
            shared.append([one is other for one, other in zip(weights, versions._latest, strict=True)])

    WeightVersions.stash = spy  # type: ignore[method-assign]
    try:
        list(pipe.stream(batches(6)))
    finally:
        WeightVersions.stash = stash  # type: ignore[method-assign]
    assert all(each[:2] == [True, True] and not any(each[2:]) for each in shared)


def test_versions_are_copied_only_while_they_are_read() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    versions = WeightVersions([first, second], behind=2)
    for number in range(4):
        versions.stash([number % 2])
        (first, second)[number % 2].add_(10)
        versions.advance()
    assert versions.held == {1, 2, 3, 4}, "one more until the next is read, which a late first stage may hold"
    assert [[float(x) for x in versions.of(number)] for number in (2, 3, 4)] == [[10, 11], [20, 11], [20, 21]]
    assert versions.of(2)[1] is versions.of(3)[1]
    with pytest.raises(KeyError):
        versions.of(1)


def test_dropout_draws_by_mini_batch() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    other = copy.deepcopy(own)
    losses = []
    for each in (own, other):
        pipe = pipeline(2, model=each)
        torch.manual_seed(5)
        losses.append(list(pipe.stream(batches(6))))
        after = torch.rand(())
    assert losses[0] == losses[1]
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.rand(()), after)  # a stream takes one number


def test_a_batch_of_another_size_drains() -> None:
    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    given = [*batches(5), *((x[:4], y[:4]) for x, y in batches(2))]
    losses = list(pipe.stream(given))
    expected = [reference.step(batch) for batch in given[:5]]
    restart(reference)
    assert losses == [*expected, *(reference.step(batch) for batch in given[5:])]


def test_what_needs_a_flush_is_refused() -> None:
    x, y = next(batches(1))

    def compiled(stages: int = 2, **options: Any) -> pipec.Pipeline:
        given: dict[str, Any] = {"schedule": "pipedream", "optimizer": SGD, "loss_fn": LOSS, **options}
        return pipec.compile(model(), stages, **given)

    with pytest.raises(pipec.errors.InputError, match="pass optimizer="):
        compiled(optimizer=None)
    with pytest.raises(pipec.errors.InputError, match="shard='optimizer' cannot hold"):
        compiled(shard="optimizer")
    with pytest.raises(pipec.errors.InputError, match="batch is 'rank0'"):
        compiled(batch="rank0")
    with pytest.raises(pipec.errors.InputError, match="runs a mini-batch as one microbatch"):
        compiled(microbatches=2)
    with pytest.raises(pipec.errors.InputError, match="needs a mini-batch of 2 microbatches or more"):
        compiled(schedule="pipedream-2bw", microbatches=1)
    pipe = compiled()
    with pipe.accumulate(), pytest.raises(pipec.errors.InputError, match="leave out accumulate"):
        pipe.step(x, target=y)
    with pipe.accumulate(), pytest.raises(pipec.errors.InputError, match="leave out accumulate"):
        list(pipe.stream(batches(2)))
    with pytest.raises(pipec.errors.InputError, match="cannot be recorded"), pipe.trace():
        list(pipe.stream(batches(2)))
    with pytest.raises(pipec.errors.InputError, match="cannot be recorded"), pipe.trace():
        pipe.step(x, target=y)


def test_tied_weights_are_refused_with_a_remedy() -> None:
    from optimizer_reference import batches as words
    from optimizer_reference import model as tied

    pipe = pipec.compile(tied(), 2, schedule="pipedream", optimizer=SGD)
    with pytest.raises(pipec.errors.InputError, match=r"words.weight is tied: stages 0 and 1 use it.*1f1b"):
        list(pipe.stream(words(2)))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"])
def test_stages_hold_the_versions_that_the_plan_counts(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline(3, SGD, schedule)
    most: dict[int, int] = {}
    of = WeightVersions.of

    def spy(versions: WeightVersions, number: int) -> Sequence[Tensor]:
        found = of(versions, number)
        most[id(versions._latest)] = max(most.get(id(versions._latest), 0), len(versions._stashed))
        return found

    monkeypatch.setattr(WeightVersions, "of", spy)
    list(pipe.stream(batches(8)))
    execution = next(iter(pipe._executions._linked.values()))
    held = {
        stage.index: most[id(stage.weights)]
        for interpreter in execution._interpreters
        for stage in interpreter.stages.values()
    }
    own = dict(pipe.named_parameters())
    for stage in pipe.plan.stages:
        num_bytes = sum(own[name].numel() * own[name].element_size() for name in stage.parameters)
        assert stage.cost.memory.versions == held[stage.index] * num_bytes
    expected = {"pipedream": [2, 1, 0], "pipedream-vertical-sync": [2, 2, 2], "pipedream-2bw": [1, 1, 1]}
    assert [held[index] for index in range(3)] == expected[schedule]


def test_what_loop_and_loader_draw_is_the_same_in_every_run() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    x, y = next(batches(1, rows=48))

    def run() -> list[Tensor]:
        pipe = pipeline(
            3, model=nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Linear(6, 3))
        )
        torch.manual_seed(7)
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        return [torch.stack([loss, torch.rand(())]) for _ in range(2) for loss in pipe.stream(loader)]

    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert torch.equal(torch.stack(first), torch.stack(run()))


class Scaled(nn.Module):
    """A view of the first stage's parameter is what the last stage reads, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale[:6].expand(x.shape[0], 6)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        head: Tensor = self.head(x * scale)
        return head


def test_views_of_weights_that_travel_keep_their_values() -> None:
    torch.manual_seed(0)
    pipe = pipeline(3, model=Scaled())
    assert any(link.source == 0 and link.target == 2 for link in pipe.plan.links)
    reference = delayed(pipe, SGD)
    assert list(pipe.stream(batches(12))) == [reference.step(batch) for batch in batches(12)]
    assert_same(pipe, reference)


@pytest.mark.slow
def test_a_language_model_trains_with_delayed_gradients() -> None:
    """Llama, which ties nothing: attention, masks and positions that several stages read."""
    from huggingface_models import llama

    own, batch = llama()
    generator = torch.Generator().manual_seed(3)

    def given() -> Iterator[dict[str, Tensor]]:
        for _ in range(6):
            ids = torch.randint(0, 48, batch["input_ids"].shape, generator=generator)
            yield {"input_ids": ids, "labels": ids}

    pipe = pipec.compile(own, 3, schedule="pipedream", optimizer=ADAM).prepare(**batch)
    reference = delayed(pipe, ADAM, losses=lambda call, batch: [(call(**batch).loss, 1.0)])
    generator.manual_seed(3)
    losses = list(pipe.stream(given()))
    generator.manual_seed(3)
    expected = [reference.step(each) for each in given()]
    assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=0)
    for name, parameter in pipe.named_parameters():
        assert torch.allclose(parameter, reference.history[-1][name], rtol=1e-3, atol=1e-5), name
