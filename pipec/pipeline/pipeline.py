"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import contextlib
import copy
import functools
import inspect
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.artifact.artifact import Artifact, write_artifact
from pipec.checkpoint import PretrainedWeights
from pipec.checkpoint.all_ranks import call_on_rank_0
from pipec.compiler.compiler import Compiler
from pipec.drawn_artifacts import DrawnTimeline, DrawnTrace, add_recorded_steps, draw_artifact
from pipec.errors import InputError
from pipec.ir import Mode
from pipec.ir.argument_checks import check_arguments
from pipec.ir.text_format import text_as_html
from pipec.options import Options
from pipec.pipeline.checkpointing import Checkpoints
from pipec.pipeline.collective_calls import CallAgreement, CallRequest, local_batch_advice
from pipec.pipeline.compiled_calls import CompiledCalls, output_of
from pipec.pipeline.inspection import predicted_memory
from pipec.pipeline.method_arguments import METHOD_ARGUMENTS
from pipec.pipeline.owned_tensors import OwnedTensors
from pipec.pipeline.pipeline_module import PipelineModule, make_module, refuse_other_forward
from pipec.plan.plan_table import PrintablePlan
from pipec.plan.predictions import simulate_plan
from pipec.plan.step_memory import StepMemory
from pipec.runtime.absent_tensors import copies_of_absent, materialized
from pipec.runtime.call_guard import exclusive_call
from pipec.runtime.held_gradients import HeldGradients
from pipec.runtime.loss_tensors import EVAL_LOSS, STEP_LOSS, ForwardOutput, StepLoss
from pipec.runtime.model_tensors import ModelTensors, fill_tensors
from pipec.runtime.pipeline_base import PipelineBase
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.sharded_loaders import same_batch_advice
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.stream_training import StreamTraining
from pipec.runtime.wrappers import refuse_wrappers
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace
from pipec.torch_compat import pytree


class _with_signature_of_model:
    """A method with the model's own signature, off which loops read what columns of a batch to pass."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, pipe: "Pipeline | None", owner: type) -> Callable[..., Any]:
        if pipe is None:
            return self._method
        bound = functools.partial(self._method, pipe)
        bound.__signature__ = pipe.forward_signature  # type: ignore[attr-defined]
        return bound

    def __set__(self, pipe: "Pipeline", forward: object) -> NoReturn:
        refuse_other_forward()


class Pipeline(PipelineBase):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It has the model's own parameters and buffers, under the model's own names. Under ``torchrun``, once it is
    compiled, a rank holds the values of its stages' alone. The others give their memory back and are absent:
    they keep shape and type, an optimizer passes them over, and whatever reads them raises InputError.
    ``state_dict`` and ``gather_into`` bring the whole together again.

    It makes one call at a time. A call on a second thread raises InputError meanwhile, and changes nothing.
    """

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        ranks: Ranks,
        updates: OptimizerUpdates | None,
        options: Options,
        weights: PretrainedWeights | None = None,
    ) -> None:
        advice = local_batch_advice if options.batch == "local" else same_batch_advice
        context = PipelineContext(ranks, updates, batch_advice=advice)
        super().__init__(context)
        self._modes_before_eval: dict[nn.Module, bool] = {}
        self.last_step_seconds: float | None = None
        self._compiler, self._options = compiler, options
        self._owned = OwnedTensors(self, compiler, tensors, context, self._linked, weights)
        self._agreement = CallAgreement(context, compiler, self._owned, options.batch, options.batched)
        self._calls = CompiledCalls(
            compiler, context, self._linked, self._owned, self._agreement, options.microbatch_weight
        )
        self._stream = StreamTraining(self._calls, context)
        self.forward_signature = inspect.signature(compiler.model.forward)
        self._checkpoints = Checkpoints(compiler, context, self._owned, self._agreement, self._stream)

    @overload
    def step(
        self, *args: Any, target: Any = None, outputs: Literal[False] = False, **kwargs: Any
    ) -> Tensor: ...

    @overload
    def step(
        self, *args: Any, target: Any = None, outputs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Any]: ...

    @overload
    def step(
        self, *args: Any, target: Any = None, outputs: bool, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]: ...

    @exclusive_call
    def step(
        self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        If the pipeline was compiled with an optimizer, the step ends with its update, which clears them.

        The arguments are those of the model for the whole mini-batch, and ``target`` goes to the loss
        function. Every rank passes the same, unless ``compile`` was told otherwise: with ``batch="local"``
        the arguments are this replica's part, which may have other numbers of rows. Tensors with the rows of
        the batch are split into microbatches, others are passed whole; see ``batched`` of ``compile``.
        A step that draws, as for dropout, takes one number of torch's default generator, rank 0's for all.

        Returns:
            The loss of the batch, on every rank; with ``outputs``, a tuple of that and the model's output.
            What ``loss_fn`` returned besides the loss is in ``logs`` then. Of results with a value for each
            row, a rank gets those of the rows that it passed.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run, or the ranks passed different
                arguments. Nothing was changed, and every rank raises it.
            NonFiniteError: the loss or a gradient is not finite, and ``on_nan`` is "raise"; on every rank.
            ExecutionError, TransportError: a rank failed.
            KeyboardInterrupt, SystemExit: some rank was sent a signal; see ``before_stop``.
        """
        refuse_wrappers()
        request = CallRequest("step", Mode.TRAIN, outputs)
        collective_call = self._calls.agree(request, args, kwargs, target)
        self._stream.leave_last()
        begun = time.perf_counter()
        loss = _explaining(self._calls.train(collective_call), STEP_LOSS)
        self.last_step_seconds = time.perf_counter() - begun
        return loss

    @overload
    def eval_step(
        self, *args: Any, target: Any = None, outputs: Literal[False] = False, **kwargs: Any
    ) -> Tensor: ...

    @overload
    def eval_step(
        self, *args: Any, target: Any = None, outputs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Any]: ...

    @overload
    def eval_step(
        self, *args: Any, target: Any = None, outputs: bool, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]: ...

    @exclusive_call
    def eval_step(
        self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """What ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        request = CallRequest("eval_step", Mode.LOSS, outputs)
        return _explaining(self._calls.loss(self._calls.agree(request, args, kwargs, target)), EVAL_LOSS)

    @_with_signature_of_model
    @exclusive_call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, without gradients, on every rank that passed these rows."""
        refuse_wrappers()
        collective_call = self._calls.agree(CallRequest("forward", Mode.FORWARD), args, kwargs)
        groups = self._calls.compiled(collective_call)
        compiled, _ = groups[0]
        results = self._calls.run(collective_call, groups)
        output = output_of(compiled, results, compiled.artifact.plan.outputs)
        if not self._compiler.model.training or not torch.is_grad_enabled():
            return output
        return pytree.tree_map(lambda x: x.as_subclass(ForwardOutput) if _is_real(x) else x, output)

    @exclusive_call
    def prepare(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        request = CallRequest("prepare", Mode.TRAIN, outputs)
        self._calls.compiled(self._calls.agree(request, args, kwargs, target))
        return self

    def as_module(self, outputs: bool = False) -> PipelineModule:
        """A module that a loop takes for the model, since its loss has a ``backward``.

        In training mode and with gradients enabled, ``loss = module(...)`` runs one step, whose gradients are
        kept apart; ``loss.backward()``, or that of what is computed of the loss, adds them to ``.grad``,
        times the gradient of the loss. Every rank calls it, and with the same factor. A loss computed outside
        of other outputs has no gradients. In evaluation mode, or under ``torch.no_grad()``, a call returns
        the model's output with its loss. The target of a ``loss_fn`` is passed as ``target=...``. If the
        pipeline was compiled with ``optimizer``, the loop calls ``pipe.optimizer.step()``.

        Args:
            outputs: in training, return the output of the model, with its loss; or with ``loss_fn``, a tuple
                of loss and output. All ranks then receive the output of the whole batch. Otherwise the module
                returns the loss, which is its own ``.loss``, ``["loss"]`` and ``[0]``.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        return make_module(self, self._compiler.model, outputs)

    @property
    def unsplit_model(self) -> nn.Module:
        """The model that was compiled, or that ``from_pretrained`` made."""
        return self._compiler.model

    @property
    def has_loss_fn(self) -> bool:
        """Whether the loss is that of a ``loss_fn``, which takes a target, and not the model's own."""
        return self._compiler.settings.loss_fn is not None

    @property
    def num_processes(self) -> int:
        """How many processes hold the parameters."""
        return self._context.ranks.count if self._context.is_distributed else 1

    def take_gradients(self) -> HeldGradients:
        """The gradients of this process, to be added again later; the parameters have none meanwhile."""
        return HeldGradients.take(
            list(self._owned.tensors.unique_parameters().values()), self._context.updates
        )

    def report_backward(self, step: int, factor: Tensor) -> None:
        """Let the next call compare with the other ranks that ``backward`` of a step was called."""
        self._context.report_backward(step, factor)

    @exclusive_call
    def join(self, after_update: Callable[[], object] | None = None) -> int:
        """Take part in what replicas do that have more batches than this one, until all ranks have joined.

        With ``batch="local"`` a rank calls this when its data end, and all ranks do in the end. Until then
        it is without rows in the steps of the others, and makes the same updates. So it needs an optimizer
        in the programs, unless the others only evaluate.

        Args:
            after_update: called after each update, as the loop of the others calls ``scheduler.step``.

        Returns:
            How many steps were made without this rank's rows.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        if self._agreement.batch != "local":
            raise InputError(
                "join is for replicas with data of their own, but the pipeline has "
                f'batch={self._agreement.batch!r}; pass batch="local" to pipec.compile'
            )
        count, steps = 0, self._context.steps
        accumulates = steps.accumulates
        try:
            while self._context.is_distributed and (call := self._agreement.next_call_of_others()):
                request, collective_call = call
                if request.method == "step":
                    self._calls.train(collective_call)
                    count += 1
                    if after_update is not None and not steps.accumulates:
                        after_update()
                elif request.method == "prepare":
                    self._calls.compiled(collective_call)
                else:
                    self._calls.run(collective_call, self._calls.compiled(collective_call))
        finally:
            steps.accumulates = accumulates
        return count

    @property
    def num_replicas(self) -> int:
        """The number of parts in which ranks pass a batch, for a ``DistributedSampler``.

        With ``batch="local"`` under ``torchrun`` these are the replicas of each stage. Else it is 1: every
        rank passes the whole batch.
        """
        return self._agreement.num_replicas

    @property
    def replica(self) -> int:
        """Which part of a batch this rank passes, from 0. Ranks of the same pipeline have the same."""
        return self._agreement.replica

    @exclusive_call
    def train(self, mode: bool = True) -> "Pipeline":
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does."""
        check_arguments(METHOD_ARGUMENTS, locals())
        if not mode and self.training:
            self._modes_before_eval = {each: each.training for each in self._compiler.model.modules()}
        self._compiler.model.train(mode)
        return super().train(mode)

    @property
    def training(self) -> bool:
        """The model's mode. Loops that restore modes after an evaluation assign it, as Lightning does."""
        return self._compiler.model.training if "_compiler" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_compiler" in self.__dict__ and mode != self._compiler.model.training:
            for module in self._compiler.model.modules():
                module.training = self._modes_before_eval.get(module, mode) if mode else mode

    @exclusive_call
    def _convert(self, function: Any, recurse: bool = True) -> Self:
        """``half`` and its kin call this. A tensor that ``to`` moves returns to its stage's device."""
        super()._convert(function, recurse)
        self._owned.adopt_replaced()
        return self

    @exclusive_call
    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """A pipeline of a copy of the model, on the same stages. It compiles its calls itself.

        It has an optimizer of its own, with a copy of the state. Every rank makes the copy then.
        """
        with self._linked.unsharded():
            memo.update(copies_of_absent(self._owned.tensors.unique().values()))
            model = copy.deepcopy(self._compiler.model, memo)
        tensors, updates = ModelTensors.of(model), self._context.updates
        if updates is not None:
            with materialized(tensors.unique().values()):
                updates = updates.of(tensors.unique_parameters())
        agreement = self._agreement
        compiler, options = self._compiler.of(model), replace(self._options, batched=agreement.batched)
        copied = Pipeline(compiler, tensors, self._context.ranks, updates, options, self._owned.weights)
        memo[id(self)] = copied
        self._owned.copy_to(copied._owned)
        copied._agreement.known_splits = dict(agreement.known_splits)
        copied._agreement.variables = copy.deepcopy(agreement.variables)
        return copied

    @exclusive_call
    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Tensor]:
        """A copy of the whole model's state on the CPU, under its own names. Every rank calls this.

        Under ``torchrun`` rank 0 gets it, and the others get an empty dict; with ``all_ranks``, all get it.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        names = self._state_names()
        whole = self._gather("full_state_dict", set(names.values()), all_ranks)
        return {name: whole[first] for name, first in names.items() if whole}

    @contextlib.contextmanager
    def state_to_write(self, folder: str) -> Iterator[dict[str, Tensor] | None]:
        """The whole state on the first rank that writes to ``folder``, None on others with the same.

        Every rank calls this. The ranks leave it together.
        """
        context, rank = self._context, self._context.ranks.world.rank
        if not context.is_distributed:
            yield self.full_state_dict()
            return
        digest = zlib.crc32(str(Path(folder).absolute()).encode())
        replies = context.require_same_call("save_pretrained", {}, [digest])
        folders = [reply.reply_values[0] for reply in replies]
        whole = self.full_state_dict(all_ranks=len({*folders}) > 1)
        yield whole if folders.index(digest) == rank else None
        context.require_same_call("save_pretrained, at its end", {})

    @exclusive_call
    def wait_for_ranks(self, activity: str) -> None:
        """Wait until every rank has come to the end of an ``activity``. Every rank calls this."""
        if self._context.is_distributed:
            self._context.require_same_call(activity, {})

    @exclusive_call
    def gather_into(self, model: nn.Module, all_ranks: bool = False) -> None:
        """Write the whole model's parameters and buffers into ``model``, on rank 0 or on all ranks.

        Every rank calls this. ``model`` is the one that was compiled, or one of the same structure. The one
        that was compiled has its memory until the next step, which empties it again.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        whole = self._gather("gather_into", self._owned.tensors.unique(), all_ranks)
        if whole:
            self._owned.needs_placement = True
            fill_tensors(model, {name: whole[first] for name, first in self._owned.canonical.items()})

    @exclusive_call
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the whole model's state, or that of this rank's stages, at any time and on any rank.

        What belongs to other ranks' stages is passed over, so every rank loads. Keys are missing alike on all
        ranks, unless the state is one of ``local_state_dict``, which has no others than this rank's.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        self._linked.require_values()
        here, canonical = self._linked.tensors(every_name=True), self._owned.canonical
        own = {name: x for name, x in state_dict.items() if name in here or name not in canonical}
        if not state_dict and self._context.owners.are_spread:
            raise InputError(
                "load_state_dict was given an empty dict, as state_dict() returns on other ranks than 0; let "
                "every rank read the file, or take full_state_dict(all_ranks=True)"
            )
        every = self._linked.all_tensors(every_name=True)
        is_whole = not here.keys() >= state_dict.keys() & canonical.keys()
        own |= {
            name: every[name]
            for name in self._state_names()
            if name not in here and name in every and (name in state_dict or not is_whole)
        }
        if assign:
            self._linked.unshard()
        with self._linked.unsharded():
            result = super().load_state_dict(own, strict, assign)
        if self._context.owners.ranks:  # the first call gives all ranks what rank 0 has
            self._context.report_load()
        if assign:
            self._owned.adopt_replaced()
        return result

    def _gather(self, method: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        return self._whole.gather(method, self._owned.tensors.unique(), names, all_ranks)

    def _state_names(self) -> dict[str, str]:
        names, canonical = self._compiler.model.state_dict(keep_vars=True), self._owned.canonical
        return {name: canonical[name] for name in names if name in canonical}

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
        return self._checkpoints.save(directory, training_state, asynchronous)

    @exclusive_call
    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model for ``from_pretrained`` of transformers, as its own ``save_pretrained`` does.

        Every rank calls this, and writes the weights of its stages, one tensor at a time. Files of a
        tokenizer or others that are in ``directory`` stay. All ranks see the same.

        Raises:
            CheckpointError: a file cannot be written.
            InputError: the model is not one of transformers, or its tensors cannot be written one at a time.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        self._checkpoints.save_pretrained(directory)

    @exclusive_call
    def start_saving(
        self,
        directory: str | Path,
        training_state: Mapping[str, Any],
        asynchronous: bool,
        then: Callable[[], None],
    ) -> Future[None]:
        """As ``save_checkpoint``. Once the checkpoint is in its place, rank 0 calls ``then``."""
        return self._checkpoints.save(directory, training_state, asynchronous, then)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background. Raises what went wrong with it."""
        self._checkpoints.finish_saving()

    @property
    def num_undelivered(self) -> int:
        """How many of the last steps are mini-batches whose losses a loop was not given, since it ended."""
        return self._stream.num_undelivered

    def keep_last_position(self) -> None:
        """Save the position of the stream that gave the last loss, even if it has ended by now."""
        self._stream.keep_last_position()

    @property
    def ranks(self) -> Ranks:
        """The processes of the pipeline, and which one this is."""
        return self._context.ranks

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
        return self._checkpoints.load(directory, optimizer, scheduler, model_only)

    @exclusive_call
    def save(self, directory: str | Path, tensors: bool = False) -> None:
        """Write plan, code and programs to a directory that ``pipec.load`` and ``pipec run`` read.

        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all, and returns once
        the directory is complete.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        values = self._gather("save", self._owned.tensors.unique(), all_ranks=False) if tensors else None
        write = functools.partial(write_artifact, self._artifact, Path(directory), values)
        if tensors and self._context.ranks.world.is_distributed:
            call_on_rank_0(self._context.ranks, f"saving to {directory}", write)
        elif self._context.ranks.world.rank == 0:
            write()

    @property
    def trained_artifact(self) -> Artifact | None:
        """What ``step`` runs, once it is compiled."""
        return self._context.trained

    def _repr_html_(self) -> str:
        """What a notebook shows: the plan, once there is one."""
        name = type(self._compiler.model).__name__
        if self.trained_artifact is None:
            return text_as_html(f"pipeline of {name}, not compiled yet: call step(...) or prepare(...)")
        return text_as_html(f"pipeline of {name} after {self.num_steps} steps\n\n{self.plan}")

    @property
    def plan(self) -> PrintablePlan:
        """What the compiler decided. It prints as a table."""
        return PrintablePlan.of(self._artifact.plan, self._artifact.representative_programs)

    def simulate(self) -> Timeline:
        """The timeline of one step, predicted from the programs and the plan's costs."""
        return DrawnTimeline.of(simulate_plan(self.plan, self.plan.programs))

    def memory(self) -> StepMemory:
        """What each rank holds in a step that begins with ``.grad`` None, predicted from the programs.

        It prints as a table. A step that adds to gradients which were kept, as when it accumulates or after
        ``zero_grad(set_to_none=False)``, holds these from its start, and its own sums beside them where these
        travel between replicas, or with ``on_nan`` and without ``optimizer``.
        """
        return predicted_memory(self.plan, self.programs)

    def visualize(self, path: str | Path | None = None, trace: Trace | None = None) -> str:
        """The timelines as text: the simulated one, or those of a ``trace``, planned and measured.

        If ``path`` is given, rank 0 also draws them there: .html is a page to explore, .svg and .txt are
        pictures, and .json is for Perfetto and chrome://tracing. Another ending raises InputError. A
        notebook shows the page in place of the text.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        drawn = Path(path) if path is not None and self._context.ranks.world.rank == 0 else None
        devices = self._compiler.decided.options.topology.devices
        return draw_artifact(self._artifact, trace, drawn, [device.memory_bytes for device in devices])

    @contextlib.contextmanager
    def trace(self, trace: Trace | None = None, every: int = 1) -> Iterator[Trace]:
        """Record steps that are made inside a ``with``. After it, the trace has their timelines.

        Every rank records, or none; each then has the times of all. They are times of the host: work that a
        GPU still has to do is not in them. A step that accumulates, and ``optimizer.step()``, are parts of a
        step, each with a timeline. In one process, a ``with`` that an error ends keeps the steps before it.

        Args:
            trace: what another ``with`` gave, to which the steps are added.
            every: record the first step and every so many steps one more, so that a ``with`` around a whole
                training gets a trace of the run. The others take the time that they take without a trace.
                Steps that were skipped or compiled are noted, whether they are recorded or not.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        trace, recording = DrawnTrace() if trace is None else trace, None
        try:
            with self.record(every, lambda: sum(self._compiler.stopwatch.seconds.values())) as recording:
                yield trace
        finally:
            if recording is not None and recording.steps:
                add_recorded_steps(trace, self._artifact, recording)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.stopwatch.seconds)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _explaining(result: Any, explanation: str) -> Tensor | tuple[Tensor, Any]:
    """What a step returns, a loss or a tuple of loss and output, with a loss that explains its backward."""
    if isinstance(result, tuple):
        loss, output = result
        return StepLoss.of(loss, explanation), output
    return StepLoss.of(result, explanation)
