"""Things that a forward can read. Tests of ``test_what_forward_reads`` run it and change it."""

# ruff: noqa: F401

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
import torch
from torch import Tensor, nn

NUMBER, PAIR, NUMBERS, NAMES = 2.0, (1.0, 2.0), [1.0, 2.0], {"a"}
OPTIONS: dict[str, Any] = {"scale": 2.0, "nested": [{"scale": 2.0}]}
TENSOR, ARRAY, MATRIX = torch.ones(4), np.ones(4, np.float32), np.ones((2, 4), np.float32)
SCALAR: Any = np.float32(2.0)
DOUBLES, BYTEARRAY = array.array("d", [1.0, 2.0]), bytearray(b"\x01\x02")
DEQUE, CHAIN = collections.deque([1.0, 2.0]), collections.ChainMap({}, {"scale": 2.0})
PROXIED = {"scale": 2.0}
PROXY, SPACE = types.MappingProxyType(PROXIED), types.SimpleNamespace(scale=2.0)
LOCAL = threading.local()
LOCAL.scale = 2.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)
COUNTER, SLICE, FILE = itertools.count(1), slice(0, 2), Path(__file__)
log = logging.getLogger("tests.forward")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Flag(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0


COLOR, FLAGS, CONFIG = Color.RED, Flag.A, Config()


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

    def __getattr__(self, name: str) -> Any:
        if name == "computed":
            return self._hidden
        raise AttributeError(name)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._hidden

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return self._hidden == other

    def __hash__(self) -> int:
        return 0


class Child(Thing):
    common = 3.0


THING = Thing()


def scaled(x: Tensor, by: float = 2.0, *, more: float = 1.0) -> Tensor:
    return x * by * more


def tripled(x: Tensor) -> Tensor:
    return x * 3


def closure(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


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

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.numbers, self.use_cache = 2.0, [1.0, 2.0], True
        self.array, self.tensor, self.tensors = np.ones(4, np.float32), torch.ones(4), [torch.ones(4)]
        self.thing, self.slotted, self.closed = Thing(), Slotted(), closure(2.0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.named, self.plain = nn.ModuleDict({"first": nn.Tanh()}), [nn.Tanh()]
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.drop, self.norm = nn.Dropout(0.0), nn.LayerNorm(4)
        self.register_buffer("mean", torch.ones(4))
        self.register_parameter("missing", None)
        self.eval()

    @property
    def computed(self) -> float:
        return self.scale * NUMBER

    def helper(self, x: Tensor) -> Tensor:
        return x * 2


def when(condition: object) -> float:
    return 2.0 if condition else 3.0


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def of_file() -> float:
    with FILE.open() as file:
        return float(len(file.readline()))
