"""Guesses time-first layouts: the batch is dimension 1 if rows along dimension 0 depend on each other."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pipec.capture.batched_option import BatchedOption
from pipec.capture.model_call import ModelCall


def sequence_first_spec(call: ModelCall) -> BatchedOption | None:
    """The ``batched`` option for a batch in dimension 1 of the first argument; None if that is impossible.

    Others are split where they have as many rows: along dimension 1 if they have it, with time and batch
    merged where they have the size of both, else along dimension 0. What the analysis then proves is right,
    whatever the dimensions mean. Only arguments that are tensors themselves are told apart.
    """
    given = dict(_arguments(call))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if any(value.is_nested for value in tensors.values()):
        return None
    first = next((x for x in tensors.values() if x.ndim > 1), None)
    nested = any(not isinstance(value, Tensor) and _holds_tensors(value) for value in given.values())
    if first is None or nested or first.shape[1] < 2:
        return None
    rows = first.shape[1]
    lengths = {x.shape[0] for x in tensors.values() if x.ndim > 1 and x.shape[1] == rows}
    return {name: _word(x, first.ndim, rows, lengths) for name, x in tensors.items()}


def _word(x: Tensor, ndim: int, rows: int, lengths: set[int]) -> int | str | None:
    if x.ndim > 1 and x.shape[1] == rows and (x.ndim == ndim or x.shape[0] in lengths):
        return 1
    if x.ndim and x.shape[0] in {length * rows for length in lengths}:
        return "(t b) ..."
    return 0 if x.ndim and x.shape[0] == rows else None


def _arguments(call: ModelCall) -> Iterator[tuple[str | int, Any]]:
    yield from enumerate(call.args)
    yield from call.kwargs.items()
    if call.target is not None:
        yield "target", call.target


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in items)
