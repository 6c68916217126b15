"""Checkpoints of a pipeline: what there is of it in this process, and the two methods that users call."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pipec.checkpoint import (
    AsyncSave,
    TensorShard,
    TrainingState,
    begin_checkpoint,
    load,
    load_weights,
    replica_position,
    tensor_spec,
    unsharded,
)
from pipec.console import log
from pipec.errors import InputError
from pipec.ir.argument_checks import check_arguments
from pipec.pipeline.collective_calls import CollectiveCallModule
from pipec.pipeline.method_arguments import METHOD_ARGUMENTS
from pipec.runtime.call_guard import exclusive_call
from pipec.runtime.messages.call_description import format_names
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.stream_training import nothing


class CheckpointModule(CollectiveCallModule):
    """Writes all that a training needs to go on, and goes on from it in any layout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_checkpoints: dict[Path, str] = {}
        self._saving: AsyncSave | None = None

    @property
    def num_steps(self) -> int:
        """How many mini-batches have been trained on, before the checkpoint that was loaded, too.

        While a loop over a stream runs, those whose losses it was given. One that has ended early may have
        trained on more, if the schedule has no flush; they count, too.
        """
        return self._steps.num_steps

    @property
    def ranks(self) -> Ranks:
        """The processes of the pipeline, and which one this is."""
        return self._ranks

    @exclusive_call
    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        extra: Any = None,
        asynchronous: bool = False,
    ) -> Future[None]:
        """Write all that the training needs to go on: see docs/checkpoints.md. Every rank calls this.

        Weights, buffers, the state of the optimizer and of the LR scheduler, the number of steps, torch's
        random state. All ranks write at the same time, beside ``directory``; only when everything is on the
        disk it comes to that name. Whatever happens before, the checkpoint that was there stays.

        Args:
            directory: the folder. All ranks see the same.
            optimizer: the optimizer, or several, that the script steps. The pipeline's own needs no mention.
            scheduler: the LR scheduler, or several. Functions of a ``LambdaLR`` are not saved.
            extra: what else ``load_checkpoint`` shall return: None, numbers, text, lists, tuples, dicts.
            asynchronous: return as soon as there is a copy in the memory of the host, and write that in the
                background. The next save or load, and the end of the process, wait until it is written, and
                raise what went wrong.

        Returns:
            What has a ``result()`` once the checkpoint is at its place, or the error.

        Raises:
            CheckpointError: it cannot be written, or ``directory`` holds something that this run has neither
                written nor loaded.
            InputError: something cannot be saved, or differs from rank to rank.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        training_state = {"optimizer": optimizer, "scheduler": scheduler, "extra": extra}
        return self.start_saving(directory, training_state, asynchronous, nothing)

    @exclusive_call
    def start_saving(
        self,
        directory: str | Path,
        training_state: Mapping[str, Any],
        asynchronous: bool,
        then: Callable[[], None],
    ) -> Future[None]:
        """As ``save_checkpoint``. Once the checkpoint is at its place, the first rank calls ``then``."""
        path = self._agreed_path("save_checkpoint", directory, asynchronous)
        training = self._training(training_state["optimizer"], training_state["scheduler"], only_owned=True)
        if self._updates is not None and self._updates.has_gradients(self._tensors.unique_parameters()):
            raise InputError(
                "gradients have been accumulated that no update has used, and a checkpoint keeps none; save "
                "after a step outside of accumulate()"
            )
        if lost := _with_extra_state(self._compiler.model):
            log(
                "pipec: the checkpoint is without the extra state (get_extra_state) of "
                f"{format_names(lost)}; pass it as extra=..., and set it after load_checkpoint"
            )
        write = begin_checkpoint(
            path, training, training_state["extra"], self._own_checkpoints, asynchronous, then
        )
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

    @exclusive_call
    def load_checkpoint(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        model_only: bool = False,
    ) -> Any:
        """Go on from a checkpoint of any layout; returns its ``extra``. Every rank calls this.

        Everything is checked, in every file, before anything is changed. Gradients are dropped.

        Args:
            directory: what ``save_checkpoint`` wrote.
            optimizer: the optimizer, or several, that the script steps, made as for the run that saved.
            scheduler: the LR scheduler, or several, made as for the run that saved.
            model_only: take weights and buffers, and nothing else. The folder may then also be one that
                ``save_pretrained`` of transformers or diffusers wrote.

        Raises:
            CheckpointError: a file is damaged or missing, or the checkpoint is of another model.
            InputError: it has a state of an optimizer or a scheduler, and none is passed; or the other way
                round.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        path = self._agreed_path("load_checkpoint", directory)
        training = self._training(optimizer, scheduler, only_owned=False)
        if model_only:
            if optimizer is not None or scheduler is not None:
                raise InputError("model_only=True takes neither an optimizer nor a scheduler")
            load_weights(path, training)
            return None
        metadata, self._own_checkpoints[path] = load(path, training)
        self._steps.num_steps, self._saved_position = metadata.num_steps, None
        self._reader = self._last_reader = None
        self._undelivered = ()
        if positions := metadata.stream_positions():
            parts = (self.replica, self.num_replicas)
            self._saved_position = lambda: replica_position(positions, *parts)
        for parameter in self._tensors.parameters.values():
            parameter.grad = None
        if self._updates is not None:
            self._updates.drop_gradients()
            self._follow_loss_scale(metadata.loss_scale)
        return metadata.value_of_extra()

    def _follow_loss_scale(self, saved: LossScale | None) -> None:
        """Go on with the scale that was saved, if the loss is scaled."""
        if self._updates is None or self._updates.loss_scale is None:
            return
        if saved is None:
            log(f"pipec: the checkpoint has no loss scale, which begins with {LossScale().scale:.0f}")
        self._updates.loss_scale = copy.copy(saved) or LossScale()

    def _agreed_path(self, method: str, directory: str | Path, asynchronous: bool = False) -> Path:
        """The folder, once all ranks have called this for the same one, and hold the tensors of the model."""
        self.finish_saving()
        self.drain()
        snapshot = self._snapshots.current()
        if self._ranks.world.is_distributed:
            how = ", asynchronous=True" if asynchronous else ""
            replaced = {"replaced": ", ".join(self._replaced_names(snapshot)) or "none"}
            self._require_same_call(f"{method}({str(directory)!r}{how})", replaced)
        self._adopt_model_changes(snapshot)
        return Path(directory).resolve()

    def _training(self, optimizer: Any, scheduler: Any, only_owned: bool) -> TrainingState:
        """What this process has; with ``only_owned``, without tensors whose values another process has."""
        unique, parameters = self._tensors.unique(), self._tensors.unique_parameters()
        kept = self._tensors.persistent | self._tensors.parameters.keys()
        first = {name: self._canonical[name] for name in self._canonical if name in kept}
        once = frozenset(first.values())
        shapes = {fqn: self._emptied.shape(fqn, x) for fqn, x in unique.items() if fqn in once}
        kinds = {fqn: tensor_spec(fqn, unique[fqn].dtype, shape) for fqn, shape in shapes.items()}
        shares = self._updates.shards() if self._updates is not None else {}
        in_shares = frozenset(self._updates.sharded_names if self._updates is not None else ())
        parts = [
            TensorShard(piece.name, kinds[piece.name], piece.start, piece.stop, x)
            for piece, x in shares.items()
        ]
        for fqn, kind in kinds.items():
            here = self._is_held(fqn) if only_owned else unique[fqn].shape == shapes[fqn]
            if here and fqn not in in_shares:
                parts.append(unsharded(fqn, kind, unique[fqn].detach()))
        return TrainingState(
            self._compiler.model,
            self._ranks,
            kinds,
            parts,
            {name: canonical for name, canonical in first.items() if name != canonical},
            [fqn for fqn, parameter in parameters.items() if not parameter.requires_grad],
            {id(parameter): fqn for fqn, parameter in parameters.items()},
            {fqn: shapes[fqn] for fqn in parameters},
            self._optimizers(optimizer),
            _listed(scheduler),
            self._num_trained,
            self._position() if only_owned else None,
            self.num_replicas,
            self._compiler.options.profile,
            copy.copy(self._updates.loss_scale) if self._updates is not None else None,
        )

    def _optimizers(self, given: Any) -> PipelineOptimizer | Sequence[Optimizer] | None:
        if self._updates is None:
            return None if given is None else _listed(given)
        if given is not None and given is not self._updates.optimizer:
            raise InputError(
                "the pipeline was compiled with optimizer=..., which makes its updates; leave out optimizer, "
                "for pipe.optimizer is saved and loaded without mention"
            )
        return self._updates.optimizer


def _with_extra_state(model: nn.Module) -> list[str]:
    """The modules that have a state which is neither a parameter nor a buffer."""
    plain = nn.Module.get_extra_state
    return [name for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def _listed(given: Any) -> list[Any]:
    """What was given, or the several that were."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
