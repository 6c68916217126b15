"""Refuses libraries that would wrap a pipeline, or a model whose tensors are on several processes."""

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn

from pipec.errors import InputError

_REPLICAS = "pipec.compile(model, devices=..., replicas=...) trains several replicas and sums their gradients"
_SHARDS = (
    'pipec.compile(model, devices=..., replicas=..., optimizer=..., shard="parameters") shards parameters, '
    "gradients and optimizer state over replicas"
)

WRAPPERS = {
    ("deepspeed", "initialize"): ("deepspeed.initialize", _SHARDS),
    ("accelerate.accelerator", "Accelerator.prepare_model"): (
        "Accelerator.prepare",
        "pipec places the stages and runs them on all ranks; prepare the DataLoader alone, or nothing",
    ),
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"): (
        "DistributedDataParallel",
        _REPLICAS,
    ),
    ("torch.distributed._composable.replicate", "replicate"): ("replicate", _REPLICAS),
    ("torch.distributed._composable.replicate_with_fsdp", "replicate"): ("replicate", _REPLICAS),
    ("torch.nn.parallel.data_parallel", "DataParallel.__init__"): ("DataParallel", _REPLICAS),
    ("torch.nn.parallel.replicate", "replicate"): ("DataParallel", _REPLICAS),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__"): (
        "FullyShardedDataParallel",
        _SHARDS,
    ),
    ("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard"): ("fully_shard", _SHARDS),
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): (
        "parallelize_module",
        "pipec divides a model into stages and replicas; apply it to neither",
    ),
    ("torch._dynamo.eval_frame", "OptimizedModule.__init__"): (
        "torch.compile",
        'pipec.compile(model, kernels="inductor") compiles the code of each stage',
    ),
}
"""By module and function: the name of a wrapper, and what to do instead."""


def refuse_wrappers() -> None:
    """Raise InputError if a wrapper looks at a pipeline or at a tensor of one."""
    calls = [(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname) for frame in _frames()]
    if found := [WRAPPERS[call] for call in calls if call in WRAPPERS]:
        name, instead = found[-1]
        raise InputError(
            f"{name} cannot wrap a pipeline, nor the model of one: its stages are on several ranks, and "
            f"pipe.step(...) runs forward, backward and all communication. Leave {name} out: {instead}"
        )


def calls_module() -> bool:
    """Whether the forward of a module runs."""
    return any(frame.f_code is nn.Module._call_impl.__code__ for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
