"""Random training loops, run by plain PyTorch and by a pipeline side by side: both compute the same.

A seed gives a ``Case``: a model with branches, an optimizer, a layout, and the actions of a script.
``Plain`` and ``Piped`` do each action. Losses, outputs, parameters, gradients and the optimizer's state are
compared. Models and losses are row-wise, and all numbers have double precision.

    python random_training_loops.py --seed 17            # one case, with what it does
    python random_training_loops.py --seed 17 --shrink   # and the shortest loop found that still fails
    python random_training_loops.py --seed 0 --seconds 3600
    python random_training_loops.py --seed 0 --seconds 3600 --ranks 2   # layouts of two processes
"""

import argparse
import collections
import copy
import dataclasses
import functools
import json
import random
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import pipec
from pipec import console
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import PipecError
from pipec.graph import TrainingGraph, copy_graph
from pipec.runtime.absent_tensors import hold, is_absent

SAME = 1e-7
"""Relative: microbatches and replicas sum in another order than the whole batch, and training adds to it."""


# a case: data alone


@dataclass(frozen=True)
class Block:
    """A part of the model, of the class ``BLOCKS[kind]``.

    ``when`` says which steps use it: "" for all, "first task", "second task", "unless skipped" and "if
    flagged". ``of`` is the block that it shares parameters with: all of them ("shared"), or the weight
    ("tied").
    """

    kind: str
    when: str = ""
    of: int = -1


@dataclass(frozen=True)
class Network:
    """The model. ``tasks`` are the values of the argument that chooses a branch."""

    blocks: tuple[Block, ...]
    width: int
    tasks: tuple[Any, Any]
    loss: str
    loss_inside: bool
    embeds: bool
    has_unused: bool
    frozen: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """How the pipeline is compiled. ``ranks``: how many processes there are, 1 or 2."""

    ranks: int
    devices: int
    replicas: int
    microbatches: int
    schedule: str
    shard: str | None
    recompute: str
    offload: str | None


@dataclass(frozen=True)
class Group:
    """A parameter group: what it has of its own. ``Optimizer.pick`` says which parameters are in it."""

    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """What updates. ``pick``: how parameters are dealt out to groups, "name" or "dimensions".

    ``owner``: "pipeline" for a factory; "model" or "pipe", whose parameters the script's own optimizer has.
    ``for_rest`` is a second optimizer for what the first one cannot do, as Muon's.
    """

    kind: str
    options: tuple[tuple[str, Any], ...]
    groups: tuple[Group, ...]
    pick: str
    named: bool
    owner: str
    for_rest: str | None = None
    clip: float | None = None
    scheduler: str | None = None
    leaves_out_frozen: bool = False


@dataclass(frozen=True)
class Action:
    """A method of ``Loop`` with its arguments."""

    name: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True)
class Case:
    """A training loop."""

    seed: int
    network: Network
    layout: Layout
    optimizer: Optimizer
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        parts = [self.network, self.layout, self.optimizer, *self.actions]
        return "\n".join(f"  {part}" for part in parts)


# the model


class Affine(nn.Module):
    def __init__(self, width: int, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=has_bias)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h))


class NoBias(Affine):
    def __init__(self, width: int) -> None:
        super().__init__(width, has_bias=False)


class Residual(Affine):
    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h))


class Gate(Affine):
    def forward(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.linear(h))


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


class Scalar(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.9))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scalar


class Offset(nn.Module):
    offset: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, width))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.offset


BLOCKS: Mapping[str, Callable[[int], nn.Module]] = {
    "affine": Affine,
    "no bias": NoBias,
    "residual": Residual,
    "gate": Gate,
    "norm": nn.LayerNorm,
    "scale": Scale,
    "scalar": Scalar,
    "offset": Offset,
}
OUTPUTS = 2

LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": nn.functional.mse_loss,
    "huber": nn.functional.smooth_l1_loss,
    "sum": lambda output, target: 0.05 * (output - target).square().sum(),
    "rows": lambda output, target: (output - target).square().sum(1).mean(),
}


class Net(nn.Module):
    """The model of a case. It returns its loss if it is given a target, and depends on its mode."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        made: list[nn.Module] = []
        for block in network.blocks:
            if block.kind == "shared":
                made.append(made[block.of])
            elif block.kind == "tied":
                made.append(Affine(network.width))
                made[-1].linear.weight = made[block.of].linear.weight
            else:
                made.append(BLOCKS[block.kind](network.width))
        self.layers = nn.ModuleList(made)
        self.when = [block.when for block in network.blocks]
        self.first_task = network.tasks[0]
        self.flagged = True
        self.loss = LOSSES[network.loss]
        self.embedding = nn.Embedding(5, network.width) if network.embeds else None
        self.unused = nn.Linear(3, 2) if network.has_unused else None
        self.head = nn.Linear(network.width, OUTPUTS)

    def forward(
        self,
        x: Tensor,
        words: Tensor | None = None,
        y: Tensor | None = None,
        task: Any = None,
        skip: bool = False,
    ) -> Tensor:
        is_first = task == self.first_task
        uses = {
            "": True,
            "first task": is_first,
            "second task": not is_first,
            "unless skipped": not skip,
            "if flagged": self.flagged,
        }
        h = x if self.embedding is None else x + self.embedding(words)
        for when, layer in zip(self.when, self.layers, strict=True):
            if uses[when]:
                h = layer(h)
        output: Tensor = self.head(h if self.training else 0.75 * h)
        return output if y is None else self.loss(output, y)


def make_model(network: Network) -> Net:
    torch.manual_seed(0)
    model = Net(network).double()
    for name in network.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


# capture takes most of the time, so that cases share models, and what was captured of them


@functools.cache
def _shared(network: Network) -> Net:
    return make_model(network)


def as_at_first(network: Network) -> Net:
    """The one model of a network that all cases compile, as it was before the first of them."""
    model, first = _shared(network), make_model(network)
    model.flagged = True
    model.train()
    values = dict([*first.named_parameters(), *first.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        hold(tensor, values[name].data)
        tensor.grad = None
        tensor.requires_grad_(values[name].requires_grad)
    return model


_captured: dict[Any, TrainingGraph] = {}


_IN_KEY = ("rewrite_loss", "may_have_tail", "outputs", "variables", "num_replicas")


def capture_once(request: CaptureRequest) -> TrainingGraph:
    """As pipec's ``capture``, for a model of ``_shared``: all that a graph depends on is in the key."""
    model: Any = request.model
    leaves = request.call.leaves
    given = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    trained = tuple(each.requires_grad for each in model.parameters())
    state = id(model), model.training, model.flagged, trained
    options = [getattr(request, name) for name in _IN_KEY]
    key = repr((state, request.mode, request.loss_fn is None, given, options))
    if key not in _captured:
        _captured[key] = copy_graph(capture(request))
    return copy_graph(_captured[key])


# what updates it

Named = list[tuple[str, Tensor]]


def group_of(spec: Optimizer, name: str, parameter: Tensor) -> int:
    index = zlib.crc32(name.encode()) if spec.pick == "name" else parameter.ndim
    return index % len(spec.groups)


def make_optimizers(spec: Optimizer, named: Named) -> list[optim.Optimizer]:
    """As a script makes them of the parameters of a model."""
    if spec.leaves_out_frozen:
        named = [(name, each) for name, each in named if each.requires_grad]
    if spec.for_rest is None:
        return [_make_one(spec, spec.kind, dict(spec.options), named)]
    rest = [(name, each) for name, each in named if each.ndim != 2]
    matrices = [(name, each) for name, each in named if each.ndim == 2]
    own = {key: value for key, value in spec.options if key == "lr"}
    made = [(spec.kind, dict(spec.options), matrices), (spec.for_rest, own, rest)]
    return [_make_one(spec, *each) for each in made if each[-1]]


def _make_one(spec: Optimizer, kind: str, options: dict[str, Any], named: Named) -> optim.Optimizer:
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].clone()
    groups: list[dict[str, Any]] = [{"params": [], **dict(group.options)} for group in spec.groups]
    for name, parameter in named:
        groups[group_of(spec, name, parameter)]["params"].append(
            (name, parameter) if spec.named else parameter
        )
    groups = [group for group in groups if group["params"]]
    made: optim.Optimizer = getattr(optim, kind)(groups, **options)
    return made


SCHEDULERS: Mapping[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda own: lr_scheduler.StepLR(own, 3, 0.5),
    "ExponentialLR": lambda own: lr_scheduler.ExponentialLR(own, 0.9),
    "LambdaLR": lambda own: lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step)),
    "CosineAnnealingWarmRestarts": lambda own: lr_scheduler.CosineAnnealingWarmRestarts(own, 5),
    "LinearLR": lambda own: lr_scheduler.LinearLR(own, 0.3, total_iters=6),
    "SequentialLR": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.ConstantLR(own, 0.5, 2), lr_scheduler.ExponentialLR(own, 0.8)], [3]
    ),
    "OneCycleLR": lambda own: lr_scheduler.OneCycleLR(own, max_lr=0.02, total_steps=200),
    "ReduceLROnPlateau": lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=0, factor=0.5),
}
NOT_FOR_ALL = ("OneCycleLR",)
"""It turns momentum, too, which not every optimizer has."""


# the two that run a case


class Loop:
    """What the script does, to ``model`` and its optimizers. Actions return numbers that must be equal."""

    model: Net
    optimizers: list[optim.Optimizer]

    def __init__(self, case: Case) -> None:
        self.case = case
        self.schedulers: list[Any] = []
        self.last_loss = 1.0
        self.saved: dict[str, Any] = {}

    @property
    def updates_in_step(self) -> bool:
        return self.case.optimizer.owner == "pipeline"

    def do(self, action: Action) -> list[float]:
        result: list[float] | None = getattr(self, action.name)(*action.args)
        return result or []

    def arguments(
        self, number: int, rows: int, task: Any, skip: bool, with_target: bool = True
    ) -> dict[str, Any]:
        """Those of the model for a mini-batch, and ``target`` if the loss is not the model's."""
        network, draws = self.case.network, torch.Generator().manual_seed(number)
        x = torch.randn(rows, network.width, generator=draws, dtype=torch.float64)
        y = torch.randn(rows, OUTPUTS, generator=draws, dtype=torch.float64)
        words = torch.randint(5, (rows,), generator=draws)
        given: dict[str, Any] = {"x": x, "task": task, "skip": skip}
        if network.embeds:
            given["words"] = words
        if with_target:
            given["y" if network.loss_inside else "target"] = y
        return given

    def make_schedulers(self) -> None:
        name = self.case.optimizer.scheduler
        self.schedulers = [] if name is None else [SCHEDULERS[name](each) for each in self.optimizers]

    # what steps are made of

    def add(self, *batch: Any) -> list[float]:
        """Forward and backward, without an update."""
        raise NotImplementedError

    def step(self, *batch: Any) -> list[float]:
        """Forward, backward and update, where the pipeline updates."""
        raise NotImplementedError

    def stream(self, batches: Sequence[tuple[Any, ...]]) -> list[float]:
        """Steps with one batch after the other."""
        raise NotImplementedError

    def clip(self, max_norm: float, norm_type: float) -> list[float]:
        raise NotImplementedError

    def evaluate(self, kind: str, changes_mode: bool, *batch: Any) -> list[float]:
        before = self.model.training
        if changes_mode:
            self.module.eval()
        result = self.evaluated(kind, *batch)
        if changes_mode:
            self.module.train(before)
        return result

    def evaluated(self, kind: str, *batch: Any) -> list[float]:
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """What a script holds instead of the model."""
        raise NotImplementedError

    def update(self) -> None:
        for each in self.optimizers:
            each.step()

    def schedule(self) -> None:
        for each in self.schedulers:
            if isinstance(each, lr_scheduler.ReduceLROnPlateau):
                each.step(self.last_loss)
            else:
                each.step()

    def zero(self, of: str, set_to_none: bool) -> None:
        owners: Mapping[str, Sequence[Any]] = {
            "pipe": [self.module],
            "model": [self.model],
            "optimizer": self.optimizers,
        }
        for each in owners[of]:
            each.zero_grad(set_to_none=set_to_none)

    # what scripts change between them

    def mode(self, of: str, training: bool) -> None:
        (self.module if of == "pipe" else self.model).train(training)

    def flag(self, value: bool) -> None:
        self.model.flagged = value

    def freeze(self, names: Sequence[str], trained: bool) -> None:
        for name in names:
            self.model.get_parameter(name).requires_grad_(trained)

    def group(self, index: int, key: str, factor: float, plus: float = 0.0) -> None:
        groups = [group for each in self.optimizers for group in each.param_groups]
        group = groups[index % len(groups)]
        if isinstance(group[key], Tensor):
            group[key].mul_(factor).add_(plus)
        else:
            group[key] = group[key] * factor + plus

    @torch.no_grad()
    def value(self, name: str, how: str) -> None:
        """Change a parameter or a buffer."""
        tensor = dict([*self.model.named_parameters(), *self.model.named_buffers()])[name]
        if is_absent(tensor):
            return
        if how == "in place":
            tensor.mul_(0.9)
        elif how == "copy":
            tensor.copy_(tensor.flatten().flip(0).view_as(tensor))
        elif how == "data in place":
            tensor.data.mul_(0.9)
        elif how == "data":
            tensor.data = tensor.data * 0.9
        elif how == "swap":
            kept, tensor.data = tensor.data, torch.zeros_like(tensor)
            tensor.data = kept + 0.01
        else:
            assert how == "vector"
            vector = nn.utils.parameters_to_vector(self.model.parameters())
            nn.utils.vector_to_parameters(vector * 0.95, self.model.parameters())

    @torch.no_grad()
    def gradient(self, name: str, how: str) -> None:
        parameter = self.model.get_parameter(name)
        if is_absent(parameter):
            return
        if how == "set":
            parameter.grad = torch.full_like(parameter, 0.1)
        elif how == "none":
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def save(self) -> None:
        self.saved = copy.deepcopy(
            {
                "model": self.tensors(),
                "optimizers": [each.state_dict() for each in self.optimizers],
                "schedulers": [each.state_dict() for each in self.schedulers],
            }
        )

    def load(self, what: str, whose: str) -> None:
        """Go on from what was saved. A pipeline may be given what ``whose`` saved."""
        saved = self.saved_by(whose)
        if not saved:
            return
        if what in ("all", "model"):
            self.module.load_state_dict(saved["model"])
        if what in ("all", "optimizer"):
            self.load_optimizers(copy.deepcopy(saved["optimizers"]))
            for each, state in zip(self.schedulers, self.saved["schedulers"], strict=True):
                each.load_state_dict(copy.deepcopy(state))

    def saved_by(self, whose: str) -> dict[str, Any]:
        return self.saved

    def load_optimizers(self, states: list[Any]) -> None:
        for each, state in zip(self.optimizers, states, strict=True):
            each.load_state_dict(state)

    def renew(self) -> None:
        """Begin with an optimizer that has no state."""
        raise NotImplementedError

    # what is compared

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, by name."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: each.grad for name, each in self.module.named_parameters()}

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter."""
        names = {each: name for name, each in self.model.named_parameters()}
        return {
            names[parameter]: entries
            for each in self.optimizers
            for parameter, entries in each.state.items()
            if entries.get("step", 1) > 0  # Adagrad's is there from the start
        }

    def numbers(self) -> list[dict[str, Any]]:
        """The hyperparameters of all groups."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for each in self.optimizers
            for group in each.param_groups
        ]


class Plain(Loop):
    """The script without pipec, on the whole batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = make_model(case.network)
        self.renew()

    @property
    def module(self) -> nn.Module:
        return self.model

    def renew(self) -> None:
        self.optimizers = make_optimizers(self.case.optimizer, list(self.model.named_parameters()))
        self.make_schedulers()

    def loss(self, batch: Sequence[Any]) -> Tensor:
        given = self.arguments(*batch)
        target = given.pop("target", None)
        result: Tensor = self.model(**given)
        return result if target is None else self.model.loss(result, target)

    def add(self, *batch: Any) -> list[float]:
        loss = self.loss(batch)
        loss.backward()
        self.last_loss = loss.item()
        return [self.last_loss]

    def step(self, *batch: Any) -> list[float]:
        found = self.add(*batch)
        if self.case.optimizer.clip is not None:
            self.clip(self.case.optimizer.clip, 2.0)
        self.update()
        self.zero("model", True)
        return found

    def stream(self, batches: Sequence[tuple[Any, ...]]) -> list[float]:
        return [loss for batch in batches for loss in self.step(*batch)]

    def clip(self, max_norm: float, norm_type: float) -> list[float]:
        return [nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type).item()]

    @torch.no_grad()
    def evaluated(self, kind: str, *batch: Any) -> list[float]:
        if kind == "loss":
            return [self.loss(batch).item()]
        output: Tensor = self.model(**self.arguments(*batch, with_target=False))
        return output.flatten().tolist()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


class Piped(Loop):
    """The script with a pipeline. ``plain`` is the one that does the same without."""

    def __init__(self, case: Case, plain: Plain) -> None:
        super().__init__(case)
        self.plain = plain
        self.model = as_at_first(case.network)
        spec, layout = case.optimizer, case.layout
        options: dict[str, Any] = {}
        if self.updates_in_step:
            factory = lambda named: make_optimizers(spec, named)  # noqa: E731
            options = {"optimizer": factory, "clip_grad_norm": spec.clip, "shard": layout.shard}
            options["offload"] = layout.offload
        self.pipe = pipec.compile(
            self.model,
            layout.devices,
            replicas=layout.replicas,
            microbatches=layout.microbatches,
            schedule=layout.schedule,
            recompute=layout.recompute,
            loss_fn=None if case.network.loss_inside else self.model.loss,
            timeout=240.0,
            **options,
        )
        self.renew()

    @property
    def module(self) -> nn.Module:
        return self.pipe

    def renew(self) -> None:
        if self.updates_in_step:
            self.optimizers = [self.pipe.optimizer]
        else:
            source = self.pipe if self.case.optimizer.owner == "pipe" else self.model
            self.optimizers = make_optimizers(self.case.optimizer, list(source.named_parameters()))
        self.make_schedulers()

    def add(self, *batch: Any) -> list[float]:
        given = self.arguments(*batch)
        if self.updates_in_step:
            with self.pipe.accumulate():
                return self._noted(self.pipe.step(**given))
        return self._noted(self.pipe.step(**given))

    def step(self, *batch: Any) -> list[float]:
        return self._noted(self.pipe.step(**self.arguments(*batch)))

    def _noted(self, loss: Tensor) -> list[float]:
        self.last_loss = loss.item()
        return [self.last_loss]

    def stream(self, batches: Sequence[tuple[Any, ...]]) -> list[float]:
        losses = self.pipe.stream([self.arguments(*batch) for batch in batches])
        return [number for loss in losses for number in self._noted(loss)]

    def clip(self, max_norm: float, norm_type: float) -> list[float]:
        return [self.pipe.clip_grad_norm_(max_norm, norm_type).item()]

    def evaluated(self, kind: str, *batch: Any) -> list[float]:
        if kind == "loss":
            return [self.pipe.eval_step(**self.arguments(*batch)).item()]
        output: Tensor = self.pipe(**self.arguments(*batch, with_target=False))
        return output.flatten().tolist()

    def saved_by(self, whose: str) -> dict[str, Any]:
        return self.plain.saved if whose == "plain" else self.saved

    def load_optimizers(self, states: list[Any]) -> None:
        if self.updates_in_step:
            self.pipe.optimizer.load_state_dict(states[0] if len(states) == 1 else states)
        else:
            super().load_optimizers(states)

    def tensors(self) -> dict[str, Tensor]:
        return self.pipe.full_state_dict(all_ranks=True)

    def states(self) -> dict[str, dict[str, Any]]:
        if not self.updates_in_step:
            return {name: entries for name, entries in super().states().items() if self._is_held(name)}
        saved = self.pipe.optimizer.state_dict()
        names = {
            number: name
            for group in saved["param_groups"]
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
        return {
            names[number]: entries for number, entries in saved["state"].items() if entries.get("step", 1) > 0
        }

    def _is_held(self, name: str) -> bool:
        return not is_absent(self.model.get_parameter(name))


# what must be equal


def differ(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return True
        return not torch.allclose(found.double(), expected.double(), SAME, 1e-3 * SAME, equal_nan=True)
    if isinstance(expected, float) and isinstance(found, float):
        return differ(torch.tensor(found), torch.tensor(expected))
    if isinstance(expected, list | tuple):
        return len(found) != len(expected) or any(map(differ, found, expected))
    return bool(found != expected)


def difference(piped: Piped, plain: Plain) -> str:
    """The first thing in which they differ, or nothing. Every rank calls it."""
    if piped.model.training != plain.model.training:
        return f"the mode is not training={plain.model.training}"
    found, expected = piped.tensors(), plain.tensors()
    if found.keys() != expected.keys():
        return f"tensors {found.keys() ^ expected.keys()} are in one state dict alone"
    for name in expected:
        if differ(found[name], expected[name]):
            return f"{name}: {found[name].tolist()} instead of {expected[name].tolist()}"
    return _difference_of_gradients(piped, plain) or _difference_of_states(piped, plain)


def _difference_of_gradients(piped: Piped, plain: Plain) -> str:
    if piped.case.layout.shard is not None:
        return ""  # they are in shares
    found, expected = piped.gradients(), plain.gradients()
    for name, gradient in found.items():
        if piped._is_held(name) and (
            (gradient is None) != (expected[name] is None) or differ(gradient, expected[name])
        ):
            return f"gradient of {name}: {gradient} instead of {expected[name]}"
    return ""


def _difference_of_states(piped: Piped, plain: Plain) -> str:
    for index, (mine, theirs) in enumerate(zip(piped.numbers(), plain.numbers(), strict=True)):
        for key in theirs:
            if differ(mine.get(key), theirs[key]):
                return f"{key} of group {index}: {mine.get(key)} instead of {theirs[key]}"
    found, expected = piped.states(), plain.states()
    if not piped.updates_in_step:
        expected = {name: entries for name, entries in expected.items() if piped._is_held(name)}
    if found.keys() != expected.keys():
        return f"optimizer state of {sorted(found)} instead of {sorted(expected)}"
    for name, entries in expected.items():
        if found[name].keys() != entries.keys():
            return f"state of {name}: {sorted(found[name])} instead of {sorted(entries)}"
        for key in entries:
            if differ(found[name][key], entries[key]):
                return f"{key} of {name}: {found[name][key]} instead of {entries[key]}"
    return ""


@dataclass(frozen=True)
class Result:
    """``kind``: "equal", "differs", "raises", or "refused" with an error of pipec's own."""

    seed: int
    kind: str
    detail: str = ""


CHECK_EVERY = 4
"""Actions after which all tensors are compared; what actions return is compared each time."""


def run(case: Case) -> Result:
    """Do the actions, on this rank. It goes on after a difference, which the other rank may not have seen."""
    first = ""
    with (
        warnings.catch_warnings(),
        mock.patch("pipec.capture.tracer.capture", capture_once),
        mock.patch("pipec.ir.sharding.ALIGNMENT", 2),
    ):
        warnings.simplefilter("ignore")
        plain = Plain(case)
        done = "compile"
        try:
            piped = Piped(case, plain)
            for number, action in enumerate(case.actions):
                done = f"action {number}, {action}"
                found, expected = piped.do(action), plain.do(action)
                text = f"{found} instead of {expected}" if differ(found, expected) else ""
                if number % CHECK_EVERY == 0 or number == len(case.actions) - 1:
                    text = difference(piped, plain) or text
                if text and not first:
                    first = f"after {done}: {text}"
                    if case.layout.ranks == 1:
                        break
        except PipecError as error:
            if not first:
                return Result(case.seed, "refused", f"{done}: {type(error).__name__}: {error}")
        except Exception as error:
            first = first or f"{done}: {type(error).__name__}: {error}"
            return Result(case.seed, "raises", first)
    return Result(case.seed, "differs", first) if first else Result(case.seed, "equal")


# drawn at random

OPTIMIZERS: Mapping[str, Sequence[tuple[tuple[str, Any], ...]]] = {
    "SGD": [
        (("lr", 0.05),),
        (("lr", 0.02), ("momentum", 0.9)),
        (("lr", 0.02), ("momentum", 0.8), ("nesterov", True), ("weight_decay", 0.05)),
        (("lr", 0.02), ("momentum", 0.7), ("dampening", 0.3)),
        (("lr", 0.05), ("weight_decay", 0.1), ("fused", True)),
    ],
    "Adam": [
        (("lr", 0.01), ("amsgrad", True), ("weight_decay", 0.1)),
        (("lr", torch.tensor(0.01, dtype=torch.float64)), ("foreach", False)),
        (("lr", 0.01), ("maximize", True)),
    ],
    "AdamW": [
        (("lr", 0.01),),
        (("lr", 0.02), ("weight_decay", 0.2), ("foreach", True)),
        (("lr", 0.01), ("betas", (0.7, 0.9)), ("fused", True)),
    ],
    "RMSprop": [(("lr", 0.005),), (("lr", 0.005), ("centered", True), ("momentum", 0.5))],
    "Adagrad": [(("lr", 0.05), ("lr_decay", 0.1)), (("lr", 0.05), ("initial_accumulator_value", 0.2))],
    "Adadelta": [(("lr", 1.0), ("weight_decay", 0.05))],
    "Adamax": [(("lr", 0.01),)],
    "NAdam": [(("lr", 0.01), ("decoupled_weight_decay", True), ("weight_decay", 0.1))],
    "RAdam": [(("lr", 0.02),)],
    "ASGD": [(("lr", 0.02), ("t0", 5.0))],
    "Rprop": [(("lr", 0.001),)],
    "Adafactor": [(("lr", 0.01),), (("lr", 0.01), ("weight_decay", 0.1))],
    "Muon": [(("lr", 0.01),)],
}
ELEMENTWISE = OPTIMIZERS.keys() - {"Adafactor", "Muon"}

ONE_PROCESS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (2, 1), (2, 2))
TWO_RANKS = ((2, 1), (2, 2), (2, 2))
"""Numbers of devices and replicas."""

SCHEDULES = ("1f1b", "1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "looped-bfs", "zb-v", "dualpipe-v")
ITERATIONS = 25
WAYS = (3, 3, 4, 5)
"""How many ways of calling the model a case may have: each is compiled, which takes most of the time."""


CASES_OF_ONE = 8
"""Seeds in a row that have the same network."""


@functools.cache
def draw_network(number: int) -> Network:
    rng, blocks = random.Random(f"network {number}"), list[Block]()
    for _ in range(rng.randint(1, 2)):
        when = rng.choice(("", "", "first task", "unless skipped", "if flagged"))
        blocks.append(Block(rng.choice((*BLOCKS, "affine")), when))
    if rng.random() < 0.6:
        blocks += [
            Block("affine"),
            Block(rng.choice(("shared", "tied")), rng.choice(("", "if flagged")), len(blocks)),
        ]
    kinds = rng.sample(("affine", "gate", "scale", "residual"), 2)
    blocks += [Block(kind, when) for kind, when in zip(kinds, ("first task", "second task"), strict=True)]
    network = Network(
        tuple(blocks),
        rng.randint(2, 5),
        rng.choice((("a", "b"), (0, 1), (False, True))),
        rng.choice(list(LOSSES)),
        rng.random() < 0.5,
        rng.random() < 0.3,
        rng.random() < 0.3,
        (),
    )
    frozen = tuple(rng.sample(freezable(network), 2)) if rng.random() < 0.3 else ()
    return dataclasses.replace(network, frozen=frozen)


def freezable(network: Network) -> list[str]:
    """What is frozen and thawed. The head always trains, so that there is always a gradient."""
    return [
        name
        for name, _ in Net(network).named_parameters()
        if name.partition(".")[0] in ("layers", "embedding")
    ]


@dataclass
class _Draw:
    """Draws a case. It follows what the actions so far have done, so that they make sense to a script."""

    seed: int
    ranks: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def case(self) -> Case:
        layout = self._layout(self.ranks)
        self.owner = (
            "pipeline"
            if layout.shard or layout.offload or self.chance(0.5)
            else self.rng.choice(("model", "pipe"))
        )
        self.layout = layout
        self.optimizer = self._optimizer()
        self.network = draw_network(self.seed // CASES_OF_ONE)
        self.model = make_model(self.network)
        actions = tuple(self._actions())
        return Case(self.seed, self.network, layout, self.optimizer, actions)

    def _layout(self, ranks: int) -> Layout:
        devices, replicas = self.rng.choice(ONE_PROCESS if ranks == 1 else TWO_RANKS)
        schedule = self.rng.choice(SCHEDULES if replicas < devices else SCHEDULES[:3])
        stages = devices // replicas
        multiple = 2 * stages if schedule == "dualpipe-v" else stages if schedule == "interleaved-1f1b" else 1
        microbatches = self.rng.choice((replicas, 2, 2, 4, 4, 3)) if multiple == 1 else multiple * replicas
        shards = [None, "optimizer", "gradients", "parameters"] if replicas > 1 else [None]
        return Layout(
            ranks,
            devices,
            replicas,
            microbatches,
            schedule,
            self.rng.choice(shards),
            self.rng.choice(("auto", "auto", "none", "full")),
            "optimizer" if self.chance(0.1) else None,
        )

    def _optimizer(self) -> Optimizer:
        kind = self.rng.choice([*OPTIMIZERS, "SGD", "Adam", "AdamW", "AdamW"])
        options = self.rng.choice(OPTIMIZERS[kind])
        groups: list[Group] = [Group()]
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            own: list[tuple[str, Any]] = []
            if self.chance(0.7) and not isinstance(dict(options)["lr"], Tensor):
                own.append(("lr", self.rng.choice((0.002, 0.02, 0.0))))
            if self.chance(0.6) and kind != "Rprop":
                own.append(("weight_decay", self.rng.choice((0.0, 0.3))))
            if self.chance(0.3) and "momentum" in dict(options) and "nesterov" not in dict(options):
                own.append(("momentum", self.rng.choice((0.0, 0.5))))
            groups.append(Group(tuple(own)))
        rest = self.rng.choice(("AdamW", "SGD")) if kind == "Muon" else None
        if rest is not None:
            groups = groups[:1]
        schedulers = [name for name in SCHEDULERS if name not in NOT_FOR_ALL or kind in ("SGD", "AdamW")]
        if dict(options).get("momentum") is None and kind == "SGD":
            schedulers.remove("OneCycleLR")
        if isinstance(dict(options)["lr"], Tensor) and "OneCycleLR" in schedulers:
            schedulers.remove("OneCycleLR")
        return Optimizer(
            kind,
            options,
            tuple(groups),
            self.rng.choice(("name", "dimensions")),
            self.chance(0.6),
            self.owner,
            rest,
            self.rng.choice((None, 0.1, 1.0)) if self.owner == "pipeline" else None,
            self.rng.choice(schedulers) if self.chance(0.6) else None,
            self.chance(0.2),
        )

    def _actions(self) -> Iterator[Action]:
        self.pending = self.has_saved = False
        self.training = self.flagged = True
        self.frozen = set(self.network.frozen)
        self.variants: set[tuple[Any, ...]] = set()
        self.num_ways = self.rng.choice(WAYS)
        self.sizes = [max(self.layout.microbatches, rows) for rows in (8, 7)]
        for _ in range(ITERATIONS):
            for _ in range(self.rng.choice((0, 1, 1, 2))):
                yield from self._change()
            yield from self._iteration()

    def _batch(self) -> tuple[Any, ...]:
        """A mini-batch and a branch."""
        whens = {block.when for block in self.network.blocks}
        task = (
            self.rng.choice(self.network.tasks)
            if whens & {"first task", "second task"}
            else self.network.tasks[0]
        )
        skip = self.chance(0.4) and "unless skipped" in whens
        return self.rng.randrange(1000), self.rng.choice(self.sizes), task, skip

    def _variant(self, mode: str, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        flagged = self.flagged and any(block.when == "if flagged" for block in self.network.blocks)
        return mode, batch[2], batch[3], self.training, flagged, frozenset(self.frozen)

    def _may(self, variant: tuple[Any, ...]) -> bool:
        """Whether a call may be compiled: it is known, or there are not too many yet."""
        if variant not in self.variants and len(self.variants) >= self.num_ways:
            return False
        self.variants.add(variant)
        return True

    def _trained_batch(self) -> tuple[Any, ...] | None:
        for _ in range(8):
            batch = self._batch()
            if self._may(self._variant("train", batch)):
                return batch
        return None

    def _iteration(self) -> Iterator[Action]:
        """An iteration of the loop: gradients, an update and what goes with it."""
        if self.owner == "pipeline":
            yield from self._iteration_of_pipeline()
        else:
            yield from self._iteration_of_script()
        if self.optimizer.scheduler is not None and self.chance(0.9):
            yield Action("schedule")

    def _iteration_of_pipeline(self) -> Iterator[Action]:
        for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2))):
            batch = self._trained_batch()
            if batch is not None:
                yield Action("add", batch)
                self.pending = True
                if self.chance(0.15):
                    yield self._zero()
                if self.chance(0.15):
                    yield self._gradient()
                if self.chance(0.15):
                    yield from self._evaluate()
        batch = self._trained_batch()
        if batch is None:
            return
        if not self.pending and self.chance(0.15):
            batches = [batch, *(self._trained_batch() for _ in range(2))]
            yield Action("stream", (tuple(each for each in batches if each is not None),))
        else:
            yield Action("step", batch)
        self.pending = False

    def _iteration_of_script(self) -> Iterator[Action]:
        zero_first = self.chance(0.3)
        if zero_first:
            yield self._zero()
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            batch = self._trained_batch()
            if batch is not None:
                yield Action("add", batch)
                if self.chance(0.1):
                    yield from self._evaluate()
        if self.chance(0.1):
            yield self._gradient()
        if self.chance(0.4):
            yield Action(
                "clip", (self.rng.choice((0.05, 0.5, 5.0)), self.rng.choice((2.0, 2.0, 1.0, float("inf"))))
            )
        yield Action("update")
        if not zero_first and self.chance(0.8):
            yield self._zero()

    def _zero(self) -> Action:
        return Action("zero", (self.rng.choice(("pipe", "model", "optimizer")), self.chance(0.6)))

    def _gradient(self) -> Action:
        names = [name for name, each in self.model.named_parameters() if name not in self.frozen]
        names = [name for name in names if not name.startswith("unused")]
        hows = ("set", "none", "scale") if self.layout.shard is None else ("set", "none")
        return Action("gradient", (self.rng.choice(names), self.rng.choice(hows)))

    def _evaluate(self) -> Iterator[Action]:
        batch, kind, changes_mode = self._batch(), self.rng.choice(("loss", "output")), self.chance(0.6)
        before, self.training = self.training, self.training and not changes_mode
        variant = self._variant(kind, batch)
        self.training = before
        if self._may(variant):
            yield Action("evaluate", (kind, changes_mode, *batch))

    def _change(self) -> Iterator[Action]:
        changes = (
            self._evaluate,
            self._evaluate,
            self._mode,
            self._flag,
            self._freeze,
            self._freeze,
            self._group,
            self._value,
            self._value,
            self._save_or_load,
            self._save_or_load,
            self._renew,
        )
        yield from self.rng.choice(changes)()

    def _mode(self) -> Iterator[Action]:
        if self.chance(0.4) or not self.training:
            self.training = not self.training
            yield Action("mode", (self.rng.choice(("pipe", "model")), self.training))

    def _flag(self) -> Iterator[Action]:
        if any(block.when == "if flagged" for block in self.network.blocks):
            self.flagged = not self.flagged
            yield Action("flag", (self.flagged,))

    def _freeze(self) -> Iterator[Action]:
        if self.optimizer.leaves_out_frozen and self.owner == "pipeline":
            return  # the factory would make other groups, which is refused
        names = freezable(self.network)
        if self.optimizer.leaves_out_frozen:
            names = [name for name in names if name not in self.network.frozen]
        if not names:
            return
        sets = [
            names[:1],
            [name for name in names if name.rpartition(".")[0] == names[-1].rpartition(".")[0]],
        ]
        chosen = self.rng.choice(sets)
        trained = chosen[0] in self.frozen
        self.frozen = self.frozen - {*chosen} if trained else self.frozen | {*chosen}
        yield Action("freeze", (tuple(chosen), trained))

    def _group(self) -> Iterator[Action]:
        if self.optimizer.kind == "Muon" or self.chance(0.7):
            yield Action("group", (self.rng.randrange(6), "lr", self.rng.choice((0.5, 0.0, 2.0))))
        elif self.optimizer.kind != "Rprop":
            yield Action("group", (self.rng.randrange(6), "weight_decay", 0.5, 0.1))

    def _value(self) -> Iterator[Action]:
        hows = ["in place", "copy", "data in place", "data", "swap", "vector"]
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        if self.layout.ranks > 1:
            hows.remove("vector")
            if self.layout.shard == "parameters":
                return  # they are there in shares alone
        yield Action("value", (self.rng.choice(tensors)[0], self.rng.choice(hows)))

    def _save_or_load(self) -> Iterator[Action]:
        if not self.has_saved:
            self.has_saved = True
            yield Action("save")
        else:
            whose = self.rng.choice(("own", "plain")) if self.owner == "pipeline" else "own"
            yield Action("load", (self.rng.choice(("all", "all", "model", "optimizer")), whose))
            if self.chance(0.5):
                yield Action("save")

    def _renew(self) -> Iterator[Action]:
        if (
            self.owner != "pipeline"
            and self.layout.ranks == 1
            and not self.optimizer.leaves_out_frozen
            and self.chance(0.3)
        ):
            yield Action("renew")


def draw(seed: int, ranks: int) -> Case:
    return _Draw(seed, ranks).case()


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case without the actions that it fails without, many at a time at first."""
    size = max(len(case.actions) // 2, 1)
    while size:
        start = 0
        while start < len(case.actions):
            fewer = case.actions[:start] + case.actions[start + size :]
            shorter = dataclasses.replace(case, actions=fewer)
            if fewer and fails(shorter):
                case = shorter
            else:
                start += size
        size //= 2
    return case


ONE_PROCESS_SEEDS = range(40)
TWO_RANKS_SEEDS = (7, 6, 10, 5, 2, 3, 9, 11)
"""Those of the tests."""

# by hand


def run_on_two_ranks(seeds: Sequence[int], scratch: Path) -> list[list[Result]]:
    """What each rank found."""
    from worker_processes import run_ranks

    printed = run_ranks(Path(__file__), 2, scratch, ["--as-rank", json.dumps([*seeds])])
    return [[Result(*each) for each in json.loads(text.splitlines()[-1])] for text in printed]


def begin() -> None:
    """What conftest.py does for the tests."""
    torch.set_num_threads(1)
    console.STATUS_DELAY_SECONDS = 3600.0
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--as-rank", default="")
    options = parser.parse_args()
    begin()
    if options.as_rank:
        results = [run(draw(seed, 2)) for seed in json.loads(options.as_rank)]
        print(json.dumps([dataclasses.astuple(each) for each in results]))
        return
    begun, found, seed = time.monotonic(), collections.Counter[str](), options.seed
    while seed < options.seed + options.cases or time.monotonic() - begun < options.seconds:
        if options.ranks == 1:
            case = draw(seed, 1)
            results = [run(case)]
            seed += 1
            if options.shrink and results[0].kind != "equal":
                kind = results[0].kind
                shorter = shrunk(case, lambda each: run(each).kind == kind)  # noqa: B023
                print(shorter, run(shorter), sep="\n")
        else:
            count = min(20, max(options.cases, 1))
            with tempfile.TemporaryDirectory() as scratch:
                ranks = run_on_two_ranks(range(seed, seed + count), Path(scratch))
            results = [
                next((each for each in pair if each.kind != "equal"), pair[0])
                for pair in zip(*ranks, strict=True)
            ]
            seed += count
        if options.cases == 1 and not options.seconds:
            print(draw(options.seed, options.ranks))
        for result in results:
            found[result.kind] += 1
            if result.kind != "equal":
                print(result.kind, result.seed, result.detail[:600], flush=True)
    print(dict(found), f"{time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
