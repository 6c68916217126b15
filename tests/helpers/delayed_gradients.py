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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from unsplit_reference import relative_error

import pipec
from pipec.ir import Plan
from pipec.ir.batch_split import split_sizes

Lag = Callable[[int, int, int], int]
"""The number of updates behind the weights that stage s of p uses for mini-batch i."""


def round_robin(*stages: tuple[int, int]) -> Lag:
    """Of stages with so many replicas, and so many mini-batches of each in flight: (2, 4) is 2 with 4."""

    def version(batch: int, stage: int, count: int) -> int:
        replicas, window = stages[stage]
        return max(0, batch // replicas - (window - 1))

    return version


def stashed(batch: int, stage: int, stages: int) -> int:
    """PipeDream: stage s of p uses its weights after max(0, i - (p - 1 - s)) updates."""
    return max(0, batch - (stages - 1 - stage))


def vertical(batch: int, stage: int, stages: int) -> int:
    """Every stage uses the version that the first one has."""
    return max(0, batch - (stages - 1))


def double(batch: int, stage: int, stages: int) -> int:
    """PipeDream-2BW: W(t + 1) = W(t) - rate * gradient at W(t - 1)."""
    return max(0, batch - 1)


def none(batch: int, stage: int, stages: int) -> int:
    """A synchronous schedule: the weights after all updates before."""
    return batch


LAGS: Mapping[str, Lag] = {
    "1f1b": none,
    **{"pipedream": stashed, "pipedream-vertical-sync": vertical, "pipedream-2bw": double},
    "2-1": round_robin((2, 2), (1, 1)),
    "2-2": round_robin((2, 2), (2, 1)),
    "3-2-1": round_robin((3, 4), (2, 2), (1, 1)),
}
"""What stages with so many replicas use: i // r - (w - 1) with a window w that is said here again."""


@dataclass
class Delayed:
    """The unsplit model, its optimizer, and all versions of its weights. ``stage_of`` is by name.

    Stage s adds up the gradients of ``replicas[s]`` mini-batches, or of one, and then updates its weights.
    ``history`` has these after each mini-batch.
    """

    model: nn.Module
    factory: Callable[[Any], torch.optim.Optimizer]
    stage_of: Mapping[str, int]
    stages: int
    version: Lag
    loss_of: Callable[[Callable[..., Any], Any], Sequence[tuple[Tensor, float]]]
    clip: float | None = None
    replicas: Sequence[int] = ()
    history: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.factory(list(self.model.named_parameters()))
        self.replicas = self.replicas or (1,) * self.stages
        self.sums: dict[str, Tensor] = {}
        self._note()

    def step(self, batch: Any) -> Tensor:
        """Train on the next mini-batch; returns its loss."""
        number = len(self.history) - 1
        used = {
            name: self._used(number, stage)[name].clone().requires_grad_()
            for name, stage in self.stage_of.items()
        }

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, used, args, kwargs)

        total: Any = 0.0
        for loss, share in self.loss_of(call, batch):
            loss.backward(torch.full((), share, dtype=loss.dtype))
            total = total + loss.detach() * share
        for name, weight in used.items():
            gradient = weight.grad
            assert gradient is not None
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        self._update([stage for stage in range(self.stages) if (number + 1) % self.replicas[stage] == 0])
        self._note()
        return total if isinstance(total, Tensor) else torch.tensor(total)

    def finish(self) -> None:
        """Update the stages whose last round is not complete, as the end of a stream does."""
        self._update(range(self.stages))
        self.history.pop()
        self._note()

    def restart(self) -> None:
        """Count versions from here on: the pipeline is empty."""
        del self.history[:-1]

    def _used(self, batch: int, stage: int) -> Mapping[str, Tensor]:
        return self.history[self.version(batch, stage, self.stages) * self.replicas[stage]]

    def _update(self, stages: Sequence[int]) -> None:
        for stage in stages:
            own = {n: p for n, p in self.model.named_parameters() if self.stage_of[n] == stage}
            for name, parameter in own.items():
                parameter.grad = self.sums.pop(name, None)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(own.values(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _note(self) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


def stages_of(plan: Plan) -> dict[str, int]:
    """The stage of each parameter."""
    return {name: stage.index for stage in plan.stages for name in stage.parameters}


# the training of the tests

LOSS = nn.functional.cross_entropy
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
FACTORIES = {"sgd": SGD, "adam": ADAM}

Batch = tuple[Tensor, Tensor]


def model(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 3))


class Scaled(nn.Module):
    """A view of the first stage's parameter is what the last stage reads, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.rand(12) + 0.5), model()

    def forward(self, x: Tensor) -> Tensor:
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
    own = options.pop("model", pipe._executions.compiler.model)
    losses = losses or losses_in(plan.num_microbatches)
    return Delayed(own, factory, stages_of(plan), len(plan.stages), version, losses, **options)


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
        is_round_robin = self.has_replicas and self.schedule == "pipedream"
        lag = LAGS["-".join(map(str, self.replicas)) if is_round_robin else self.schedule]
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.precision is not None)
        losses = autocast(losses_in(pipe.plan.num_microbatches))
        options = {"model": self.make(), "clip": self.clip}
        replicas = self.replicas if self.schedule == "pipedream" else ()
        return delayed(pipe, FACTORIES[self.optimizer], lag, losses, replicas=replicas, **options)

    @property
    def begun(self) -> int:
        """How many mini-batches have been begun when the loss ``at`` is there: those in flight, too."""
        behind = {"1f1b": 0, "pipedream-2bw": 1}.get(self.schedule, sum(self.replicas) - 1)
        return min(self.batches, self.at + 1 + behind)


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
    """The loop of a script, and what it does behind a loss."""

    def __init__(self, row: Row, pipe: pipec.Pipeline) -> None:
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
            raise RuntimeError("the script's own")
        ways: dict[str, Callable[[], Any]] = {
            "drain": pipe.drain,
            "eval": pipe.eval,
            "eval_step": lambda: pipe.eval_step(x, target=y),
            "forward": lambda: pipe(x),
            "state_dict": lambda: pipe.full_state_dict(all_ranks=True),
            "optimizer": pipe.optimizer.state_dict,
            "load": lambda: pipe.optimizer.load_state_dict(pipe.optimizer.state_dict()),
            "step": lambda: pipe.step(x, target=y),
            "other stream": lambda: [*pipe.stream(batches(4))],
        }
        found = ways[event]()
        self.results += found if isinstance(found, list) else [found] if isinstance(found, Tensor) else []


def expected(row: Row, reference: Delayed) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of a row, and the results of its event."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.9)
    losses, results, given = list[Tensor](), list[Tensor](), [*batches(row.batches)]

    def trained(part: Sequence[Batch], last: int) -> None:
        """So many mini-batches, then none in flight; behind ``last`` of them the scheduler makes no step."""
        for number, batch in enumerate(part):
            losses.append(reference.step(batch))
            if number < last:
                scheduler.step()
        reference.finish()
        reference.restart()

    if not row.event:
        trained(given, len(given) - 1)
        return losses, results
    trained(given[: row.begun], row.at + 1)
    (x, y), plain = next(batches(1)), copy.deepcopy(reference.model)
    if row.event in ("step", "other stream"):
        for batch in batches(1 if row.event == "step" else 4):
            results.append(reference.step(batch))
        reference.restart()
    elif row.event in ("eval_step", "forward"):
        output = plain(x).detach()
        results.append(LOSS(output, y) if row.event == "eval_step" else output)
    if row.event in ("break", "raises"):
        return losses[: row.at + 1], results
    for _ in range(row.begun - row.at - 1):
        scheduler.step()
    trained(given[row.begun :], len(given) - row.begun - 1)
    return losses, results


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
    script, reference = Script(row, pipe), row.reference(pipe)
    with contextlib.suppress(RuntimeError) if row.event == "raises" else contextlib.nullcontext():
        script.train()
    pipe.train().drain()
    losses, results = expected(row, reference)
    if len(script.losses) != len(losses):
        return f"{len(script.losses)} losses, not {len(losses)}"
    wanted = reference.history[-1]
    pairs = [(f"loss {k}", *pair) for k, pair in enumerate(zip(script.losses, losses, strict=True))]
    pairs += [(row.event, *pair) for pair in zip(script.results, results, strict=True)]
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
