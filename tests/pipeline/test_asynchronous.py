"""Streams without a flush: the bits of a process that applies delayed gradients as the versions say."""

import copy
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import delayed_gradients
import pytest
import torch
from delayed_gradients import (
    ADAM,
    DOUBLE,
    LOSS,
    ROWS,
    SGD,
    VERTICAL,
    Batch,
    Row,
    assert_same,
    batches,
    delayed,
    difference,
    model,
    pipeline,
    with_norms,
)
from slow_params import slow
from torch import Tensor
from worker_processes import run_lines, run_ranks

import pipec
from pipec.cli.artifact_inputs import load_with_random_tensors, random_batches
from pipec.errors import ExecutionError, InfeasibleError, InputError
from pipec.plan.predictions import plan_memory
from pipec.runtime.stages.bound_stage import WeightVersions
from pipec.timeline.curves import rank_memory_over_time
from pipec.viz import DrawnStep
from pipec.viz.page_data import steps_data
from tests.cli.test_cli import pipec_cli, pipec_json


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_stream_trains_with_delayed_gradients(row: Row) -> None:
    assert not difference(row)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_processes_train_with_delayed_gradients(num_ranks: int, tmp_path: Path) -> None:
    for printed in run_ranks(Path(delayed_gradients.__file__), num_ranks, tmp_path):
        found = json.loads(printed.splitlines()[-1])
        assert found
        assert not any(found.values()), found


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [("pipedream", (1, 1, 1)), (DOUBLE, (1, 1)), slow("pipedream", (2, 1))],
)
def test_a_saved_artifact_trains_on(schedule: str, replicas: tuple[int, ...], tmp_path: Path) -> None:
    row = Row(schedule, replicas, optimizer="adam")
    pipe = row.pipeline()
    reference = row.reference(pipe)
    pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved", optimizer=ADAM)
    assert loaded.programs == pipe.programs
    assert list(loaded.stream(batches(8))) == [reference.feed(batch) for batch in batches(8)]
    reference.drain()
    assert_same(loaded, reference)
    with pytest.raises(InputError, match=r"step was given kwargs\['x'\], target"):
        list(loaded.stream([{"x": torch.zeros(8, 6), "target": torch.zeros(8)}]))


def test_buffers_are_updated_mini_batch_by_mini_batch() -> None:
    own = with_norms()
    pipe, plain = pipeline(2, partial(torch.optim.SGD, lr=0.0), model=own), copy.deepcopy(own)
    list(pipe.stream(batches(7)))
    for x, _ in batches(7):
        plain(x)
    buffers = dict(pipe.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in plain.named_buffers())


def test_an_epoch_ends_with_batches_of_fewer_rows_than_microbatches() -> None:
    """Those of another number of rows are trained on when the pipeline is empty."""
    pipe, wanted = pipeline(2, schedule=DOUBLE, microbatches=4), list[Tensor]()
    given = [(x[:rows], y[:rows]) for (x, y), rows in zip(batches(7), (8, 8, 8, 2, 1, 8, 8), strict=True)]
    reference = delayed(pipe, SGD)
    for number, batch in enumerate(given):
        if len(batch[0]) != len(given[number - 1][0]):
            reference.drain()
        wanted.append(reference.feed(batch))
    assert list(pipe.stream(given)) == wanted
    assert_same(pipe, reference)


# versions of weights


@pytest.mark.parametrize(
    ("schedule", "counts"), [("pipedream", (2, 1, 0)), (VERTICAL, (2, 2, 2)), (DOUBLE, (1, 1, 1))]
)
def test_stages_hold_the_versions_that_the_plan_counts(
    schedule: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen weight is in none of them."""
    own, most, of = model(), Counter[int](), WeightVersions.of
    own[0].requires_grad_(False)
    trained: Any = lambda named: SGD([p for _, p in named if p.requires_grad])  # noqa: E731
    pipe = pipeline(3, trained, schedule, model=own)

    def spy(versions: WeightVersions, number: int) -> Sequence[Tensor]:
        found, latest = of(versions, number), {*map(id, versions._latest)}
        copies = [x for weights in versions._stashed.values() for x in weights if id(x) not in latest]
        key = id(versions._latest)
        most[key] = max(most[key], sum(x.nbytes for x in copies))
        return found

    monkeypatch.setattr(WeightVersions, "of", spy)
    list(pipe.stream(batches(8)))
    (execution, *_) = pipe._executions._linked.values()
    weights = {k: stage.weights for each in execution._interpreters for k, stage in each.stages.items()}
    for stage, count in zip(pipe.plan.stages, counts, strict=True):
        own_bytes = sum(p.nbytes for p in map(own.get_parameter, stage.parameters) if p.requires_grad)
        assert stage.cost.memory.versions == most[id(weights[stage.index])] == count * own_bytes


# how streams end


def halves(count: int) -> Iterator[Batch]:
    return ((x[:4], y[:4]) for x, y in batches(count))


def unreadable(count: int) -> Iterator[Batch]:
    yield from batches(count)
    raise OSError("the disk is full")


def unfit(count: int) -> Iterator[Batch]:
    yield from batches(count)
    yield torch.zeros(8, 6), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize(
    ("given", "error", "match"),
    [(unreadable, OSError, "the disk is full"), (unfit, InputError, "target has 3 rows but the batch has 8")],
)
def test_what_an_iterator_raises_is_raised_when_all_batches_are_trained_on(
    given: Callable[[int], Iterator[Batch]], error: type[Exception], match: str, schedule: str
) -> None:
    row = Row(schedule, microbatches=None if schedule == "pipedream" else 2)
    pipe, losses = row.pipeline(), list[Tensor]()
    reference = row.reference(pipe)
    with pytest.raises(error, match=match):
        losses.extend(pipe.stream(given(6)))
    assert losses == [reference.feed(batch) for batch in batches(6)]
    assert_same(pipe, reference)
    reference.drain()
    assert list(pipe.stream([*batches(2), *halves(2)]))[:2] == [reference.feed(batch) for batch in batches(2)]
    reference.drain()
    for batch in halves(2):
        reference.feed(batch)
    assert_same(pipe, reference)


def test_an_interrupt_completes_what_was_begun() -> None:
    """Ctrl-C while the script waits for a loss: every stage has made the same updates afterwards."""
    pipe, losses, main = pipeline(3), list[Tensor](), threading.main_thread().ident
    reference = delayed(pipe, SGD)
    assert main is not None

    def interrupting() -> Iterator[Batch]:
        for number, batch in enumerate(batches(50)):
            if number == 10:
                signal.pthread_kill(main, signal.SIGINT)
            yield batch

    with pytest.raises(KeyboardInterrupt):
        losses.extend(pipe.stream(interrupting()))
    for batch in islice(batches(50), pipe.num_steps):
        reference.feed(batch)
    assert len(losses) < pipe.num_steps <= len(losses) + 3
    assert_same(pipe, reference)
    reference.drain()
    assert list(pipe.stream(batches(3))) == [reference.feed(batch) for batch in batches(3)]


class Fails(torch.optim.SGD):
    """Raises in the middle of the sixth update of the stage that has the layer 4."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.9)
        self.count, self.names = 0, {name for name, p in named if not p.is_meta}

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if "4.weight" in self.names and self.count == 6:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(7.0)
            raise ValueError("the learning rate is negative")
        return super().step(closure)


LAST_IS_DONE = threading.Event()


class FailsLate(Fails):
    """The first stage fails in its fifth update, when the last one has nothing in flight any more."""

    def step(self, closure: Any = None) -> Any:
        if "0.weight" in self.names and self.count == 4:
            assert LAST_IS_DONE.wait(60)
            raise ValueError("the learning rate is negative")
        self.names.discard("4.weight")
        super().step(closure)
        if "8.weight" in self.names and self.count == 7:
            LAST_IS_DONE.set()


@pytest.mark.parametrize(
    ("schedule", "optimizer", "least", "most"),
    [
        ("pipedream", Fails, 0, 0),
        (VERTICAL, FailsLate, 4, 4),
        slow(VERTICAL, Fails, 3, 6),
        slow(DOUBLE, Fails, 3, 6),
    ],
)
def test_an_optimizer_that_raises_leaves_the_newest_version_that_all_stages_hold(
    schedule: str, optimizer: Any, least: int, most: int
) -> None:
    """The bits of a stream of so many batches. Plain stashing holds no such version, and says so."""
    pipe, straight = (pipeline(3, each, schedule, model=with_norms()) for each in (optimizer, SGD))
    before = {name: x.clone() for name, x in pipe.state_dict().items()}
    with pytest.raises(ExecutionError, match=r"update: ValueError: the learning rate is negative") as caught:
        list(pipe.stream(batches(20, 12)))
    (note,) = caught.value.__notes__
    if schedule == "pipedream":
        assert re.search(r"no version of the weights is held by all stages.*stage 2 holds \d+, in", note)
        pipe.load_state_dict(before)
        assert len(list(pipe.stream(batches(5)))) == 5
        return
    count = int(note.removeprefix("the parameters and buffers are those after ").split()[0])
    assert least <= count <= most
    list(straight.stream(batches(count, 12)))
    for name, expected in straight.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], expected), name


ENDS = """
import os
import torch, pipec
from delayed_gradients import *
rank = int(os.environ.get("RANK", 0))
pipe = pipeline(3, timeout=240.0)

def streamed(given):
    losses = []
    try:
        for loss in pipe.stream(given):
            losses.append(loss)
    except Exception as error:
        print(type(error).__name__, error)
    return len(losses)

def failing(count):
    yield from batches(count)
    raise OSError("the disk is full")

def other(count):
    yield from batches(count)
    yield torch.full((8, 6), float(rank)), torch.zeros(8, dtype=torch.long)

print("shorter", streamed(batches(9 - (rank == 1))))
print("raises", streamed(failing(5) if rank == 2 else batches(9)))
print("differs", streamed(other(4)))
print("all raise", streamed(failing(1)))
print("goes on", streamed(batches(7)))
state = pipe.full_state_dict(all_ranks=True)
print("holds", round(sum(x.double().sum().item() for x in state.values()), 9))
next(pipe.stream(batches(50)))  # and ends in the middle of it
"""


@pytest.mark.slow
def test_streams_end_alike_on_all_ranks(tmp_path: Path) -> None:
    """Whatever ends a stream on one rank ends it on all, at the same mini-batch, and training goes on."""
    one, *others = run_lines(ENDS, 3, tmp_path)
    assert [each == one for each in others] == [True, True]
    ends = [line for line in one if line.startswith(("shorter", "raises", "differs", "all raise", "goes on"))]
    assert ends == ["shorter 8", "raises 5", "differs 4", "all raise 1", "goes on 7"]
    assert "  batches: another one on ranks 0, 2; no more on rank 1" in one
    assert "  batches: another one on ranks 0, 1; OSError: the disk is full on rank 2" in one
    assert any(line.startswith("InputError the ranks passed different batches to step") for line in one)
    assert "InputError the iterator of batches raised OSError: the disk is full" in one


# what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "pass optimizer="),
        ({"shard": "optimizer"}, "shard='optimizer' cannot hold"),
        ({"batch": "rank0"}, "batch is 'rank0'"),
        ({"microbatches": 2}, "runs a mini-batch as one microbatch"),
        ({"schedule": DOUBLE, "microbatches": 1}, "needs a mini-batch of 3 microbatches or more"),
        ({"schedule": VERTICAL, "replicas": (2, 1)}, r"replicas are \(2, 1\); take pipedream"),
        ({"schedule": DOUBLE, "replicas": (2, 1)}, "the same number of replicas for every stage"),
        ({"schedule": DOUBLE, "devices": 4, "replicas": 2, "microbatches": 5}, "multiple of the 2 replicas"),
        ({"model": with_norms(), "replicas": (2, 1)}, "change the buffer 1.num_batches_tracked; .* replicas"),
        ({"on_nan": "skip"}, "pass on_nan='raise'"),
        ({"on_nan": "raise", "replicas": "auto"}, "once for several mini-batches"),
        ({"on_nan": "raise", "replicas": (2, 1)}, "once for several mini-batches"),
    ],
)
def test_what_needs_a_flush_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"devices": 3, "model": model(), "schedule": "pipedream", "optimizer": SGD}
    with pytest.raises(InputError, match=message):
        list(pipec.compile(loss_fn=LOSS, **(given | options)).stream(batches(2)))


def test_an_accumulation_a_trace_and_a_tied_weight_are_refused() -> None:
    from optimizer_reference import batches as words
    from optimizer_reference import model as tied

    pipe, (x, y) = pipeline(2), next(batches(1))
    for call in (lambda: pipe.step(x, target=y), lambda: list(pipe.stream(batches(2)))):
        with pipe.accumulate(), pytest.raises(InputError, match="leave out accumulate"):
            call()
        with pytest.raises(InputError, match="cannot be recorded"), pipe.trace():
            call()
    pipe = pipec.compile(tied(), 2, schedule="pipedream", optimizer=SGD)
    with pytest.raises(InputError, match=r"words.weight is tied: stages 0 and 1 use it.*1f1b"):
        list(pipe.stream(words(2)))


# programs without end are saved, run, simulated and drawn like those of a step

MODELS = Path(__file__).parents[1] / "helpers" / "cli_models.py"
TARGET, MOMENTUM = f"{MODELS}:mlp", f"{MODELS}:momentum"


def test_the_command_line_draws_several_periods(tmp_path: Path) -> None:
    words = ("schedule", "pipedream", "--stages", 4, "--microbatches", 12)
    pipec_cli(*words, "-o", tmp_path / "drawn.svg")
    drawn = re.findall(r">[FB]?(\d+v\d+)<", (tmp_path / "drawn.svg").read_text())
    assert {"0v0", "2v1", "3v2", "4v3"} <= {*drawn}
    facts = pipec_json("schedule", DOUBLE, "--stages", 2, "--microbatches", 12)
    assert facts["steady"] == {"time": pytest.approx(6), "bubble_rate": pytest.approx(0)}
    assert facts["events"][0]["version"] == 0  # type: ignore[index]


@pytest.mark.slow
def test_the_command_line_runs_a_model_without_a_flush(tmp_path: Path) -> None:
    options = ("--devices", 2, "--schedule", "pipedream", "--optimizer", MOMENTUM)
    assert "a mini-batch every" in pipec_cli("plan", TARGET, *options).stdout
    pipec_cli("plan", TARGET, *options, "-o", tmp_path / "saved")
    assert "is a valid artifact: 2 stages, 2 ranks" in pipec_cli("check", tmp_path / "saved").stdout
    facts = pipec_json("run", tmp_path / "saved", "--optimizer", MOMENTUM, "--steps", 5)
    pipe = load_with_random_tensors(tmp_path / "saved", 0, MOMENTUM)[0]
    given = list(islice(random_batches(pipe.plan, 2), 5))
    assert facts["losses"] == [loss.item() for loss in pipe.stream_of_leaves(given)]


def test_the_plan_and_its_pictures_are_of_a_stream() -> None:
    pipe = pipeline(3)
    timeline = pipe.simulate()
    assert "pipedream, 10 microbatches" in pipe.visualize()
    (step,) = steps_data([DrawnStep("pipedream", 10, timeline)])
    assert step["computes"]["version"].numbers[:3].tolist() == [0, 0, 0]
    curves = rank_memory_over_time(pipe.plan, pipe.programs, timeline)
    highest = [curve.total.amounts.max() for curve in curves]
    assert highest == pytest.approx([need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs)])


def test_the_cut_makes_room_for_versions() -> None:
    """On the fastest cut stashed versions need more memory than 1F1B does; the planner finds another one."""

    def made(schedule: str, limit: int | None = None) -> tuple[pipec.Pipeline, float]:
        pipe = pipeline(2, SGD, schedule, memory_limit=limit, microbatches=1, recompute="none")
        return pipe, max(need.peak_bytes for need in plan_memory(pipe.plan, pipe.programs))

    (fastest, needed), (_, flushed) = made("pipedream"), made("1f1b")
    limit = int(needed) * 4 // 5
    assert flushed <= limit
    assert "versions" in str(fastest.memory())
    fitting, needed = made("pipedream", limit)
    assert needed <= limit
    assert fitting.plan.stages[0].last_operator < fastest.plan.stages[0].last_operator
    with pytest.raises(InfeasibleError, match="nothing that was tried fits"):
        made("pipedream", limit * 4 // 5)
