"""Merges the results of the microbatches of a step into the results of the whole batch.

A replica makes a part of a result of its own microbatches. The parts of all replicas then make the whole.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipec.errors import InputError, VerifyError
from pipec.ir import Payload, Plan, Sizes, Value, result_ranks
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


class StepResults:
    """The results of a mini-batch on one rank: the parts of microbatches, and what is merged of them.

    A rank collects what its forwards make. In a step it receives the merged parts of other replicas; in a
    stream the parts of each microbatch.

    Raises:
        VerifyError: a result cannot be joined from microbatches.
    """

    losses: Mapping[int, Tensor]
    """Those of the microbatches of this rank."""
    batch_slice: BatchSlice
    """What the microbatches are of the batch."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._values = {value.name: value for value in result_values(plan)}
        self._of_tail = {name for stage in plan.stages if stage.tail for name in stage.tail.results}
        for name, value in self._values.items() if plan.num_microbatches > 1 else ():
            if name not in self._of_tail:
                check_mergeable(value)
        self.forget()

    def forget(self) -> None:
        self.parts: dict[str, dict[int, Tensor]] = {name: {} for name in self._values}
        self._merged: dict[str, Tensor] = {}
        self._received: dict[tuple[str, int], Tensor] = {}
        self.losses = self.parts.get("loss", {})

    def collect(self, microbatch: int, sent: dict[str, Tensor]) -> None:
        """Keep these results of the forward of ``microbatch``, and no other memory."""
        for name, parts in self.parts.items():
            if name in sent:
                parts[microbatch] = sent[name] = compact(sent[name])

    def set_whole(self, results: Mapping[str, Tensor], microbatch: int) -> None:
        """Keep results of the whole batch. What is found in the loss counts as found in ``microbatch``."""
        for name, tensor in results.items():
            self._merged[name] = compact(tensor)
            if name == "loss":
                self.parts[name][microbatch] = tensor

    def receive(self, names: Sequence[str], peer: int, tensors: Sequence[Tensor]) -> None:
        """Keep what another replica has made."""
        self._received.update(((name, peer), tensor) for name, tensor in zip(names, tensors, strict=True))

    def merged(self, name: str) -> Tensor:
        """The part of a result that the collected microbatches make; see ``merge``."""
        if name not in self._merged:
            parts, own = self.parts[name], self.batch_slice
            self.parts[name] = {}
            order = sorted(parts)
            sizes, weights = [own.sizes[each] for each in order], None
            if name == "loss" and own.custom_loss_weights is not None:
                weights = [own.custom_loss_weights[each] for each in order]
            elif name not in self._plan.summed_outputs:
                weights = [size / own.num_rows for size in sizes]
            joined = own.joined_names(sum(sizes))
            self._merged[name] = merge(self._values[name], [parts[k] for k in order], weights, joined)
        return self._merged[name]

    @property
    def is_local(self) -> bool:
        """Whether each replica was given its own rows, which stay in its pipeline."""
        return self.batch_slice.is_local

    def is_of_tail(self, names: Sequence[str]) -> bool:
        """Whether a tail makes these results of the whole batch."""
        return self._of_tail.issuperset(names)

    def sent(self, name: str, to_other_pipeline: bool) -> Tensor:
        """The part of a result that another rank receives."""
        whole, value = self.merged(name), self._values[name]
        stays = to_other_pipeline and self.is_local and has_rows(value)
        return zeros_of(value, self.batch_slice.joined_names(0), whole.device) if stays else whole

    def of_batch(self, device: torch.device) -> dict[str, Tensor]:
        """The results of the batch that this rank gets, merged from those of all replicas.

        If replicas pass their own parts of the batch, a result with rows has this replica's rows.
        """
        found, own = dict[str, Tensor](), self.batch_slice
        placement, links = self._plan.placement, self._plan.links
        results = (link for link in links if link.payload is Payload.RESULT)
        for made in (link for link in results if self._rank in result_ranks(link, placement)):
            ranks = placement[made.source]
            for value in made.values:
                if len(ranks) == 1 or value.name in self._of_tail:
                    found[value.name] = self._made_by(ranks[0], value.name)
                    continue
                mine = ranks[own.replica : own.replica + 1] if own.is_local and has_rows(value) else ranks
                parts = [
                    self._made_by(rank, value.name)
                    for rank in mine
                    if any(own.sizes[each] for each in self._plan.microbatches_on(made.source, rank))
                ]
                if parts:
                    is_sum = value.name in self._plan.summed_outputs
                    found[value.name] = merge_replicas(value, parts, own, is_sum)
                else:
                    found[value.name] = zeros_of(value, own.joined_names(0), device)
        return found

    def _made_by(self, rank: int, name: str) -> Tensor:
        return self.merged(name) if rank == self._rank else self._received[name, rank]


def merge(value: Value, parts: Sequence[Tensor], weights: Sequence[float] | None, sizes: Sizes) -> Tensor:
    """Join the parts that microbatches make of a value, which has these ``sizes``, into a new tensor.

    Parts with a batch dimension are concatenated along it. Floating-point parts without one, such as mean
    losses, are added up with their ``weights``. Parts without weights are terms of a sum. Any other value
    must be the same for every microbatch.

    Raises:
        InputError: the parts cannot stand for the whole batch.
    """
    if dims := _batch_dims(value):
        return _concatenate(value, parts, dims[0], sizes)
    if weights is None:
        return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
    if parts[0].is_floating_point() or parts[0].is_complex():
        terms = (part * weight for part, weight in zip(parts, weights, strict=True))
        return functools.reduce(torch.add, terms)
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise InputError(
            f"the result {format_value(value)} differs between microbatches, and whole numbers have no "
            "mean; return it per sample, or as floating point, or use one microbatch"
        )
    return parts[0].clone()


def gradient_parts(
    value: Value, gradient: Tensor | None, own: BatchSlice, is_sum: bool, device: torch.device
) -> dict[int, Tensor]:
    """By microbatch with rows, the gradient of its part of a result, of that of the batch's; see ``merge``.

    None stands for zeros.
    """
    found, first, dims = dict[int, Tensor](), own.start, _batch_dims(value)
    for number, (size, names) in enumerate(zip(own.sizes, own.names, strict=True)):
        whole = gradient
        if not size:
            continue
        if whole is None:
            found[number] = zeros_of(value, names, device)
        elif dims:
            along, per_row = evaluate_dim(value.shape[dims[0]], names), whole.shape[dims[0]] // own.batch
            found[number] = whole.narrow(dims[0], first * per_row, along).contiguous()
        else:
            found[number] = whole if is_sum else whole * (size / own.batch)
        first += size
    return found


def merge_replicas(value: Value, parts: Sequence[Tensor], own: BatchSlice, is_sum: bool) -> Tensor:
    """The result of the batch from the merged results of the replicas that have rows.

    A replica whose microbatches have no rows made nothing. Of three microbatches, the first of two replicas
    has the rows of the first and the last::

        parts [a a c], [b b]    sizes [2, 2, 1]    ->    [a a b b c]
    """
    count = len(parts)
    if count == 1:
        return parts[0]
    if dims := _batch_dims(value):
        along = [evaluate_dim(value.shape[dims[0]], names) for names in own.names]
        rows = [iter(part.split(along[k::count], dims[0])) for k, part in enumerate(parts)]
        return torch.cat([next(rows[microbatch % count]) for microbatch in range(len(own.sizes))], dims[0])
    is_term = is_sum or parts[0].is_floating_point() or parts[0].is_complex()
    return merge(value, parts, None if is_term else (), own.joined_names(0))


def result_values(plan: Plan) -> list[Value]:
    """The values that the stages of a plan return, each once."""
    return list(dict.fromkeys(v for link in plan.links if link.payload.is_result for v in link.values))


def merge_slices(
    plan: Plan, parts: Sequence[Mapping[str, Tensor]], batch_slices: Sequence[BatchSlice]
) -> dict[str, Tensor]:
    """The results of a batch from those of the slices that make it up."""
    first, sizes = batch_slices[0], [batch_slice.num_rows for batch_slice in batch_slices]
    sums = {*plan.summed_outputs, "loss"} if first.custom_loss_weights else plan.summed_outputs
    weights, joined = [size / first.batch for size in sizes], first.joined_names(sum(sizes))
    return {
        value.name: merge(
            value, [part[value.name] for part in parts], None if value.name in sums else weights, joined
        )
        for value in result_values(plan)
    }


def has_rows(value: Value) -> bool:
    """Whether a value has an element for each row of the batch."""
    return bool(_batch_dims(value))


def zeros_of(value: Value, sizes: Sizes, device: torch.device) -> Tensor:
    """Zeros in the shape that a value has with these sizes."""
    shape = [evaluate_dim(dim, sizes) for dim in value.shape]
    return torch.zeros(shape, dtype=getattr(torch, value.dtype), device=device)


@functools.lru_cache
def _batch_dims(value: Value) -> Sequence[int]:
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
