"""Saves and loads checkpoints of a pipeline: what of its state is in this process."""

import contextlib
import copy
import functools
import logging
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from pipec.checkpoint import (
    TensorShard,
    TrainingState,
    begin_checkpoint,
    load,
    load_weights,
    replica_position,
    save_pretrained,
    tensor_spec,
    unsharded,
)
from pipec.console import logger, notice
from pipec.errors import InputError
from pipec.runtime.absent_tensors import is_absent
from pipec.runtime.executions import Executions
from pipec.runtime.messages.call_description import format_names
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.stream_training import StreamTraining


class Checkpoints:
    """Writes and reads checkpoints of a pipeline, in any layout.

    It overwrites only checkpoints that this run has written or loaded: it knows their digests, by path.
    """

    def __init__(self, module: nn.Module, executions: Executions, stream: StreamTraining) -> None:
        self._module = cast(nn.Module, weakref.proxy(module))  # it owns this object
        self._executions, self._stream = executions, stream
        self._tensors, self._agreement = executions.tensors, executions.agreement
        self._steps = executions.steps
        self._own: dict[Path, str] = {}
        self._saving: AsyncSave | None = None

    @property
    def _model(self) -> nn.Module:
        """The model, or for a loaded artifact the module of its tensors."""
        return self._executions.model or self._module

    def save(
        self,
        directory: str | Path,
        training_state: Mapping[str, Any],
        asynchronous: bool,
        then: Callable[[], object] | None,
    ) -> Future[None]:
        """As ``Pipeline.save_checkpoint``."""
        path = self._agreed_path("save_checkpoint", directory, asynchronous)
        training = self._training(training_state["optimizer"], training_state["scheduler"], only_owned=True)
        updates = self._steps.updates
        if updates is not None and updates.has_gradients(self._tensors.names.unique_parameters()):
            raise InputError(
                "gradients have been accumulated that no update has used, and a checkpoint keeps none; save "
                "after a step outside of accumulate()"
            )
        if lost := _with_extra_state(self._model):
            notice(
                "the checkpoint is without the extra state (get_extra_state) of "
                f"{format_names(lost)}; pass it as extra=..., and set it after load_checkpoint"
            )
        write = begin_checkpoint(path, training, training_state["extra"], self._own, asynchronous, then)
        if asynchronous:
            self._saving = AsyncSave(write)
            return self._saving
        write()
        over = Future[None]()
        over.set_result(None)
        return over

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background. Raises what went wrong with it."""
        if self._saving is not None and self._saving.is_unobserved:
            self._saving.result()

    def load(self, directory: str | Path, optimizer: Any, scheduler: Any, model_only: bool) -> Any:
        """As ``Pipeline.load_checkpoint``."""
        path = self._agreed_path("load_checkpoint", directory)
        training = self._training(optimizer, scheduler, only_owned=False)
        if model_only:
            if optimizer is not None or scheduler is not None:
                raise InputError("model_only=True takes neither an optimizer nor a scheduler")
            load_weights(path, training)
            return None
        metadata, self._own[path] = load(path, training)
        self._steps.num_steps = metadata.num_steps
        position = None
        if positions := metadata.stream_positions():
            part = self._executions.replica, self._executions.num_replicas
            position = functools.partial(replica_position, positions, *part)
        self._stream.restore(position)
        for parameter in self._tensors.names.parameters.values():
            parameter.grad = None
        if self._steps.updates is not None:
            self._steps.updates.drop_gradients()
            self._follow_loss_scale(metadata.loss_scale)
        return metadata.extra

    def save_pretrained(self, directory: str | Path) -> None:
        """As ``Pipeline.save_pretrained``."""
        path = self._agreed_path("save_pretrained", directory)
        save_pretrained(path, self._training(None, None, only_owned=True))

    def _follow_loss_scale(self, saved: LossScale | None) -> None:
        """Go on with the scale that was saved, if the loss is scaled."""
        updates = self._steps.updates
        if updates is None or updates.loss_scale is None:
            return
        if saved is None:
            notice(f"the checkpoint has no loss scale, which begins with {LossScale().scale:.0f}")
        updates.loss_scale = copy.copy(saved) or LossScale()

    def _agreed_path(self, method: str, directory: str | Path, asynchronous: bool = False) -> Path:
        """The folder, once all ranks have called this for the same one, and adopted the model's tensors."""
        self.finish_saving()
        self._executions.drain()
        self._tensors.require_values()
        how = ", asynchronous=True" if asynchronous else ""
        self._executions.adopt_on_all_ranks(f"{method}({str(directory)!r}{how})")
        return Path(directory).resolve()

    def _training(self, optimizer: Any, scheduler: Any, only_owned: bool) -> TrainingState:
        """The state in this process; with ``only_owned``, without tensors that other processes own."""
        unique, parameters = self._tensors.names.unique(), self._tensors.names.unique_parameters()
        saved = self._tensors.names.persistent | self._tensors.names.parameters.keys()
        first = {name: self._tensors.canonical[name] for name in self._tensors.canonical if name in saved}
        once = frozenset(first.values())
        kinds = {fqn: tensor_spec(fqn, x.dtype, x.shape) for fqn, x in unique.items() if fqn in once}
        updates = self._steps.updates
        shares = updates.shards() if updates is not None else {}
        sharded = frozenset(updates.sharded_names if updates is not None else ())
        parts = [
            TensorShard(piece.name, kinds[piece.name], piece.start, piece.stop, x)
            for piece, x in shares.items()
        ]
        for fqn, kind in kinds.items():
            here = self._tensors.is_here(fqn) if only_owned else not is_absent(unique[fqn])
            if here and fqn not in sharded:
                parts.append(unsharded(fqn, kind, unique[fqn].detach()))
        return TrainingState(
            self._model,
            self._agreement.ranks,
            kinds,
            parts,
            {name: canonical for name, canonical in first.items() if name != canonical},
            [name for name in self._tensors.names.frozen() if name in parameters],
            {id(parameter): fqn for fqn, parameter in parameters.items()},
            self._optimizers(optimizer),
            listed(scheduler),
            self._stream.num_trained,
            self._stream.position() if only_owned else None,
            self._executions.num_replicas,
            copy.copy(updates.loss_scale) if updates is not None else None,
        )

    def _optimizers(self, given: Any) -> PipelineOptimizer | Sequence[Optimizer] | None:
        updates = self._steps.updates
        if updates is None:
            return None if given is None else listed(given)
        if given is not None and given is not updates.optimizer:
            raise InputError(
                "the pipeline was compiled with optimizer=..., which makes its updates; leave out optimizer, "
                "for pipe.optimizer is saved and loaded without mention"
            )
        return updates.optimizer


def _with_extra_state(model: nn.Module) -> list[str]:
    """The modules with extra state: neither a parameter nor a buffer."""
    plain = nn.Module.get_extra_state
    return [name for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def listed(given: Any) -> list[Any]:
    """A list of what was given: one, several or none."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


class AsyncSave(Future[None]):
    """A checkpoint that is being written: ``result()`` waits until it is complete.

    ``result()`` raises the error, if there was one. If it is not called, the next save or load of the
    pipeline raises the error. If there is none, the process waits for the checkpoint before it ends, logs
    the error, and exits with 1.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._at_exit = multiprocessing.util.Finalize(None, self._before_exit, exitpriority=_BEFORE_OTHERS)
        threading.Thread(target=self._run, args=(write,), name="pipec checkpoint", daemon=True).start()

    def result(self, timeout: float | None = None) -> None:
        if (error := self.exception(timeout)) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._at_exit.cancel()
        return error

    @property
    def is_unobserved(self) -> bool:
        """Whether nobody has seen yet how it ended."""
        return self._at_exit.still_active()

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def _before_exit(self) -> None:
        """Wait, since other processes depend on this one. Raising here would not change the exit status."""
        if (error := self.exception()) is not None:
            logger.error("%s", error)
            multiprocessing.util.Finalize(None, _exit_with_failure, exitpriority=_AFTER_OTHERS)


def _exit_with_failure() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


_BEFORE_OTHERS, _AFTER_OTHERS = 10, -100
"""Priorities at exit: connections to other processes are closed in between."""
