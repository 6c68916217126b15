"""Collectives that a model or a loss may call, over the replicas of a stage.

The replicas of a stage work on the microbatches of a step in rounds. With r replicas, microbatches 0 to r - 1
are the first round, one on each of them. A collective takes the values of one round. Unless
``pipec.compile(..., microbatches=...)`` says otherwise, a step of a model that calls one has a single round,
which then is the whole mini-batch::

    def contrastive(images, texts):                        # features: two tensors of shape (rows, width)
        logits = images @ pipec.ops.all_gather(texts).T    # (rows, rows of the whole mini-batch)
        positive = (images * texts).sum(1)
        return (logits.logsumexp(1) - positive).mean()

With one replica, and in a script without pipec, they return a copy. They are differentiable. The gradients
that replicas have of shared values add up, as the losses of microbatches do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

__all__ = ["all_gather", "all_reduce", "broadcast"]


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every replica's ``x``, the same bits on each of them.

    ``x`` has the same shape on all replicas. Its gradient is the sum of every replica's gradient.

    Raises:
        TypeError: ``x`` is boolean.
    """
    if x.dtype is torch.bool:
        raise TypeError("all_reduce adds numbers, but x is boolean; pass x.int()")
    return torch.ops.pipec.all_reduce(x)  # type: ignore[no-any-return]


def all_gather(x: Tensor) -> Tensor:
    """Every replica's ``x``, one after the other along dimension 0.

    ``x`` has the same shape on all replicas. Its gradient is the sum of the gradients for this part.

    Raises:
        IndexError: ``x`` has no dimension.
    """
    if not x.ndim:
        raise IndexError("all_gather concatenates along dimension 0, but x has none; pass x.reshape(1)")
    return torch.ops.pipec.all_gather(x)  # type: ignore[no-any-return]


def broadcast(x: Tensor) -> Tensor:
    """The first replica's ``x``.

    ``x`` has the same shape on all replicas. Its gradient is the sum of every replica's gradient on the first
    one, and zero on the others.
    """
    return torch.ops.pipec.broadcast(x)  # type: ignore[no-any-return]


@contextmanager
def tracing_with_replicas(num_replicas: int) -> Iterator[None]:
    """Trace collectives as if over this many replicas, inside a ``with``."""
    token = _num_replicas.set(num_replicas)
    try:
        yield
    finally:
        _num_replicas.reset(token)


_num_replicas: ContextVar[int] = ContextVar("replicas of what is traced", default=1)

_library = torch.library.Library("pipec", "FRAGMENT")
_library.define("all_reduce(Tensor x) -> Tensor")
_library.define("all_gather(Tensor x) -> Tensor")
_library.define("reduce_scatter(Tensor x, SymInt rows) -> Tensor")
_library.define("broadcast(Tensor x) -> Tensor")

ALL_REDUCE = torch.ops.pipec.all_reduce.default
ALL_GATHER = torch.ops.pipec.all_gather.default
REDUCE_SCATTER = torch.ops.pipec.reduce_scatter.default
"""Each replica's ``rows`` of the sum of every replica's tensor: the gradient of ``all_gather``."""

BROADCAST = torch.ops.pipec.broadcast.default
"""Differentiation decomposes it: it is the first part of an ``all_gather``."""

COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
"""The collectives that a differentiated graph may contain."""

_library.impl("all_reduce", torch.clone, "CompositeExplicitAutograd")
_library.impl("all_gather", torch.clone, "CompositeExplicitAutograd")
_library.impl("reduce_scatter", lambda x, rows: x.clone(), "CompositeExplicitAutograd")
_library.impl("broadcast", lambda x: ALL_GATHER(x.unsqueeze(0))[0], "CompositeImplicitAutograd")


@torch.library.register_fake("pipec::all_reduce", lib=_library)  # type: ignore[untyped-decorator]
def _reduced(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pipec::all_gather", lib=_library)  # type: ignore[untyped-decorator]
def _gathered(x: Tensor) -> Tensor:
    return x.new_empty((_num_replicas.get() * x.shape[0], *x.shape[1:]))


@torch.library.register_fake("pipec::reduce_scatter", lib=_library)  # type: ignore[untyped-decorator]
def _scattered(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _keep_rows(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.rows = inputs[0].shape[0]  # type: ignore[attr-defined]


def _gradient_of_gathered(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    return REDUCE_SCATTER(gradient, ctx.rows)  # type: ignore[attr-defined,no-any-return]


torch.library.register_autograd("pipec::all_reduce", lambda ctx, gradient: ALL_REDUCE(gradient), lib=_library)
torch.library.register_autograd(
    "pipec::all_gather", _gradient_of_gathered, setup_context=_keep_rows, lib=_library
)
