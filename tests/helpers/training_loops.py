"""Random training loops: one script, run with a pipeline and with the unsplit model behind the same methods.

``Plain`` has the methods of a pipeline that scripts call, so that ``Script`` is written once. A seed draws a
layout, an optimizer and whose it is, and what the script does between steps. ``difference`` runs both and
returns the first value that differs. All is in double precision, and losses are means over rows.

``python tests/helpers/training_loops.py 17`` runs one seed. Under ``torchrun`` every rank prints what it
finds for all seeds that are given, as JSON.
"""

import contextlib
import copy
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from split_optimizers import EVERY
from torch import Tensor, nn, optim
from unsplit_reference import Plain

import pipec
from pipec.runtime.absent_tensors import is_absent

WIDTH, ACTIONS, CHECK_EVERY = 4, 24, 4
SAME = 1e-7
"""Relative: microbatches and replicas sum in another order than the whole batch, and training adds to it."""

OPTIMIZERS = [name for name in EVERY if name not in ("Anchored", "Muon and AdamW", "fused SGD")]
"""Without those that depend on the values at first, that round to 16 bits, or that want all gradients."""

LAYOUTS: Mapping[int, Sequence[dict[str, Any]]] = {
    0: (
        {"devices": 2},
        {"devices": 2, "schedule": "zb-h1", "recompute": "full"},
        {"devices": 2, "schedule": "interleaved-1f1b"},
        {"devices": 2, "stages": 1, "shard": "optimizer"},
        {"devices": 4, "replicas": 2, "shard": "gradients"},
        {"devices": 4, "replicas": 2, "shard": "parameters"},
        {"devices": 2, "offload": "optimizer"},
        {"devices": 1, "schedule": "looped-bfs-v3", "offload": "weights"},
        {"devices": 2, "schedule": "interleaved-1f1b", "offload": "weights"},
    ),
    2: (
        {"devices": 2},
        {"devices": 2, "schedule": "zb-v", "recompute": "full"},
        {"devices": 2, "stages": 1},
        {"devices": 2, "stages": 1, "shard": "optimizer"},
        {"devices": 2, "stages": 1, "shard": "parameters"},
        {"devices": 2, "schedule": "looped-bfs", "offload": "weights"},
    ),
}
"""By the number of processes, 0 for one that has all ranks."""


class Net(nn.Module):
    """A trunk with a tied weight, a head for each of two tasks, and a layer that runs if ``flagged``."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.trunk[2].weight = self.trunk[0].weight
        self.norm, self.optional = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, WIDTH))
        self.a, self.b = nn.Linear(WIDTH, 2), nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2))
        self.flagged = True

    def forward(self, x: Tensor, y: Tensor | None = None, task: str = "a") -> Tensor:
        for layer in self.trunk:
            x = layer(x).tanh()
        if self.flagged:
            x = self.optional(x)
        x = self.norm(x) * self.scale + self.offset
        output = (self.a if task == "a" else self.b)(x if self.training else 0.75 * x)
        return output if y is None else nn.functional.mse_loss(output, y)


def make_model() -> Net:
    torch.manual_seed(0)
    return Net().double()


@dataclass(frozen=True)
class Case:
    """``owner`` of the optimizer: "pipeline" if that updates, else whose parameters it was given."""

    seed: int
    layouts: tuple[dict[str, Any], dict[str, Any]]
    optimizer: str
    owner: str
    clip: float | None
    scheduler: type[optim.lr_scheduler.LRScheduler] | None

    @classmethod
    def drawn(cls, seed: int, num_ranks: int) -> "Case":
        draws = random.Random(seed)
        layouts = draws.choice(LAYOUTS[num_ranks]), draws.choice(LAYOUTS[num_ranks])
        needs_pipeline = any("shard" in each or each.get("offload") == "optimizer" for each in layouts)
        owner = "pipeline" if needs_pipeline else draws.choice(("pipeline", "model", "pipe"))
        scheduler = draws.choice((None, optim.lr_scheduler.ExponentialLR))
        return cls(seed, layouts, draws.choice(OPTIMIZERS), owner, draws.choice((None, 0.1)), scheduler)

    @property
    def updates(self) -> bool:
        return self.owner == "pipeline"

    @property
    def is_sharded(self) -> bool:
        return any("shard" in each for each in self.layouts)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all parameters."""
        return all(each.get("stages") == 1 and each.get("shard") != "parameters" for each in self.layouts)


class Script:
    """What a script does, with a pipeline or with ``Plain``. Actions return what must be equal."""

    def __init__(self, case: Case, is_plain: bool, folder: Path) -> None:
        self.case, self.is_plain, self.folder = case, is_plain, folder
        self._compile(case.layouts[0])

    def _compile(self, layout: Mapping[str, Any]) -> None:
        case = self.case
        self.model, options = make_model(), {}
        if case.updates:
            options = {"optimizer": EVERY[case.optimizer], "clip_grad_norm": case.clip}
        self.pipe: Any = (
            Plain(self.model, **options)
            if self.is_plain
            else pipec.compile(self.model, microbatches=4, check="off", timeout=240.0, **layout, **options)
        )
        source = self.pipe if case.owner == "pipe" else self.model
        self.optimizer = (
            self.pipe.optimizer if case.updates else EVERY[case.optimizer]([*source.named_parameters()])
        )
        self.schedulers = [case.scheduler(self.optimizer, 0.9)] if case.scheduler else []

    def add(self, *batch: Any) -> list[Tensor]:
        with self.pipe.accumulate() if self.case.updates else contextlib.nullcontext():
            return [self.pipe.step(*arguments(*batch))]

    def step(self, *batch: Any) -> list[Tensor]:
        found = [self.pipe.step(*arguments(*batch))]
        if not self.case.updates:
            if self.case.clip is not None:
                found.append(self.pipe.clip_grad_norm_(self.case.clip))
            self.optimizer.step()
            self.pipe.zero_grad()
        for each in self.schedulers:
            each.step()
        return found

    def weigh(self, factors: Sequence[float], *batches: Any) -> None:
        """Losses of the module of a pipeline, weighted outside of it; that of weight 0 is thrown away."""
        module = self.pipe.as_module()
        losses = [module(*arguments(*batch)) for batch in batches]
        for factor, loss in zip(factors, losses, strict=True):
            if factor:
                (factor * loss).backward()

    def copied(self, *batch: Any) -> list[Tensor]:
        """What a copy makes of a step and of an evaluation, with an optimizer of its own."""
        other = copy.deepcopy(self.pipe)
        return [other.step(*arguments(*batch)), other.eval_step(*arguments(*batch))]

    def update(self) -> None:
        """The update alone, of the gradients that there are."""
        if self.is_plain:
            self.pipe.update()
        elif self.case.updates:
            self.pipe.optimizer.step()

    def stream(self, *batches: Any) -> list[Tensor]:
        if not self.case.updates:
            return self.step(*batches[0])
        return [*self.pipe.stream([arguments(*batch) for batch in batches])]

    def evaluate(self, with_loss: bool, changes_mode: bool, *batch: Any) -> list[Tensor]:
        x, y, task = arguments(*batch)
        self.pipe.train(not changes_mode)
        found = self.pipe.eval_step(x, y, task) if with_loss else self.pipe(x, None, task)
        self.pipe.train()
        return [found]

    def flag(self, value: bool) -> None:
        self.model.flagged = value

    def freeze(self, name: str, trained: bool) -> None:
        self.model.get_parameter(name).requires_grad_(trained)

    def group(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    @torch.no_grad()
    def value(self, name: str, how: str) -> None:
        tensor = dict([*self.model.named_parameters(), *self.model.named_buffers()])[name]
        if is_absent(tensor):
            return
        if how == "in place":
            tensor.mul_(0.9)
        elif how == "copy":
            tensor.copy_(tensor.flatten().flip(0).view_as(tensor))
        else:
            tensor.data = tensor.data * 0.9

    @torch.no_grad()
    def gradient(self, name: str, how: str) -> None:
        parameter = self.model.get_parameter(name)
        if is_absent(parameter):
            return
        if how == "none":
            parameter.grad = None
        elif how == "ones":
            parameter.grad = torch.ones_like(parameter)
        elif parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def zero(self, of: str, set_to_none: bool) -> None:
        owner = self.model.norm if of == "layer" else getattr(self, of)
        owner.zero_grad(set_to_none)

    def replace(self, path: str, name: str, *batch: Any) -> list[Tensor]:
        """A step with another parameter of the same name, which keeps the state of the optimizer."""
        module = self.model.get_submodule(path)
        value = torch.linspace(-0.3, 0.3, module.get_parameter(name).numel(), dtype=torch.float64)
        value = value.view(module.get_parameter(name).shape)
        if self.is_plain:
            module.get_parameter(name).data.copy_(value)
        else:
            setattr(module, name, nn.Parameter(value))
        return self.step(*batch)

    def everywhere(self) -> None:
        """All parameters in other memory, by torch's function."""
        parameters = [*self.model.parameters()]
        values = [torch.linspace(-0.4, 0.4, each.numel(), dtype=torch.float64) for each in parameters]
        nn.utils.vector_to_parameters(torch.cat(values), parameters)

    def _state(self) -> list[Any]:
        return copy.deepcopy([self.pipe.full_state_dict(all_ranks=True), self.optimizer.state_dict()])

    def _load(self, model: Any, optimizer: Any) -> None:
        self.pipe.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def save(self) -> None:
        """A checkpoint, or copies of all state."""
        if self.case.updates and not self.is_plain:
            self.pipe.save_checkpoint(self.folder / "saved")
        self.saved = self._state()

    def load(self) -> None:
        if self.case.updates and not self.is_plain:
            self.pipe.load_checkpoint(self.folder / "saved")
        else:
            self._load(*copy.deepcopy(self.saved))

    def move(self) -> None:
        """Go on with another layout, or with another optimizer of the script."""
        state, before = self._state(), self.model
        self._compile(self.case.layouts[1])
        self.model.flagged = before.flagged
        for parameter, former in zip(self.model.parameters(), before.parameters(), strict=True):
            parameter.requires_grad_(former.requires_grad)
        self._load(*state)

    def values(self) -> dict[str, Any]:
        """Every tensor of the model, gradients, and the optimizer's state and rates by parameter."""
        found: dict[str, Any] = dict(self.pipe.full_state_dict(all_ranks=True))
        if not self.case.is_sharded:
            named = self.model.named_parameters()
            found |= {f"gradient of {name}": each.grad for name, each in named if not is_absent(each)}
        for index, group in enumerate(self.optimizer.param_groups):
            found[f"lr of group {index}"] = group["lr"]
        for name, entries in self._states():
            if entries.get("step", 1):  # some have a state from the start
                found |= {f"{key} of {name}": value for key, value in entries.items()}
        return found

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        saved, names = self.optimizer.state_dict(), dict[int, str]()
        known = {id(each): name for name, each in self.model.named_parameters()}
        for saved_group, group in zip(saved["param_groups"], self.optimizer.param_groups, strict=True):
            own = saved_group.get("param_names") or [known[id(each)] for each in group["params"]]
            names |= dict(zip(saved_group["params"], own, strict=True))
        yield from ((names[number], entries) for number, entries in saved["state"].items())


def arguments(number: int, rows: int, task: str) -> tuple[Tensor, Tensor, str]:
    draws = torch.Generator().manual_seed(number)
    x, y = (torch.randn(rows, size, generator=draws, dtype=torch.float64) for size in (WIDTH, 2))
    return x, y, task


KINDS = ("add", "add", "weigh", "evaluate", "flag", "freeze", "group", "value", "zero", "save", "stream")


def actions(case: Case, num_ranks: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What the script does: a step every other time."""
    draws = random.Random(case.seed)
    names = [name for name, _ in make_model().named_parameters() if not name.startswith(("a.", "b."))]
    frozen, has_saved = draws.choice(names), False

    def batch(tasks: str = "aab") -> tuple[Any, ...]:
        return draws.randrange(1000), draws.choice((8, 7, 3)), draws.choice(tasks)

    in_process, kinds = not num_ranks, [*KINDS]
    if case.updates:
        kinds += ["copied", "replace"]
    if in_process or case.is_whole:
        kinds.append("everywhere")
    for number in range(ACTIONS):
        if number % 2:
            yield "step", batch()
            continue
        kind = "move" if number == ACTIONS // 2 else draws.choice(kinds)
        match kind:
            case "add":
                yield "add", batch()
                hows = ("none", "half", "ones") if in_process or not case.is_sharded else ("ones",)
                if in_process or not case.is_sharded or case.is_whole:
                    yield "gradient", (draws.choice(names), draws.choice(hows))
                if case.updates and draws.random() < 0.3:
                    yield "update", ()
            case "weigh":
                tasks = "a" if case.is_sharded else "aab"  # a new task's parameters are sharded anew
                yield "weigh", ((0.25, 0.0, 2.0), *(batch(tasks) for _ in range(3)))
            case "evaluate":
                yield "evaluate", (draws.random() < 0.5, draws.random() < 0.6, *batch())
            case "freeze":
                yield "freeze", (frozen, draws.random() < 0.5)
            case "value":
                how = draws.choice(("in place", "copy", "data"))
                if in_process or not case.is_sharded:
                    yield "value", (draws.choice([*names, "offset"]), how)
            case "save":
                yield "load" if has_saved else "save", ()
                has_saved = True
            case "stream":
                yield "stream", (batch(), batch())
            case "copied":
                yield "copied", batch()
            case "replace":
                yield "replace", (*draws.choice((("a", "bias"), ("b.0", "weight"))), *batch())
            case "flag":
                yield "flag", (draws.random() < 0.5,)
            case "group":
                yield "group", (draws.choice((0.5, 1.5)),)
            case "zero":
                yield "zero", (draws.choice(("pipe", "model", "optimizer", "layer")), draws.random() < 0.5)
            case _:
                yield kind, ()


def differs(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        is_same = found.shape == expected.shape
        return not (is_same and torch.allclose(found.double(), expected.double(), SAME, 1e-3 * SAME))
    if isinstance(expected, float) and isinstance(found, float):
        return differs(torch.tensor(found), torch.tensor(expected))
    return bool(found != expected)


def difference(seed: int, num_ranks: int = 0) -> str:
    """The first thing that differs, and after which action. Ranks go on: others may not see it."""
    case, first = Case.drawn(seed, num_ranks), ""
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        if num_ranks:
            dist.broadcast_object_list(shared)
        piped, plain = (Script(case, is_plain, Path(shared[0])) for is_plain in (False, True))
        for number, (action, args) in enumerate(actions(case, num_ranks)):
            done = f"{case}, action {number}, {action}{args}"
            try:
                found, expected = (getattr(each, action)(*args) or [] for each in (piped, plain))
                pairs = [("result", *pair) for pair in zip(found, expected, strict=True)]
                if number % CHECK_EVERY == 0 or number == ACTIONS - 1:
                    found, expected = piped.values(), plain.values()
                    pairs += [(key, value, expected.get(key)) for key, value in found.items()]
                    if not num_ranks:
                        pairs += [(key, None, value) for key, value in expected.items() if key not in found]
            except Exception as error:
                return first or f"{done}: {type(error).__name__}: {error}"
            wrong = [f"{key} is {value}, not {other}" for key, value, other in pairs if differs(value, other)]
            first = first or (f"{done}: {wrong[0]}" if wrong else "")
        if num_ranks:
            dist.barrier()
    return first


def main() -> None:
    torch.set_num_threads(1)
    seeds, num_ranks = [*map(int, sys.argv[1:])], int(os.environ.get("WORLD_SIZE", "0"))
    if num_ranks:
        dist.init_process_group("gloo")
    found = {seed: difference(seed, num_ranks) for seed in seeds}
    print(json.dumps(found) if num_ranks else "\n".join(f"{seed}: {text}" for seed, text in found.items()))


if __name__ == "__main__":
    main()
