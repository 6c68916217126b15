"""Training loops of other libraries, each in a module of its own: `import pipec` imports none of them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

import pipec
from pipec.errors import InputError
from pipec.pipeline.pipeline_module import PipelineModule


def refuse_optimizer(options: Mapping[str, Any]) -> None:
    """Raise InputError for options by which programs would make the updates that a loop makes."""
    if "optimizer" in options:
        raise InputError(
            "optimizer=... makes updates in the programs, and the loop's own optimizer would make them "
            "again; leave it out"
        )


def module_of(model: nn.Module, options: Mapping[str, Any]) -> PipelineModule:
    """``as_module`` of a pipeline: of ``model`` with these options, unless it is a pipeline already."""
    if isinstance(model, PipelineModule):
        return model
    pipe = model if isinstance(model, pipec.Pipeline) else pipec.compile(model, **options)
    if pipe.num_replicas > 1:
        raise InputError(
            'batch="local" leaves it to the loop which rows each rank reads, but here every rank reads all '
            "rows of a batch, and pipec divides them among replicas; leave it out"
        )
    return pipe.as_module()


def replicas_of(parallelism_config: Any) -> int:
    """The replicas of a ``ParallelismConfig`` of Accelerate. Raises InputError if it has another axis."""
    sizes = {name: getattr(parallelism_config, f"{name}_size") for name in ("dp_shard", "tp", "cp", "sp")}
    if others := [f"{name}_size={size}" for name, size in sizes.items() if size > 1]:
        raise InputError(
            f"parallelism_config has {', '.join(others)}, but stages divide the model; leave out all but "
            "dp_replicate_size, the replicas, and pass shard='parameters' for what dp_shard_size does, or "
            "group=mesh['pp'] to run beside other axes of a mesh"
        )
    return int(parallelism_config.dp_replicate_size)


def process_groups(group: ProcessGroup | DeviceMesh | None) -> list[ProcessGroup | None]:
    """The process groups along the axes of a mesh, or the group itself; none if nothing is initialised.

    What is done in all of them, one after the other, is done with all members.
    """
    if not dist.is_initialized():
        return []
    return [*group.get_all_groups()] if isinstance(group, DeviceMesh) else [group]


def wait_for_members(group: ProcessGroup | DeviceMesh | None) -> None:
    """Wait for all processes of the group of ``pipec.compile``."""
    for each in process_groups(group):
        dist.barrier(each)


def clip_grad_norm(
    models: Iterable[nn.Module], parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, over all stages if one of the models trains these parameters.

    Every rank calls it then, also one whose stages train nothing.
    """
    given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    trained = {id(each) for each in given if each.requires_grad}
    for model in models:
        is_trained = trained == {id(each) for each in model.parameters() if each.requires_grad}
        if is_trained and isinstance(model, PipelineModule):
            return model.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
