"""The executions of a pipeline: artifacts linked to its tensors, which run the calls that all ranks make.

Those of a saved artifact are given: no model and no compiler, only the plan, the code and the programs.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipec.artifact.artifact import Artifact, MicrobatchGroups
from pipec.errors import InputError
from pipec.ir import InputLeaf, Mode, Plan, Sizes, Value
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.batch_split import (
    leaf_path,
    repeated_tensors,
    require_equal_rows,
    split_sizes,
    variable_values,
)
from pipec.ir.text_format import evaluate_dim, format_value, holds, names_in
from pipec.runtime.absent_outputs import AbsentOutput, LastOutput, absent_output
from pipec.runtime.absent_tensors import is_absent, release_sharded
from pipec.runtime.call_agreement import CallAgreement
from pipec.runtime.local_gradients import GradientNorms
from pipec.runtime.loss_tensors import EVAL_LOSS, STEP_LOSS, StepLoss
from pipec.runtime.messages.call_description import CallDescription, describe_leaf, describe_microbatches
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import PipelineOptimizer, StateShard
from pipec.runtime.random_seeds import advance_default_generator, peek_seed
from pipec.runtime.stages.input_layout import as_contiguous
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import CallLeaves, Execution
from pipec.runtime.step.microbatch_weight import MicrobatchWeight, loss_weights
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.step_results import merge_slices, result_values, zeros_of
from pipec.runtime.step.stream_results import BatchResult, StreamBatch
from pipec.runtime.step_state import StepState
from pipec.runtime.stream.call_arguments import CallArguments, GivenMicrobatches, StepArguments, in_microbatch
from pipec.runtime.stream.stream_session import CompiledStream, StreamSession
from pipec.runtime.tensors import Tensors, owner_ranks
from pipec.runtime.waiting_forward import OutputsOf, WaitingForward
from pipec.torch_compat import pytree

UnflattenCall = Callable[[list[Any]], tuple[Any, dict[str, Any], Any]]
"""Makes arguments, keyword arguments and the target of their leaves."""

OnStarted = Callable[[], None]
"""What a step calls as soon as it draws no more random numbers, and before it works."""


@dataclass(frozen=True)
class CallRequest:
    """The method of a pipeline that was called, with what decides a compilation."""

    method: str
    mode: Mode
    outputs: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} with outputs" if self.outputs else self.method


STEP = CallRequest("step", Mode.TRAIN)


class Leaves(CallArguments):
    """The leaves of all arguments of a call, in the place of positional arguments."""


@dataclass(frozen=True)
class Call:
    """A call that all ranks make, with what executes it: an artifact for each group of microbatches.

    ``leaves`` are those of the arguments, with their rows in front, and ``axes`` say where they are passed.
    ``with_leaves`` makes arguments, keyword arguments and target of others. ``rows`` are those of the whole
    batch. ``values`` are its other sizes. ``seed`` is the next number of torch's default generator on rank 0.
    With ``batch="local"``, ``replica`` says which part of the batch the leaves are, of how many.

    If microbatches are given, ``weights`` are those of their losses, and each of them counts as a row, and
    has leaves and values of its own.

    ``linked`` has the execution of each group, with its rows and the weights of its losses; ``draws`` says
    whether any draws random numbers. ``trained`` is the artifact of a step, which the pipeline shows.
    """

    request: CallRequest
    leaves: CallLeaves
    with_leaves: UnflattenCall
    axes: Sequence[BatchAxis | None]
    rows: int
    values: Sequence[Sizes]
    groups: MicrobatchGroups
    seed: int
    replica: tuple[int, int] = (0, 1)
    weights: Sequence[float] = ()
    linked: Sequence[tuple[Execution, BatchSlice]] = ()
    draws: bool = False
    trained: Artifact | None = None

    @property
    def first(self) -> Artifact:
        """What executes the first microbatches, and says what results there are."""
        return self.groups[0][0]


CallT = TypeVar("CallT", bound=Call)


class Executions:
    """Agrees with the other ranks on the calls of a pipeline, and runs them by artifacts.

    These are ``given``, for arguments of the shapes that they were compiled for; a subclass compiles them for
    the calls of a model. An artifact is linked at its first call, and again after tensors were replaced or
    sharded in another way. ``trained`` is the one that ``step`` runs, None until it is compiled. ``session``
    runs the mini-batches of an asynchronous stream; the results of those that it has completed, and whose
    losses the loop is still to be given, are ``undelivered``. ``model`` is the one that was compiled, if
    there is one. ``has_target`` says whether a step has a target beside the model's arguments.
    """

    model: nn.Module | None = None
    loss_path: Any = None
    """Where the loss is in the model's results, if the user says so."""
    batch = "same"
    """Whose arguments count, as ``pipec.compile`` says."""

    def __init__(
        self,
        tensors: Tensors,
        agreement: CallAgreement,
        steps: StepState,
        microbatch_weight: MicrobatchWeight | None,
        given: Mapping[Mode, Artifact] = MappingProxyType({}),
    ) -> None:
        self.tensors, self.agreement, self.steps = tensors, agreement, steps
        self.ranks, self._microbatch_weight = agreement.ranks, microbatch_weight
        self.norms = GradientNorms(tensors, agreement)
        self.non_finite: NonFinite | None = None
        """Why the last step was skipped, if it was."""
        self._linked: dict[Artifact, Execution] = {}
        self._num_forwards, self._forwards = 0, WeakSet[WaitingForward]()
        self.trained: Artifact | None = None
        self.session: StreamSession | None = None
        self.undelivered: Sequence[BatchResult] = ()
        self.state_readers: Sequence[int] | None = None
        """The ranks that get the state of an optimizer; None: all."""
        self.compile_seconds: Mapping[str, float] = {}
        """How long each step of compilation took, summed over all compilations."""
        self._given = given
        if given:
            self.trained = given.get(Mode.TRAIN) or given[Mode.OUTPUTS]
            plan = self.trained.plan
            self._training = plan.training
            self._microbatch_weight = microbatch_weight or plan.microbatch_weight
            self.has_target = any(path.startswith("target") for path in plan.arguments)
            owners = [owner_ranks(each.plan) for each in given.values()]
            tensors.owner_ranks = {
                fqn: tuple(dict.fromkeys(rank for own in owners for rank in own.get(fqn, ())))
                for fqn in dict.fromkeys(name for own in owners for name in own)
            }

    def agree(self, request: CallRequest, arguments: StepArguments) -> Call:
        """The call that all ranks make, with its executions.

        A rank that cannot use its arguments raises only when the others know.
        """
        self.drain()
        self.agreement.begin(self.drain)
        if not self.agreement.is_distributed:
            return self.linked(self._checked(request, arguments))
        try:
            call = self._checked(request, arguments)
            description, refusal = self._described(call), None
        except InputError as error:
            description, refusal = {"refused": str(error)}, error
        if request.mode.trains:
            description |= self.agreement.describe_updates()
        answer = self.agreement.require_same_call(
            request.name, description, lambda _: None if refusal else call.seed
        )
        self.agreement.exit_on_signal(self.drain, answer.stops)
        if refusal is not None:
            raise refusal
        return self.linked(replace(call, seed=answer.value))

    def linked(self, call: CallT) -> CallT:
        """The call with its executions; without any if it is only prepared."""
        if call.request.method == "prepare":
            return call
        if len(call.groups) > 1 and call.first.plan.sync_spec.may_skip_step:
            raise InputError(
                f"{_several_programs(call)}; so a step cannot be skipped as a whole. Pass others, or compile "
                "without on_nan=... and in another precision than 'fp16-mixed'"
            )
        executions = [self.execution(artifact) for artifact, _ in call.groups]
        draws = any(artifact.has_random_operators for artifact, _ in call.groups)
        return replace(call, linked=[*zip(executions, self._batch_slices(call), strict=True)], draws=draws)

    def matching(self, first: Call, arguments: StepArguments) -> Call | None:
        """A call as ``first`` with other arguments; None if they need other programs."""
        call = self._checked(STEP, arguments)
        is_equal = call.groups == first.groups and (bool(call.weights) or call.values == first.values)
        return replace(call, seed=first.seed) if is_equal else None

    def describe_batch(self, arguments: StepArguments) -> CallDescription:
        """What must be equal on all ranks of a batch of a stream. Raises InputError if it does not fit."""
        return self._described(self._checked(STEP, arguments))

    def next_call_of_others(self) -> Call | None:
        """The next call of the ranks that have rows, on one that has joined; None if all have joined."""
        raise NotImplementedError

    def is_valid(self, call: Call) -> bool:
        """Whether the programs of a call are right for the model as it is now."""
        return True

    def saved(self) -> Mapping[Mode, Artifact]:
        """What a saved artifact holds: what runs a step, and evaluations that were compiled."""
        return self._given

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._training if self.model is None else self.model.training

    def set_mode(self, training: bool) -> None:
        """Run in this mode. A call for which there is no code in it is refused."""
        self._training = training

    def _chosen(self, request: CallRequest) -> Artifact:
        """What runs a call. Raises InputError if it was not saved, or for the other mode of the model."""
        given = self._given.get(request.mode)
        has_outputs = request.mode is not Mode.TRAIN or not request.outputs
        if given is None or not (has_outputs or len(given.plan.outputs) > 1 + len(given.plan.log_names)):
            raise InputError(
                f"{request.name} was called, but this artifact holds no code for it; call that, or "
                f"prepare(...) for a step, on the pipeline of pipec.compile, and then save(...)"
            )
        if given.plan.training != self._training:
            modes = {True: "training", False: "evaluation"}
            raise InputError(
                f"{request.name} was called in {modes[self._training]} mode, but the artifact holds its code "
                f"for {modes[given.plan.training]} mode alone; call train({given.plan.training}) before, or "
                f"save one that was compiled after train({self._training})"
            )
        return given

    def _described(self, call: Call) -> CallDescription:
        inputs = call.first.plan.inputs
        described = [{x.path: describe_leaf(_leaf(x, leaves)) for x in inputs} for leaves in call.leaves]
        return describe_microbatches(described, call.weights)

    def _checked(self, request: CallRequest, arguments: StepArguments) -> Call:
        """The call. Raises InputError if the arguments are not those of the artifact."""
        plan = self._chosen(request).plan
        if (
            plan.has_given_microbatches
            and plan.num_microbatches == 1
            and isinstance(arguments, CallArguments)
        ):
            arguments = GivenMicrobatches([arguments])
        if isinstance(arguments, GivenMicrobatches) != plan.has_given_microbatches:
            made_for, meant = "a batch to be split", "the arguments of a batch"
            if plan.has_given_microbatches:
                made_for, meant = "given microbatches", "microbatches=[...]"
            raise InputError(f"this artifact was compiled for {made_for}: pass {meant} to {request.method}")
        if not isinstance(arguments, GivenMicrobatches):
            return self._checked_call(request, arguments)
        calls = list[Call]()
        for number, each in enumerate(arguments.calls(self.has_target)):
            with in_microbatch(number):
                calls.append(self._checked_call(request, each))
        most = plan.num_microbatches
        sizes = [min(1, max(0, len(calls) - k)) for k in range(-(-len(calls) // most) * most)]
        return replace(
            calls[0],
            leaves=[call.leaves[0] for call in calls],
            rows=len(calls),
            values=[call.values[0] for call in calls],
            groups=[(self._given[request.mode], sizes[k : k + most]) for k in range(0, len(sizes), most)],
            weights=arguments.loss_weights(len(calls)),
        )

    def _checked_call(self, request: CallRequest, arguments: CallArguments) -> Call:
        """The call of a batch, or of one of the given microbatches, which counts as one row."""
        given = self._chosen(request)
        plan, leaves, with_leaves = given.plan, [*arguments.args], _as_positional
        if not isinstance(arguments, Leaves):
            kwargs = dict(sorted(arguments.kwargs.items()))
            tree = {"args": arguments.args, "kwargs": kwargs, "target": arguments.target}
            found, structure = pytree.tree_flatten_with_path(tree)
            paths, leaves = [leaf_path(keys) for keys, _ in found], [leaf for _, leaf in found]
            if paths != list(plan.arguments):
                raise InputError(
                    f"{request.method} was given {_listed(paths)}; this artifact was made for "
                    f"{_listed(plan.arguments)}. Pass the same, by position or by name as there"
                )

            def with_leaves(leaves: list[Any]) -> Any:
                return tuple(pytree.tree_unflatten(leaves, structure).values())

        if plan.repeated not in (None, repeated_tensors(leaves)):
            same = [f"{plan.arguments[k]} is {plan.arguments[first]}" for k, first in plan.repeated]
            raise InputError(
                "forward() may ask which of its arguments are one tensor, and this artifact was made for "
                f"calls in which {' and '.join(same) or 'none is another'}. Pass the same, or save one for "
                "each"
            )
        rows = 1 if plan.has_given_microbatches else _batch_size(plan, leaves)
        leaves = [_rows_in_front(plan, k, as_contiguous(leaf), rows) for k, leaf in enumerate(leaves)]
        sizes = split_sizes(rows, plan.num_microbatches)
        values = values_in(plan, leaves)
        for leaf in plan.inputs:
            _check(leaf, leaves, {"b": rows, **values}, plan.batch_axes[leaf.position])
        distinct = {*sizes} - {0}
        if not plan.dynamic_batch and distinct != {plan.microbatch_size}:
            raise InputError(
                f"this artifact takes microbatches of exactly {plan.microbatch_size} rows, so a batch of "
                f"{plan.microbatch_size * plan.num_microbatches}; the batch has {rows}. "
                "Pass as many: the model makes a constant of the batch"
            )
        _check_guards(plan, distinct, values)
        if plan.model_collectives:
            require_equal_rows(sizes)
        groups = [(given, sizes)]
        return Call(request, [leaves], with_leaves, plan.batch_axes, rows, [values], groups, peek_seed())

    @property
    def may_differentiate(self) -> bool:
        """Whether a script may compute a loss of outputs."""
        return Mode.OUTPUTS in self._given

    @property
    def may_be_asynchronous(self) -> bool:
        """Whether the schedule is asynchronous, or a search may find one that is."""
        return self.artifact.plan.sync_spec.stream is not None

    @property
    def num_replicas(self) -> int:
        """The number of parts in which ranks pass a batch."""
        return 1

    @property
    def replica(self) -> int:
        """The part of a batch that this rank passes, from 0."""
        return self.ranks.world.rank % self.num_replicas

    @property
    def memory_bytes(self) -> Sequence[float]:
        """The memory of each device, as far as it is known."""
        return ()

    def describe_model(self) -> CallDescription:
        """What must be equal on all ranks of the model, which is taken as it is now."""
        return {}

    def adopt_model_changes(self) -> None:
        """Take over tensors that the model was given."""

    def adopt_on_all_ranks(self, call: str) -> None:
        """Take over tensors that the model was given, alike on all ranks, which make this ``call``."""
        if self.agreement.is_distributed:
            self.agreement.require_same_call(call, self.describe_model())
        self.adopt_model_changes()

    def copied(self, model: nn.Module) -> "MakeExecutions":
        """Makes the executions of a copy of the model."""
        raise NotImplementedError

    def follow_tensors(self) -> None:
        """Run with the tensors that the pipeline owns by now."""
        self.clear()

    @property
    def artifact(self) -> Artifact:
        """The artifact that ``step`` runs. Raises InputError if it is not compiled yet."""
        if self.trained is None:
            raise InputError(
                "the pipeline is not compiled yet: call step(...), or prepare(...) with the arguments of step"
            )
        return self.trained

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer whose updates the programs make. Raises InputError if they make none."""
        if self.steps.updates is None:
            raise InputError(
                "the pipeline has no optimizer of its own; pass optimizer=... to pipec.compile, such as "
                "functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        return self.steps.updates.optimizer

    def drain(self) -> None:
        """Complete the mini-batches that a stream has begun. All stages have made the same updates then."""
        session, self.session = self.session, None
        if session is not None:
            self.undelivered = session.drain(self.optimizer.hyperparameters())

    def deliver(self, result: BatchResult, found: NonFinite | None = None) -> Tensor:
        """The loss of a completed step, which is counted. Its logs are kept."""
        self.steps.logs = dict(result.logs)
        self.steps.count(found, self.trained)
        return result.loss

    def train(self, call: Call, on_started: OnStarted | None = None) -> Any:
        """Make a step, and count it. Returns what ``loss`` does."""
        leaves_gradients = self.steps.updates is None and self.agreement.is_distributed
        if leaves_gradients:
            self.norms.unmark()
        loss = self.loss(call, on_started)
        if leaves_gradients and self.tensors.are_spread:
            self.norms.mark()
        self.steps.count(self.non_finite, self.trained)
        return loss

    def loss(self, call: Call, on_started: OnStarted | None = None) -> Any:
        """The loss, which explains its ``backward``, and the output if requested. The logs are kept."""
        results, (artifact, _) = self.run(call, on_started), call.groups[0]
        names, outputs = artifact.plan.log_names, artifact.plan.outputs
        self.steps.logs = {name: results[kept] for name, kept in zip(names, outputs[1:], strict=False)}
        loss = StepLoss.of(results["loss"], STEP_LOSS if call.request.mode is Mode.TRAIN else EVAL_LOSS)
        if not call.request.outputs:
            return loss
        return loss, _output_of(artifact, results, outputs[1 + len(names) :])

    def differentiable_outputs(self, call: Call, anchor: Tensor) -> Any:
        """The model's output, with a graph whose backward runs the backwards of the call."""
        if call.draws:
            advance_default_generator()
        plans, parts, begun = [artifact.plan for artifact, _ in call.groups], [], []
        for execution, batch_slice in call.linked:
            results, suspended = execution.forward(call.leaves, batch_slice, call.seed, self.steps.recorded)
            parts.append(results)
            begun.append((execution, suspended))
        first, batch_slice = call.linked[0]
        if first.results_are_elsewhere:
            values = result_values(plans[0])
            merged = {value.name: self._absent_output(value, first, batch_slice) for value in values}
        else:
            merged = {**_merged(call, parts)}
        changed = {fqn for plan in plans for stage in plan.stages for fqn in stage.updated_buffers}
        read = {fqn: x for fqn, x in self.tensors.here().items() if fqn not in changed and not is_absent(x)}
        read |= {
            path: x
            for path, x in zip(plans[0].arguments, call.leaves[0], strict=False)
            if isinstance(x, Tensor)
        }
        self._num_forwards += 1
        waiting = WaitingForward(self._num_forwards, begun, read, self._run_backward)
        self._forwards.add(waiting)
        names = [each.name for each in waiting.trained]
        outputs = [merged[name] for name in names]
        if self.agreement.is_distributed and len(waiting.readers) < self.ranks.count:
            outputs = [x if isinstance(x, AbsentOutput) else x.as_subclass(LastOutput) for x in outputs]
        trained = OutputsOf.apply(anchor, waiting, len(outputs), *outputs, *self.tensors.trained_here())  # type: ignore[no-untyped-call]
        results = _restored(call.first, {**merged, **dict(zip(names, trained, strict=True))})
        return _output_of(call.first, results, plans[0].outputs)

    def _absent_output(self, value: Value, execution: Execution, batch_slice: BatchSlice) -> Tensor:
        """A result of the batch without values, for a process that does not get it."""
        memory = zeros_of(value, batch_slice.batch_names, torch.device("meta"))
        return absent_output(memory, execution.result_ranks, next(iter(self.ranks.devices.values())))

    def _run_backward(self, waiting: WaitingForward, gradients: Mapping[str, Tensor | None]) -> None:
        """Run the backwards of a forward. All ranks call this alike, or all raise InputError.

        ``gradients`` are those of outputs, by their names.
        """
        self.drain()
        steps, is_distributed, before = self.steps, self.agreement.is_distributed, self.steps.accumulates
        gradients = {name: None if x is None else x.contiguous() for name, x in gradients.items()}
        obstacle = waiting.obstacle()
        if is_distributed:
            loss = LastOutput.differentiated
            answer = self.agreement.require_same_backward(
                waiting.number, gradients, obstacle, waiting.readers, loss
            )
            self.agreement.exit_on_signal(self.drain, answer.stops)
            if isinstance(loss, AbsentOutput):
                loss.value = answer.value
        if obstacle:
            raise InputError(obstacle)
        unset = [*self._without_gradient(waiting.untrained(gradients))]
        leaves_gradients = steps.updates is None and is_distributed
        if leaves_gradients:
            self.norms.unmark()
        for execution, suspended in (begun := waiting.take()):
            execution.backward(suspended, gradients, steps.recorded)
        for parameter in unset:
            parameter.grad = None
        if leaves_gradients and self.tensors.are_spread:
            self.norms.mark()
        steps.accumulates = True
        try:
            steps.count(begun[-1][0].non_finite, self.trained)
        finally:
            steps.accumulates = before

    def _without_gradient(self, untrained: Iterable[str]) -> Iterator[Tensor]:
        """Those of some parameters that have no gradient, and are to have none."""
        here = self.tensors.here()
        for fqn in untrained:
            if self.steps.updates is not None:
                raise InputError(
                    f"the loss does not depend on {fqn}, but the optimizer of the pipeline updates all "
                    "parameters: freeze it with requires_grad_(False), or leave out optimizer=... and step "
                    "an optimizer of torch, which passes over parameters without a gradient"
                )
            if fqn in here and here[fqn].grad is None:
                yield here[fqn]

    def output(self, call: Call) -> Any:
        """The model's output."""
        return _output_of(call.first, self.run(call), call.first.plan.outputs)

    def run(self, call: Call, on_started: OnStarted | None = None) -> Mapping[str, Tensor]:
        """The results of a call, by their names in the plan."""
        artifact, trains, parts = call.first, call.request.mode is Mode.TRAIN, list[Mapping[str, Tensor]]()
        if call.draws:
            advance_default_generator()
        if on_started is not None:
            on_started()
        recorded = self.steps.recorded if trains else None
        with contextlib.nullcontext() if trains else self.unsharded([each.plan for each, _ in call.groups]):
            for execution, batch_slice in call.linked:
                update = len(parts) + 1 == len(call.linked) and not self.steps.accumulates
                parts.append(execution.run(call.leaves, batch_slice, call.seed, recorded, update))
                self.non_finite = execution.non_finite
        results = _merged(call, parts)
        return _restored(artifact, results) if artifact.axes else results

    def _batch_slices(self, call: Call) -> Sequence[BatchSlice]:
        """The rows and the loss weights of each group of microbatches."""
        if call.weights:
            return list(_given_slices(call))
        every, weights = [size for _, sizes in call.groups for size in sizes], None
        if call.request.mode.has_loss:
            given = self._microbatch_weight, call.leaves[0], call.with_leaves
            weights = loss_weights(*given, call.axes, every)
        batch_slices, start, first = list[BatchSlice](), 0, 0
        for _, sizes in call.groups:
            own = None if weights is None else weights[first : first + len(sizes)]
            values = [*call.values] * len(sizes)
            batch_slices.append(BatchSlice(sizes, call.rows, start, first, own, *call.replica, values))
            start, first = start + sum(sizes), first + len(sizes)
        return batch_slices

    def compiled_stream(self, arguments: StepArguments) -> CompiledStream | None:
        """What runs a batch, and those after it; None if its steps do not overlap after all.

        Every rank calls it with the same arguments.
        """
        first = self.agree(STEP, arguments)
        execution, _ = first.linked[0]
        if not execution.is_stream:
            return None
        if len(first.groups) > 1:
            raise InputError(f"{_several_programs(first)}; an asynchronous schedule takes one. Pass others")
        if first.draws:
            advance_default_generator()

        def split(arguments: StepArguments) -> StreamBatch | None:
            call = self.matching(first, arguments)
            return None if call is None else execution.batch(call.leaves, *self._batch_slices(call))

        return CompiledStream(execution, first.seed, split, lambda: self.is_valid(first))

    def execution(self, artifact: Artifact) -> Execution:
        """The artifact linked to the tensors.

        Raises:
            InputError: a tensor has no values; or the artifact updates weights, and there is no optimizer.
        """
        if artifact not in self._linked:
            self.tensors.refuse_unset(artifact.plan)
        updates = self._bound_updates(artifact.plan)  # which may unlink all
        if artifact not in self._linked:
            here = self.tensors.here()
            self._linked[artifact] = Execution(artifact, here, here, self.ranks, updates)
        return self._linked[artifact]

    def keep(self, artifacts: Collection[Artifact]) -> None:
        """Unlink all other artifacts."""
        self._linked = {artifact: x for artifact, x in self._linked.items() if artifact in artifacts}

    def clear(self) -> None:
        """Unlink all artifacts, because the tensors are replaced."""
        self._linked.clear()

    def unshard(self) -> None:
        """Gather sharded parameters, before they are sharded in another way or replaced."""
        self.clear()
        self.drain()
        if self.steps.updates is not None:
            self.steps.updates.release(self._group_of)

    @contextlib.contextmanager
    def unsharded(self, plans: Sequence[Plan] = ()) -> Iterator[None]:
        """Gather sharded parameters inside a ``with``, unless the programs of ``plans`` do so.

        All ranks do so together.
        """
        self.drain()
        updates = self.steps.updates
        if updates is None or (plans and all(map(updates.has_sharded, plans))):
            yield
        else:
            with updates.gathered(self._group_of):
                yield

    def _bound_updates(self, plan: Plan) -> OptimizerUpdates | None:
        """The optimizer, bound to the parameters as the plan shards them; None if it needs none."""
        updates = self.steps.updates
        if not plan.sync_spec.updates:
            gathers = bool(plan.sync_spec.shard) and updates is not None and updates.has_sharded(plan)
            return updates if gathers else None
        if updates is None:
            raise InputError("the program updates its weights, and so needs an optimizer: pass optimizer=...")
        if not updates.is_bound_to(plan):
            self.unshard()
            own, ranks = self.tensors.names.unique_parameters(), self.ranks
            distributed, owners = self.agreement.is_distributed, self.tensors.owner_ranks
            updates.bind(plan, own, ranks.devices, distributed, self.gather_states, owners)
            for fqn in updates.sharded_names:
                release_sharded(fqn, own[fqn])
            updates.mark_gradients()
        return updates

    def _group_of(self, rank: int, stage: int) -> CollectiveGroup:
        placement = self.artifact.plan.placement
        return self.ranks.transport(rank).group(placement[stage])

    def gather_states(self, own: list[StateShard]) -> list[list[StateShard]]:
        """The shards of the optimizer's state of every process, on the ``state_readers``; [] on others."""
        if not self.agreement.is_distributed:
            return [own]
        self.agreement.require_same_call("optimizer.state_dict", {})
        leaves, structure = pytree.tree_flatten([(shard.piece, shard.entries) for shard in own])
        gathered, readers = [], self.state_readers
        for rank in range(self.ranks.count):
            theirs, shape = self.ranks.exchange.broadcast_pytree(
                rank, "gathering the optimizer's state", leaves, structure, readers
            )
            gathered.append([StateShard(*shard) for shard in pytree.tree_unflatten(theirs, shape)])
        return gathered if readers is None or self.ranks.world.rank in readers else []


MakeExecutions = Callable[[Tensors, CallAgreement, StepState], Executions]


def _several_programs(call: Call) -> str:
    """Why the microbatches of a call are run by several programs."""
    if not call.weights:
        return (
            "the batch does not divide evenly into its microbatches, and each of their two sizes needs a "
            "graph of its own, because the model makes a constant of their rows"
        )
    return (
        "the given microbatches are run by several programs one after the other: because some have a size of "
        "0 or 1 or one that the model makes a constant of, or are more than a saved artifact was compiled for"
    )


def _given_slices(call: Call) -> Iterator[BatchSlice]:
    """The given microbatches of each group, each of one row; the last of a group may have none."""
    start = 0
    for _, sizes in call.groups:
        end = start + sum(sizes)
        empty = len(sizes) - sum(sizes)
        weights, values = (*call.weights[start:end], *[0.0] * empty), (*call.values[start:end], *[{}] * empty)
        yield BatchSlice(sizes, call.rows, start, start, weights, values=values, is_given=True)
        start = end


def _merged(call: Call, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """The results of a call from those of its groups."""
    if len(parts) == 1:
        return parts[0]
    return merge_slices(call.first.plan, parts, [batch_slice for _, batch_slice in call.linked])


def _restored(artifact: Artifact, results: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Results with their rows where the user has them."""
    axes = artifact.axes
    return {name: axes[name].restore(x) if name in axes else x for name, x in results.items()}


def _as_positional(leaves: list[Any]) -> Any:
    return leaves, {}, None


def _output_of(artifact: Artifact, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """The model's output, put together of the results of these names."""
    assert artifact.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], artifact.output_spec)


def _batch_size(plan: Plan, leaves: Sequence[Any]) -> int:
    """The rows of the first argument that is split along the batch, and shows how many there are."""
    positions = [*(given.position for given in plan.inputs), *range(len(plan.batch_axes))]
    for position in positions:
        leaf = leaves[position] if position < len(leaves) else None
        axis = plan.batch_axes[position]
        if axis is None or not isinstance(leaf, Tensor) or leaf.ndim <= axis.dim:
            continue
        rows: int | None = axis.rows(leaf.shape)
        if rows is not None:
            return rows
    raise InputError(f"the arguments hold no batch; expected {_expected(plan)}")


def _expected(plan: Plan) -> str:
    """The arguments that an artifact reads, as its user passes them."""
    return ", ".join(f"{each.path} ({format_value(plan.user_value(each))})" for each in plan.inputs)


def _rows_in_front(plan: Plan, position: int, leaf: Any, rows: int) -> Any:
    """A leaf that is split with its rows as dimension 0. None stands for one that nothing reads."""
    axis = plan.batch_axes[position] if position < len(plan.batch_axes) else None
    if axis is None or axis.is_leading or leaf is None:
        return leaf
    if not isinstance(leaf, Tensor) or not axis.fits(leaf.shape, rows):
        found = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        raise InputError(
            f"{plan.arguments[position]} is {found}; expected {rows} rows, as the batch has, in dimension "
            f"{axis.dim}, and so {_expected(plan)}"
        )
    return axis.rows_first(leaf, rows).contiguous()


def values_in(plan: Plan, leaves: Sequence[Any]) -> Sizes:
    """The size or number of each variable. Raises InputError if an argument lacks it, or two disagree."""
    found: dict[str, int | float] = {}
    for variable in plan.variables:
        leaf = leaves[variable.position] if variable.position < len(leaves) else None
        expected = type(plan.planned_sizes[variable.name])
        if variable.dim is None and type(leaf) is not expected:
            raise InputError(f"{variable.path} is {leaf!r}; expected a number of type {expected.__name__}")
        if variable.dim is not None and not (isinstance(leaf, Tensor) and leaf.ndim > variable.dim):
            raise InputError(f"{variable.path} has no {variable.size}, which is {variable.name}")
        value = variable_values([variable], leaves)[variable.name]
        if found.setdefault(variable.name, value) != value:
            raise InputError(
                f"{variable.what} is {value}, but {variable.name} is "
                f"{found[variable.name]} in other arguments; pass equal ones, for which the artifact was made"
            )
    return found


def _check_guards(plan: Plan, rows: Iterable[int], values: Sizes) -> None:
    """Raise InputError where the code of the artifact is not right for these sizes and numbers."""
    conditions = [*(f"{name} == {fixed}" for name, fixed in plan.fixed_sizes.items()), *plan.guards]
    for sizes in ({"b": each, **values} for each in {*rows}):
        for condition in conditions:
            if not holds(condition, sizes):
                read = [name for name in sizes if name in names_in(condition)]
                found = " and ".join(f"{name} = {sizes[name]}" for name in read)
                named = {"b": "the rows of a microbatch", **{each.name: each.what for each in plan.variables}}
                what = ", ".join(named[name] for name in read)
                raise InputError(
                    f"this artifact is right where {condition}, but the arguments have {found}: {what}; "
                    "save one that was compiled for such arguments"
                )


def _check(given: InputLeaf, leaves: Sequence[Any], sizes: Sizes, axis: BatchAxis | None) -> None:
    """Raise InputError unless the argument has the dtype and the shape that the plan says."""
    leaf, as_passed = _leaf(given, leaves), tuple if axis is None or axis.is_leading else axis.restored_shape
    shape = tuple(evaluate_dim(dim, sizes) for dim in given.value.shape)
    dtype = getattr(torch, given.value.dtype)
    if not (isinstance(leaf, Tensor) and leaf.dtype == dtype and leaf.shape == shape):
        found = f"{leaf.dtype} of shape {as_passed(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        raise InputError(f"{given.path} is {found}; expected {dtype} of shape {as_passed(shape)}")


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(paths) or "nothing"


def _leaf(given: InputLeaf, leaves: Sequence[Any]) -> Any:
    return leaves[given.position] if given.position < len(leaves) else None
