"""Merges the results of the microbatches of a step into the results of the whole batch.

A replica makes a part of a result of its own microbatches. The parts of all replicas then make the whole.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipec.errors import InputError, VerifyError
from pipec.ir import Plan, Sizes, Value
from pipec.ir.text_format import evaluate_dim, format_value, names_in
from pipec.runtime.memory.storage import compact
from pipec.runtime.step.batch_slice import BatchSlice


def check_mergeable(value: Value) -> None:
    """Raise VerifyError if the batch is in several dimensions: parts of such a value cannot be joined."""
    if len(_batch_dims(value)) > 1:
        raise VerifyError(
            f"the result {format_value(value)} has the batch in more than one dimension, so the results of "
            "microbatches cannot be joined; return a value with one batch dimension, or use one microbatch"
        )


class ResultCollector(Protocol):
    """Collects the results that forwards return."""

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        """Keep the results among the values that the forward of ``microbatch`` returned."""


class StepResults:
    """Collects the parts of each result that a rank makes, by microbatch.

    ``made`` has the results and the microbatches of which this rank makes them. ``sums`` names those that add
    up, and ``whole`` those that are set for the whole batch. ``loss_weights`` are the microbatch weights, if
    they are not the fractions of the rows. If the batch ``is_local`` to replicas, what has rows stays in the
    pipeline of its replica.
    """

    loss_weights: Sequence[float] | None = None
    is_local = False
    losses: Mapping[int, Tensor]
    """Those of the microbatches of this rank."""

    def __init__(
        self,
        made: Sequence[tuple[Value, Sequence[int]]],
        num_microbatches: int,
        sums: Sequence[str] = (),
        whole: Collection[str] = (),
    ) -> None:
        self._sums = sums
        for value, _ in made if num_microbatches > 1 else ():
            if value.name not in whole:
                check_mergeable(value)
        self._values = {value.name: value for value, _ in made}
        self._own = {value.name: own for value, own in made}
        self.forget_step()

    def forget_step(self) -> None:
        self._parts: dict[str, dict[int, Tensor]] = {name: {} for name in self._values}
        self._merged: dict[str, Tensor] = {}
        self.losses = self._parts.get("loss", {})

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        """Keep these results of the forward of ``microbatch``, and no other memory."""
        for name, parts in self._parts.items():
            if name in sent:
                parts[microbatch] = sent[name] = compact(sent[name])

    def set_whole(self, results: Mapping[str, Tensor], microbatch: int) -> None:
        """Keep results of the whole batch. What is found in the loss counts as found in ``microbatch``."""
        for name, tensor in results.items():
            self._merged[name] = compact(tensor)
            if name == "loss":
                self._parts[name][microbatch] = tensor

    def merged(self, name: str, sizes: Sequence[int], values: Sizes) -> Tensor:
        """The part of a result that this rank's microbatches make; see ``merge``."""
        if name not in self._merged:
            parts = self._parts.pop(name)
            own = {microbatch: parts[microbatch] for microbatch in self._own[name] if sizes[microbatch]}
            self._merged[name] = merge_microbatches(
                self._values[name], own, sizes, self.loss_weights, values, name in self._sums
            )
        return self._merged[name]

    def sent_to_other_pipeline(self, name: str, sizes: Sequence[int], values: Sizes) -> Tensor:
        """The part of a result that ranks of other pipelines receive."""
        whole, value = self.merged(name, sizes, values), self._values[name]
        is_empty = self.is_local and has_rows(value)
        return zeros_of(value, {**values, "b": 0}, whole.device) if is_empty else whole


def merge_microbatches(
    value: Value,
    parts: Mapping[int, Tensor],
    sizes: Sequence[int],
    loss_weights: Sequence[float] | None,
    values: Sizes,
    is_sum: bool = False,
) -> Tensor:
    """Merge a result's ``parts`` of some microbatches, in their order.

    ``sizes`` and ``loss_weights`` are those of all microbatches. The latter are None if they are the
    fractions of the rows.
    """
    if value.name == "loss" and loss_weights is not None:
        return weighted_sum([*parts.values()], [loss_weights[microbatch] for microbatch in parts])
    own_sizes = [sizes[microbatch] for microbatch in parts]
    return merge(value, [*parts.values()], own_sizes, sum(sizes), values, is_sum)


def merge(
    value: Value,
    parts: Sequence[Tensor],
    sizes: Sequence[int],
    batch: int,
    values: Sizes,
    is_sum: bool = False,
) -> Tensor:
    """Join the parts of microbatches that hold ``sizes`` of the samples of a batch into a new tensor.

    Parts with a batch dimension are concatenated along it. Floating-point parts without one, such as mean
    losses, become the mean over samples: each is weighted with its fraction of the batch. Parts that
    ``is_sum`` says are terms become their sum. Any other value must be the same for every microbatch.

    Raises:
        InputError: the parts cannot stand for the whole batch.
    """
    if dims := _batch_dims(value):
        return _concatenate(value, parts, dims[0], {**values, "b": sum(sizes)})
    if is_sum:
        return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
    if parts[0].is_floating_point() or parts[0].is_complex():
        return weighted_sum(parts, [size / batch for size in sizes])
    return _the_same(value, parts).clone()


def merge_replicas(
    value: Value, made: Sequence[Tensor | None], sizes: Sequence[int], values: Sizes, is_sum: bool = False
) -> Tensor:
    """The result of the batch from the merged results of each replica.

    A replica whose microbatches have no rows made nothing. Of three microbatches, the first of two replicas
    has the rows of the first and the last::

        parts [a a c], [b b]    sizes [2, 2, 1]    ->    [a a b b c]
    """
    parts = [part for part in made if part is not None]
    count = len(parts)
    if count == 1:
        return parts[0]
    if dims := _batch_dims(value):
        along = [evaluate_dim(value.shape[dims[0]], {**values, "b": size}) for size in sizes]
        rows = [iter(part.split(along[k::count], dims[0])) for k, part in enumerate(parts)]
        return torch.cat([next(rows[microbatch % count]) for microbatch in range(len(sizes))], dims[0])
    if is_sum or parts[0].is_floating_point() or parts[0].is_complex():
        return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
    return _the_same(value, parts)


def result_values(plan: Plan) -> list[Value]:
    """The values that the stages of a plan return, each once."""
    return list(dict.fromkeys(v for link in plan.links if link.payload.is_result for v in link.values))


def _the_same(value: Value, parts: Sequence[Tensor]) -> Tensor:
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise InputError(
            f"the result {format_value(value)} differs between microbatches, and whole numbers have no "
            "mean; return it per sample, or as floating point, or use one microbatch"
        )
    return parts[0]


def merge_slices(
    plan: Plan, parts: Sequence[Mapping[str, Tensor]], batch_slices: Sequence[BatchSlice]
) -> dict[str, Tensor]:
    """The results of a batch from those of the slices that make it up."""
    values = result_values(plan)
    sizes, batch = [batch_slice.num_rows for batch_slice in batch_slices], batch_slices[0].batch
    sums = {*plan.summed_outputs, "loss"} if batch_slices[0].custom_loss_weights else plan.summed_outputs
    return {
        value.name: merge(
            value,
            [part[value.name] for part in parts],
            sizes,
            batch,
            batch_slices[0].values,
            value.name in sums,
        )
        for value in values
    }


def has_rows(value: Value) -> bool:
    """Whether a value has an element for each row of the batch."""
    return bool(_batch_dims(value))


def zeros_of(value: Value, sizes: Sizes, device: torch.device) -> Tensor:
    """Zeros in the shape that a value has with these sizes."""
    shape = [evaluate_dim(dim, sizes) for dim in value.shape]
    return torch.zeros(shape, dtype=getattr(torch, value.dtype), device=device)


def _batch_dims(value: Value) -> list[int]:
    return [index for index, dim in enumerate(value.shape) if "b" in names_in(dim)]


def _concatenate(value: Value, parts: Sequence[Tensor], dim: int, sizes: Sizes) -> Tensor:
    joined = torch.cat(list(parts), dim)
    expected = evaluate_dim(value.shape[dim], sizes)
    if joined.shape[dim] != expected:
        raise InputError(
            f"the result {format_value(value)} has size {joined.shape[dim]} in dimension {dim} when joined "
            f"from microbatches, but {expected} for the whole batch; return a value whose size is "
            "proportional to the batch, or use one microbatch"
        )
    return joined


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    terms = (part * weight for part, weight in zip(parts, weights, strict=True))
    return functools.reduce(torch.add, terms)
