"""Inputs for running an artifact: random parameters and mini-batches."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipec.artifact.artifact import read_artifact
from pipec.cli.target import load_optimizer
from pipec.ir import Plan, Sizes, Value
from pipec.ir.text_format import evaluate_dim
from pipec.pipeline.load import check_sync_spec, pipeline_of
from pipec.pipeline.pipeline import Pipeline
from pipec.runtime.step.ranks import Ranks

PARAMETER_DEVIATION = 0.02
"""The standard deviation of random parameters: GPT-2's at initialization, small enough for most models."""

Leaves = list[Tensor | float | None]
"""The flattened arguments of ``step``, as ``stream_of_leaves`` takes them; None for those no stage reads."""


def load_with_random_tensors(
    directory: Path,
    seed: int,
    optimizer: str | None = None,
    clip_grad_norm: float | None = None,
    kernels: str = "source",
) -> tuple[Pipeline, int]:
    """A pipeline of the artifact, and the number of its tensors that were not saved and are random."""
    artifact, saved = read_artifact(directory)
    factory = load_optimizer(optimizer)
    check_sync_spec(artifact.plan.sync_spec, factory, clip_grad_norm)
    torch.manual_seed(seed)
    tensors = random_tensors(artifact.plan, {**saved, **artifact.constants})
    ranks = Ranks(artifact.plan.num_ranks, timeout=300.0, kernels=kernels)
    pipe = pipeline_of(artifact, tensors, ranks, factory, clip_grad_norm)
    return pipe, len(tensors) - len(saved) - len(artifact.constants)


def random_tensors(plan: Plan, saved_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plan's tensors: those in ``saved_tensors``, and random parameters and buffers of ones for the rest.

    Parameters are normal. Ones work both for a mask, which then hides nothing, and for a variance.
    """
    tensors = dict(saved_tensors)
    for value in plan.parameters:
        if value.name not in saved_tensors:
            tensors[value.name] = torch.randn(_shape(value, {})).mul(PARAMETER_DEVIATION).to(_dtype(value))
    for value in plan.buffers:
        if value.name not in saved_tensors:
            tensors[value.name] = torch.ones(_shape(value, {}), dtype=_dtype(value))
    return tensors


def random_batches(plan: Plan, int_high: int) -> Iterator[Leaves]:
    """Yield random mini-batches of the size for which the plan was made, without end."""
    while True:
        leaves = _empty(plan)
        for planned_input in plan.inputs:
            tensor = _random(planned_input.value, {"b": _batch_size(plan), **plan.planned_sizes}, int_high)
            leaves[planned_input.position] = _restore_axis(plan, planned_input.position, tensor)
        yield _repeated(plan, leaves)


def _repeated(plan: Plan, leaves: Leaves) -> Leaves:
    """The leaves, with one tensor wherever the calls that were compiled passed the same one again."""
    for position, first in plan.repeated or ():
        leaves[position] = leaves[first]
    return leaves


def _empty(plan: Plan) -> Leaves:
    """Leaves without the inputs: planned numbers, and zeros for arguments of which only sizes are read."""
    leaves: Leaves = [None] * len(plan.arguments)
    for position in {variable.position for variable in plan.variables}:
        axis = plan.batch_axes[position]
        own = {x.dim: plan.planned_sizes[x.name] for x in plan.variables if x.position == position}
        num_dims = 1 + max([axis.dim + axis.num_merged if axis else 0, *(dim or 0 for dim in own)])
        shape = [int(own.get(dim, 1)) for dim in range(num_dims)]
        if axis:
            shape[0] = _batch_size(plan)
        leaves[position] = own[None] if None in own else _restore_axis(plan, position, torch.zeros(shape))
    return leaves


def _restore_axis(plan: Plan, position: int, leaf: Tensor) -> Tensor:
    """Move the batch from the first dimension to the argument's batch axis."""
    axis = plan.batch_axes[position]
    return axis.restore(leaf).contiguous() if axis else leaf


def _batch_size(plan: Plan) -> int:
    return plan.microbatch_size * plan.num_microbatches


def _random(value: Value, sizes: Sizes, int_high: int) -> Tensor:
    shape, dtype = _shape(value, sizes), _dtype(value)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(2 if dtype is torch.bool else int_high, shape).to(dtype)


def _shape(value: Value, sizes: Sizes) -> list[int]:
    return [evaluate_dim(dim, sizes) for dim in value.shape]


def _dtype(value: Value) -> torch.dtype:
    dtype = getattr(torch, value.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
