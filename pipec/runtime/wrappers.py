"""Refuses what would take a pipeline, or a model whose tensors are on several processes, for a module."""

import functools
import gc
import sys
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

from pipec.errors import InputError
from pipec.runtime.absent_tensors import is_absent
from pipec.torch_compat.run_time import ConvertedModule

_WRAPPERS = {
    "DistributedDataParallel": "Leave it out: pipe.step(...) runs forward, backward and all communication, "
    "and pipec.compile(..., replicas=...) trains replicas and sums their gradients. Loops that call "
    "backward() take pipe.as_module(), also from Accelerator.prepare; a Trainer of Lightning leaves the "
    "processes to torchrun with devices=1",
    "FullyShardedDataParallel": "Leave it out: pipec.compile(..., replicas=..., optimizer=..., "
    'shard="parameters") shards parameters, gradients and optimizer state over replicas',
    "OptimizedModule": 'Leave it out: pipec.compile(..., kernels="inductor") compiles the code of each stage',
}
"""By the class of a module that wraps another one: what to do instead."""


@functools.cache
def refuse_wrappers() -> None:
    """From now on refuse modules around a pipeline, or a model of which other processes hold a part."""
    register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    advice = _WRAPPERS.get(type(module).__name__)
    if advice is None or wrapped is None:
        return
    if isinstance(wrapped, ConvertedModule) or any(map(is_absent, wrapped.parameters())):
        raise InputError(
            f"{type(module).__name__} cannot take a pipeline, nor the model of one: it is no module of "
            f"layers that this process holds. {advice}"
        )


def calling_modules() -> list[str]:
    """The names of the modules whose functions run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = list[str]()
    while frame is not None:
        found.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return found


def refuse_or_find_dcp() -> bool:
    """Whether ``save`` or ``load`` of ``torch.distributed.checkpoint`` asks for a state.

    Raises InputError if one of its functions does that take states of sharded models apart.
    """
    for asking in calling_modules():
        if asking == _DCP:
            raise InputError(
                f"{_DCP} cannot take a pipeline. Save pipe.state_dict(), which is the whole "
                "model's on rank 0, by dcp.save or torch.save, and load the whole by "
                "pipe.load_state_dict(...) on every rank; or call pipe.save_checkpoint(..., optimizer=...)"
            )
        if asking in (f"{_DCP}_saver", f"{_DCP}_loader"):
            return True
    return False


def refuse_functional_call() -> None:
    """Raise InputError if ``functional_call`` has given a model other tensors for a while."""
    if "torch._functorch.functional_call" in calling_modules():
        raise InputError(
            "functional_call cannot take a pipeline: it gives the model other parameters for one call, which "
            "would be trained and divided among ranks. Call the model itself with them before it is "
            "compiled, or write them into the pipeline by pipe.load_state_dict(...)"
        )


_DCP = "torch.distributed.checkpoint.state_dict"


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
