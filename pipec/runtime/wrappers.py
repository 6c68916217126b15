"""Refuses what would take a pipeline, or a model whose tensors are on several processes, for a module."""

import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pipec.errors import InputError

_REPLICAS = (
    "Leave it out: pipe.step(...) runs forward, backward and all communication, and "
    "pipec.compile(..., replicas=...) trains replicas and sums their gradients"
)
_SHARDS = (
    "Leave it out: pipe.step(...) runs forward, backward and all communication, and "
    'pipec.compile(..., replicas=..., optimizer=..., shard="parameters") shards parameters, gradients and '
    "optimizer state over replicas"
)
_STATE = (
    "Save pipe.state_dict(), which is the whole model's on rank 0, by dcp.save or torch.save, and load the "
    "whole by pipe.load_state_dict(...) on every rank; or call pipe.save_checkpoint(..., optimizer=...)"
)
_DCP = "torch.distributed.checkpoint.state_dict"

REFUSED = {
    ("deepspeed", "initialize"): ("deepspeed.initialize", _SHARDS),
    ("accelerate.accelerator", "Accelerator.prepare_model"): (
        "Accelerator.prepare",
        "Pass module = pipe.as_module(), to a Trainer as its model, too: its loss has the backward that "
        "their loops call. Where pipe.step(...) runs, which does forward, backward and all communication, "
        "leave it out",
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"): (
        "DistributedDataParallel",
        _REPLICAS,
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.forward"): (
        "DistributedDataParallel",
        _REPLICAS,
    ),
    ("torch.distributed", "replicate"): ("replicate", _REPLICAS),
    ("torch.nn.parallel.replicate", "replicate"): ("DataParallel", _REPLICAS),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__"): (
        "FullyShardedDataParallel",
        _SHARDS,
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.forward"): (
        "FullyShardedDataParallel",
        _SHARDS,
    ),
    ("torch.distributed.fsdp", "fully_shard"): ("fully_shard", _SHARDS),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer.__init__"): (
        "ZeroRedundancyOptimizer",
        _SHARDS,
    ),
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): (
        "parallelize_module",
        "Leave it out: pipec divides a model into stages and replicas alone",
    ),
    ("torch.distributed.tensor", "distribute_module"): (
        "distribute_module",
        "Leave it out: pipec divides a model into stages and replicas alone",
    ),
    ("torch.amp.grad_scaler", "GradScaler.step"): (
        "GradScaler",
        'Leave it out: pipec.compile(..., precision="fp16-mixed") scales the loss, and all ranks skip a step',
    ),
    (_DCP, "get_model_state_dict"): ("get_model_state_dict", _STATE),
    (_DCP, "set_model_state_dict"): ("set_model_state_dict", _STATE),
    (_DCP, "get_optimizer_state_dict"): ("get_optimizer_state_dict", _STATE),
    (_DCP, "set_optimizer_state_dict"): ("set_optimizer_state_dict", _STATE),
    (_DCP, "get_state_dict"): ("get_state_dict", _STATE),
    (_DCP, "set_state_dict"): ("set_state_dict", _STATE),
    ("torch", "compile"): (
        "torch.compile",
        'Leave it out: pipec.compile(..., kernels="inductor") compiles the code of each stage',
    ),
    ("torch", "functional_call"): (
        "functional_call",
        "Call the model itself with other parameters before it is compiled, or write them into the pipeline "
        "by pipe.load_state_dict(...)",
    ),
    ("torch.optim.swa_utils", "update_bn"): (
        "update_bn",
        "It needs the whole model in this process: every rank calls pipe.gather_into(model), "
        "then rank 0 update_bn(loader, model), and every rank loads its state by pipe.load_state_dict(...)",
    ),
}
"""By module and function: the name that users know, and what to do instead.

A function of a module inside of the named one counts, too: torch defines many in a private file.
"""

_FUNCTIONS = frozenset(function for _, function in REFUSED)


def refuse_wrappers() -> None:
    """Raise InputError if one of these functions looks at a pipeline or at a tensor of one."""
    calls = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
        for frame in _frames()
        if frame.f_code.co_qualname in _FUNCTIONS
        and not isinstance(frame.f_locals.get("model"), AcceleratedModule)
        and not _is_disabled_scaler(frame.f_locals.get("self"))
    ]
    if found := [each for call in calls for each in _refused(*call)]:
        name, instead = found[-1]
        if name == "DistributedDataParallel":
            instead += lightning_advice()
        raise InputError(
            f"{name} cannot take a pipeline, nor the model of one: it is no module of layers that this "
            f"process holds. {instead}"
        )


def _is_disabled_scaler(owner: object) -> bool:
    """Whether this is a ``GradScaler`` that scales nothing, as scripts have it that train in float32, too."""
    return isinstance(owner, torch.amp.GradScaler) and not owner.is_enabled()


def _refused(module: str, function: str) -> Iterator[tuple[str, str]]:
    """What is refused by the name of this function, if it is in the module of that name, or inside of it."""
    for (owner, name), advice in REFUSED.items():
        if name == function and f"{module}.".startswith(f"{owner}."):
            yield advice


class AcceleratedModule(nn.Module):
    """A module that ``Accelerator.prepare`` returns as it is, since it is on its devices already.

    Raises InputError where the accelerator was made to do more than that.
    """

    @property
    def _is_accelerate_prepared(self) -> bool:
        _require_lone_accelerator(sys._getframe(1).f_locals.get("self"))
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Accelerate notes what it has prepared."""


def _require_lone_accelerator(accelerator: Any) -> None:
    """Raise InputError if this Accelerator divides data among processes, casts or compiles."""
    if accelerator.num_processes > 1 or accelerator.process_index > 0:
        raise InputError(
            "Accelerate would give each process rows of its own, gather the results of all, and save on one "
            "alone; but the ranks of a pipeline work on the same rows, and save together. Let each process "
            "be alone for it, before an Accelerator or TrainingArguments is made: "
            "state = accelerate.PartialState(); state.num_processes, state.process_index = 1, 0; "
            "state.distributed_type = accelerate.DistributedType.NO. For a Trainer of transformers there "
            "is PipecTrainer in pipec.integrations.transformers"
        )
    if accelerator.mixed_precision != "no":
        raise InputError(
            f"Accelerate would cast what the model computes to {accelerator.mixed_precision}, but pipec has "
            "compiled the stages already. Leave mixed_precision, bf16 and fp16 out there, and pass "
            f'precision="{accelerator.mixed_precision}-mixed" to pipec.compile'
        )
    if accelerator.state.dynamo_plugin.backend != "NO":
        raise InputError(
            "Accelerate would compile the model by torch.compile, but pipec has compiled the stages already. "
            'Leave torch_compile and the dynamo backend out there, and pass kernels="inductor" to '
            "pipec.compile"
        )


def refuse_scheduler_of_accelerate(optimizer: Optimizer) -> None:
    """Raise InputError if accelerate has prepared a learning rate scheduler of this optimizer.

    Only the garbage collector knows who refers to an optimizer.
    """
    kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    if (
        kind is None
        or sys.modules["accelerate.state"].PartialState._shared_state.get("num_processes", 1) == 1
    ):
        return
    for each in gc.get_objects():
        if type(each) is not kind or each.split_batches or not each.step_with_optimizer:
            continue
        if any(getattr(own, "optimizer", own) is optimizer for own in each.optimizers):
            raise InputError(
                "a scheduler of Accelerator.prepare steps the learning rate once for each process, but the "
                "processes of a pipeline make one step together. Leave the scheduler out of prepare(...)"
            )


def lightning_advice() -> str:
    """How a Trainer of Lightning leaves the processes to a pipeline, if the script has imported Lightning."""
    if {"lightning.pytorch", "pytorch_lightning"}.isdisjoint(sys.modules):
        return ""
    return ". A Trainer of Lightning leaves it out with devices=1, in each process that torchrun starts"


def is_called_by_dcp() -> bool:
    """Whether ``save`` or ``load`` of ``torch.distributed.checkpoint`` asks for a state."""
    return any(frame.f_globals.get("__name__", "") in _DCP_CALLERS for frame in _frames())


_DCP_CALLERS = {f"torch.distributed.checkpoint.state_dict_{name}" for name in ("saver", "loader")}


def calls_module() -> bool:
    """Whether the forward of a module runs."""
    return any(frame.f_code is nn.Module.__call__.__code__ for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
