"""A module that trains across stages and is compiled at its first step: what ``pipec.compile`` returns."""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pipec.artifact.artifact import write_artifact
from pipec.capture.batch_inputs import BatchedOption, observed_splits
from pipec.capture.model_call import ModelCall
from pipec.capture.sequence_first import sequence_first_spec
from pipec.compiler.capture_key import CollectiveCall
from pipec.compiler.compiler import Compiler
from pipec.compiler.microbatch_groups import CompiledArtifact, MicrobatchGroups
from pipec.errors import CaptureError, InputError, MixedRowsError, TargetRowsError
from pipec.graph import TracedConstants
from pipec.ir import Mode, Plan, RankMemory
from pipec.ir.argument_checks import check_arguments
from pipec.ir.batch_split import replica_microbatch_sizes, require_equal_rows, variable_values
from pipec.pipeline.checkpointing import CheckpointModule
from pipec.pipeline.collective_calls import CallRequest
from pipec.pipeline.inspection import add_recorded_steps, draw_timelines, predicted_memory
from pipec.pipeline.method_arguments import METHOD_ARGUMENTS
from pipec.plan.local_batch_check import check_local_batch
from pipec.plan.plan_table import PrintablePlan
from pipec.plan.predictions import simulate_plan
from pipec.plan.step_memory import StepMemory
from pipec.runtime.call_guard import exclusive_call
from pipec.runtime.model_tensors import EmptiedTensors, ModelTensors, unregister_tensors
from pipec.runtime.random_seeds import advance_default_generator
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.microbatch_weight import MicrobatchWeight, loss_weights
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.step_results import merge_slices
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.runtime.stream.stream_execution import StreamExecution
from pipec.runtime.stream.stream_session import CompiledStream
from pipec.runtime.stream_training import OnStarted, nothing
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace
from pipec.torch_compat import ValuePath, pytree

logger = logging.getLogger("pipec")


class Pipeline(CheckpointModule):
    """A model cut into stages. Make one with :func:`pipec.compile`.

    It holds the model's own parameters and buffers, under the model's own names. In one process these are all
    of them. Under ``torchrun``, once it is compiled, they are those of this rank's stages; the model's other
    tensors are emptied where they are, so that their memory is given back and an optimizer passes them over.
    ``full_state_dict`` and ``gather_into`` bring the whole together again.

    It makes one call at a time. A call on a second thread raises InputError meanwhile, and changes nothing.
    """

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        ranks: Ranks,
        batch: str = "same",
        updates: OptimizerUpdates | None = None,
        batched: BatchedOption | None = None,
        microbatch_weight: MicrobatchWeight | None = None,
    ) -> None:
        super().__init__(compiler, tensors, ranks, batch, updates, batched)
        self._weight = microbatch_weight
        self._measured: list[RankMemory] | None = None
        self._batch_axis_is_known = False
        self._checked_sizes: set[tuple[int, frozenset[int], tuple[float, ...]]] = set()

    @exclusive_call
    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
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
        collective_call = self._agree_with_batch_axis(
            CallRequest("step", Mode.TRAIN, outputs), args, kwargs, target
        )
        self._last_reader = None
        return self._train(collective_call)

    def _train(self, collective_call: CollectiveCall, begun: OnStarted = nothing) -> Any:
        loss = self._loss(collective_call, begun)
        trained = self._artifact
        self._steps.count(self._execution(trained).non_finite, trained, self._accumulates)
        return loss

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
        if self._batch != "local":
            raise InputError(
                f"join is for replicas with data of their own, but the pipeline has batch={self._batch!r}; "
                'pass batch="local" to pipec.compile'
            )
        count, accumulates = 0, self._accumulates
        try:
            while self._ranks.world.is_distributed and (told := self._next_call_of_others()):
                request, collective_call = told
                if request.method == "step":
                    self._train(collective_call)
                    count += 1
                    if after_update is not None and not self._accumulates:
                        after_update()
                elif request.method == "prepare":
                    self._compiled(collective_call)
                else:
                    self._run(collective_call, self._compiled(collective_call))
        finally:
            self._accumulates = accumulates
        return count

    @exclusive_call
    def eval_step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> Any:
        """What ``step`` would return, without gradients.

        Dropout and the like run in the mode that ``train()`` or ``eval()`` set last.
        """
        return self._loss(
            self._agree_with_batch_axis(CallRequest("eval_step", Mode.LOSS, outputs), args, kwargs, target)
        )

    @exclusive_call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the batch, without gradients, on every rank that passed these rows."""
        collective_call = self._agree_with_batch_axis(CallRequest("forward", Mode.FORWARD), args, kwargs)
        groups = self._compiled(collective_call)
        compiled, _ = groups[0]
        results = self._run(collective_call, groups)
        return _output(compiled, results, compiled.artifact.plan.outputs)

    @property
    def _has_target(self) -> bool:
        return self._compiler.loss_fn is not None

    @property
    def _may_be_asynchronous(self) -> bool:
        return self._compiler.policy.may_be_asynchronous

    def _compiled_stream(self, given: CallArguments) -> CompiledStream | None:
        collective_call = self._agree_on_batch(given)
        groups = self._compiled(collective_call)
        execution = self._execution(groups[0][0].artifact)
        if not isinstance(execution, StreamExecution):
            return None
        if len(groups) > 1:
            raise InputError(
                "the microbatches of a mini-batch are compiled apart, because the model makes a constant of "
                "their rows, so that they make no stream; pass batches that divide evenly"
            )
        if groups[0][0].artifact.has_random_operators:
            advance_default_generator(collective_call.generator_after)

        key, variables = collective_call.signature.key, collective_call.signature.key.variables

        def split(given: CallArguments) -> StreamBatch | None:
            call = self._check_call(Mode.TRAIN, given.args, dict(given.kwargs), given.target)
            if (
                call.batch_size != collective_call.call.batch_size
                or call.signature(variables) != key.call_signature
            ):
                return None
            if variable_values(variables, call.leaves) != variable_values(
                variables, collective_call.call.leaves
            ):
                return None
            (batch_slice,) = self._batch_slices(replace(collective_call, call=call), [groups[0][1]])
            return execution.batch(call.leaves, batch_slice)

        return CompiledStream(
            execution,
            collective_call.seed,
            split,
            functools.partial(self._is_valid, collective_call.signature),
        )

    def _stream_step(self, given: CallArguments, begun: OnStarted) -> Tensor:
        loss: Tensor = self._train(self._agree_on_batch(given), begun)
        return loss

    def _loss(self, collective_call: CollectiveCall, begun: OnStarted = nothing) -> Any:
        """The loss of a step, and if it was requested, the model's output. The logs are kept."""
        groups = self._compiled(collective_call)
        compiled, _ = groups[0]
        results, plan = self._run(collective_call, groups, begun), compiled.artifact.plan
        self.logs = {
            name: results[kept] for name, kept in zip(plan.log_names, plan.outputs[1:], strict=False)
        }
        loss = results["loss"]
        if not collective_call.signature.key.outputs:
            return loss
        return loss, _output(compiled, results, plan.outputs[1 + len(plan.log_names) :])

    @exclusive_call
    def prepare(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> "Pipeline":
        """Compile what ``step`` with these arguments would run, and run nothing. Returns the pipeline."""
        self._compiled(
            self._agree_with_batch_axis(CallRequest("prepare", Mode.TRAIN, outputs), args, kwargs, target)
        )
        return self

    @exclusive_call
    def measure_memory(self, *args: Any, target: Any = None, **kwargs: Any) -> StepMemory:
        """Run ``step`` with these arguments, and return what each rank held. Every rank calls this.

        On a GPU that one rank has for itself this is what torch's allocator says; else it is what the tensors
        took that operators made. The step takes longer than others, and does all that they do.

        Raises:
            InputError: the programs have no end; and what ``step`` raises.
        """
        measured: list[RankMemory] = []
        self._measured = measured
        try:
            self.step(*args, target=target, **kwargs)
        finally:
            self._measured = None
        return StepMemory(self._ranks.peak_memory(measured), self.programs)

    @exclusive_call
    def train(self, mode: bool = True) -> "Pipeline":
        """Set every module of the model to training or evaluation mode, as ``nn.Module.train`` does."""
        check_arguments(METHOD_ARGUMENTS, locals())
        self._compiler.model.train(mode)
        return super().train(mode)

    @exclusive_call
    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        """A pipeline of a copy of the model, on the same stages. It compiles its calls itself.

        It has an optimizer of its own, with a copy of the state. Every rank makes the copy then.
        """
        with self._unsharded():
            model = copy.deepcopy(self._compiler.model, memo)
        tensors = ModelTensors.of(model)
        emptied = EmptiedTensors(
            {fqn: x for fqn, x in self._emptied.layouts.items() if not self._is_held(fqn)}
        )
        with emptied.materialized(tensors.unique()):
            updates = self._updates.of(tensors.unique_parameters()) if self._updates else None
        compiler, ranks = self._compiler.of(model), self._ranks
        made = Pipeline(compiler, tensors, ranks, self._batch, updates, self._batched, self._weight)
        memo[id(self)] = made
        made._uninitialized.marked = {
            fqn: (tensor, tensor._version)
            for fqn, tensor in tensors.unique().items()
            if fqn in self._uninitialized.marked
        }
        made._owner_ranks, made._emptied = dict(self._owner_ranks), emptied
        made._mutable_buffers = set(self._mutable_buffers)
        made._known_splits = dict(self._known_splits)
        made._variables = copy.deepcopy(self._variables)
        unregister_tensors(made, [fqn for fqn, first in self._canonical.items() if first in emptied.layouts])
        return made

    @exclusive_call
    def save(self, directory: str | Path, tensors: bool = False) -> None:
        """Write plan, code and programs to a directory that ``pipec.load`` and ``pipec run`` read.

        With ``tensors``, the parameters and buffers are written too, as safetensors. Under ``torchrun``
        rank 0 writes; every rank then calls this, because rank 0 gathers the tensors of all.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        held = self._gather("save", set(self._tensors.unique()), all_ranks=False) if tensors else None
        if self._ranks.world.rank == 0:
            write_artifact(self._artifact, Path(directory), held)

    @property
    def plan(self) -> Plan:
        """What the compiler decided. It prints as a table."""
        return PrintablePlan.of(self._artifact.plan, self._artifact.programs)

    def simulate(self) -> Timeline:
        """The timeline of one step, predicted from the programs and the plan's costs."""
        return simulate_plan(self.plan, self.programs)

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
        pictures, and .json is for Perfetto and chrome://tracing. Another ending raises InputError.
        """
        check_arguments(METHOD_ARGUMENTS, locals())
        timelines = trace.timelines() if trace else {"planned": self.simulate()}
        drawn = Path(path) if path is not None and self._ranks.world.rank == 0 else None
        return draw_timelines(self.plan, self.programs, timelines, drawn)

    @contextlib.contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record the steps that are made inside a ``with``. After it, the trace has their timelines.

        Every rank records, or none; each then has the times of all. They are times of the host: work that a
        GPU still has to do is not in them.
        """
        trace = Trace()
        with self.record() as recorded:
            yield trace
        if recorded:
            add_recorded_steps(trace, self.plan, self.programs, recorded)

    @property
    def compile_seconds(self) -> dict[str, float]:
        """How long each step of compilation took, summed over all compilations."""
        return dict(self._compiler.stopwatch.seconds)

    def _compiled(self, collective_call: CollectiveCall) -> MicrobatchGroups:
        """What runs each group of consecutive microbatches, and their sizes.

        There are two groups if one graph cannot serve both sizes of a batch that does not divide evenly.
        """
        rows = self._rows_to_compile(collective_call)
        found = self._compiler.cache.find(collective_call.signature, rows, collective_call.call)
        groups = found or self._compile(collective_call, rows)
        if collective_call.signature.key.mode is Mode.TRAIN:
            self._trained = groups[0][0].artifact
        if found is None or self._needs_placement:
            self._place_tensors(groups[0][0].artifact.plan)
            self._needs_placement = False
        return groups if len(collective_call.rows) == 1 else self._of_local_batch(collective_call, groups)

    def _agree_with_batch_axis(
        self, request: CallRequest, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> CollectiveCall:
        """The call that all ranks make, by the dimension that is the batch.

        That is dimension 0, unless rows along it are proved to depend on one another, the user says nothing
        of it, and along dimension 1 they are proved not to.
        """
        other = None
        if not self._batch_axis_is_known and self._batched is None and self._batch == "same":
            other = sequence_first_spec(ModelCall(args, kwargs, target))
        if other is None:
            collective_call = self._agree(request, args, kwargs, target)
            self._batch_axis_is_known = True
            return collective_call
        try:
            collective_call = self._agree_and_compile(request, args, kwargs, target)
        except InputError as error:
            if not isinstance(error, MixedRowsError | TargetRowsError):
                raise
            why, self._batched = error, other
        else:
            self._batch_axis_is_known = True
            return collective_call
        self._calls.clear()
        try:
            collective_call = self._agree_and_compile(request, args, kwargs, target)
        except (InputError, CaptureError):
            self._batched = None
            self._calls.clear()
            if isinstance(why, TargetRowsError):
                raise why from None
            collective_call = self._agree(request, args, kwargs, target)
        else:
            listed = ", ".join(f"{name!r}: {word!r}" for name, word in other.items())
            logger.warning(
                "the batch is dimension 1, along which no row depends on others: split with batched={%s}. "
                "Dimension 0 is not: %s",
                listed,
                str(why).splitlines()[-2 if isinstance(why, MixedRowsError) else 0].strip(),
            )
        self._batch_axis_is_known = True
        return collective_call

    def _agree_and_compile(
        self, request: CallRequest, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> CollectiveCall:
        """The call that all ranks make, if its microbatches are proved to make what the batch does."""
        collective_call = self._agree(request, args, kwargs, target)
        self._compiler.refuses_mixed_rows = True
        try:
            self._compiled(collective_call)
        finally:
            self._compiler.refuses_mixed_rows = False
        return collective_call

    def _rows_to_compile(self, collective_call: CollectiveCall) -> int:
        """The rows of the batch; if replicas have their own, as if all had as many as one has at most."""
        if len(collective_call.rows) == 1:
            return collective_call.rows[0]
        return max(len(collective_call.rows) * max(collective_call.rows), self._compiler.microbatches or 0)

    def _of_local_batch(self, collective_call: CollectiveCall, groups: MicrobatchGroups) -> MicrobatchGroups:
        """What runs the microbatches of all replicas, each of which splits its own rows."""
        compiled, _ = groups[0]
        plan = compiled.artifact.plan
        check_local_batch(plan, self.num_replicas)
        sizes = replica_microbatch_sizes(collective_call.rows, plan.num_microbatches)
        if plan.model_collectives:
            require_equal_rows(sizes)
        kinds = frozenset(sizes) - {0}
        values = variable_values(collective_call.signature.key.variables, collective_call.call.leaves)
        served = compiled.number, kinds, tuple(values.values())
        if served not in self._checked_sizes:
            request = f"microbatches of {sorted(kinds)} rows"
            require = functools.partial(
                self._compiler.require_one_graph_for, collective_call.signature, sorted(kinds), values
            )
            self._ranks.call_on_rank_0(request, require)
            self._checked_sizes.add(served)
        return [(compiled, sizes)]

    def _compile(self, collective_call: CollectiveCall, rows: int) -> MicrobatchGroups:
        """Compile in one process, for all, and let go of what was used longest ago."""
        key, version, call = (
            collective_call.signature.key,
            collective_call.signature.version,
            collective_call.call,
        )
        change = self._variables.change(call, key.mode)

        def compiled() -> tuple[MicrobatchGroups, dict[ValuePath, Any]]:
            whole = call if len(collective_call.rows) == 1 else call.sample(rows, None)
            with self._emptied.materialized(self._tensors.unique()):
                groups = self._compiler.compile(collective_call.signature, whole, change)
                return groups, self._compiler.read(collective_call.signature)

        values = variable_values(key.variables, call.leaves)
        request = repr((*key.without_state, key.state.digest, self._trainable, version, rows, values))
        groups, read = self._ranks.call_on_rank_0(request, compiled)
        self._read[key.mode] = TracedConstants(read)
        self._known_splits |= observed_splits(call)
        self._variables.note(call, key.mode)
        self._calls.clear()
        self._compiler.cache.add(collective_call.signature, rows, groups)
        kept = {made.number: made.artifact for made in self._compiler.cache.compiled}
        self._executions = {made: x for made, x in self._executions.items() if made in kept.values()}
        self._checked_sizes = {served for served in self._checked_sizes if served[0] in kept}
        return groups

    def _run(
        self, collective_call: CollectiveCall, groups: MicrobatchGroups, begun: OnStarted = nothing
    ) -> Mapping[str, Tensor]:
        if any(compiled.artifact.has_random_operators for compiled, _ in groups):
            advance_default_generator(collective_call.generator_after)
        begun()
        if collective_call.signature.key.mode is Mode.TRAIN:
            return self._run_groups(collective_call, groups)
        with self._unsharded():
            return self._run_groups(collective_call, groups)

    def _run_groups(self, collective_call: CollectiveCall, groups: MicrobatchGroups) -> Mapping[str, Tensor]:
        executions = [self._execution(compiled.artifact) for compiled, _ in groups]
        if len(groups) > 1 and groups[0][0].artifact.plan.sync_spec.may_skip_step:
            raise InputError(
                "the microbatches of the batch are compiled apart, because the model makes a constant of "
                "their rows, so that there is no moment before anything comes of any gradient; pass batches "
                "that divide evenly, or compile without on_nan=... and in another precision than 'fp16-mixed'"
            )
        batch_slices = self._batch_slices(collective_call, [sizes for _, sizes in groups])
        recorded = self._recorded if collective_call.signature.key.mode is Mode.TRAIN else None
        parts = []
        for execution, batch_slice in zip(executions, batch_slices, strict=True):
            update = batch_slice is batch_slices[-1] and not self._accumulates
            leaves, measured = collective_call.call.leaves, self._measured
            parts.append(execution.run(leaves, batch_slice, collective_call.seed, recorded, update, measured))
        axes = groups[0][0].axes
        results = (
            parts[0] if len(parts) == 1 else merge_slices(groups[0][0].artifact.plan, parts, batch_slices)
        )
        return {name: axes[name].restore(x) if name in axes else x for name, x in results.items()}

    def _batch_slices(self, collective_call: CollectiveCall, groups: Sequence[list[int]]) -> list[BatchSlice]:
        """What each group of microbatches is of the batch."""
        call, every, batch = (
            collective_call.call,
            [size for sizes in groups for size in sizes],
            sum(collective_call.rows),
        )
        shares = None
        if collective_call.signature.key.mode is not Mode.FORWARD:
            shares = loss_weights(self._weight, call.leaves, call.with_leaves, call.axes, every)
        values = variable_values(collective_call.signature.key.variables, call.leaves)
        batch_slices, start, first = list[BatchSlice](), 0, 0
        for sizes in groups:
            own = None if shares is None else shares[first : first + len(sizes)]
            batch_slices.append(
                BatchSlice(sizes, batch, start, first, own, self.replica, self.num_replicas, values)
            )
            start, first = start + sum(sizes), first + len(sizes)
        return batch_slices


def _output(compiled: CompiledArtifact, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    assert compiled.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], compiled.output_spec)
