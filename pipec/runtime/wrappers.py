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


def refuse_dcp(is_spread: bool) -> None:
    """Raise InputError if ``torch.distributed.checkpoint`` asks for a state to take apart.

    Its ``save`` and ``load`` may, unless the state ``is_spread`` over ranks.
    """
    for asking in calling_modules():
        if asking == _DCP or (is_spread and asking in (f"{_DCP}_saver", f"{_DCP}_loader")):
            raise InputError(
                f"{asking} cannot take a pipeline. Save pipe.state_dict(), which is the whole model's on "
                "rank 0, by dcp.save or torch.save, and load it by pipe.load_state_dict(...) on every rank; "
                "or call pipe.save_checkpoint(..., optimizer=...), which `pipec checkpoint convert` writes "
                "in that format"
            )


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
    is_alone = accelerator.num_processes == 1 and accelerator.process_index == 0
    casts, compiles = accelerator.mixed_precision, accelerator.state.dynamo_plugin.backend
    if not is_alone or (casts, compiles) != ("no", "NO"):
        raise InputError(
            "this Accelerator would divide rows among processes, cast to another precision or compile the "
            "model, which the pipeline does itself. Use PipecAccelerator of pipec.integrations.accelerate, "
            "or PipecTrainer of pipec.integrations.transformers; pipec.compile takes precision=... and "
            'kernels="inductor"'
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
