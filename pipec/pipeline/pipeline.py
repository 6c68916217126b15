"""What ``pipec.compile`` and ``pipec.load`` return: a module that trains across stages."""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.artifact.artifact import MODE_FOLDERS, Artifact, write_artifact
from pipec.checkpoint.all_ranks import call_on_rank_0
from pipec.checkpoint.hugging_face import saved_by_this_process
from pipec.console import notice
from pipec.errors import CaptureError, InputError, MixedRowsError, NoLossError
from pipec.ir import Mode, Program
from pipec.ir.argument_checks import (
    FLAG,
    FUNCTION,
    NONE,
    NUMBER,
    PATH,
    ArgumentRule,
    check_arguments,
    instance,
    integer_between,
    one_of,
)
from pipec.pipeline.checkpointing import Checkpoints, listed
from pipec.pipeline.pipeline_module import (
    OutputsOption,
    PipelineModule,
    make_module,
    refuse_other_forward,
)
from pipec.runtime.absent_tensors import copies_of_absent, is_absent, materialized
from pipec.runtime.call_agreement import CallAgreement
from pipec.runtime.call_guard import CallGuard, LossIterator, exclusive_call
from pipec.runtime.executions import STEP, CallRequest, Leaves, MakeExecutions
from pipec.runtime.loss_tensors import ForwardOutput
from pipec.runtime.messages.exchange import RankNote
from pipec.runtime.model_tensors import ModelTensors, fill_tensors, register_tensors
from pipec.runtime.optimizers import PipelineOptimizer
from pipec.runtime.optimizers.pipeline_optimizer import refuse_update
from pipec.runtime.recording import Recording
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step_state import StepState
from pipec.runtime.stream.call_arguments import ITERABLE, CallArguments, GivenMicrobatches, step_arguments
from pipec.runtime.stream_training import StreamTraining
from pipec.runtime.tensors import ReadTensors, Tensors
from pipec.runtime.whole_model import StateOfRank0, WholeState, local_state
from pipec.runtime.wrappers import refuse_dcp, refuse_wrappers
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import ConvertedModule, share_registries

if TYPE_CHECKING:
    from pipec.plan.plan_table import PrintablePlan
    from pipec.plan.step_memory import StepMemory
    from pipec.timeline.events import Timeline
    from pipec.timeline.trace import Trace


class Pipeline(ConvertedModule):
    """A model cut into stages, as :func:`pipec.compile` makes it, or :func:`pipec.load` of an artifact.

    It has the model's own parameters and buffers, under the model's own names. Under ``torchrun``, once it is
    compiled, a rank holds the values of its stages' alone. The others give their memory back and are absent:
    they keep shape and type, an optimizer passes them over, and whatever reads them raises InputError.
    ``state_dict`` and ``gather_into`` bring the whole together again.

    It makes one call at a time. A call on a second thread raises InputError meanwhile, and changes nothing.

    It has four parts. ``_tensors`` are the model's, ``_agreement`` makes a call one of all ranks,
    ``_executions`` finds what runs a call, and runs it, and ``_stream`` makes the steps of streams.
    """

    def __init__(
        self,
        names: ModelTensors,
        ranks: Ranks,
        updates: OptimizerUpdates | None,
        make_executions: MakeExecutions,
        read: ReadTensors | None = None,
    ) -> None:
        super().__init__()
        refuse_wrappers()
        self._call_guard, self._steps = CallGuard(), StepState(updates)
        ranks.tell_elsewhere(self._call_guard.elsewhere)
        self._tensors = Tensors(self, names, ranks, updates, read)
        self._agreement = CallAgreement(ranks, self._steps)
        self._executions = make_executions(self._tensors, self._agreement, self._steps)
        self._stream = StreamTraining(self._executions)
        self._checkpoints = Checkpoints(self, self._executions, self._stream)
        self._whole = WholeState(self._executions)
        self._anchor, self._without_gradients = torch.zeros((), requires_grad=True), set[object]()
        if updates is not None:
            updates.optimizer.before_state_access, updates.optimizer.make_update = self.drain, self._update
        self._register()

    def _register(self) -> None:
        """Take the model's modules and tensors for its own; without a model, the tensors alone."""
        model = self._executions.model
        if model is None:
            register_tensors(self, self._tensors.names)
        else:
            share_registries(self, model)
            self.__dict__["_model"] = model  # not a submodule

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, if it has one of this name and the pipeline has not."""
        if name == "forward":
            refuse_other_forward()
        model = vars(self).get("_model")
        if model is None or name in vars(self) or hasattr(type(self), name) or name not in vars(model):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply ``fn`` to every module of the model, as ``nn.Module.apply`` does."""
        for module in self.modules():
            fn(module)
        return self

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The modules of the model. Raises InputError of a loaded artifact, which has none."""
        if self._executions.model is None:
            raise InputError(
                "a loaded artifact has the code of its stages, and no modules of the model to set up or look "
                "at: change the model, and compile and save it again. Parameters are in named_parameters()"
            )
        return super().modules(*args, **kwargs)

    @overload
    def step(
        self,
        *args: Any,
        target: Any = None,
        outputs: Literal[False] = False,
        microbatches: Iterable[Any] | None = None,
        weights: Any = None,
        **kwargs: Any,
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
        self,
        *args: Any,
        target: Any = None,
        outputs: bool = False,
        microbatches: Iterable[Any] | None = None,
        weights: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """Run forward and backward of one mini-batch. Gradients are added to ``.grad``.

        If the pipeline was compiled with an optimizer, the step ends with its update, which clears them.

        Pass the model's arguments for the whole mini-batch; ``target`` goes to the loss function. Every rank
        passes the same, unless ``compile(batch=...)`` says otherwise: with ``"local"`` each rank passes the
        rows of its replica. Tensors with the rows of the batch are split into microbatches, others are passed
        whole; see ``batched`` of ``compile``. Dropout follows ``torch.manual_seed``: every rank uses rank 0's
        seed.

        Or pass ``microbatches``, a list of what ``stream`` takes as batches: each is a batch of its own, and
        nothing is split. Their number and every size may differ, also within a list. The loss is the sum of
        their losses, each times its weight, as in a loop that accumulates gradients. ``weights`` has a number
        for each; "sum" is 1 for each, and None the mean. Without ``microbatches``, it is an argument of the
        model. ``logs`` are means over microbatches.

        Returns:
            The loss of the batch, on every rank; with ``outputs``, a tuple of the loss and the model's
            output. ``logs`` then has what ``loss_fn`` returned besides the loss. A rank gets the results of
            the rows that it passed.

        Raises:
            CaptureError, InputError, PlanError: the step cannot be run, or the ranks passed different
                arguments. Nothing was changed, and every rank raises it.
            NonFiniteError: the loss or a gradient is not finite, and ``on_nan`` is "raise"; on every rank.
            ExecutionError, TransportError: a rank failed.
            KeyboardInterrupt, SystemExit: some rank was sent a signal; see ``before_stop``.
        """
        request = CallRequest("step", Mode.TRAIN, True) if outputs else STEP
        arguments = step_arguments(args, kwargs, target, outputs, microbatches, weights)
        call = self._executions.agree(request, arguments)
        self._stream.last_reader = None
        begun = time.perf_counter()
        loss: Tensor | tuple[Tensor, Any] = self._executions.train(call)
        self._steps.last_seconds = time.perf_counter() - begun
        return loss

    @overload
    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        outputs: Literal[False] = False,
        microbatches: Iterable[Any] | None = None,
        weights: Any = None,
        **kwargs: Any,
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
        self,
        *args: Any,
        target: Any = None,
        outputs: bool = False,
        microbatches: Iterable[Any] | None = None,
        weights: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Any]:
        """What ``step`` would return, without gradients. It takes given microbatches, too.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        request = CallRequest("eval_step", Mode.LOSS, outputs)
        arguments = step_arguments(args, kwargs, target, outputs, microbatches, weights)
        call = self._executions.agree(request, arguments)
        loss: Tensor | tuple[Tensor, Any] = self._executions.loss(call)
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, on every rank that passed these rows.

        In training mode, with gradients enabled and without a ``loss_fn``, it has a graph, as with
        ``as_module(outputs="differentiable")``; what no graph can be made for explains itself in its
        ``backward``. Otherwise it has none.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._output(args, kwargs)
        kind = len(args), *sorted(kwargs), sum(each.requires_grad for each in self.parameters())
        given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad)
        if (
            self._executions.may_differentiate
            and kind not in self._without_gradients
            and not any(True for _ in given)
        ):
            try:
                return self._differentiable_outputs(args, kwargs)
            except (CaptureError, MixedRowsError, NoLossError):
                self._without_gradients.add(kind)
        output = self._output(args, kwargs)
        return pytree.tree_map(lambda x: x.as_subclass(ForwardOutput) if _is_real(x) else x, output)

    @exclusive_call
    def _output(self, args: Any, kwargs: Any) -> Any:
        request = CallRequest("forward", Mode.FORWARD)
        return self._executions.output(self._executions.agree(request, CallArguments(args, kwargs)))

    @exclusive_call
    def _differentiable_outputs(self, args: Any, kwargs: Any, on_all_ranks: bool = True) -> Any:
        """The model's output for the batch, with a graph whose backward the pipeline runs.

        Raises as ``step``.
        """
        if self._executions.batch == "local":
            raise InputError(
                'batch is "local", with which each replica would compute another loss; pass the whole batch '
                'on all ranks, with batch="same", or compute the loss in the model or in loss_fn=...'
            )
        request = CallRequest("forward", Mode.OUTPUTS, on_all_ranks)
        call = self._executions.agree(request, CallArguments(args, kwargs))
        self._stream.last_reader = None
        return self._executions.differentiable_outputs(call, self._anchor)

    @exclusive_call
    def prepare(
        self,
        *args: Any,
        target: Any = None,
        outputs: bool = False,
        microbatches: Iterable[Any] | None = None,
        **kwargs: Any,
    ) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        request = CallRequest("prepare", Mode.TRAIN, outputs)
        self._executions.agree(request, step_arguments(args, kwargs, target, outputs, microbatches, None))
        return self

    def stream_of_leaves(self, batches: Iterable[Sequence[Any]]) -> Iterator[Tensor]:
        """As ``stream`` of a loaded artifact, for the leaves of each batch, in the order of the plan.

        If it takes given microbatches, all of a step have these leaves.
        """
        plan, each = self._artifact.plan, map(Leaves, map(tuple, batches))
        given = (GivenMicrobatches([leaves] * plan.num_microbatches) for leaves in each)
        return LossIterator(self, self._stream.losses_of(given if plan.has_given_microbatches else each))

    def stream(
        self,
        batches: Iterable[Any],
        resume: bool | None = None,
        microbatches: bool = False,
        weights: Any = None,
    ) -> Iterator[Tensor]:
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
            microbatches: each of ``batches`` is a list of microbatches, as ``step(microbatches=...)`` takes.
            weights: the weights of the microbatches' losses, the same for each list.

        Raises:
            InputError: a batch does not fit, or the batches of some rank end before the others'. Nothing was
                changed by that batch, and every rank raises it.
            KeyboardInterrupt, SystemExit: some rank was sent SIGINT or SIGTERM; see ``before_stop``.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        return LossIterator(self, self._stream.losses(batches, resume, microbatches, weights))

    def as_module(self, outputs: OutputsOption = False) -> PipelineModule:
        """A module that a loop takes for the model, since its loss has a ``backward``.

        In training mode and with gradients enabled, ``loss = module(...)`` runs one step and keeps its
        gradients apart. ``loss.backward()``, or the backward of a value computed from the loss, adds them to
        ``.grad``, times the gradient of the loss. Every rank calls it, with the same factor. In evaluation
        mode, or under ``torch.no_grad()``, a call returns the model's output with its loss. The target of a
        ``loss_fn`` is passed as ``target=...``. If the pipeline was compiled with ``optimizer``, the loop
        calls ``pipe.optimizer.step()``.

        If there is no ``loss_fn``, and the model returns no loss for these arguments, ``out = module(...)``
        runs the forwards of the step and returns the outputs of the whole batch on every rank. They have a
        graph: all ranks compute the same loss of them, of any function, and its ``backward`` runs the
        backwards of the step and adds to ``.grad``. Several calls may wait for one backward, as memory
        allows. If outputs are dropped, what was saved for their backward is freed.

        Args:
            outputs: in training, return the output of the model, with its loss; or with ``loss_fn``, a tuple
                of loss and output. All ranks then receive the output of the whole batch. Otherwise the module
                returns the loss, which is its own ``.loss``, ``["loss"]`` and ``[0]``. "differentiable": the
                script computes the loss, even if the model returns one, which then is an output like others.
                "last": as "differentiable", but the ranks of the last stage alone get the outputs. On other
                ranks these have shape, dtype, device and a graph, and no values, and so has the loss until
                its ``backward``. What reads other values there raises InputError.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        return make_module(self, self.unsplit_model, outputs, self._executions.loss_path)

    @property
    def unsplit_model(self) -> nn.Module:
        """The model that was compiled, or that ``from_pretrained`` made. A loaded artifact has none."""
        if self._executions.model is None:
            raise InputError(
                "a loaded artifact has no model, but only the code of its stages; take what pipec.compile "
                "returns"
            )
        return self._executions.model

    @property
    def has_loss_fn(self) -> bool:
        """Whether a ``loss_fn`` with a target computes the loss, and not the model itself."""
        has_target: bool = self._executions.has_target
        return has_target

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
        count, steps, executions = 0, self._steps, self._executions
        if executions.batch != "local":
            raise InputError(
                "join is for replicas with data of their own, but the pipeline has "
                f'batch={executions.batch!r}; pass batch="local" to pipec.compile'
            )
        accumulates = steps.accumulates
        try:
            while self._agreement.is_distributed and (call := executions.next_call_of_others()):
                if call.request.method == "step":
                    executions.train(call)
                    count += 1
                    if after_update is not None and not steps.accumulates:
                        after_update()
                elif call.request.method != "prepare":
                    executions.run(call)
        finally:
            steps.accumulates = accumulates
        return count

    @property
    def num_replicas(self) -> int:
        """The number of parts in which ranks pass a batch, for a ``DistributedSampler``.

        With ``batch="local"`` under ``torchrun`` these are the replicas of each stage. Else it is 1: every
        rank passes the whole batch.
        """
        return self._executions.num_replicas

    @property
    def replica(self) -> int:
        """Which part of a batch this rank passes, from 0. Ranks of the same pipeline have the same."""
        return self._executions.replica

    @exclusive_call
    def train(self, mode: bool = True) -> Self:
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does.

        A loaded artifact refuses the calls for which it holds no code in this mode.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        if self._executions.model is None:
            self._executions.set_mode(mode)
        else:
            self._executions.model.train(mode)
        return self

    @property
    def training(self) -> bool:
        """The model's own mode. Loops that restore the mode of each module assign it, as Lightning does."""
        executions = self.__dict__.get("_executions")
        if executions is None:
            return True
        training: bool = executions.training
        return training

    @training.setter
    def training(self, mode: bool) -> None:
        executions = self.__dict__.get("_executions")
        if executions is not None and executions.model is not None:
            executions.model.training = mode

    @exclusive_call
    def _convert(self, function: Any, recurse: bool = True) -> Self:
        """``half`` and its kin call this. A tensor that ``to`` moves returns to its stage's device."""
        self._executions.adopt_model_changes()
        self._executions.unshard()
        super()._convert(function, recurse)
        self._adopt_registered()
        return self

    def _adopt_registered(self) -> None:
        """Train the tensors that replaced others in this module."""
        self._tensors.adopt_registered()
        self._executions.follow_tensors()

    @exclusive_call
    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """A pipeline of a copy of the model, on the same stages. It compiles its calls itself.

        It has an optimizer of its own, with a copy of the state. Every rank makes the copy then.
        """
        whole = self._executions.model
        if whole is None:
            self.__reduce__()
        with self._executions.unsharded():
            memo.update(copies_of_absent(self._tensors.names.unique().values()))
            model: Any = copy.deepcopy(whole, memo)
        names, updates = ModelTensors.of(model), self._steps.updates
        if updates is not None:
            with materialized(names.unique().values()):
                updates = updates.of(names.unique_parameters())
        make = self._executions.copied(model)
        copied = memo[id(self)] = Pipeline(names, self.ranks, updates, make, self._tensors.read)
        self._tensors.copy_to(copied._tensors)
        return copied

    @property
    def logs(self) -> dict[str, Tensor]:
        """By name, what the loss function of the last step returned besides the loss, for the batch."""
        return self._steps.logs

    @property
    def num_steps(self) -> int:
        """The number of mini-batches trained on, with those before the checkpoint that was loaded.

        While a loop over a stream runs, the number of losses that it was given. A loop that ended early may
        have trained on more, if the schedule is asynchronous; they count, too.
        """
        return self._steps.num_steps

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped because a loss or gradient was not finite.

        See ``on_nan`` and ``precision="fp16-mixed"``.
        """
        return self._steps.num_skipped

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step: 1 unless ``precision="fp16-mixed"``.

        Neither losses nor gradients show it.
        """
        return self.loss_scaler.scale if self.loss_scaler else 1.0

    @property
    def loss_scaler(self) -> LossScale | None:
        """The scale, and the number of updates since it changed, if the loss is scaled."""
        return self._steps.updates.loss_scale if self._steps.updates else None

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the whole model's gradients that ``clip_grad_norm`` has found last, before clipping."""
        updates = self._steps.updates
        return updates.grad_norm if updates else None

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer of the whole model, for LR schedulers and checkpoints.

        ``pipe.step`` makes its updates. After steps inside of ``accumulate``, so does ``optimizer.step()``.
        """
        return self._executions.optimizer

    @exclusive_call
    def _update(self) -> None:
        """Update with the gradients that there are."""
        executions, agreement, updates = self._executions, self._agreement, self._steps.updates
        assert updates is not None, "its optimizer calls this"
        executions.drain()
        agreement.refuse_fork()
        found = updates.has_gradients(self._tensors.here())
        if agreement.is_distributed:
            found = agreement.require_same_call(
                "optimizer.step",
                agreement.describe_updates(),
                lambda notes: any(note.numbers[0] for note in notes),
                [found],
            ).value
        if not found:
            refuse_update()
        execution = executions.execution(executions.artifact)
        recording = self._steps.recording
        recorded = recording.of_update() if recording is not None else None
        execution.update(recorded)
        self._steps.count_update(execution.non_finite, executions.artifact)

    @property
    def programs(self) -> Sequence[Program]:
        """The program of each rank; it prints as text, one instruction a line."""
        return self._artifact.programs

    def source(self, stage: int) -> str:
        """The generated Python of a stage."""
        check_arguments(METHOD_ARGUMENTS, locals())
        sources = self._artifact.sources
        if not 0 <= stage < len(sources):
            raise InputError(f"there is no stage {stage}: the pipeline has stages 0 to {len(sources) - 1}")
        return sources[stage]

    @property
    def _artifact(self) -> Artifact:
        return self._executions.artifact

    @exclusive_call
    def drain(self) -> None:
        """Complete the mini-batches that a stream has begun, so that all stages have made the same updates.

        Every rank calls it. Their losses are the next that the stream yields. Whatever reads or replaces
        parameters through the pipeline drains it before. With a synchronous schedule there is nothing to do.
        """
        self._executions.drain()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let the steps that are made inside a ``with`` add up gradients, for the next update to use.

        That is the update of the next step outside of it, or of ``optimizer.step()``.
        """
        steps = self._steps
        before, steps.accumulates = steps.accumulates, True
        try:
            yield
        finally:
            steps.accumulates = before

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank when all end because one was sent SIGTERM or SIGINT.

        All ranks have made the same steps then, and whatever they did together they can still do, such as
        saving a checkpoint. Afterwards every rank raises KeyboardInterrupt, or for SIGTERM SystemExit with
        status 143. Under ``torchrun`` a signal is noted from the first step on, whatever the rank does, and
        all ranks follow it before the next step, mini-batch or evaluation that they make. In one process
        that holds for SIGTERM once this has been called; Ctrl-C raises at once.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        self._agreement.before_stop(call)

    @exclusive_call
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        It does what ``torch.nn.utils.clip_grad_norm_`` does to the unsplit model, wherever the parameters
        are; a tied parameter counts once. Every rank calls it. Returns the norm before.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        if self._steps.updates is not None:
            raise InputError(
                "pipe.step(...) has already updated the parameters: the pipeline was compiled with "
                "optimizer=...; pass clip_grad_norm=... to pipec.compile"
            )
        total = self._executions.norms.total(f"clip_grad_norm_({max_norm}, {norm_type})", norm_type)
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, total)
        return total

    @exclusive_call
    def state_dict(self, *args: Any, all_ranks: bool = False, **kwargs: Any) -> Any:
        """The state of the whole model, under the model's names.

        Under ``torchrun`` every rank calls this, unless each holds the whole model. Rank 0, or with
        ``all_ranks`` every rank, gets copies on the CPU, and the others get an empty dict, which refuses to
        be pickled, so that it is not written over rank 0's. ``local_state_dict`` has what a rank holds
        itself.

        Raises:
            InputError: under ``torchrun``, not all ranks call it, or ``keep_vars`` asks for the tensors
                themselves.
        """
        refuse_dcp(self._tensors.are_spread)
        if not self._tensors.are_spread:
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

    @contextlib.contextmanager
    def optimizer_state_on_rank_0(self) -> Iterator[None]:
        """Let ``state_dict`` of an optimizer be the whole model's on rank 0 alone inside a ``with``."""
        self._executions.state_readers = [0]
        try:
            yield
        finally:
            self._executions.state_readers = None

    @exclusive_call
    def local_state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """The state of this rank's stages, or with ``optimizer``, what this rank has of a script's optimizer.

        In one process it is the whole. Where parameters are kept in shards, they are gathered and copied:
        every rank then calls this.
        """
        if optimizer is not None:
            with local_state():
                return optimizer.state_dict()
        return {name: x for name, x in self._state().items() if not is_absent(x)}

    def _state(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of torch. What is kept in shards is gathered and copied."""
        self._tensors.require_values()
        with self._executions.unsharded():
            state = super().state_dict(*args, **kwargs)
            updates = self._steps.updates
            if updates is None or not updates.sharded_names:
                return state
            return {
                name: x.detach().clone() if isinstance(x, Tensor) and not is_absent(x) else x
                for name, x in state.items()
            }

    @exclusive_call
    def full_state_dict(self, all_ranks: bool = False) -> dict[str, Tensor]:
        """A copy of the whole model's state on the CPU, under its own names. Every rank calls this.

        Under ``torchrun`` rank 0 gets it, and the others get an empty dict; with ``all_ranks``, all get it.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        names = self._state_names()
        whole = self._gather("full_state_dict", set(names.values()), all_ranks)
        return {name: whole[first] for name, first in names.items() if whole}

    @exclusive_call
    def write_whole(self, folder: str, write: Callable[[dict[str, Tensor]], object]) -> None:
        """Call ``write`` with the whole state on rank 0. Every rank calls this, and raises its error."""
        if self._agreement.is_distributed:
            self._agreement.require_same_call(f"saving to {folder!r}", {})
        state = self.full_state_dict()

        def save() -> None:
            with saved_by_this_process(self.unsplit_model):
                write(state)

        call_on_rank_0(self.ranks, f"saving to {folder}", save)

    @exclusive_call
    def gather_into(self, model: nn.Module, all_ranks: bool = False) -> None:
        """Write the whole model's parameters and buffers into ``model``, on rank 0 or on all ranks.

        Every rank calls this. ``model`` is the one that was compiled, or one of the same structure. The one
        that was compiled has its memory until the next step, which empties it again.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        whole = self._gather("gather_into", self._tensors.names.unique(), all_ranks)
        if whole:
            self._tensors.needs_placement = True
            fill_tensors(model, {name: whole[first] for name, first in self._tensors.canonical.items()})

    @exclusive_call
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of the whole model, or of this rank's stages. Every rank calls this.

        What belongs to other ranks' stages is passed over. A rank that is given an empty state, as
        ``state_dict`` returns on other ranks than 0, takes the values that rank 0 was given. Keys are missing
        alike on all ranks, unless the state is one of ``local_state_dict``, which has this rank's alone.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        self._tensors.require_values()
        if self._agreement.is_distributed and self._tensors.owner_ranks:
            self._executions.adopt_on_all_ranks(f"load_state_dict(strict={strict}, assign={assign})")
            state_dict = self._shared_state(state_dict)
        self._executions.adopt_model_changes()
        here, canonical = self._tensors.here(every_name=True), self._tensors.canonical
        own = {name: x for name, x in state_dict.items() if name in here or name not in canonical}
        every = self._tensors.names.every()
        is_whole = not here.keys() >= state_dict.keys() & canonical.keys()
        own |= {
            name: every[name]
            for name in self._state_names()
            if name not in here and name in every and (name in state_dict or not is_whole)
        }
        if assign:
            self._executions.unshard()
        with self._executions.unsharded():
            result = super().load_state_dict(own, strict, assign)
        if assign:
            self._adopt_registered()
        return result

    def _shared_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state, or rank 0's tensors of this rank if this rank was given an empty one."""

        def decide(notes: Sequence[RankNote]) -> Any:
            lacking = [rank for rank, note in enumerate(notes) if rank and note.numbers[0]]
            tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)} if lacking else {}
            own = self._tensors.names.every()
            for name, x in tensors.items():
                if name in own and own[name].shape != x.shape:
                    raise InputError(
                        f"{name} is {list(x.shape)} in the state and {list(own[name].shape)} in the model; "
                        "load the state of a model of the same sizes"
                    )
            kinds = {name: (str(x.dtype).removeprefix("torch."), [*x.shape]) for name, x in tensors.items()}
            return [lacking, [[name, *kind] for name, kind in kinds.items()]]

        answer = self._agreement.require_same_call("load_state_dict", {}, decide, [not state])
        lacking, described = answer.value
        rank, owners, canonical = self.ranks.world.rank, self._tensors.owner_ranks, self._tensors.canonical
        found: dict[str, Any] = {}
        for name, dtype, shape in described:
            sent = state[name] if rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
            readers = [each for each in lacking if each in owners.get(canonical.get(name, ""), ())]
            found[name] = self.ranks.exchange.broadcast_tensor(0, f"loading {name}", sent, readers)
        return found if rank in lacking else state

    def _gather(self, method: str, names: Collection[str], all_ranks: bool) -> dict[str, Tensor]:
        """Copies of the tensors of the whole model that have these first names."""
        self._tensors.require_values()
        self._executions.adopt_on_all_ranks(f"{method}(all_ranks={all_ranks})")
        with self._executions.unsharded():
            return self._tensors.gathered(names, range(self.ranks.count) if all_ranks else [0])

    def _state_names(self) -> dict[str, str]:
        """The names of a state dict, each with the first name of its tensor."""
        model, canonical = self._executions.model, self._tensors.canonical
        names = super().state_dict(keep_vars=True) if model is None else model.state_dict(keep_vars=True)
        return {name: canonical[name] for name in names if name in canonical}

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give the tensors on the meta device memory on ``device``. Others keep their values, and move there.

        A step refuses tensors that have been given no values by then.
        """
        on_meta = [fqn for fqn, tensor in self._tensors.here().items() if tensor.is_meta]
        self._convert(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device), recurse)
        tensors = self._tensors.here()
        self._tensors.uninitialized.mark({fqn: x for fqn, x in tensors.items() if fqn in on_meta})
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own modules, the model itself first. The next call follows changes in them."""
        model = self._executions.model
        named = super().named_modules if model is None else model.named_modules
        return named(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: stages are compiled already."""
        raise InputError(
            "pipe.compile(...) would trace forward, which runs compiled stages on all ranks. Leave it out: "
            'pipec.compile(..., kernels="inductor") compiles the code of each stage'
        )

    def __reduce__(self) -> Any:
        raise InputError(
            "a pipeline cannot be pickled, nor a loaded one copied: it holds threads and connections. Save "
            "state_dict(), or full_state_dict() under torchrun; or write and load an artifact once more"
        )

    @exclusive_call
    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        extra: Any = None,
        asynchronous: bool = False,
        then: Callable[[], object] | None = None,
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
            then: called on rank 0 once the checkpoint is at its place.

        Returns:
            What has a ``result()`` once the checkpoint is at its place, or the error.

        Raises:
            CheckpointError: it cannot be written, or ``directory`` holds something that this run has neither
                written nor loaded.
            InputError: something cannot be saved, or differs from rank to rank.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        training_state = {"optimizer": optimizer, "scheduler": scheduler, "extra": extra}
        return self._checkpoints.save(directory, training_state, asynchronous, then)

    @exclusive_call
    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model for ``from_pretrained`` of transformers, as its own ``save_pretrained`` does.

        Every rank calls this, and writes the weights of its stages. The new folder replaces ``directory`` in
        one step, with the other files of the folder, such as a tokenizer's. All ranks see the same.

        Raises:
            CheckpointError: a file cannot be written.
            InputError: the model is not one of transformers, or its tensors cannot be written one at a time.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        self._checkpoints.save_pretrained(directory)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is written in the background. Raises what went wrong with it."""
        self._checkpoints.finish_saving()

    @property
    def ranks(self) -> Ranks:
        """The processes of the pipeline, and which one this is."""
        return self._agreement.ranks

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

        These are what ``step`` runs, and what the last ``eval_step`` and calls have run, if there were any.
        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all, and returns once
        the directory is complete.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        values = self._gather("save", self._tensors.names.unique(), all_ranks=False) if tensors else None
        names, saved, refused = self._tensors.names, {}, {}
        ties = {name: first for name, first in names.canonical.items() if name != first}
        for mode, compiled in self._executions.saved().items():
            try:
                saved[mode] = compiled.as_saved(ties, sorted(names.buffers.keys() - names.persistent))
            except NotImplementedError as error:
                refused[mode] = error
        main = next(mode for mode in (Mode.TRAIN, Mode.OUTPUTS) if mode in {*saved, *refused})
        if main in refused:
            raise InputError(
                "the step cannot be saved: the model returns values that are no tensors, or classes that are "
                f"not registered with torch.export.register_dataclass ({refused[main]})"
            )
        for mode, reason in refused.items():
            notice(f"the artifact is without the {mode} that was compiled: {reason}")
        artifact = saved.pop(main)
        others = {MODE_FOLDERS[mode]: other for mode, other in saved.items()}
        write = functools.partial(write_artifact, artifact, Path(directory), values, others)
        if tensors and self.ranks.world.is_distributed:
            call_on_rank_0(self.ranks, f"saving to {directory}", write)
        elif self.ranks.world.rank == 0:
            write()

    @property
    def plan(self) -> "PrintablePlan":
        """What the compiler decided. It prints as a table."""
        from pipec.plan.plan_table import PrintablePlan

        return PrintablePlan.of(self._artifact.plan, self._artifact.representative_programs)

    def simulate(self) -> "Timeline":
        """The timeline of one step, predicted from the programs and the plan's costs."""
        from pipec.plan.predictions import simulate_plan

        return simulate_plan(self._artifact.plan, self._artifact.representative_programs)

    def memory(self) -> "StepMemory":
        """What each rank holds in a step that begins with ``.grad`` None, predicted from the programs.

        It prints as a table. A step that adds to gradients which were kept, as when it accumulates or after
        ``zero_grad(set_to_none=False)``, holds these from its start, and its own sums beside them where these
        travel between replicas, or with ``on_nan`` and without ``optimizer``.
        """
        from pipec.pipeline.logged_metrics import predicted_memory

        return predicted_memory(self.plan, self.programs)

    def visualize(self, path: str | Path | None = None, trace: "Trace | None" = None) -> str:
        """The timelines as text: the simulated one, or with a ``trace`` the planned and the measured one.

        If ``path`` is given, rank 0 also draws them there: .html is a page to explore, .svg and .txt are
        pictures, and .json is for Perfetto and chrome://tracing. Another ending raises InputError. A
        notebook shows the page in place of the text.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        from pipec.drawn_artifacts import draw_artifact

        drawn = Path(path) if path is not None and self.ranks.world.rank == 0 else None
        return draw_artifact(self._artifact, trace, drawn, self._executions.memory_bytes)

    @contextlib.contextmanager
    def trace(self, trace: "Trace | None" = None, every: int = 1) -> "Iterator[Trace]":
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
        from pipec.drawn_artifacts import add_recorded_steps
        from pipec.timeline.trace import Trace

        trace, steps = Trace() if trace is None else trace, self._steps
        outer = steps.recording
        recording = Recording(every, steps.num_steps, lambda: sum(self.compile_seconds.values()))
        steps.recording = recording
        try:
            yield trace
            recording.steps = self.ranks.gathered(recording.steps)
        except BaseException:
            if self._agreement.is_distributed:  # the other ranks may be elsewhere
                recording.steps.clear()
            raise
        finally:
            steps.recording = outer
            recording.drop_unfinished()
            if recording.steps:
                add_recorded_steps(trace, self._artifact, recording)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._executions.compile_seconds)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _are_optimizers(given: object) -> bool:
    return all(isinstance(each, Optimizer) for each in listed(given))


def _are_schedulers(given: object) -> bool:
    methods = ("state_dict", "load_state_dict", "step")
    return all(hasattr(each, method) for each in listed(given) for method in methods)


def _is_trace(given: object) -> bool:
    from pipec.timeline.trace import Trace

    return isinstance(given, Trace)


METHOD_ARGUMENTS = {
    "after_update": FUNCTION | NONE,
    "all_ranks": FLAG,
    "asynchronous": FLAG,
    "batches": ITERABLE,
    "call": FUNCTION,
    "directory": PATH,
    "max_norm": NUMBER,
    "microbatches": FLAG,
    "norm_type": NUMBER,
    "resume": FLAG | NONE,
    "stage": instance("the number of a stage", int),
    "mode": FLAG,
    "outputs": FLAG | one_of("differentiable", "last"),
    "optimizer": ArgumentRule("the optimizer that the script steps, or a list of them", _are_optimizers)
    | NONE,
    "scheduler": ArgumentRule("an LR scheduler, or a list of them", _are_schedulers) | NONE,
    "every": integer_between(1, 10**9),
    "model_only": FLAG,
    "model": instance("an nn.Module", nn.Module),
    "path": PATH | NONE,
    "state_dict": instance("a mapping of names to tensors", Mapping),
    "tensors": FLAG,
    "then": FUNCTION | NONE,
    "trace": ArgumentRule("what the with of trace() gave", _is_trace) | NONE,
}
"""What the arguments of methods must be. Those of the model are the model's own."""
