"""A model whose compilation is kept, and changes of what a later process may find different.

Each change makes a context in which the step of the model is built and run. The model's code is compiled from
text without a file, so that no line of its source gives a change away.
"""

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import symbolic_convert

import pipec
from pipec.capture import traced_step
from pipec.console import logger
from pipec.hardware.devices import DEVICES
from pipec.schedules import SCHEDULES

SOURCE = """
import math
import torch
import torch.nn.functional as F
from torch import nn

TABLE = torch.linspace(0.0, 1.0, 8)
FACTOR = 0.5
FLAG = True
NAMES = ("scaled", "gate")

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)
        self.scale = 1.5
    def forward(self, x):
        return x + self.scale * self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.register_buffer("calls", torch.zeros(()))
        self.kept = torch.arange(8.0)
    def forward(self, x):
        x = torch.sin(self.embed(x)) * FACTOR + TABLE
        x = F.silu(F.relu(x)) + x
        if FLAG:
            x = x + self.shift
        for block in self.blocks:
            x = block(x)
        if x.shape[1] > 4:
            x = x * 1.25
        x = x + math.sqrt(4.0) * self.kept
        return {NAMES[0]: self.head(x), NAMES[1]: x.mean(-1), "count": 3}

def loss_fn(output, target):
    values = list(output.values())
    return F.mse_loss(values[0], target), {"gate": values[1].mean()}
"""


@dataclass
class Setting:
    """What a run is made of. Changes edit it."""

    source: str = SOURCE
    options: dict[str, Any] = field(
        default_factory=lambda: {"devices": 2, "microbatches": 4, "schedule": "1f1b"}
    )
    prepare: Callable[[Any, Any], object] = lambda net, scope: None
    rows: int = 8
    input: Callable[[Tensor], Tensor] = lambda x: x
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    calls: Callable[[Any, Any, Any], list[Any]] | None = None


def scope_of(source: str) -> dict[str, Any]:
    """The names that the source of a model defines."""
    vars(traced_step).pop("__import_kept_model", None)  # where Dynamo would still find the last one
    symbolic_convert._import_module.cache_clear()
    module = types.ModuleType("kept_model")
    sys.modules["kept_model"] = module  # Dynamo looks for it there
    exec(compile(source, "<model>", "exec"), vars(module))
    return vars(module)


@dataclass(frozen=True)
class Outcome:
    """What a run computed and compiled, and whether it was read from the cache."""

    values: list[Tensor]
    texts: list[str]
    said: list[str]
    num_read: int

    def same_as(self, other: "Outcome") -> bool:
        same = len(self.values) == len(other.values) and all(
            torch.equal(one, two) and one.dtype == two.dtype
            for one, two in zip(self.values, other.values, strict=True)
        )
        return same and self.texts == other.texts and self.said == other.said


def run(setting: Setting, folder: Path | None, caplog: pytest.LogCaptureFixture) -> Outcome:
    """Build the model and make its calls, with what processes before kept in ``folder``."""
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch, setting.around():
        patch.setenv("PIPEC_COMPILE_CACHE", str(folder or ""))
        torch.manual_seed(0)
        scope = scope_of(setting.source)
        net = scope["Net"]()
        setting.prepare(net, scope)
        pipe = pipec.compile(net, loss_fn=scope["loss_fn"], **setting.options)
        x = setting.input(torch.randn(setting.rows, 8))
        values = (setting.calls or make_calls)(pipe, net, x)
        texts = [each.artifact.canonical_text() for each in pipe._compiler.cache.compiled]
        texts.append(repr(pipe._compiler.decided))
    said = [record.getMessage() for record in caplog.records if record.name == "pipec"]
    read = [message for message in said if message.startswith("traced in")]
    own = [each for each in said if "compilation cache" not in each and not each.startswith("compiling")]
    return Outcome(values, texts, own, len(read))


def make_calls(pipe: Any, net: Any, x: Tensor) -> list[Tensor]:
    loss, output = pipe.step(x, target=torch.ones_like(x), outputs=True)
    assert output["count"] == 3
    evaluated = pipe.eval_step(x, target=torch.ones_like(x))
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    values = [each for each in output.values() if isinstance(each, Tensor)]
    return [each.detach().clone() for each in (loss, *values, evaluated, *gradients, *net.buffers())]


CHANGES: dict[str, Setting] = {}


def edit(name: str, *edits: tuple[str, str]) -> None:
    source = SOURCE
    for before, after in edits:
        assert before in source, before
        source = source.replace(before, after)
    CHANGES[name] = Setting(source)


def prepared(name: str, prepare: Callable[[Any, Any], object]) -> None:
    CHANGES[name] = Setting(prepare=prepare)


def optioned(name: str, **options: Any) -> None:
    CHANGES[name] = Setting(options={**Setting().options, **options})


def within(name: str, around: Callable[[], contextlib.AbstractContextManager[Any]], **kwargs: Any) -> None:
    CHANGES[name] = Setting(around=around, **kwargs)


edit("a constant in the code", ("x * 1.25", "x * 1.5"))
edit("a constant of a function", ("math.sqrt(4.0)", "math.sqrt(9.0)"))
edit("an activation", ("F.gelu", "F.silu"))
edit("an argument of an activation", ("F.gelu(", "F.gelu(approximate='tanh', input="))
edit("a global number", ("FACTOR = 0.5", "FACTOR = 0.75"))
edit("the bytes of a global tensor", ("linspace(0.0, 1.0", "linspace(0.0, 2.0"))
edit("a branch on a global", ("FLAG = True", "FLAG = False"))
edit("a branch on a size", ("x.shape[1] > 4", "x.shape[1] > 16"))
edit("a branch on the rows", ("if x.shape[1] > 4", "if x.shape[0] < 1000"))
edit("another bound of a branch on the rows", ("if x.shape[1] > 4", "if x.shape[0] < 3"))
edit("the loss function", ("F.mse_loss", "F.l1_loss"))
edit(
    "the reduction of the loss",
    ("F.mse_loss(values[0], target)", "F.mse_loss(values[0], target, reduction='sum')"),
)
edit("names of results", ('"scaled", "gate"', '"gate", "scaled"'))
edit(
    "the order of results",
    ("{NAMES[0]: self.head(x), NAMES[1]: x.mean(-1), ", "{'z': self.head(x), 'a': x.mean(-1), "),
)
edit("a plain result", ('"count": 3', '"count": 3, "more": "text"'))
edit("a result that is the same tensor again", ('"count": 3', '"count": 3, "again": self.shift'))
edit("names of logs", ('{"gate": values', '{"mean": values'))
edit("an attribute of a module", ("self.scale = 1.5", "self.scale = 2.5"))
edit("the probability of a dropout", ("nn.Dropout(0.1)", "nn.Dropout(0.2)"))
edit("the class of a norm", ("nn.LayerNorm(8)", "nn.RMSNorm(8)"))
edit("the epsilon of a norm", ("nn.LayerNorm(8)", "nn.LayerNorm(8, eps=1e-3)"))
edit("a bias less", ("nn.Linear(8, 16)", "nn.Linear(8, 16, bias=False)"))
edit("another width", ("nn.Linear(8, 16)", "nn.Linear(8, 24)"), ("nn.Linear(16, 8)", "nn.Linear(24, 8)"))
edit("another number of blocks", ("range(3)", "range(4)"))
edit("a buffer that the forward changes", ("x = x + math", "self.calls += 1\n        x = x + math"))
edit("an autograd function", ("torch.sin(", "Double.apply("))
edit(
    "the backward of an autograd function",
    ("torch.sin(", "Double.apply("),
    ("return gradient * 2", "return gradient * 3"),
)
edit("a random operator", ("torch.sin(self.embed(x))", "torch.sin(self.embed(x)) + torch.rand_like(x)"))
edit("a hook on a value", ("return {NAMES", "x.register_hook(lambda g: g * 2)\n        return {NAMES"))
edit("a value that is detached", ("x = x * 1.25", "x = x.detach() * 1.25 + x * 0.0"))
edit(
    "a part without gradients",
    ("x = x * 1.25", "x = x * 1.25\n            with torch.no_grad():\n                x = x + 0"),
)
edit("a cast", ("x = x * 1.25", "x = x.double().mul(1.25).float()"))
edit("a checkpoint", ("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"))
edit(
    "the question whether gradients are enabled",
    ("x * 1.25", "x * (1.25 if torch.is_grad_enabled() else 0.5)"),
)
edit("the question whether the model trains", ("x * 1.25", "x * (1.25 if self.training else 0.5)"))
edit(
    "autocast in the code",
    ("x = block(x)", "with torch.autocast('cpu', torch.bfloat16):\n                x = block(x)"),
)
edit("a branch on values of the arguments", ("if FLAG:", "if x.new_ones(()).sum() > 0:"))
edit("Python's state", ("x = x * 1.25", "x = x * 1.25\n            self.seen = 4"))

prepared("the bytes of an unregistered tensor", lambda net, _: setattr(net, "kept", torch.arange(8.0) + 1))
prepared("the bytes of an unregistered tensor, in place", lambda net, _: net.kept.add_(1))
prepared("the class of an unregistered tensor", lambda net, _: setattr(net, "kept", nn.Parameter(net.kept)))
prepared("the bytes of a buffer", lambda net, _: net.shift.fill_(0.75))
prepared("the bytes of a parameter", lambda net, _: net.head.weight.data.mul_(2))
prepared("requires_grad of a parameter", lambda net, _: net.head.weight.requires_grad_(False))
prepared("requires_grad of the first layer", lambda net, _: net.embed.requires_grad_(False))
prepared("tied weights", lambda net, _: setattr(net.head, "weight", net.embed.weight))
prepared("tied weights of blocks", lambda net, _: setattr(net.blocks[2], "wide", net.blocks[0].wide))
prepared("a module in two places", lambda net, _: net.blocks.__setitem__(2, net.blocks[0]))
prepared("evaluation mode", lambda net, _: net.eval())
prepared("evaluation mode of one module", lambda net, _: net.blocks[1].drop.eval())
prepared("the forward of a module", lambda net, _: setattr(net.head, "forward", lambda x: x * 2))
prepared("a hook of a module", lambda net, _: net.head.register_forward_hook(lambda m, a, out: out * 2))
prepared("another hook of a module", lambda net, _: net.head.register_forward_hook(lambda m, a, out: out * 3))
prepared(
    "a hook before a module", lambda net, _: net.head.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
)
prepared(
    "a hook on the backward", lambda net, _: net.head.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
)
prepared("a parametrization", lambda net, _: nn.utils.parametrizations.weight_norm(net.head))
prepared(
    "another memory format",
    lambda net, _: setattr(net.head, "weight", nn.Parameter(net.head.weight.data.t().contiguous().t())),
)
prepared("names of blocks", lambda net, _: setattr(net, "blocks", nn.Sequential(*net.blocks)))
prepared("double precision", lambda net, _: net.double())
prepared("a global of the model's file", lambda net, scope: scope.update(FACTOR=0.25))
prepared(
    "a function of the model's file",
    lambda net, scope: scope.update(F=_With(silu=F.silu, gelu=F.silu, mse_loss=F.mse_loss)),
)
CHANGES["double precision"].input = Tensor.double


class _With:
    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


optioned("the number of microbatches", microbatches=2)
optioned("the schedule", schedule="gpipe")
optioned("a schedule with split backwards", schedule="zb-h1")
optioned("one device", devices=1)
optioned("another stage count", devices=4)
optioned("full recompute", recompute="full")
optioned("no recompute", recompute="none")
optioned("a memory limit", memory_limit="1GB")
optioned("an optimizer", optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
optioned("another optimizer", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
optioned("clipped gradients", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), clip_grad_norm=1.0)
optioned("precision", precision="bf16-mixed")
optioned("fused gradients", fused_gradients=True)
optioned("a fixed batch", dynamic=False)
optioned("replicas", devices=4, replicas=2)
optioned(
    "sharded replicas",
    devices=4,
    replicas=2,
    shard="parameters",
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
)
optioned("microbatch weights", microbatch_weight="sum")
optioned("checked gradients", on_nan="raise")
optioned(
    "an asynchronous schedule",
    schedule="pipedream",
    microbatches=None,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
)
optioned("the schedule that is found", schedule="auto", microbatches=None, device_model=DEVICES["cpu"])
CHANGES["more rows"] = Setting(rows=12)
CHANGES["rows that do not divide"] = Setting(rows=10)
CHANGES["half the rows"] = Setting(rows=4)


@contextlib.contextmanager
def _calling(set_value: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextlib.contextmanager
def _kernel(name: str, key: str, function: Callable[..., Any]) -> Iterator[None]:
    scope: dict[str, Any] = {"library": torch.library.Library("aten", "IMPL"), "given": (name, function, key)}
    exec(compile("library.impl(*given)", "<stdin>", "exec"), scope)  # as in an interactive session
    try:
        yield
    finally:
        scope["library"]._destroy()


@contextlib.contextmanager
def _python_kernel(operator: Any, function: Callable[..., Any]) -> Iterator[None]:
    key = torch._C.DispatchKey.AutogradCPU  # type: ignore[attr-defined]
    operator.py_impl(key)(lambda *args: function(*args))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def _schedule(name: str, make: Callable[[int, int], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULES, name, make)
        yield


def _twice(x: Tensor) -> Tensor:
    return torch.cos(x)


within("the default dtype", lambda: _calling(torch.set_default_dtype, torch.float64, torch.float32))
within(
    "autocast",
    lambda: torch.autocast("cpu", torch.bfloat16),
    options={**Setting().options, "precision": "bf16-mixed"},
)
within("deterministic algorithms", lambda: _calling(torch.use_deterministic_algorithms, True, False))
within("kernels of attention", lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH))
within("precision of products", lambda: _calling(torch.set_float32_matmul_precision, "medium", "highest"))
within("a method of tensors", lambda: _attribute(Tensor, "mean", lambda x, *dims: Tensor.sum(x, *dims)))
within("a function of torch", lambda: _attribute(torch, "sin", torch.cos))
within("a function of torch that the user wrote", lambda: _attribute(torch, "sin", _twice))
within(
    "a function of torch.nn.functional", lambda: _attribute(F, "mse_loss", lambda a, b: (a - b).abs().mean())
)
within("a kernel of an operator", lambda: _kernel("sin", "CompositeImplicitAutograd", _twice))
within("no gradients", torch.no_grad, calls=lambda pipe, net, x: make_calls(pipe, net, x))
within("a function of torch that others of torch call", lambda: _attribute(torch, "relu", torch.sigmoid))
within(
    "an object in the place of a function",
    lambda: _attribute(torch, "relu", functools.partial(F.leaky_relu, negative_slope=0.5)),
)
within("an operator of tensors", lambda: _attribute(Tensor, "__add__", Tensor.sub))
within("a kernel in Python", lambda: _python_kernel(torch.ops.aten.sin.default, torch.ops.aten.cos.default))
within("a schedule of the program", lambda: _schedule("1f1b", SCHEDULES["gpipe"]))
within("a version of torch", lambda: _attribute(torch, "__version__", "2.12.9"))
within(
    "a configuration of functorch",
    lambda: torch._functorch.config.patch(functionalize_rng_ops=False, view_replay_for_aliased_outputs=True),
)

PAIRS: dict[str, tuple[Setting, Setting]] = {}
"""Two settings of one source, in which Dynamo traces the same graph."""


def unseen(
    name: str, line: str, first: Callable[[Any], object], second: Callable[[Any], object], **kwargs: Any
) -> None:
    """Two preparations of a model that has one more ``line`` in its forward."""
    before = "x = x + math"
    source = SOURCE.replace(before, f"{line}\n        {before}")
    one, two = (Setting(source, prepare=_of_net(prepare), **kwargs) for prepare in (first, second))
    PAIRS[name] = one, two


def _of_net(prepare: Callable[[Any], object]) -> Callable[[Any, Any], object]:
    return lambda net, _: prepare(net)


class _Record:
    def append(self, value: int) -> None:
        self.value = value


def _named(name: str) -> Callable[[Any], object]:
    return lambda net: setattr(type(net), "__name__", name)


@torch.inference_mode()
def _made_for_inference(net: Any) -> None:
    net.kept = torch.arange(8.0)


def steps(*rows: int) -> Callable[[Any, Any, Any], list[Any]]:
    return lambda pipe, net, x: [pipe.step(x[:each], target=x[:each]) for each in rows]


@contextlib.contextmanager
def _filtered(keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _drop_all(record: logging.LogRecord) -> bool:
    return False


def _replace_text(record: logging.LogRecord) -> bool:
    record.msg, record.args = "", ()
    return True


unseen(
    "the memory of two buffers",
    "self.calls += 1; x = x + self.other",
    lambda net: net.register_buffer("other", torch.zeros(())),
    lambda net: net.register_buffer("other", net.calls.view(())),
)
unseen(
    "the memory of a buffer and of a tensor that is not registered",
    "self.calls += 1; x = x + self.other",
    lambda net: setattr(net, "other", torch.zeros(())),
    lambda net: setattr(net, "other", net.calls.view(())),
    calls=steps(8),
)
unseen(
    "the class of what the forward changes",
    "self.seen.append(3)",
    lambda net: setattr(net, "seen", []),
    lambda net: setattr(net, "seen", _Record()),
)
unseen("the name of a class", "self.seen = 3", _named("Net"), _named("Other"))
unseen("the mode in which a tensor was made", "x = x * self.kept", lambda net: None, _made_for_inference)
unseen(
    "the last digit of a number in a condition on sizes",
    "x = x * 2 if x.shape[0] * 0.1 != self.bound else x",
    lambda net: setattr(net, "bound", 0.3),
    lambda net: setattr(net, "bound", 0.1 * 3),
    options={"devices": 2, "microbatches": 2},
    calls=steps(8, 6),
)
for _name, _keep in (("dropped", _drop_all), ("changed", _replace_text)):
    unseen(f"messages that a filter {_name}", "self.seen = 3", lambda net: None, lambda net: None)
    PAIRS[f"messages that a filter {_name}"][0].around = functools.partial(_filtered, _keep)


Changes = Mapping[str, Setting]
