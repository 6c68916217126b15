"""Random operators as generated code calls them: each draws from a generator that it is given.

Where ``torch.compile`` takes the function around it, each is given a seed instead, and is an operator that
makes the generator of this seed.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.random_seeds import generator_of_seed
from pipec.torch_compat.run_time import schema

_default_generator = threading.Lock()


def dropout(input: Tensor, p: float, source: torch.Generator | Tensor) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout(input, p, True)``: the scaled output, and the mask of what is kept.

    It draws from a generator, or from the one of a seed.
    """
    if isinstance(source, Tensor):
        output, mask = _seeded_dropout(input, p, source)
        return output, mask
    return _dropout(input, p, source)


def _dropout(input: Tensor, p: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    if generator is not None and generator.device.type == "cuda":  # one kernel instead of four
        output, mask = call_with_generator(generator, torch.native_dropout, input, p, True)
        return output, mask
    mask = torch.empty_like(input, dtype=torch.bool)
    if p == 1.0:
        mask.zero_()
        return torch.zeros_like(input), mask
    mask.bernoulli_(1.0 - p, generator=generator)
    return (input * mask).mul_(1.0 / (1.0 - p)), mask


@torch.library.custom_op("pipec::dropout", mutates_args=())
def _seeded_dropout(input: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return _dropout(input, p, generator_of_seed(input.device, seed))


@_seeded_dropout.register_fake
def _(input: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return _dropout(input, p, None)


def call_with_generator(
    source: torch.Generator | Tensor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a random operator without a generator of its own; ``kwargs`` may hold its ``generator=None``.

    It draws from the device's default generator, which has the state of ``source`` during the call. On a GPU
    it is that very state, so that a CUDA graph with which the generator is registered knows of it.
    """
    if isinstance(source, Tensor):
        return _seeded_operator(function)(source, *args, **kwargs)
    with _default_generator, _as_default(source):
        return function(*args, **kwargs)


_library = torch.library.Library("pipec", "FRAGMENT")


@functools.cache
def _seeded_operator(function: Any) -> Any:
    """The operator that calls a random operator with the generator of its first argument, a seed.

    ``aten::bernoulli(Tensor self)    ->    pipec::seeded_bernoulli_default(Tensor seed, Tensor self)``
    """
    _, _, arguments = str(schema(function)).partition("(")
    _, *names = str(function).split(".")
    name = "_".join(["seeded", *names])

    def call(seed: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = kwargs.get("device") or torch.device("cpu")
        device = next((each.device for each in args if isinstance(each, Tensor)), named)
        generator = generator_of_seed(device, seed)
        return call_with_generator(generator, function, *args, **kwargs)

    def like_call(seed: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    _library.define(f"{name}(Tensor seed, {arguments}")
    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipec::{name}", like_call, lib=_library)
    return getattr(torch.ops.pipec, name).default


@contextlib.contextmanager
def _as_default(generator: torch.Generator) -> Iterator[None]:
    """Let the default generator of its device be in the state of this one inside a ``with``."""
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index or 0]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        restore = functools.partial(default.graphsafe_set_state, before)
    else:
        default = torch.default_generator
        restore = functools.partial(default.set_state, default.get_state())
        default.set_state(generator.get_state())
    try:
        yield
    finally:
        restore()
