"""Merges what the microbatches of a step return into what the whole batch returns."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipec.errors import InputError, VerifyError
from pipec.ir import Payload, Plan, Value
from pipec.ir.text import evaluate_dim, format_value


def check_mergeable(value: Value) -> None:
    """Raise VerifyError if the batch is in several dimensions: parts of such a value cannot be joined."""
    if len(_batch_dims(value)) > 1:
        raise VerifyError(
            f"the result {format_value(value)} has the batch in more than one dimension, so the results of "
            "microbatches cannot be joined; return a value with one batch dimension, or use one microbatch"
        )


class Results:
    """Collects the parts of each result by microbatch."""

    def __init__(self, values: Sequence[Value], num_microbatches: int) -> None:
        for value in values if num_microbatches > 1 else ():
            check_mergeable(value)
        self._values = {value.name: value for value in values}
        self._num_microbatches = num_microbatches
        self.forget_step()

    def forget_step(self) -> None:
        self._parts = {name: [_UNSET] * self._num_microbatches for name in self._values}
        self._merged: dict[str, Tensor] = {}

    def collect(self, microbatch: int, sent: Mapping[str, Tensor]) -> None:
        """Keep what the forward of ``microbatch`` returned for these results."""
        for name, parts in self._parts.items():
            if name in sent:
                parts[microbatch] = sent[name]

    def merged(self, name: str, sizes: Sequence[int]) -> Tensor:
        """The result of the whole batch; see ``merge``."""
        if name not in self._merged:
            self._merged[name] = merge(self._values[name], self._parts.pop(name), sizes)
        return self._merged[name]

    def all_merged(self, sizes: Sequence[int]) -> dict[str, Tensor]:
        return {name: self.merged(name, sizes) for name in self._values}


_UNSET = torch.empty(0)


def merge(value: Value, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Join the parts of microbatches that hold ``sizes`` samples into a new tensor.

    Parts with a batch dimension are concatenated along it. Floating-point parts without one, such as mean
    losses, become the mean over samples: each is weighted with its share of the batch. Any other value must
    be the same for every microbatch.

    Raises:
        InputError: the parts cannot stand for the whole batch.
    """
    if dims := _batch_dims(value):
        return _concatenate(value, parts, dims[0], sum(sizes))
    if parts[0].is_floating_point() or parts[0].is_complex():
        return _weighted_sum(parts, sizes)
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise InputError(
            f"the result {format_value(value)} differs between microbatches, and whole numbers have no "
            "mean; return it per sample, or as floating point, or use one microbatch"
        )
    return parts[0].clone()


def join(plan: Plan, parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """The results of a batch, of whose rows ``parts`` are those of so many consecutive ones each."""
    values = [value for link in plan.links if link.payload is Payload.RESULT for value in link.values]
    return {value.name: merge(value, [part[value.name] for part in parts], sizes) for value in values}


def _batch_dims(value: Value) -> list[int]:
    return [index for index, dim in enumerate(value.shape) if isinstance(dim, str)]


def _concatenate(value: Value, parts: Sequence[Tensor], dim: int, batch: int) -> Tensor:
    joined = torch.cat(list(parts), dim)
    expected = evaluate_dim(value.shape[dim], batch)
    if joined.shape[dim] != expected:
        raise InputError(
            f"the result {format_value(value)} has size {joined.shape[dim]} in dimension {dim} when joined "
            f"from microbatches, but {expected} for the whole batch; return a value whose size is "
            "proportional to the batch, or use one microbatch"
        )
    return joined


def _weighted_sum(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    batch = sum(sizes)
    total = parts[0] * (sizes[0] / batch)
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        total = total + part * (size / batch)
    return total
