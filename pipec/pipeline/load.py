"""Reads a saved artifact as a pipeline, without a model and without the compiler."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from pipec.artifact.artifact import MODE_FOLDERS, Artifact, read_artifact
from pipec.errors import InputError
from pipec.ir import Mode, SyncSpec, Value
from pipec.ir.argument_checks import (
    DEVICES,
    KERNELS,
    MICROBATCH_WEIGHT,
    NONE,
    OPTIMIZER,
    SECONDS,
    check_arguments,
    instance,
    number,
)
from pipec.options import OPTIONS
from pipec.pipeline.pipeline import Pipeline
from pipec.runtime.absent_tensors import materialized, release_elsewhere
from pipec.runtime.executions import Executions
from pipec.runtime.model_tensors import ModelTensors
from pipec.runtime.optimizers import Factory
from pipec.runtime.processes.judge import format_ranks
from pipec.runtime.processes.launch import Devices, world
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.microbatch_weight import CUSTOM_WEIGHT, MicrobatchWeight
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.tensors import owner_ranks, tensor_devices
from pipec.saved_folders import find_folder


def load(
    directory: str | Path,
    devices: Devices | None = None,
    timeout: float = 300.0,
    *,
    optimizer: Factory | None = None,
    clip_grad_norm: float | None = None,
    microbatch_weight: MicrobatchWeight | None = None,
    kernels: str = "source",
    group: ProcessGroup | DeviceMesh | None = None,
) -> Pipeline:
    """Read what ``Pipeline.save`` wrote.

    ``devices`` says how many devices to use, or which; None is one for each rank of the plan. Tensors that
    were not saved are on the meta device until ``to_empty`` and ``load_state_dict`` give them values. An
    artifact holds no function: if ``compile`` was given an ``optimizer``, or a function as
    ``microbatch_weight``, pass it again, or another one. The same holds for ``clip_grad_norm``.
    ``kernels`` and ``group`` are what ``compile`` takes.

    Raises:
        ArtifactError, VerifyError: the directory does not hold an intact artifact of this format, or its
            programs are not one correct step.
        InputError: the devices do not match the ranks of the plan, or the optimizer or the norm is missing
            or not asked for.
    """
    check_arguments(LOAD, locals())
    place = find_folder(Path(directory))
    artifact, tensors = read_artifact(place)
    evaluations = {
        mode: read_artifact(place / folder)[0]
        for mode, folder in MODE_FOLDERS.items()
        if (place / folder).exists()
    }
    num_ranks = artifact.plan.num_ranks
    here = world(group)
    ranks = Ranks(devices if devices is not None else num_ranks, timeout, kernels, here)
    if ranks.count != num_ranks:
        raise InputError(
            f"the artifact in {directory} is for {num_ranks} ranks, but devices asks for {ranks.count}; "
            f"pass devices={num_ranks}, or compile and save it for {ranks.count}"
        )
    if here.replicas is not None and any(len(each) != here.replicas for each in artifact.plan.placement):
        raise InputError(
            f"the mesh has {here.replicas} replicas, but the artifact in {directory} has its stages on the "
            f"ranks {artifact.plan.placement}; pass a mesh of one axis, or compile and save it on this mesh"
        )
    check_sync_spec(artifact.plan.sync_spec, optimizer, clip_grad_norm)
    return pipeline_of(artifact, tensors, ranks, optimizer, clip_grad_norm, microbatch_weight, evaluations)


LOAD = {
    "directory": instance("the path of a folder", str, Path),
    "devices": DEVICES | NONE,
    "timeout": SECONDS,
    "optimizer": OPTIMIZER | NONE,
    "clip_grad_norm": number(0, math.inf) | NONE,
    "microbatch_weight": MICROBATCH_WEIGHT | NONE,
    "kernels": KERNELS,
    "group": OPTIONS["group"].rule,
}
"""What each argument of ``load`` must be."""


def pipeline_of(
    artifact: Artifact,
    tensors: dict[str, Tensor],
    ranks: Ranks,
    optimizer: Factory | None = None,
    max_norm: float | None = None,
    microbatch_weight: MicrobatchWeight | None = None,
    evaluations: Mapping[Mode, Artifact] = MappingProxyType({}),
) -> Pipeline:
    """A pipeline that runs the artifact, and those of evaluations, with these tensors."""
    plan, artifacts = artifact.plan, {artifact.plan.mode: artifact, **evaluations}
    names = _tensors_of(artifact, tensors, ranks)
    loss_scale, updates = LossScale() if plan.sync_spec.has_loss_scale else None, None
    if optimizer is not None:
        with materialized(names.unique().values()):
            updates = OptimizerUpdates(optimizer, max_norm, names.unique_parameters(), loss_scale)
    if (plan.microbatch_weight == CUSTOM_WEIGHT) != callable(microbatch_weight):
        raise InputError(
            "the artifact was compiled with a function as microbatch_weight; pass that to load"
            if microbatch_weight is None
            else "the artifact was compiled without a function as microbatch_weight, and takes none; "
            "leave it out"
        )
    executions = functools.partial(Executions, given=artifacts, microbatch_weight=microbatch_weight)
    return Pipeline(names, ranks, updates, executions)


def _tensors_of(artifact: Artifact, saved: Mapping[str, Tensor], ranks: Ranks) -> ModelTensors:
    """The tensors of the plan, on their devices. Those that were not saved are on meta, or absent."""
    plan = artifact.plan
    owners, home_of = owner_ranks(plan), tensor_devices(plan, ranks.devices)
    made = {
        value.name: _make(value, saved.get(value.name), home_of[value.name])
        for value in plan.parameters + plan.buffers
        if value.name not in artifact.constants
    }
    parameters = {
        v.name: nn.Parameter(made[v.name], made[v.name].is_floating_point()) for v in plan.parameters
    }
    buffers = {v.name: made[v.name] for v in plan.buffers if v.name in made}
    ties = {name: first for name, first in artifact.ties.items() if first in made}
    parameters |= {name: parameters[first] for name, first in ties.items() if first in parameters}
    buffers |= {name: buffers[first] for name, first in ties.items() if first in buffers}
    persistent = frozenset(buffers.keys() - {*artifact.unsaved})
    tensors = ModelTensors(parameters, buffers, persistent, {fqn: fqn for fqn in made} | ties)
    for fqn, tensor in tensors.unique().items():
        if home_of[fqn] is None:
            release_elsewhere(fqn, tensor, f"on {format_ranks(owners[fqn])}")
    return tensors


def check_sync_spec(sync_spec: SyncSpec, optimizer: Factory | None, max_norm: float | None) -> None:
    """Raise InputError unless the given options are those that the artifact's programs need."""
    if callable(optimizer) != sync_spec.updates:
        does = "update the weights" if sync_spec.updates else "end with gradients"
        raise InputError(
            f"the artifact's programs {does}, but optimizer is {optimizer!r}; pass a function of (name, "
            "parameter) pairs, such as functools.partial(torch.optim.AdamW, lr=1e-3), or --optimizer AdamW "
            "on the command line, to an artifact that was compiled with an optimizer, and to no other"
        )
    if (max_norm is not None and max_norm > 0) != sync_spec.clips:
        does = "clip gradients" if sync_spec.clips else "do not clip"
        raise InputError(
            f"the artifact's programs {does}, but clip_grad_norm is {max_norm!r}; pass a number above 0, "
            "which may be another than it was compiled with, to an artifact that clips, and to no other"
        )


def _make(value: Value, saved: Tensor | None, device: torch.device | None) -> Tensor:
    if saved is not None and device is not None:
        return saved.to(device)
    return torch.empty([int(d) for d in value.shape], dtype=getattr(torch, value.dtype), device="meta")
