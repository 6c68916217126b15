"""Training with delayed gradients in one process, as the versions of a stream say, and a table of streams.

``difference`` trains a row by a pipeline and by ``Delayed``, and returns the first thing that differs. Under
``torchrun``, ``delayed_gradients.py`` does so for all rows of as many ranks, and prints JSON.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from forward_modules import model as module
from torch import Tensor, nn
from unsplit_reference import relative_error

import pipec
from pipec.ir import Plan
from pipec.ir.batch_split import split_sizes

WINDOWS: Mapping[tuple[int, ...], tuple[int, ...]] = {(2, 1): (2, 1), (2, 2): (2, 1), (3, 2, 1): (4, 2, 1)}
"""By the replicas of stages that take turns: the mini-batches that each replica has in flight."""

Batch = tuple[Tensor, Tensor]


class Delayed:
    """The unsplit model, its optimizer, and all versions of its weights, behind the methods of a pipeline.

    With ``pipedream`` a stage adds up the gradients of as many mini-batches as it has replicas, and then
    updates its weights. ``history`` has these after each mini-batch since the pipeline was empty.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        factory: Callable[[Any], torch.optim.Optimizer],
        clip: float | None = None,
        precision: str | None = None,
    ) -> None:
        self.plan, self.model, self.clip, self.is_mixed = plan, copy.deepcopy(model), clip, bool(precision)
        self._optimizer = factory(list(self.model.named_parameters()))
        self.stage_of = {name: stage.index for stage in plan.stages for name in stage.parameters}
        replicas = tuple(map(len, plan.placement))
        self.windows = WINDOWS.get(replicas, range(len(replicas), 0, -1))
        self.replicas = replicas if plan.schedule == "pipedream" else (1,) * len(replicas)
        self.in_flight = {"1f1b": 0, "pipedream-2bw": 1}.get(plan.schedule, sum(replicas) - 1)
        self.sums, self.history = dict[str, Tensor](), list[dict[str, Tensor]]()
        self._note()
        self._stream = deque[Batch](), deque[Tensor]()

    def version(self, batch: int, stage: int) -> int:
        """The number of updates behind the weights that a stage uses for a mini-batch."""
        behind = {
            "1f1b": 0,  # synchronous: the weights after all updates before
            "pipedream": self.windows[stage] - 1,  # stage s of p, for i: after max(0, i - (p - 1 - s))
            "pipedream-vertical-sync": len(self.replicas) - 1,  # every stage, the version of the first one
            "pipedream-2bw": 1,  # W(t + 1) = W(t) - rate * gradient at W(t - 1)
        }[self.plan.schedule]
        return max(0, batch // self.replicas[stage] - behind)

    def feed(self, batch: Batch) -> Tensor:
        """Train on the next mini-batch of a stream; returns its loss."""
        number, (x, y), total = len(self.history) - 1, batch, torch.tensor(0.0)
        used = dict[str, Tensor]()
        for name, stage in self.stage_of.items():
            weights = self.history[self.version(number, stage) * self.replicas[stage]]
            used[name] = weights[name].clone().requires_grad_()
        sizes = split_sizes(len(x), self.plan.num_microbatches)
        for rows, target in zip(x.split(sizes), y.split(sizes), strict=True):
            if not len(rows):
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
                loss = LOSS(torch.func.functional_call(self.model, used, rows), target)
            share = len(rows) / len(x)
            loss.backward(torch.full((), share, dtype=loss.dtype))
            total = total + loss.detach() * share
        for name, weight in used.items():
            gradient = weight.grad
            assert gradient is not None
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        self._update([k for k, count in enumerate(self.replicas) if (number + 1) % count == 0])
        self._note()
        return total

    def stream(self, given: Iterable[Batch]) -> Iterator[Tensor]:
        self.drain()
        pending, losses = deque(given), deque[Tensor]()
        while pending or losses:
            self._stream = pending, losses
            if not losses:
                losses.append(self.feed(pending.popleft()))
                if not pending:
                    self.drain()
            yield losses.popleft()

    def drain(self) -> None:
        """Train on what is in flight, and update the stages whose last round is not complete."""
        (pending, losses), self._stream = self._stream, (deque(), deque())
        for _ in range(min(self.in_flight, len(pending))):
            losses.append(self.feed(pending.popleft()))
        self._update(range(len(self.replicas)))
        self.history.clear()
        self._note()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        self.drain()
        return self._optimizer

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        (loss,) = self.stream([(x, target)])
        return loss

    def __call__(self, x: Tensor) -> Tensor:
        self.drain()
        return self.model(x).detach()

    def eval_step(self, x: Tensor, target: Tensor) -> Tensor:
        return LOSS(self(x), target)

    def eval(self) -> None:
        self.drain()

    def full_state_dict(self, all_ranks: bool) -> None:
        self.drain()

    def _update(self, stages: Sequence[int]) -> None:
        for stage in stages:
            own = {n: p for n, p in self.model.named_parameters() if self.stage_of[n] == stage}
            for name, parameter in own.items():
                parameter.grad = self.sums.pop(name, None)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(own.values(), self.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _note(self) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


# the training of the tests

LOSS = nn.functional.cross_entropy
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
FACTORIES = {"sgd": SGD, "adam": ADAM}


def model(depth: int = 4, between: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), between())]
    return nn.Sequential(*layers, nn.Linear(6, 3))


with_norms = functools.partial(model, between=lambda: nn.BatchNorm1d(6))


@module(scale=lambda: nn.Parameter(torch.rand(12) + 0.5), body=model)
def Scaled(self: Any, x: Tensor) -> Tensor:
    """A view of the first stage's parameter is what the last stage reads, a skip connection."""
    scale, (*layers, head) = self.scale[:6].expand(x.shape[0], 6), self.body
    for layer in layers:
        x = layer(x)
    return head(x * scale)


def batches(count: int, rows: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def pipeline(
    stages: int, optimizer: Any = SGD, schedule: str = "pipedream", **options: Any
) -> pipec.Pipeline:
    given = {"loss_fn": LOSS, "schedule": schedule, "optimizer": optimizer, **options}
    pipe = pipec.compile(given.pop("model", None) or model(), stages, **given)
    x, y = next(batches(1))
    return pipe.prepare(x, target=y)


def delayed(pipe: pipec.Pipeline, factory: Any, model: nn.Module | None = None) -> Delayed:
    """The reference of a pipeline, from the weights that its model has now, or those of ``model``."""
    return Delayed(pipe.plan, model or pipe._executions.compiler.model, factory)


def assert_same(pipe: pipec.Pipeline, reference: Delayed) -> None:
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, reference.history[-1][name]), name


# the table


@dataclass(frozen=True)
class Row:
    """A stream of mini-batches; behind loss ``at`` there is an ``event``, which empties the pipeline."""

    schedule: str = "pipedream"
    replicas: tuple[int, ...] = (1, 1, 1)
    batches: int = 12
    event: str = ""
    at: int = 2
    optimizer: str = "sgd"
    clip: float | None = None
    microbatches: int | None = None
    model: str = "dense"
    precision: str | None = None

    def __str__(self) -> str:
        return " ".join(map(str, (self.schedule, *self.replicas, self.batches, self.event, self.optimizer)))

    @property
    def has_replicas(self) -> bool:
        return max(self.replicas) > 1

    @property
    def error(self) -> float:
        """None, unless sums have another order."""
        return 1e-5 if self.clip or (self.has_replicas and self.schedule != "pipedream") else 0.0

    def pipeline(self, **options: Any) -> pipec.Pipeline:
        if self.has_replicas:
            options["replicas"] = self.replicas if len({*self.replicas}) > 1 else self.replicas[0]
        options |= {"clip_grad_norm": self.clip, "precision": self.precision, "model": self.make()}
        options |= {"optimizer": FACTORIES[self.optimizer], "schedule": self.schedule}
        return pipeline(sum(self.replicas), microbatches=self.microbatches, **options)

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return Scaled() if self.model == "scaled" else model(5)

    def reference(self, pipe: pipec.Pipeline) -> Delayed:
        assert pipe.plan.schedule == self.schedule
        assert tuple(map(len, pipe.plan.placement)) == self.replicas
        return Delayed(pipe.plan, self.make(), FACTORIES[self.optimizer], self.clip, self.precision)


DOUBLE, VERTICAL = "pipedream-2bw", "pipedream-vertical-sync"
FOUR = (1, 1, 1, 1)
ROWS = (
    Row(replicas=(1, 1), batches=30, optimizer="adam"),
    Row(replicas=FOUR, batches=30),
    Row(VERTICAL, optimizer="adam"),
    Row(VERTICAL, FOUR),
    Row(DOUBLE, (1, 1), optimizer="adam"),
    Row(DOUBLE, FOUR),
    Row(DOUBLE, (1, 1), microbatches=4),
    Row(replicas=(2, 1), batches=23, optimizer="adam"),
    Row(replicas=(2, 2), optimizer="adam"),
    Row(replicas=(3, 2, 1), batches=50, optimizer="adam"),
    Row(DOUBLE, (2, 2), microbatches=6, optimizer="adam"),
    Row(clip=0.01),
    Row(replicas=(2, 1), clip=0.01),
    Row(model="scaled"),
    Row(precision="bf16-mixed"),
    Row("1f1b", (1, 1), microbatches=2),
    Row("1f1b", (2, 1), microbatches=4, optimizer="adam"),
    # shorter than the pipeline
    *(Row(replicas=FOUR, batches=count) for count in (0, 1, 3)),
    *(Row(replicas=(2, 1), batches=count) for count in (1, 2)),
    # what empties it
    Row(event="break", replicas=FOUR, at=4),
    Row(event="break", replicas=(2, 1), at=3),
    Row(event="break", replicas=(2, 1), at=4),
    Row(event="raises", replicas=FOUR),
    *(Row("1f1b", (1, 1), microbatches=2, event=name) for name in ("break", "other stream", "step")),
    Row(event="drain", batches=5),
    Row(event="eval", batches=5),
    Row(DOUBLE, (1, 1), event="drain"),
    Row(VERTICAL, event="state_dict"),
    *(Row(event=name) for name in ("forward", "optimizer", "load", "step", "other stream")),
    Row(event="eval_step", replicas=(2, 1), at=0),
    Row(event="eval_step", optimizer="adam"),
)


class Script:
    """The loop of a script, and what it does behind a loss, with a pipeline or with ``Delayed``."""

    def __init__(self, row: Row, pipe: Any) -> None:
        self.row, self.pipe, self.losses, self.results = row, pipe, list[Tensor](), list[Tensor]()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.9)

    def train(self) -> None:
        for number, loss in enumerate(self.pipe.stream(batches(self.row.batches))):
            self.losses.append(loss)
            self.scheduler.step()
            if number == self.row.at and self.row.event:
                if self.row.event == "break":
                    break
                self.happen(self.row.event)

    def happen(self, event: str) -> None:
        pipe, (x, y) = self.pipe, next(batches(1))
        if event == "raises":
            raise ZeroDivisionError("the script's own")
        ways: dict[str, Callable[[], Any]] = {
            "drain": pipe.drain,
            "eval": pipe.eval,
            "eval_step": lambda: pipe.eval_step(x, target=y),
            "forward": lambda: pipe(x),
            "state_dict": lambda: pipe.full_state_dict(all_ranks=True),
            "optimizer": lambda: pipe.optimizer.state_dict(),
            "load": lambda: pipe.optimizer.load_state_dict(pipe.optimizer.state_dict()),
            "step": lambda: pipe.step(x, target=y),
            "other stream": lambda: [*pipe.stream(batches(4))],
        }
        found = ways[event]()
        self.results += found if isinstance(found, list) else [found] if isinstance(found, Tensor) else []


@functools.cache
def _compiled(row: Row, **options: Any) -> tuple[pipec.Pipeline, dict[str, Tensor], dict[str, Any]]:
    pipe = row.pipeline(**options)
    state, optimizer = pipe.full_state_dict(all_ranks=True), pipe.optimizer.state_dict()
    return pipe, copy.deepcopy(state), copy.deepcopy(optimizer)


def _at_first(row: Row, **options: Any) -> pipec.Pipeline:
    """The pipeline of a row, with its first weights, and without momentum."""
    pipe, state, optimizer = _compiled(row, **options)
    pipe.load_state_dict(state)
    pipe.optimizer.load_state_dict(copy.deepcopy(optimizer))
    for group in pipe.optimizer.param_groups:
        group.pop("initial_lr", None)
    return pipe


def difference(row: Row, **options: Any) -> str:
    """What is not as with delayed gradients; empty if all is."""
    pipe = _at_first(dataclasses.replace(row, batches=0, event="", at=0), **options)
    script, expected = Script(row, pipe), Script(row, row.reference(pipe))
    for each in (script, expected):
        with contextlib.suppress(ZeroDivisionError):
            each.train()
    pipe.train().drain()
    expected.pipe.drain()
    if len(script.losses) != len(expected.losses):
        return f"{len(script.losses)} losses, not {len(expected.losses)}"
    wanted = expected.pipe.history[-1]
    pairs = [(f"loss {k}", *pair) for k, pair in enumerate(zip(script.losses, expected.losses, strict=True))]
    pairs += [(row.event, *pair) for pair in zip(script.results, expected.results, strict=True)]
    pairs += [(name, value, wanted[name]) for name, value in pipe.local_state_dict().items()]
    for name, found, value in pairs:
        if not (torch.equal(found, value) or 0 < relative_error(found, value) < row.error):
            return f"{name} is {found}, not {value}"
    has_copies = "RANK" not in os.environ and row.batches and row.schedule != "1f1b"
    return _differing_replicas(pipe) if has_copies else ""


def _differing_replicas(pipe: pipec.Pipeline) -> str:
    """A parameter whose copies on ranks of this process have not the bits of the model's."""
    own, updates = dict(pipe.named_parameters()), pipe._steps.updates
    copied = {
        name for x in pipe.plan.stages if len(pipe.plan.placement[x.index]) > 1 for name in x.parameters
    }
    for rank in range(pipe.plan.num_ranks):
        for name, value in updates.updated_on(rank).items() if updates else ():
            if not torch.equal(value, own[name]):
                return f"{name} on rank {rank} is {value}, not {own[name]}"
            copied -= {name} if value is not own[name] else set()
    return f"no copies of {copied}" if copied else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for row in ROWS if sum(row.replicas) == dist.get_world_size()]
    print(json.dumps({str(row): difference(row, timeout=240.0) for row in rows}))
