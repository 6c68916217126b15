"""What compiled and loaded pipelines have in common: an ``nn.Module`` that trains on streams of batches."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import Program
from pipec.ir.argument_checks import FLAG, FUNCTION, NONE, NUMBER, check_arguments, instance
from pipec.runtime.absent_tensors import is_absent
from pipec.runtime.call_guard import CallGuard, LossIterator, exclusive_call
from pipec.runtime.linked_artifacts import LinkedArtifacts
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.optimizers.pipeline_optimizer import refuse_update
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.recording import Recording
from pipec.runtime.stream.call_arguments import ITERABLE
from pipec.runtime.stream_training import StreamTraining
from pipec.runtime.whole_model import StateOfRank0, WholeModel, local_optimizer_state
from pipec.runtime.wrappers import is_called_by_dcp, refuse_wrappers
from pipec.torch_compat.run_time import ConvertedModule


class PipelineBase(ConvertedModule):
    """The tensors of this process under the model's own names, and the parts that train them.

    A subclass registers the tensors, and sets ``_stream``, which makes the steps of streams.
    """

    _stream: StreamTraining

    def __init__(self, context: PipelineContext) -> None:
        super().__init__()
        self._call_guard = CallGuard()
        self._context = context
        self._linked = LinkedArtifacts(self, context)
        self._whole = WholeModel(self, context, self._linked)
        if context.updates is not None:
            optimizer = context.updates.optimizer
            optimizer.before_state_access, optimizer.make_update = self.drain, self._update

    @property
    def logs(self) -> dict[str, Tensor]:
        """By name, what the loss function of the last step returned besides the loss, for the batch."""
        return self._context.logs

    @logs.setter
    def logs(self, logs: dict[str, Tensor]) -> None:
        self._context.logs = logs

    def stream(self, batches: Iterable[Any], resume: bool | None = None) -> Iterator[Tensor]:
        """Make a step with each of ``batches``, and yield the losses in order.

        A batch is what a DataLoader yields: a dict of keyword arguments, ``target`` among them; a pair of
        inputs and target where there is a ``loss_fn``; else positional arguments. The next batch is read on a
        thread while the ranks work on one. Every rank iterates over the same batches. With ``batch="rank0"``
        each has as many, and rank 0's count. What the iterator raises is raised here; under ``torchrun`` as
        InputError, by every rank.

        Args:
            batches: such as a DataLoader.
            resume: go on where the checkpoint that was loaded last was made, if it was made in a stream: give
                the losses that the loop had not yet got, and pass over what was trained on. False: begin with
                the first batch all the same.

        Raises:
            InputError: a batch does not fit, or the batches of some rank end before the others'. Nothing was
                changed by that batch, and every rank raises it.
            KeyboardInterrupt, SystemExit: some rank was sent SIGINT or SIGTERM; see ``before_stop``.
        """
        check_arguments(METHODS, locals())
        return LossIterator(self, self._stream.losses(batches, resume))

    @property
    def num_steps(self) -> int:
        """How many mini-batches have been trained on, before the checkpoint that was loaded, too.

        While a loop over a stream runs, those whose losses it was given. One that has ended early may have
        trained on more, if the schedule is asynchronous; they count, too.
        """
        return self._context.steps.num_steps

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because a loss or gradient was not finite.

        See ``on_nan`` and ``precision="fp16-mixed"``.
        """
        return self._context.steps.num_skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step: 1 unless ``precision="fp16-mixed"``.

        Neither losses nor gradients show it.
        """
        updates = self._context.updates
        return updates.loss_scale.scale if updates and updates.loss_scale else 1.0

    @property
    def loss_scale_state(self) -> dict[str, float] | None:
        """The scale, and the number of updates since it changed, if the loss is scaled. May be assigned."""
        updates = self._context.updates
        return dict(vars(updates.loss_scale)) if updates and updates.loss_scale else None

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float]) -> None:
        updates = self._context.updates
        assert updates is not None, "the loss is scaled"
        vars(updates.loss_scale).update(state)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the whole model's gradients that ``clip_grad_norm`` has found last, before clipping."""
        updates = self._context.updates
        return updates.grad_norm if updates else None

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer of the whole model, for LR schedulers and checkpoints.

        ``pipe.step`` makes its updates. After steps inside of ``accumulate``, so does ``optimizer.step()``.
        """
        return self._context.optimizer

    @exclusive_call
    def _update(self) -> None:
        """Update with the gradients that there are."""
        context, updates = self._context, self._context.updates
        assert updates is not None, "its optimizer calls this"
        context.drain()
        found = [updates.has_gradients(self._linked.tensors())]
        if context.is_distributed:
            replies = context.require_same_call("optimizer.step", context.describe_updates(), found)
            found = [bool(reply.reply_values[0]) for reply in replies]
        if not any(found):
            refuse_update()
        execution = self._linked.execution(context.artifact)
        recording = context.steps.recording
        recorded = recording.of_update() if recording is not None else None
        execution.update(recorded)
        context.steps.count_update(execution.non_finite, context.artifact)

    @property
    def programs(self) -> Sequence[Program]:
        """The program of each rank; it prints as text, one instruction a line."""
        return self._artifact.programs

    def source(self, stage: int) -> str:
        """The generated Python of a stage."""
        check_arguments(METHODS, locals())
        sources = self._artifact.sources
        if not 0 <= stage < len(sources):
            raise InputError(f"there is no stage {stage}: the pipeline has stages 0 to {len(sources) - 1}")
        return sources[stage]

    @property
    def _artifact(self) -> Artifact:
        return self._context.artifact

    @exclusive_call
    def drain(self) -> None:
        """Complete the mini-batches that a stream has begun, so that all stages have made the same updates.

        Every rank calls it. Their losses are the next that the stream yields. Whatever reads or replaces
        parameters through the pipeline drains it before. With a synchronous schedule there is nothing to do.
        """
        self._context.drain()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let the steps that are made inside a ``with`` add up gradients, for the next update to use.

        That is the update of the next step outside of it, or of ``optimizer.step()``.
        """
        steps = self._context.steps
        before, steps.accumulates = steps.accumulates, True
        try:
            yield
        finally:
            steps.accumulates = before

    @contextlib.contextmanager
    def record(
        self, every: int = 1, compile_seconds: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Recording]:
        """Note when every instruction runs, in every ``every``-th step that is made inside a ``with``.

        When the ``with`` ends, the recording has the times of every rank, so all ranks record, or none. If it
        ends with an error, in one process it has the steps before; under ``torchrun`` it has none.
        """
        steps = self._context.steps
        outer, steps.recording = steps.recording, Recording(every, steps.num_steps, compile_seconds)
        recording = steps.recording
        try:
            yield recording
            recording.steps = self._context.ranks.gathered(recording.steps)
        except BaseException:
            if self._context.is_distributed:  # the other ranks may be elsewhere
                recording.steps.clear()
            raise
        finally:
            steps.recording = outer
            recording.drop_unfinished()

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank when all end because one was sent SIGTERM or SIGINT.

        All ranks have made the same steps then, and whatever they did together they can still do, such as
        saving a checkpoint. Afterwards every rank raises KeyboardInterrupt, or for SIGTERM SystemExit with
        status 143. Under ``torchrun`` a signal is noted from the first step on, whatever the rank does, and
        all ranks follow it before the next step, mini-batch or evaluation that they make. In one process
        that holds for SIGTERM once this has been called; Ctrl-C raises at once.
        """
        check_arguments(METHODS, locals())
        self._context.before_stop(call)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, in less time."""
        if not set_to_none:
            return super().zero_grad(set_to_none)
        modules: list[nn.Module] = [self]
        for module in modules:
            modules += filter(None, module._modules.values())
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None

    @exclusive_call
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        It does what ``torch.nn.utils.clip_grad_norm_`` does to the unsplit model, wherever the parameters
        are; a tied parameter counts once. Every rank calls it. Returns the norm before.
        """
        check_arguments(METHODS, locals())
        context = self._context
        if context.updates is not None:
            raise InputError(
                "pipe.step(...) has already updated the parameters: the pipeline was compiled with "
                "optimizer=...; pass clip_grad_norm=... to pipec.compile"
            )
        total = self._whole.total_norm(f"clip_grad_norm_({max_norm}, {norm_type})", None, norm_type)
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, total)
        return total

    @exclusive_call
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the whole model, under the model's names.

        Under ``torchrun`` every rank calls this, unless each holds the whole model. Rank 0 gets copies on the
        CPU, and the others get an empty dict, which refuses to be pickled, so that it is not written over
        rank 0's; ``local_state_dict`` has what a rank holds itself. As an entry of what
        ``torch.distributed.checkpoint`` saves or loads, a pipeline gives each rank's own part.

        Raises:
            InputError: under ``torchrun``, not all ranks call it, or ``keep_vars`` asks for the tensors
                themselves.
        """
        return self._whole_state(False, args, kwargs)

    @exclusive_call
    def state_dict_on_all_ranks(self, *args: Any, **kwargs: Any) -> Any:
        """As ``state_dict``, with copies of the whole model's state on every rank."""
        return self._whole_state(True, args, kwargs)

    def _whole_state(self, all_ranks: bool, args: Any, kwargs: Any) -> Any:
        refuse_wrappers()
        if is_called_by_dcp():
            return self._state_for_dcp()
        if not self._context.owners.are_spread:
            return self._state(*args, **kwargs)
        state = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars", False) or any(args[2:]):
            raise InputError(
                "state_dict(keep_vars=True) asks for the tensors themselves, but the whole model's are on "
                "several ranks; call state_dict() on every rank, or local_state_dict(), whose tensors share "
                "memory with those of this rank"
            )
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        names = self._state_names()
        whole = self._gather("state_dict", set(names.values()), all_ranks)
        if whole:
            state.update({prefix + name: whole[first] for name, first in names.items()})
        elif not args and "destination" not in kwargs:
            return StateOfRank0()
        return state  # a module around this one gets absent tensors on other ranks than 0

    def _state_for_dcp(self) -> dict[str, Tensor]:
        """The tensors of this rank, into which ``torch.distributed.checkpoint`` loads."""
        if self._context.updates is not None:
            raise InputError(
                "torch.distributed.checkpoint would save the pipeline without the state of its optimizer; "
                "call pipe.save_checkpoint(...), which `pipec checkpoint convert` writes in that format"
            )
        return {name: x for name, x in self._state().items() if not is_absent(x)}

    def _gather(self, method: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        """Copies of the tensors of the whole model that have these first names."""
        return self._whole.gather(method, self._linked.all_tensors(), names, all_ranks)

    def _state_names(self) -> dict[str, str]:
        """The names of a state dict, each with the first name of its tensor."""
        return {name: name for name in super().state_dict(keep_vars=True)}

    @exclusive_call
    def local_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """The state of this rank's stages, or with ``optimizer``, what this rank has of a script's optimizer.

        In one process it is the whole. Where parameters are kept in shards, they are gathered and copied:
        every rank then calls this.
        """
        if optimizer is not None:
            return local_optimizer_state(optimizer)
        return {name: x for name, x in self._state().items() if not is_absent(x)}

    def _state(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of torch. What is kept in shards is gathered and copied."""
        self._linked.require_values()
        with self._linked.unsharded():
            state = super().state_dict(*args, **kwargs)
            updates = self._context.updates
            if updates is None or not updates.sharded_names:
                return state
            return {name: x if is_absent(x) else x.detach().clone() for name, x in state.items()}

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give the tensors on the meta device memory on ``device``. Others keep their values, and move there.

        A step refuses tensors that have been given no values by then.
        """
        on_meta = [fqn for fqn, tensor in self._linked.tensors().items() if tensor.is_meta]
        self._convert(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device), recurse)
        tensors = self._linked.tensors()
        self._linked.uninitialized.mark({fqn: x for fqn, x in tensors.items() if fqn in on_meta})
        return self

    @exclusive_call
    def _convert(self, function: Any, recurse: bool = True) -> Self:
        """``to_empty`` and its kin call this. It may replace tensors, so artifacts are linked again."""
        self._linked.unshard()
        super()._convert(function, recurse)
        self._linked.clear()
        return self

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """As in torch. Wrappers look for attributes that they give to modules."""
        refuse_wrappers()
        return super().__getattr__(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        refuse_wrappers()
        return super().named_modules(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: stages are compiled already."""
        raise InputError(
            "pipe.compile(...) would trace forward, which runs compiled stages on all ranks. Leave it out: "
            'pipec.compile(..., kernels="inductor") compiles the code of each stage'
        )

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch."""
        refuse_wrappers()
        return super().register_forward_pre_hook(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> NoReturn:
        """Refuse: ``DataParallel`` calls this."""
        refuse_wrappers()
        raise InputError("a pipeline cannot be replicated; pass replicas=... to pipec.compile")

    def __reduce__(self) -> Any:
        raise InputError(
            "a pipeline cannot be pickled, nor a loaded one copied: it holds threads and connections. Save "
            "state_dict(), or full_state_dict() under torchrun; or write and load an artifact once more"
        )


METHODS = {
    "batches": ITERABLE,
    "call": FUNCTION,
    "max_norm": NUMBER,
    "norm_type": NUMBER,
    "resume": FLAG | NONE,
    "stage": instance("the number of a stage", int),
}
"""What the arguments of the methods must be."""
