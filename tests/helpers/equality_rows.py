"""One table of trainings: models, losses, schedules, layouts and options. Each equals eager torch.

``covering`` draws rows until every two values that go together meet in one of them. ``difference`` trains a
row by a pipeline and in eager torch, and returns the first value that differs. ``diagnosis`` says where to
look: which choices make the difference go away, and the operator at which microbatches stop making up the
batch. ``PYTHONPATH=tests python tests/helpers/equality_rows.py 17`` does both for one row, in this process.
Under ``torchrun``, ``equality_rows.py 3 8 17`` prints the differences that each rank finds, as JSON.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_graphs import RandomModel
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from unsplit_reference import Plain, microbatches, relative_error, unsplit_step

import pipec
from pipec.ir.batch_split import split_sizes
from pipec.runtime.absent_tensors import is_absent
from pipec.schedules import SCHEDULES, SEARCHED_SCHEDULES
from zoo.layers import Apply

TOKENS, WIDTH, CLASSES = 3, 4, 4
Loss = Callable[[Any, Tensor], Any]
Tensors = dict[str, Tensor]


# models: rows of TOKENS by WIDTH numbers become rows of CLASSES logits


def _dense(*extra: nn.Module) -> nn.Sequential:
    wide = TOKENS * WIDTH
    layers = [nn.Linear(wide, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *layers, *extra, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Tied(nn.Module):
    """Words, whose table is the head, too: the first stage and the last one use it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WIDTH, 8), nn.Sequential(*_dense()[3:8])
        self.head = nn.Linear(8, CLASSES)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x.argmax(-1)))).mean(1)


def _recurrent() -> nn.Module:
    layers = [nn.LSTM(WIDTH, 8, 2, batch_first=True), Apply(lambda found: found[0][:, -1])]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class Unusual(nn.Module):
    """Shared, frozen and unused layers, a computed weight, a checkpoint, writes in place, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8).requires_grad_(False)
        self.shared, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
        self.computed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.scale, self.head = nn.Parameter(torch.tensor(0.7)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.shared(self.first(x)).tanh()
        hidden = checkpoint(lambda h: self.computed(h).relu(), skipped, use_reentrant=False).clone()
        hidden[:, 0] = 2 * hidden[:, 1]
        return self.head(self.shared(hidden).mul_(self.scale) + skipped).mean(1)


class StraightThrough(torch.autograd.Function):
    """Rounds. The true derivative is zero; what trains is the backward written here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


class Odd(nn.Module):
    """Hooks, a backward of its own, complex numbers, a mask, a reentrant checkpoint, and no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.hooked.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.hooked.register_forward_hook(lambda module, args, output: output * 2)

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        return self.head(x).mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hooked(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        hidden = (torch.fft.fft(hidden.tanh()) * (0.2 - 0.1j)).real
        hidden = StraightThrough.apply(4 * hidden) / 4 + hidden * self.teach(hidden)
        hidden[:, 1:].mul_(2)
        hidden.masked_fill_(hidden > 1, -1.0)
        return checkpoint(self.head, self.spectral(hidden).tanh().mean(1), use_reentrant=True)


def _norms() -> nn.Module:
    """Its statistics are those of each microbatch."""
    layers = [nn.Conv1d(WIDTH, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6), nn.Tanh()]
    layers += [nn.Conv1d(6, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(6 * TOKENS, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(Apply(lambda x: x.transpose(1, 2)), *layers)


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, Apply(lambda x: x.mean(1)), nn.Linear(WIDTH, CLASSES))


def _graph(seed: int) -> nn.Module:
    """A random graph of layers, branches and skips."""
    layers = [nn.Linear(WIDTH, 8), RandomModel(seed), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers, Apply(lambda x: x.mean(1)))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "dense": _dense,
    "tied": Tied,
    "recurrent": _recurrent,
    "unusual": Unusual,
    "odd": Odd,
    "time first": lambda: nn.Sequential(Apply(lambda x: x.transpose(0, 1)), *_dense()),
    "norms": _norms,
    "attention": _attention,
    "dropout": lambda: _dense(nn.Dropout(0.3)),
    "graph 1": lambda: _graph(1),
    "graph 3": lambda: _graph(3),
}


def _mixing(logits: Tensor, target: Tensor) -> Tensor:
    """A contrastive loss, which needs all rows at once."""
    own = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits @ logits.T, own) + logits.square().mean()


def _logged(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensors]:
    return F.cross_entropy(logits, target), {"right": (logits.argmax(1) == target).double().mean()}


LOSSES: Mapping[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": functools.partial(F.cross_entropy, reduction="sum"),
    "ignored": functools.partial(F.cross_entropy, ignore_index=2),
    "weighted": lambda logits, y: F.cross_entropy(logits, y, torch.tensor([0.1, 0.7, 1.3, 0.4]).to(logits)),
    "mixing": _mixing,
    "logged": _logged,
    "weights given": F.cross_entropy,
    "of the model": F.cross_entropy,
}


class WithLoss(nn.Module):
    """Returns its loss among its results."""

    def __init__(self, body: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.body, self.loss_fn = body, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"logits": logits, "loss": self.loss_fn(logits, y)}


# updates: the factory of the optimizer, and the options that go with it; "script" ones are the script's

SGD = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)


Named = list[tuple[str, nn.Parameter]]


def _by_shape(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the others."""
    return [p for _, p in named if p.ndim == 2], [p for _, p in named if p.ndim != 2]


def _groups(named: Named) -> optim.Optimizer:
    matrices, others = _by_shape(named)
    return optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.05}], lr=0.1)


def _muon(named: Named) -> list[optim.Optimizer]:
    """Two optimizers. One needs whole matrices."""
    matrices, others = _by_shape(named)
    return [optim.Muon(matrices, lr=0.02), ADAMW(others)]


UPDATES: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "script": (SGD, {}),
    "script of the model": (ADAMW, {}),
    "sgd": (SGD, {}),
    "clipped": (ADAMW, {"clip_grad_norm": 0.1, "on_nan": "skip"}),
    "groups": (_groups, {}),
    "accumulated": (SGD, {}),
    "muon": (_muon, {"clip_grad_norm": 0.5}),
    "adafactor": (functools.partial(optim.Adafactor, lr=0.01, eps=(1e-6, 1e-3)), {"clip_grad_norm": 0.5}),
}
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "1": {"devices": 1},
    "2": {"devices": 2},
    "3": {"devices": 3},
    "1x2": {"devices": 2, "stages": 1},
    "1x4": {"devices": 4, "stages": 1},
    "2x2": {"devices": 4, "replicas": 2},
    "2-1": {"devices": 3, "replicas": (2, 1)},
    "1-3": {"devices": 4, "replicas": (1, 3)},
    "3-2-1": {"devices": 6, "replicas": (3, 2, 1)},
}
RECOMPUTES: Mapping[str, dict[str, Any]] = {
    "saved": {"recompute": "none"},
    "recomputed": {"recompute": "full"},
    "state offloaded": {"offload": "optimizer"},
    "weights offloaded": {"offload": "weights"},
}

AXES: dict[str, Sequence[Any]] = {
    "model": [*MODELS],
    "loss": [*LOSSES],
    "schedule": [*SCHEDULES, *SEARCHED_SCHEDULES, "looped-bfs-v3", "auto", "pipedream-2bw"],
    "layout": [*LAYOUTS],
    "recompute": [*RECOMPUTES],
    "update": [*UPDATES],
    "shard": [None, "optimizer", "gradients", "parameters"],
    "precision": [None, "bf16-mixed"],
    "batch": ["same", "rank0", "local"],
    "evaluates": ["nothing", "loss", "outputs"],
    "run": ["step", "module", "stream", "saved"],
}
"""``run`` is how a script trains: by steps, by ``backward`` of a module's loss, a stream, or an artifact."""

FOLDERS = {
    "model": "pipec/capture",
    "loss": "pipec/capture/batch",
    "schedule": "pipec/schedules, pipec/programs",
    "layout": "pipec/plan, pipec/runtime/messages",
    "recompute": "pipec/passes",
    "update": "pipec/runtime/optimizers",
    "shard": "pipec/plan, pipec/runtime/optimizers",
    "precision": "pipec/passes",
    "batch": "pipec/runtime/messages",
    "evaluates": "pipec/pipeline",
    "run": "pipec/pipeline, pipec/artifact",
}
"""Where to look first if the difference goes away with the axis's plainest value."""


@dataclass(frozen=True)
class Row:
    """One training: a value of each axis."""

    model: str = "dense"
    loss: str = "mean"
    schedule: str = "gpipe"
    layout: str = "2"
    recompute: str = "saved"
    update: str = "script"
    shard: str | None = None
    precision: str | None = None
    batch: str = "same"
    evaluates: str = "nothing"
    run: str = "step"

    def __str__(self) -> str:
        return ", ".join(str(value) for value in dataclasses.astuple(self) if value not in (None, "same"))

    @property
    def devices(self) -> int:
        return int(LAYOUTS[self.layout]["devices"])

    @property
    def replicas(self) -> int:
        """Of one stage, the most."""
        layout = LAYOUTS[self.layout]
        given = layout.get("replicas", layout["devices"] // layout.get("stages", layout["devices"]))
        return max(given) if isinstance(given, tuple) else given

    @property
    def updates(self) -> bool:
        """Whether the pipeline has the optimizer."""
        return not self.update.startswith("script")

    @property
    def is_asynchronous(self) -> bool:
        return self.schedule.startswith("pipedream")

    @property
    def goes_by_microbatches(self) -> bool:
        """Whether eager torch has to run the same microbatches: their statistics and casts count."""
        return self.model == "norms" or self.precision is not None

    @property
    def microbatches(self) -> int:
        stages = self.devices // self.replicas
        unit = {"interleaved-1f1b": stages, "dualpipe-v": 2 * stages}.get(self.schedule, 1)
        return unit * self.replicas * max(1, 4 // (unit * self.replicas))

    def is_valid(self, num_ranks: int) -> bool:
        """Whether pipec takes these together, on processes if there are ``num_ranks`` of them."""
        is_uneven, is_plain = "-" in self.layout, self.loss in ("mean", "of the model")
        return all(
            (
                self.devices == num_ranks if num_ranks else self.batch == "same",
                self.model != "dropout" or not num_ranks,  # whose reference is one stage
                not is_uneven or (self.schedule == "1f1b" and self.shard is None),
                self.devices // self.replicas > 1 or is_uneven or self.schedule in ("1f1b", "gpipe"),
                self.shard is None or (self.replicas > 1 and self.updates),
                self.recompute != "state offloaded" or self.updates,
                self.recompute != "weights offloaded" or self._may_have_weights_on_host(),
                self.run not in ("module", "stream") or self.batch != "rank0",
                self.run != "module" or not self.is_asynchronous,
                self.run != "saved" or self._is_loaded_alike(num_ranks),
                not self.goes_by_microbatches or (is_plain and self.batch != "local" and not is_uneven),
                self.precision is None or self.model not in ("norms", "dropout", "time first", "odd"),
                self.batch != "local" or (not is_uneven and self.model not in ("dropout", "time first")),
                self.batch != "local" or self.loss != "weights given",
                self.loss != "mixing" or not is_uneven,
                self.model != "odd" or self.loss in ("mean", "logged"),  # a hook it warns of
                self.model != "recurrent" or self.schedule != "looped-bfs-v3",  # few operators
                not self.is_asynchronous or self._may_be_asynchronous(),
            )
        )

    def _is_loaded_alike(self, num_ranks: int) -> bool:
        """An artifact has one program, and no model."""
        return not num_ranks and self.update != "script of the model" and self.evaluates == "nothing"

    def _may_have_weights_on_host(self) -> bool:
        """Replicas divide them."""
        return (self.replicas == 1 or self.shard == "parameters") and not self.is_asynchronous

    def _may_be_asynchronous(self) -> bool:
        """Stages clip and accumulate by themselves, a tied weight has two versions, and ranks read ahead."""
        taken = self.update in ("sgd", "groups") and self.shard is None and "offloaded" not in self.recompute
        return (
            taken
            and self.batch == "same"
            and self.loss != "mixing"
            and self.model in ("dense", "recurrent", "attention", "time first", "dropout")
        )


FAILED_ONCE = (
    Row(layout="1x2", schedule="1f1b", update="clipped"),
    Row(model="tied", layout="2x2", schedule="1f1b", update="sgd"),
    Row(loss="mixing", layout="1x2", schedule="1f1b", batch="local"),
    Row(model="odd", recompute="weights offloaded", update="sgd"),
    Row(model="unusual", recompute="weights offloaded", schedule="looped-bfs-v3", batch="rank0"),
)


def covering(num_ranks: int = 0, seed: int = 0) -> list[Row]:
    """Rows in which every two values meet that may. Rows that have shown a fault of pipec are among them.

    Those that bring a new value come first, and then those that bring most new pairs.
    """
    draws = random.Random(seed)

    def drawn() -> tuple[Row, frozenset[Any]]:
        while True:
            row = Row(*(draws.choice(values) for values in AXES.values()))
            if row.is_valid(num_ranks):
                return row, frozenset(itertools.combinations(enumerate(dataclasses.astuple(row)), 2))

    candidates, rows = (
        [drawn() for _ in range(1500)],
        [each for each in FAILED_ONCE if each.is_valid(num_ranks)],
    )
    wanted = set[Any]().union(*(pairs for _, pairs in candidates))
    while wanted:
        row, pairs = max(candidates, key=lambda each: len(wanted & each[1]))
        rows.append(row)
        wanted -= pairs
    values = [{*enumerate(dataclasses.astuple(row))} for row in rows]
    brings_none = [values[number] <= set[Any]().union(*values[:number]) for number in range(len(rows))]
    return [rows[number] for number in sorted(range(len(rows)), key=lambda number: brings_none[number])]


# the two that train


def sizes_of(row: Row) -> list[int]:
    """Rows of each mini-batch: any number, as few as one."""
    draws = random.Random(str(row))
    return [row.microbatches + draws.randint(1, 4), 1, draws.choice((2, 3)), 2 * row.microbatches]


def batch_of(row: Row, number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    dtype = torch.float32 if row.precision else torch.float64
    x = torch.randn(rows, TOKENS, WIDTH, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    y[0] = 0  # not all may be left out
    return x, y


def model_of(row: Row) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[row.model]()
    if row.loss == "of the model":
        model = WithLoss(model, LOSSES[row.loss])
    return model if row.precision else model.double()


class Script:
    """A training script, with a pipeline or with the unsplit model behind the same methods."""

    def __init__(self, row: Row, model: nn.Module, pipe: Any) -> None:
        self.row, self.model, self.pipe = row, model, pipe
        self.module = pipe.as_module() if row.run == "module" else None
        self.own: optim.Optimizer | None = None
        if not row.updates:
            source = model if row.update == "script of the model" else pipe
            self.own = UPDATES[row.update][0](source.parameters())

    def call(self, method: Callable[..., Any], x: Tensor, y: Tensor, with_loss: bool = True) -> Any:
        if self.row.batch == "local":
            x, y = (each.split(parts_of(len(each), self.row.replicas))[self.pipe.replica] for each in (x, y))
        if self.row.batch == "rank0" and os.environ.get("RANK", "0") != "0":
            return method()
        x = x.transpose(0, 1).contiguous() if self.row.model == "time first" else x
        if self.row.loss == "of the model":
            return method(x=x, y=y)
        return method(x, target=y) if with_loss else method(x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.module is not None:
            loss = self.call(self.module, x, y)
            loss.backward()
            return loss.detach()
        with self.pipe.accumulate() if self.row.updates else contextlib.nullcontext():
            return self.call(self.pipe.step, x, y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.row.run == "stream":
            (loss,) = self.call(lambda *x, **named: self.pipe.stream([streamed(*x, **named)]), x, y)
            return loss
        if self.module is None:
            return self.call(self.pipe.step, x, y)
        loss = self.add(x, y)
        if self.row.updates:
            self.pipe.optimizer.step()
        return loss

    def gradients(self) -> Tensors:
        owner = self.pipe if self.row.run == "saved" else self.model
        named = [(name, p) for name, p in owner.named_parameters() if not is_absent(p)]
        return {f"gradient of {name}": p.grad.clone() for name, p in named if p.grad is not None}

    def update(self) -> Tensors:
        """Update by the script's own optimizer; the norm, if it clips."""
        found = Tensors()
        if self.own is not None:
            if self.row.update == "script of the model":
                found["norm"] = self.pipe.clip_grad_norm_(0.5)
            self.own.step()
            self.own.zero_grad()
        return found

    def state(self) -> Tensors:
        return self.pipe.full_state_dict(all_ranks=True)

    def evaluation(self, x: Tensor, y: Tensor) -> Tensor:
        self.pipe.eval()
        if self.row.evaluates == "loss":
            return self.call(self.pipe.eval_step, x, y)
        found = self.call(self.pipe, x, y, with_loss=False)
        found = found["logits"] if self.row.loss == "of the model" else found
        if self.row.batch != "local":
            return found
        whole = [x.new_zeros(rows, CLASSES) for rows in parts_of(len(x), self.row.replicas)]
        whole[self.pipe.replica] = found
        for k, own in enumerate(whole):  # rank k has the first stage of replica k
            dist.broadcast(own, k)
        return torch.cat(whole)


def streamed(*x: Tensor, target: Tensor | None = None, **named: Tensor) -> Any:
    """A batch of a stream."""
    return named if target is None else (*x, target)


def piped(row: Row, **changed: Any) -> Script:
    """The script with a pipeline."""
    model, (factory, options) = model_of(row), UPDATES[row.update]
    options = {**options, **LAYOUTS[row.layout], **RECOMPUTES[row.recompute]}
    if row.updates:
        options |= {"optimizer": factory, "shard": row.shard}
    if row.loss != "of the model":
        options["loss_fn"] = LOSSES[row.loss]
    if row.loss == "weights given":
        options["microbatch_weight"] = lambda x, target: len(target)
    if row.model == "time first":
        options["batched"] = {"x" if row.loss == "of the model" else 0: 1}
    options |= {"schedule": row.schedule, "precision": row.precision, "batch": row.batch}
    options |= {"microbatches": row.microbatches, "check": "off", "timeout": 240.0, **changed}
    pipe = pipec.compile(model, **options)
    if row.run != "saved":
        return Script(row, model, pipe)
    Script(row, model, pipe).call(pipe.prepare, *batch_of(row, 0, sizes_of(row)[0]))
    names = ("optimizer", "microbatch_weight", "clip_grad_norm")
    given = {name: options[name] for name in names if name in options}
    with tempfile.TemporaryDirectory() as folder:
        pipe.save(Path(folder, "saved"), tensors=True)
        return Script(row, model, pipec.load(Path(folder, "saved"), timeout=240.0, **given))


def eager(row: Row) -> Script:
    """The script in eager torch: on the whole batch, or on the microbatches where they matter."""
    model, (factory, options) = model_of(row), UPDATES[row.update]
    given = {"optimizer": factory} if row.updates else {}
    given |= {"clip_grad_norm": options.get("clip_grad_norm")}
    if row.loss != "of the model":
        given["loss_fn"] = LOSSES[row.loss]
    if row.precision is not None:
        autocast = torch.autocast("cpu", torch.bfloat16)
        model.forward = autocast(model.forward)  # type: ignore[method-assign]
        given |= {name: autocast(given[name]) for name in {"loss_fn"} & {*given}}
    kind = functools.partial(ByMicrobatches, row) if row.goes_by_microbatches else Plain
    return Script(dataclasses.replace(row, batch="same", run="step"), model, kind(model, **given))


class ByMicrobatches(Plain):
    """Runs the microbatches one after another, and averages statistics as replicas do."""

    def __init__(self, row: Row, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.row = row

    def add(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        inputs = {**kwargs, **({"first": args[0]} if args else {})}
        sizes = split_sizes(len(next(iter(inputs.values()))), self.row.microbatches)
        before = {name: each.clone() for name, each in self.model.named_buffers()}
        loss = unsplit_step(self._microbatch, inputs, [size for size in sizes if size], self.model)
        if self.row.replicas > 1:
            self._agree(before, [*microbatches(inputs, sizes)])
        return loss

    def _microbatch(self, **given: Tensor) -> Tensor:
        return self.loss(*[given.pop("first")] if "first" in given else (), **given)

    @torch.no_grad()
    def _agree(self, before: Tensors, parts: Sequence[dict[str, Tensor]]) -> None:
        """Running statistics of replicas, each of which ran its own microbatches, in proportion to them."""
        count, with_rows = self.row.replicas, [part for part in parts if len(next(iter(part.values())))]
        total = {name: torch.zeros_like(each) for name, each in before.items()}
        for k in range(count):
            own = [part for part in parts[k::count] if len(next(iter(part.values())))]
            for name, each in self.model.named_buffers():
                each.copy_(before[name])
            for part in own:
                self._microbatch(**part)
            for name, each in self.model.named_buffers():
                if each.is_floating_point():
                    total[name] += each * len(own) / len(with_rows)
        for name, each in self.model.named_buffers():
            each.copy_(total[name] if each.is_floating_point() else before[name] + 1)


def trained(script: Script, sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Every value that the script sees, in order, of mini-batches of so many rows."""
    row = script.row
    torch.manual_seed(3)
    for number, rows in enumerate(sizes):
        if row.update in ("accumulated", "script"):
            yield f"loss {number}, first half", script.add(*batch_of(row, 50 + number, rows))
        yield f"loss {number}", script.step(*batch_of(row, number, rows))
        if not row.updates:
            yield from script.gradients().items()
        yield from script.pipe.logs.items()
        yield from script.update().items()
    yield from script.state().items()
    if row.evaluates != "nothing":
        yield row.evaluates, script.evaluation(*batch_of(row, 100, 5))


def parts_of(rows: int, replicas: int) -> list[int]:
    """How many rows each replica passes: all but the first, or the last, have equally many, or none."""
    own = rows // (replicas + 1)
    parts = [rows - own * (replicas - 1), *[own] * (replicas - 1)]
    return parts[::-1] if rows % 2 else parts


def difference(row: Row, **changed: Any) -> str:
    """The first value that is not that of eager torch, or an error. Every rank goes on to the end.

    The pipeline is compiled with the options that are ``changed``.
    """
    wanted: dict[str, list[Tensor]] = {}
    try:
        found = [(name, value.cpu()) for name, value in trained(piped(row, **changed), sizes_of(row))]
        for name, value in trained(_reference(row), sizes_of(row)):
            wanted.setdefault(name, []).append(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    least, least_by_itself = (2e-2, 4e-4) if row.precision else (1e-9, 1e-12)
    for name, value in found:
        if not wanted.get(name):
            return f"{name} is there, and not in eager torch"
        expected = wanted[name].pop(0)
        off = relative_error(value, expected) if value.shape == expected.shape else float("inf")
        if not (off < least or (value - expected).abs().max() < least_by_itself):
            first, other = (each.flatten()[:3].tolist() for each in (value, expected))
            return f"{name} is off by {off:.1e}: {first}, not {other}"
    if dist.is_initialized():  # a rank has the gradients of its own stages alone
        return ""
    missing = [name for name, values in wanted.items() if values and "." not in name]
    return f"{missing[0]} is in eager torch alone" if missing else ""  # an artifact lacks unused parameters


def _reference(row: Row) -> Script:
    """Eager torch. A model that draws numbers runs on one stage: where a microbatch runs changes none."""
    if row.model != "dropout":
        return eager(row)
    unsplit = {"schedule": "gpipe", "layout": "1", "recompute": "saved", "shard": None}
    unsplit |= {"batch": "same", "run": "step"}
    return piped(dataclasses.replace(row, **unsplit), microbatches=row.microbatches)


def diagnosis(row: Row) -> str:
    """Where to look for a difference of a row, in this process."""
    lines, plain = [f"{row}: {difference(row)}"], Row()
    for axis in AXES:
        simpler = dataclasses.replace(row, **{axis: getattr(plain, axis)})
        if simpler != row and simpler.is_valid(0) and not difference(simpler):
            lines.append(f"  none with {axis} {getattr(plain, axis)!r}: look in {FOLDERS[axis]}")
    try:
        piped(row, check="always").step(*batch_of(row, 0, sizes_of(row)[0]))
    except pipec.PipecError as error:
        lines.append(f"  pipec's own check: {error}")
    return "\n".join(lines)


def main() -> None:
    numbers, num_ranks = [*map(int, sys.argv[1:])], int(os.environ.get("WORLD_SIZE", "0"))
    rows = covering(num_ranks)
    torch.set_num_threads(1)
    if num_ranks:
        dist.init_process_group("gloo")
        print(json.dumps({number: difference(rows[number]) for number in numbers}))
    else:
        print(*(diagnosis(rows[number]) for number in numbers), sep="\n")


if __name__ == "__main__":
    main()
