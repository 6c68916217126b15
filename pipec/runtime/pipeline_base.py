"""What compiled and loaded pipelines have in common: an ``nn.Module`` that trains on streams of batches."""

import contextlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipec.artifact.artifact import Artifact
from pipec.errors import InputError
from pipec.ir import Program
from pipec.ir.argument_checks import FLAG, FUNCTION, NONE, NUMBER, check_arguments, instance
from pipec.runtime.call_guard import CallGuard, LossIterator, exclusive_call
from pipec.runtime.linked_artifacts import LinkedArtifacts
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.step.timestamps import RecordedStep
from pipec.runtime.stream.call_arguments import ITERABLE
from pipec.runtime.stream_training import StreamTraining


class PipelineBase(nn.Module):
    """The tensors of this process under the model's own names, and the parts that train them.

    A subclass registers the tensors, and sets ``_stream``, which makes the steps of streams.
    """

    _stream: StreamTraining

    def __init__(self, context: PipelineContext) -> None:
        super().__init__()
        self._call_guard = CallGuard()
        self._context = context
        self._linked = LinkedArtifacts(self, context)
        self._warned = False
        if context.updates is not None:
            context.updates.optimizer.before_state_access = self.drain  # before its state is read or replaced

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
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer of the whole model, for LR schedulers and checkpoints; ``step`` makes its updates."""
        return self._context.optimizer

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
        """Let the steps that are made inside a ``with`` add up gradients, for the next update to use."""
        steps = self._context.steps
        before, steps.accumulates = steps.accumulates, True
        try:
            yield
        finally:
            steps.accumulates = before

    @contextlib.contextmanager
    def record(self) -> Iterator[list[RecordedStep]]:
        """Note when every instruction runs, in the steps that are made inside a ``with``.

        The list is filled when the ``with`` ends. It then has the times of every rank, so all ranks record,
        or none.
        """
        recorded: list[RecordedStep] = []
        of_this_process = self._context.steps.recorded = []
        try:
            yield recorded
        finally:
            self._context.steps.recorded = None
        recorded += self._context.ranks.gathered(of_this_process)

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

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            self._warn_if_clipping(sys._getframe(1).f_globals.get("__name__", ""))
            yield parameter

    def _warn_if_clipping(self, reader: str) -> None:
        """Warn if torch's function, which knows this process's gradients alone, asks for the parameters."""
        if self._context.is_distributed and not self._warned and reader == "torch.nn.utils.clip_grad":
            self._warned = True
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...) clips by the norm of this rank's "
                "stages alone; call pipe.clip_grad_norm_(...), which takes the norm of the whole model",
                stacklevel=4,
            )

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
        if context.is_distributed:
            context.require_same_call(f"clip_grad_norm_({max_norm}, {norm_type})", {})
        own = dict(self.named_parameters())
        dtypes = self._norm_dtypes()
        table = torch.zeros(2, len(dtypes), dtype=torch.float64)  # whether there is a gradient, and its norm
        norms_by_device: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        for column, fqn in enumerate(dtypes):
            gradient = own[fqn].grad if fqn in own and context.owners.is_source(fqn) else None
            if gradient is not None:
                norms_by_device[gradient.device][column] = torch.linalg.vector_norm(gradient, norm_type)
        for found in norms_by_device.values():  # one copy each: the host waits for it
            table[0, [*found]] = 1
            table[1, [*found]] = torch.stack([*found.values()]).to("cpu", torch.float64)
        if context.is_distributed:
            tables = context.ranks.agreement.all_gather("calling clip_grad_norm_", table)
            table = torch.stack(tables).sum(0)
        norms = [norm.to(dtype) for there, norm, dtype in zip(*table, dtypes.values(), strict=True) if there]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        torch.nn.utils.clip_grads_with_norm_(list(own.values()), max_norm, total)
        return total

    def _norm_dtypes(self) -> dict[str, torch.dtype]:
        """The type of the norm of each parameter of the whole model, in the model's order."""
        return {value.name: getattr(torch, value.dtype) for value in self._artifact.plan.parameters}

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give the tensors on the meta device memory on ``device``. Others keep their values, and move there.

        A step refuses tensors that have been given no values by then.
        """
        on_meta = [fqn for fqn, tensor in self._linked.tensors().items() if tensor.is_meta]
        self._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device), recurse)
        tensors = self._linked.tensors()
        self._linked.uninitialized.mark({fqn: x for fqn, x in tensors.items() if fqn in on_meta})
        return self

    @exclusive_call
    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``to_empty`` and its kin call this. It may replace tensors, so artifacts are linked again."""
        self._linked.unshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._linked.clear()
        return self

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
