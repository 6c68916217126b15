"""Whatever a forward can read: where it changes between two steps, that is noticed, or the model was refused.

What Dynamo cannot follow has no guards: a warning at capture says so. Nothing is silent.
"""

import array
import builtins
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import logging
import operator
import os
import random
import sys
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError
from pipec.graph import Fingerprint, ModelSnapshot, TrainingGraph, torch_values
from pipec.ir import Mode

Patch = pytest.MonkeyPatch

NUMBER, WORD, NOTHING, FLAG = 2.0, "two", None, False
PAIR, NUMBERS = (1.0, 2.0), [1.0, 2.0]
OPTIONS: dict[str, Any] = {"scale": 2.0, "nested": [{"scale": 2.0}]}
NAMES, FROZEN = {"a"}, frozenset({"a"})
TENSOR, ARRAY = torch.ones(4), np.ones(4, np.float32)
SCALAR: Any = np.float32(2.0)
MATRIX = np.ones((2, 4), np.float32)
DOUBLES, BYTES, BYTEARRAY = array.array("d", [1.0, 2.0]), b"\x01\x02", bytearray(b"\x01\x02")
DEQUE = collections.deque([1.0, 2.0])
CHAIN = collections.ChainMap({}, {"scale": 2.0})
PROXIED = {"scale": 2.0}
PROXY = types.MappingProxyType(PROXIED)
SPACE = types.SimpleNamespace(scale=2.0)
LOCAL = threading.local()
LOCAL.scale = 2.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)
COUNTER = itertools.count(1)
RANGE, SLICE = range(2), slice(0, 2)
GENERATOR = random.Random(0)
FILE = Path(__file__)
log = logging.getLogger("tests.forward")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Size(enum.IntEnum):
    ONE = 1
    TWO = 2


class Flag(enum.Flag):
    A = 1
    B = 2


COLOR, SIZE, FLAGS = Color.RED, Size.ONE, Flag.A


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


CONFIG, FIXED = Config(), Frozen()


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Descriptor:
    def __get__(self, owner: Any, kind: type) -> float:
        return owner._hidden if owner is not None else 0.0


class Thing:
    """An object with all that a class can have."""

    common = 2.0
    described = Descriptor()

    def __init__(self) -> None:
        self._hidden, self.items = 2.0, [1.0]

    @property
    def scale(self) -> float:
        return self._hidden

    @functools.cached_property
    def cached(self) -> float:
        return self._hidden

    @classmethod
    def of_class(cls) -> float:
        return cls.common

    @staticmethod
    def of_nothing() -> float:
        return NUMBER

    def __getattr__(self, name: str) -> Any:
        if name == "computed":
            return self._hidden
        raise AttributeError(name)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._hidden

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return self._hidden == 2.0

    def __getitem__(self, key: int) -> float:
        return self.items[key]

    def __contains__(self, key: str) -> bool:
        return self._hidden == 2.0

    def __eq__(self, other: object) -> bool:
        return self._hidden == other

    def __hash__(self) -> int:
        return 0

    def __float__(self) -> float:
        return self._hidden

    def __iter__(self) -> Any:
        return iter(self.items)


class Child(Thing):
    common = 3.0


THING = Thing()


def scaled(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return x * by * more


def tripled(x: Tensor) -> Tensor:
    return x * 3


def closure(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def numbers() -> Any:
    yield NUMBER


PARTIAL, TABLE = functools.partial(scaled, by=2.0), {"function": scaled}


class Twice(torch.autograd.Function):
    apply: Any

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Twice.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Twice.factor


class Net(nn.Module):
    """Has attributes of every kind."""

    common = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.word, self.flag, self.nothing = 2.0, "two", False, None
        self.options, self.numbers = {"scale": 2.0, "nested": [{"scale": 2.0}]}, [1.0, 2.0]
        self.array, self.tensor, self.tensors = np.ones(4, np.float32), torch.ones(4), [torch.ones(4)]
        self.config, self.thing, self.color, self.slotted = Config(), Thing(), Color.RED, Slotted()
        self.partial, self.closed, self.function = functools.partial(scaled, by=2.0), closure(2.0), scaled
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.named = nn.ModuleDict({"first": nn.Tanh()})
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.plain = [nn.Tanh()]
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(4)
        self.register_buffer("mean", torch.ones(4))
        self.optional: Any = None
        self.register_parameter("missing", None)
        self.doubles = array.array("d", [1.0, 2.0])
        self.eval()

    @property
    def computed(self) -> float:
        return self.scale * NUMBER

    def helper(self, x: Tensor) -> Tensor:
        return x * 2


def when(condition: object) -> float:
    return 2.0 if condition else 3.0


HERE = globals()

Read = Callable[[Any, Tensor], Any]
Change = Callable[[Any, Patch], object]


def to(name: str, value: Any) -> Change:
    """Set a global."""
    return lambda net, patch: patch.setitem(HERE, name, value)


def item(name: str, key: Any, value: Any) -> Change:
    """Set an item of a global, or add it to a dict."""

    def changed(net: Any, patch: Patch) -> None:
        if isinstance(HERE[name], dict | collections.ChainMap):
            patch.setitem(HERE[name], key, value)
        else:
            _undone.append(functools.partial(operator.setitem, HERE[name], key, HERE[name][key]))
            HERE[name][key] = value

    return changed


def attribute(name: str, key: str, value: Any, raising: bool = True) -> Change:
    return lambda net, patch: patch.setattr(HERE[name], key, value, raising=raising)


def own(name: str, value: Any) -> Change:
    """Set an attribute of the model."""
    return lambda net, patch: setattr(net, name, value)


def doing(change: Callable[[Any], object], undo: Callable[[], object] = lambda: None) -> Change:
    def changed(net: Any, patch: Patch) -> None:
        change(net)
        _undone.append(undo)

    return changed


_undone: list[Callable[[], object]] = []


def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Change:
    def changed(net: Any, patch: Patch) -> None:
        _undone.append(functools.partial(put, get()))
        put(value)

    return changed


def _set(holder: Any, name: str, value: Any) -> Change:
    return lambda net, patch: patch.setattr(holder, name, value)


NOTICED: dict[str, tuple[Read, Change]] = {
    # globals
    "global": (lambda net, x: x * NUMBER, to("NUMBER", 3.0)),
    "tuple": (lambda net, x: x * PAIR[1], to("PAIR", (1.0, 3.0))),
    "item of a list": (lambda net, x: x * NUMBERS[1], item("NUMBERS", 1, 3.0)),
    "item of a dict": (lambda net, x: x * OPTIONS["scale"], item("OPTIONS", "scale", 3.0)),
    "get of a dict": (lambda net, x: x * OPTIONS.get("scale", 1.0), item("OPTIONS", "scale", 3.0)),
    "absent key of a dict": (lambda net, x: x * OPTIONS.get("more", 1.0), item("OPTIONS", "more", 3.0)),
    "nested containers": (
        lambda net, x: x * OPTIONS["nested"][0]["scale"],
        lambda net, patch: patch.setitem(OPTIONS["nested"][0], "scale", 3.0),
    ),
    "added to a set": (
        lambda net, x: x * when("b" in NAMES),
        doing(lambda net: NAMES.add("b"), lambda: NAMES.discard("b")),
    ),
    "deque": (lambda net, x: x * DEQUE[1], to("DEQUE", collections.deque([1.0, 3.0]))),
    "chain map": (lambda net, x: x * CHAIN["scale"], item("CHAIN", "scale", 3.0)),
    "mapping proxy": (lambda net, x: x * PROXY["scale"], item("PROXIED", "scale", 3.0)),
    "name space": (lambda net, x: x * SPACE.scale, attribute("SPACE", "scale", 3.0)),
    "value of an enum": (lambda net, x: x * COLOR.value, to("COLOR", Color.BLUE)),
    "flags": (lambda net, x: x * when(FLAGS & Flag.B), to("FLAGS", Flag.A | Flag.B)),
    "dataclass": (lambda net, x: x * CONFIG.scale, attribute("CONFIG", "scale", 3.0)),
    "slice": (lambda net, x: x[:, SLICE], to("SLICE", slice(0, 3))),
    "tensor": (lambda net, x: x * TENSOR, to("TENSOR", torch.full((4,), 2.0))),
    "tensor in place": (lambda net, x: x * TENSOR, doing(lambda net: TENSOR.add_(1), lambda: TENSOR.sub_(1))),
    "array in place": (lambda net, x: x * torch.from_numpy(ARRAY), item("ARRAY", 1, 3.0)),
    "view of an array": (lambda net, x: x * torch.from_numpy(MATRIX[1]), item("MATRIX", (1, 1), 3.0)),
    "numpy's scalar": (lambda net, x: x * SCALAR, to("SCALAR", np.float32(3.0))),
    "array of doubles": (lambda net, x: x * DOUBLES[1], item("DOUBLES", 1, 3.0)),
    "bytearray": (lambda net, x: x * BYTEARRAY[1], item("BYTEARRAY", 1, 3)),
    "context variable": (
        lambda net, x: x * VARIABLE.get(),
        doing(lambda net: VARIABLE.set(3.0), lambda: VARIABLE.set(2.0)),
    ),
    # functions and objects
    "function": (lambda net, x: scaled(x), to("scaled", tripled)),
    "code of a function": (
        lambda net, x: scaled(x),
        _set(scaled, "__code__", (lambda x, by=2.0, *, more=1.0: x - 1).__code__),
    ),
    "default": (lambda net, x: scaled(x), _set(scaled, "__defaults__", (3.0,))),
    "default by name": (lambda net, x: scaled(x), _set(scaled, "__kwdefaults__", {"more": 3.0})),
    "attribute of a function": (
        lambda net, x: x * getattr(scaled, "tag", 1.0),
        lambda net, patch: patch.setattr(scaled, "tag", 3.0, raising=False),
    ),
    "function in a dict": (lambda net, x: TABLE["function"](x), item("TABLE", "function", tripled)),
    "partial": (lambda net, x: PARTIAL(x), to("PARTIAL", functools.partial(scaled, by=3.0))),
    "keywords of a partial": (
        lambda net, x: PARTIAL(x),
        lambda net, patch: patch.setitem(PARTIAL.keywords, "by", 3.0),
    ),
    "property of an object": (lambda net, x: x * THING.scale, attribute("THING", "_hidden", 3.0)),
    "descriptor": (lambda net, x: x * THING.described, attribute("THING", "_hidden", 3.0)),
    "cached property": (
        lambda net, x: x * THING.cached,
        lambda net, patch: patch.setitem(vars(THING), "cached", 3.0),
    ),
    "getattr of an object": (lambda net, x: x * THING.computed, attribute("THING", "_hidden", 3.0)),
    "class method": (lambda net, x: x * Thing.of_class(), attribute("Thing", "common", 3.0)),
    "attribute of a class": (lambda net, x: x * Thing.common, attribute("Thing", "common", 3.0)),
    "attribute that hides the class's": (
        lambda net, x: x * THING.common,
        lambda net, patch: patch.setattr(THING, "common", 3.0),
    ),
    "class of an object": (lambda net, x: x * THING.common, _set(THING, "__class__", Child)),
    "call of an object": (lambda net, x: THING(x), attribute("THING", "_hidden", 3.0)),
    "method of a class": (lambda net, x: THING(x), attribute("Thing", "__call__", lambda self, x: x * 3)),
    "length of an object": (lambda net, x: x * len(THING), attribute("THING", "items", [1.0, 2.0])),
    "equality of an object": (lambda net, x: x * when(THING == 2.0), attribute("THING", "_hidden", 3.0)),
    "slots": (lambda net, x: x * net.slotted.scale, lambda net, patch: setattr(net.slotted, "scale", 3.0)),
    "hasattr of an object": (
        lambda net, x: x * when(hasattr(SPACE, "more")),
        attribute("SPACE", "more", 3.0, raising=False),
    ),
    "attrgetter": (lambda net, x: x * operator.attrgetter("scale")(SPACE), attribute("SPACE", "scale", 3.0)),
    "autograd function": (lambda net, x: Twice.apply(x), attribute("Twice", "factor", 3.0)),
    "built-in function": (lambda net, x: x * abs(-NUMBER), _set(builtins, "abs", lambda value: 3.0)),
    # the model
    "attribute": (lambda net, x: x * net.scale, own("scale", 3.0)),
    "use_cache": (lambda net, x: x * when(net.use_cache), own("use_cache", False)),
    "getattr with a default": (lambda net, x: x * getattr(net, "more", 1.0), own("more", 3.0)),
    "appended to an attribute": (lambda net, x: x * len(net.numbers), lambda net, _: net.numbers.append(3.0)),
    "own array in place": (
        lambda net, x: x * torch.from_numpy(net.array),
        lambda net, _: net.array.__setitem__(1, 3.0),
    ),
    "own tensor in place": (lambda net, x: x * net.tensor, lambda net, _: net.tensor.add_(1)),
    "own tensor resized by data": (
        lambda net, x: x * net.tensor,
        lambda net, _: setattr(net.tensor, "data", torch.full((4,), 3.0)),
    ),
    "own list of tensors": (lambda net, x: x * net.tensors[0], lambda net, _: net.tensors[0].add_(1)),
    "own object": (lambda net, x: x * net.thing.scale, lambda net, _: setattr(net.thing, "_hidden", 3.0)),
    "own closure": (lambda net, x: net.closed(x), own("closed", closure(3.0))),
    "own property": (lambda net, x: x * net.computed, own("scale", 3.0)),
    "method": (lambda net, x: net.helper(x), own("helper", tripled)),
    "method of the model's class": (
        lambda net, x: net.helper(x),
        lambda net, patch: patch.setattr(Net, "helper", lambda self, x: x * 3),
    ),
    "appended layer": (lambda net, x: _through(net.layers, x), lambda net, _: net.layers.append(nn.ReLU())),
    "module in a plain list": (
        lambda net, x: net.plain[0](x),
        lambda net, _: net.plain.__setitem__(0, nn.ReLU()),
    ),
    "added parameter": (lambda net, x: x * len(net.parts), lambda net, _: net.parts.append(torch.ones(4))),
    "missing parameter": (
        lambda net, x: x * when(net.missing is None),
        lambda net, _: net.register_parameter("missing", nn.Parameter(torch.ones(4))),
    ),
    "attribute of a parameter": (
        lambda net, x: x * when(hasattr(net.norm.weight, "tag")),
        lambda net, _: setattr(net.norm.weight, "tag", 1),
    ),
    "requires_grad": (
        lambda net, x: x * when(net.norm.weight.requires_grad),
        lambda net, _: net.norm.requires_grad_(False),
    ),
    "type of a buffer": (
        lambda net, x: x * when(net.mean.dtype is torch.float32),
        lambda net, _: setattr(net, "mean", net.mean.double()),
    ),
    "number of a layer": (lambda net, x: net.norm(x), lambda net, _: setattr(net.norm, "eps", 1.0)),
    "mode of a layer": (lambda net, x: x * when(net.drop.training), lambda net, _: net.drop.train()),
    "mode": (lambda net, x: x * when(net.training), lambda net, _: net.train()),
    "hook": (
        lambda net, x: net.norm(x),
        lambda net, _: net.norm.register_forward_hook(lambda module, args, output: output * 3),
    ),
    "forward of a layer": (lambda net, x: net.norm(x), lambda net, _: setattr(net.norm, "forward", tripled)),
    "class of a layer": (
        lambda net, x: net.named["first"](x),
        lambda net, _: setattr(net.named["first"], "__class__", nn.Softsign),
    ),
    # torch
    "deterministic algorithms": (
        lambda net, x: x * when(torch.are_deterministic_algorithms_enabled()),
        setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "cudnn": (
        lambda net, x: x * when(torch.backends.cudnn.enabled),
        lambda net, patch: patch.setattr(torch.backends.cudnn, "enabled", False),
    ),
    "flash attention": (
        lambda net, x: x * when(torch.backends.cuda.flash_sdp_enabled()),
        setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    ),
    "matmul precision": (
        lambda net, x: x * when(torch.get_float32_matmul_precision() == "highest"),
        setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    ),
    "default type": (
        lambda net, x: x * torch.tensor([0.1]).double(),
        setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    ),
    "anomaly detection": (
        lambda net, x: x * when(torch.is_anomaly_enabled()),
        setting(torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on, False), True),
    ),
    "function of torch": (
        lambda net, x: torch.relu(x),
        lambda net, patch: patch.setattr(torch, "relu", torch.tanh),
    ),
    "method of a tensor": (
        lambda net, x: x.tanh(),
        lambda net, patch: patch.setattr(Tensor, "tanh", lambda self: self * 3, raising=False),
    ),
    "layer of torch": (
        lambda net, x: net.layers[1](x),
        lambda net, patch: patch.setattr(nn.Tanh, "forward", lambda self, x: x * 3),
    ),
    "torch's version": (
        lambda net, x: x * when(torch.__version__ == "0"),
        lambda net, patch: patch.setattr(torch, "__version__", "0"),
    ),
    # the process
    "environment": (
        lambda net, x: x * when(os.environ.get("PIPEC_TEST_READ")),
        lambda net, patch: patch.setenv("PIPEC_TEST_READ", "1"),
    ),
    "getenv": (
        lambda net, x: x * when(os.getenv("PIPEC_TEST_READ", "no") == "no"),
        lambda net, patch: patch.setenv("PIPEC_TEST_READ", "1"),
    ),
    "local of a thread": (lambda net, x: x * LOCAL.scale, attribute("LOCAL", "scale", 3.0)),
    "iterator": (lambda net, x: x * next(COUNTER), doing(lambda net: next(COUNTER))),
    "filters of warnings": (
        lambda net, x: x * len(warnings.filters),
        lambda net, patch: patch.setattr(warnings, "filters", [*warnings.filters, warnings.filters[0]]),
    ),
    "level of a logger": (
        lambda net, x: x * when(log.level == logging.DEBUG),
        lambda net, patch: patch.setattr(log, "level", logging.DEBUG),
    ),
}


def _through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.fixture(autouse=True)
def undone() -> Any:
    yield
    while _undone:
        _undone.pop()()


def net_of(read: Read) -> Any:
    net = type("Reader", (Net,), {"forward": read})()
    net.use_cache = True
    return net


def captured(net: nn.Module, x: Tensor) -> tuple[TrainingGraph, Fingerprint]:
    graph = capture(CaptureRequest(net, None, Mode.FORWARD, ModelCall((x,), {})))
    return graph, fingerprint(net)


def fingerprint(net: nn.Module) -> Fingerprint:
    return ModelSnapshot(net).fingerprint(Mode.FORWARD, torch_values())


def is_noticed(graph: TrainingGraph, before: Fingerprint, net: nn.Module) -> bool:
    return bool(graph.reads.difference()) or fingerprint(net) != before


X = torch.arange(1.0, 9.0).view(2, 4)


@pytest.mark.parametrize("name", NOTICED)
def test_what_changes_is_noticed(name: str, monkeypatch: Patch) -> None:
    if name in ("attribute of a parameter", "iterator") and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 has no guard for it")
    read, change = NOTICED[name]
    net = net_of(read)
    before = net(X)
    graph, before_change = captured(net, X)
    assert not is_noticed(graph, before_change, net)
    change(net, monkeypatch)
    after = net(X)
    assert before.shape != after.shape or not torch.equal(before, after), "the change changes nothing"
    assert is_noticed(graph, before_change, net)


def of_file() -> float:
    with FILE.open() as file:
        return float(len(file.readline()))


REFUSED: dict[str, Read] = {
    "random numbers of Python": lambda net, x: x * random.random(),
    "random numbers of numpy": lambda net, x: x * float(np.random.rand()),
    "a generator": lambda net, x: x * GENERATOR.random(),
    "a value of a tensor": lambda net, x: x * x.sum().item(),
    "unique number": lambda net, x: x * uuid.uuid4().int,
    "seed": lambda net, x: x * when(torch.initial_seed() == 0),
}

TOLD: dict[str, Read] = {
    "time": lambda net, x: x * time.time(),
    "date": lambda net, x: x * datetime.datetime.now().microsecond,
    "file": lambda net, x: x * of_file(),
    "file that exists": lambda net, x: x * when(os.path.exists("more")),
    "working folder": lambda net, x: x * len(os.getcwd()),
    "number of threads": lambda net, x: x * threading.active_count(),
    "torch's threads": lambda net, x: x * torch.get_num_threads(),
    "decimal context": lambda net, x: x * decimal.getcontext().prec,
    "C": lambda net, x: x * ctypes.c_int.in_dll(ctypes.pythonapi, "Py_OptimizeFlag").value,
    "memory": lambda net, x: x * sys.getrefcount(net),
    "host": lambda net, x: x * len(os.uname().nodename),
    "stack": lambda net, x: x * sys._getframe().f_lineno,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_in_every_step_is_refused(name: str) -> None:
    with pytest.raises(CaptureError):
        captured(net_of(REFUSED[name]), X)


@pytest.mark.parametrize("name", TOLD)
def test_what_no_front_end_can_tell_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    captured(net_of(TOLD[name]), X)
    assert "what its code reads is taken to stay as it is" in caplog.text
