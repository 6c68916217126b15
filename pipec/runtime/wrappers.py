"""Refuses what would take a pipeline, or a model whose tensors are on several processes, for a module."""

import gc
import sys
from collections.abc import Iterator
from types import FrameType

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
        "Leave it out: pipec has placed the stages on the devices of all ranks, and pipe.step(...) runs "
        "forward, backward and all communication",
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"): (
        "DistributedDataParallel",
        _REPLICAS,
    ),
    ("torch.distributed._composable.replicate", "replicate"): ("replicate", _REPLICAS),
    ("torch.distributed._composable.replicate_with_fsdp", "replicate"): ("replicate", _REPLICAS),
    ("torch.nn.parallel.replicate", "replicate"): ("DataParallel", _REPLICAS),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__"): (
        "FullyShardedDataParallel",
        _SHARDS,
    ),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard"): ("fully_shard", _SHARDS),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer.__init__"): (
        "ZeroRedundancyOptimizer",
        _SHARDS,
    ),
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): (
        "parallelize_module",
        "Leave it out: pipec divides a model into stages and replicas alone",
    ),
    ("torch.distributed.tensor._api", "distribute_module"): (
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
    ("torch._dynamo.eval_frame", "OptimizedModule.__init__"): (
        "torch.compile",
        'Leave it out: pipec.compile(..., kernels="inductor") compiles the code of each stage',
    ),
    ("torch.nn.utils.stateless", "_functional_call"): (
        "functional_call",
        "Call the model itself with other parameters before it is compiled, or write them into the pipeline "
        "by pipe.load_state_dict(...)",
    ),
    ("torch.optim.swa_utils", "update_bn"): (
        "update_bn",
        "It looks for modules of batch norms, and would find none: every rank calls pipe.gather_into(model), "
        "then rank 0 update_bn(loader, model), and every rank loads its state by pipe.load_state_dict(...)",
    ),
}
"""By module and function: the name that users know, and what to do instead."""


def refuse_wrappers() -> None:
    """Raise InputError if one of these functions looks at a pipeline or at a tensor of one."""
    calls = [(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname) for frame in _frames()]
    if found := [REFUSED[call] for call in calls if call in REFUSED]:
        name, instead = found[-1]
        raise InputError(
            f"{name} cannot take a pipeline, nor the model of one: it is no module of layers that this "
            f"process holds. {instead}"
        )


def refuse_scheduler_of_accelerate(optimizer: Optimizer) -> None:
    """Raise InputError if accelerate has prepared a learning rate scheduler of this optimizer.

    Only the garbage collector knows who refers to an optimizer.
    """
    kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    for each in gc.get_objects() if kind is not None else ():
        if type(each) is not kind or each.split_batches or not each.step_with_optimizer:
            continue
        if any(getattr(own, "optimizer", own) is optimizer for own in each.optimizers):
            raise InputError(
                "a scheduler of Accelerator.prepare steps the learning rate once for each process, but the "
                "processes of a pipeline make one step together. Leave the scheduler out of prepare(...)"
            )


def calls_module() -> bool:
    """Whether the forward of a module runs."""
    return any(frame.f_code is nn.Module._call_impl.__code__ for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
