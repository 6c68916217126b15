"""Operators, distributions and arithmetic on sizes of torch while a model is traced.

For every tensor of a trace, torch computes whether it is contiguous and how many elements it has: some eighty
operations on symbols for each operator of a graph, each through sympy. A training graph repeats a few hundred
of them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import DispatchKey
from torch._decomp import decomposition_table
from torch.distributions import Bernoulli, Distribution
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.utils.checkpoint import CheckpointFunction

RECURRENT = {"lstm": "lstm", "gru": "gru", "tanh": "rnn_tanh", "relu": "rnn_relu"}
"""Operators that torch decomposes into each step of each layer while it traces them, by their cell."""

_AUTOGRAD = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA)


@contextlib.contextmanager
def skip_distribution_validation() -> Iterator[None]:
    """Let ``torch.distributions`` skip checks of values, which do not exist during capture."""
    before = _distributions_are_validated()
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _distributions_are_validated() -> bool:
    try:
        Bernoulli(probs=torch.tensor(2.0, device="cpu"))
    except ValueError:
        return True
    return False


@contextlib.contextmanager
def traced_otherwise(
    network: Callable[..., tuple[torch.Tensor, ...]], ctc_loss: Callable[..., torch.Tensor]
) -> Iterator[None]:
    """Let torch trace recurrent networks as ``network(cell, ...)``, and other operators as such functions.

    torch traces a recurrent network step by step, which makes the length a constant, and takes 4.7 s for a
    GRU of 100 steps. What ``ctc_loss`` saves has a size that depends on the values of the lengths. ``cov``,
    and ``corrcoef`` with it, asks for a value to warn of few observations. Kernels
    that ``torch.library`` registers reach real tensors too, in all threads; these are called where torch
    traces, and nowhere else.
    """
    operators: dict[Any, Callable[..., Any]] = {
        getattr(torch.ops.aten, name).input: functools.partial(network, cell)
        for cell, name in RECURRENT.items()
    }
    operators |= {torch.ops.aten.ctc_loss.Tensor: ctc_loss, torch.ops.aten.cov.default: _covariance}
    for operator, function in operators.items():
        for key in _AUTOGRAD:
            operator.py_impl(key)(function)
    try:
        yield
    finally:
        for operator in operators:
            for key in _AUTOGRAD:
                del operator.py_kernels[key]
            operator._dispatch_cache.clear()


def _covariance(
    values: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    values = values if values.ndim == 2 else values.reshape(1, -1)
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    count: Any = values.shape[1] if weights is None else weights.sum()
    weighted = values if weights is None else values * weights
    lost: Any = correction
    if weights is not None and aweights is not None:
        lost = correction * (weights * aweights).sum() / count
    centred = values - (weighted.sum(1) / count).unsqueeze(1)
    product = centred @ (centred if weights is None else centred * weights).t().conj()
    left = count - lost
    left = left.clamp_min(0) if isinstance(left, torch.Tensor) else torch.sym_max(left, 0)
    covariance: torch.Tensor = product / left
    return covariance.squeeze()


@contextlib.contextmanager
def inlined_reentrant_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` with ``use_reentrant=True`` call its function once, as any other call.

    As in eager torch, what it computes has no gradients if none of its inputs requires one.
    """

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        trains = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            return function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply


@functools.cache
def decompositions() -> dict[Any, Any]:
    """torch's decompositions of operators into simpler ones."""
    return dict(decomposition_table)


CACHED_METHODS = (
    *("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "sym_min", "sym_max"),
)
"""Methods of symbolic numbers whose result depends on the operands alone. ``mod`` is not one of them: its
result depends on the range that torch has derived for the symbols so far."""

Method = Callable[[SymNode, SymNode], SymNode]


@contextlib.contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Cache the results of operations on equal symbolic numbers within one trace.

    Data-dependent numbers are not cached, because the graph must compute them.
    """
    methods: dict[str, Any] = {name: getattr(SymNode, name) for name in CACHED_METHODS}
    for name, method in methods.items():
        setattr(SymNode, name, _cached(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(SymNode, name, method)


def _cached(method: Method) -> Method:
    cache: dict[tuple[Any, ...], SymNode] = {}

    def cached(self: SymNode, other: SymNode) -> SymNode:
        one, another = _operand(self), _operand(other)
        if one is None or another is None:
            return method(self, other)
        key = get_proxy_mode(), one, another
        result = cache.get(key)
        if result is None:
            result = cache[key] = method(self, other)
        return result

    return cached


def _operand(number: SymNode) -> tuple[Any, ...] | None:
    """Everything that an operation reads of a number, with known symbols replaced.

    None for one that torch does not know in the call that is traced, as a data-dependent one.
    """
    if type(number) is not SymNode or type(number.hint) not in (int, float, bool):
        return None
    return number.shape_env, number.expr, number.pytype, number.hint, number.constant
