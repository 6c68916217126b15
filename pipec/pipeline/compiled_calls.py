"""Compiles and runs the calls on which all ranks agreed."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pipec.capture.batch_inputs import observed_splits
from pipec.capture.model_call import ModelCall
from pipec.capture.sequence_first import sequence_first_spec
from pipec.compiler.compile_cache import CompiledArtifact, MicrobatchGroups
from pipec.compiler.compiler import Compiler
from pipec.console import logger
from pipec.errors import CaptureError, InputError, MixedRowsError, TargetRowsError
from pipec.graph import PlainValues
from pipec.ir import Mode
from pipec.ir.batch_split import replica_microbatch_sizes, require_equal_rows, variable_values
from pipec.pipeline.collective_calls import CallAgreement, CallRequest, CollectiveCall
from pipec.pipeline.owned_tensors import OwnedTensors
from pipec.plan.local_batch_check import check_local_batch
from pipec.runtime.absent_tensors import materialized
from pipec.runtime.linked_artifacts import LinkedArtifacts
from pipec.runtime.local_gradients import mark_one, unmark
from pipec.runtime.messages.call_description import CallDescription
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.random_seeds import advance_default_generator
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.microbatch_weight import MicrobatchWeight, loss_weights
from pipec.runtime.step.step_results import merge_slices
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.runtime.stream.stream_session import CompiledStream
from pipec.runtime.stream_training import OnStarted, nothing
from pipec.torch_compat import pytree


class CompiledCalls:
    """Compiles the calls of a model, places its tensors by the plan, and runs the artifacts.

    Args:
        microbatch_weight: as ``pipec.compile`` says.
    """

    def __init__(
        self,
        compiler: Compiler,
        context: PipelineContext,
        linked: LinkedArtifacts,
        owned: OwnedTensors,
        agreement: CallAgreement,
        microbatch_weight: MicrobatchWeight | None,
    ) -> None:
        self._compiler, self._context, self._linked = compiler, context, linked
        self._owned, self._agreement, self._microbatch_weight = owned, agreement, microbatch_weight
        self._batch_axis_is_known = False
        self._checked_sizes: set[tuple[int, frozenset[int], tuple[float, ...]]] = set()

    def agree(
        self, request: CallRequest, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> CollectiveCall:
        """The call that all ranks make, with its batch dimension found.

        It is dimension 0, unless the user says otherwise, or rows along dimension 0 depend on one another and
        are proved not to along dimension 1.
        """
        agreement, other = self._agreement, None
        if not self._batch_axis_is_known and agreement.batched is None and agreement.batch == "same":
            other = sequence_first_spec(ModelCall(args, kwargs, target))
        if other is None:
            collective_call = self._agreement.agree(request, args, kwargs, target)
            self._batch_axis_is_known = True
            return collective_call
        try:
            collective_call = self._agree_and_compile(request, args, kwargs, target)
        except InputError as error:
            if not isinstance(error, MixedRowsError | TargetRowsError):
                raise
            why, self._agreement.batched = error, other
        else:
            self._batch_axis_is_known = True
            return collective_call
        self._agreement.checked_calls.clear()
        try:
            collective_call = self._agree_and_compile(request, args, kwargs, target)
        except (InputError, CaptureError):
            self._agreement.batched = None
            self._agreement.checked_calls.clear()
            if isinstance(why, TargetRowsError):
                raise why from None
            collective_call = self._agreement.agree(request, args, kwargs, target)
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
        """The call that all ranks make. Raises MixedRowsError if rows of the batch are not independent."""
        collective_call = self._agreement.agree(request, args, kwargs, target)
        self.compiled(collective_call, refuses_mixed_rows=True)
        return collective_call

    def train(self, collective_call: CollectiveCall, on_started: OnStarted = nothing) -> Any:
        """Make a step, and count it. Returns what ``loss`` does."""
        leaves_gradients = self._context.updates is None and self._context.is_distributed
        parameters = self._owned.tensors.parameters.values() if leaves_gradients else ()
        unmark(parameters)
        loss = self.loss(collective_call, on_started)
        if self._context.owners.are_spread:
            mark_one(parameters)
        trained = self._context.artifact
        self._context.steps.count(self._linked.execution(trained).non_finite, trained)
        return loss

    @property
    def has_target(self) -> bool:
        return self._compiler.settings.loss_fn is not None

    @property
    def may_be_asynchronous(self) -> bool:
        return self._compiler.decided.policy.may_be_asynchronous

    def compiled_stream(self, arguments: CallArguments) -> CompiledStream | None:
        collective_call = self._agree_on_step(arguments)
        groups = self.compiled(collective_call)
        execution = self._linked.execution(groups[0][0].artifact)
        if not execution.is_stream:
            return None
        if len(groups) > 1:
            raise InputError(
                "the microbatches of a mini-batch have two sizes, and each needs a graph of its own, because "
                "the model makes a constant of their rows; an asynchronous schedule takes one. Pass batches "
                "that divide evenly"
            )
        if groups[0][0].artifact.has_random_operators:
            advance_default_generator(collective_call.generator_after)

        first, key = collective_call.call, collective_call.signature.key
        variables = key.variables

        def split(arguments: CallArguments) -> StreamBatch | None:
            args, kwargs = arguments.args, dict(arguments.kwargs)
            call = self._agreement.check_call(Mode.TRAIN, args, kwargs, arguments.target)
            if call.batch_size != first.batch_size or call.signature(variables) != key.call_signature:
                return None
            if variable_values(variables, call.leaves) != variable_values(variables, first.leaves):
                return None
            (batch_slice,) = self._batch_slices(replace(collective_call, call=call), [groups[0][1]])
            return execution.batch(call.leaves, batch_slice)

        return CompiledStream(
            execution,
            collective_call.seed,
            split,
            functools.partial(self._agreement.is_valid, collective_call.signature),
        )

    def stream_step(self, arguments: CallArguments, on_started: OnStarted) -> Tensor:
        loss: Tensor = self.train(self._agree_on_step(arguments), on_started)
        return loss

    def describe_batch(self, arguments: CallArguments) -> CallDescription:
        return self._agreement.describe_batch(arguments)

    def _agree_on_step(self, arguments: CallArguments) -> CollectiveCall:
        kwargs = dict(arguments.kwargs)
        request = CallRequest("step", Mode.TRAIN)
        return self._agreement.agree(request, arguments.args, kwargs, arguments.target)

    def loss(self, collective_call: CollectiveCall, on_started: OnStarted = nothing) -> Any:
        """The loss of a step, and if it was requested, the model's output. The logs are kept."""
        groups = self.compiled(collective_call)
        compiled, _ = groups[0]
        results, plan = self.run(collective_call, groups, on_started), compiled.artifact.plan
        self._context.logs = {
            name: results[kept] for name, kept in zip(plan.log_names, plan.outputs[1:], strict=False)
        }
        loss = results["loss"]
        if not collective_call.signature.key.outputs:
            return loss
        return loss, output_of(compiled, results, plan.outputs[1 + len(plan.log_names) :])

    def compiled(self, collective_call: CollectiveCall, refuses_mixed_rows: bool = False) -> MicrobatchGroups:
        """The artifact of each group of consecutive microbatches, and their rows.

        There are two groups if one graph cannot serve both sizes of a batch that does not divide evenly.
        """
        rows = self._rows_to_compile(collective_call)
        found = self._compiler.cache.find(collective_call.signature, rows, collective_call.call)
        groups = found or self._compile(collective_call, rows, refuses_mixed_rows)
        if collective_call.signature.key.mode is Mode.TRAIN:
            self._context.trained = groups[0][0].artifact
        if found is None or self._owned.needs_placement:
            self._owned.place(groups[0][0].artifact.plan)
            self._owned.needs_placement = False
        return groups if len(collective_call.rows) == 1 else self._of_local_batch(collective_call, groups)

    def _rows_to_compile(self, collective_call: CollectiveCall) -> int:
        """The rows of the batch; with ``batch="local"``, as if all replicas had as many as the largest."""
        if len(collective_call.rows) == 1:
            return collective_call.rows[0]
        num_microbatches = self._compiler.decided.num_microbatches or 0
        return max(len(collective_call.rows) * max(collective_call.rows), num_microbatches)

    def _of_local_batch(self, collective_call: CollectiveCall, groups: MicrobatchGroups) -> MicrobatchGroups:
        """The artifact for the microbatches of all replicas, each of which splits its own rows."""
        compiled, _ = groups[0]
        plan = compiled.artifact.plan
        check_local_batch(plan, self._agreement.num_replicas)
        sizes = replica_microbatch_sizes(collective_call.rows, plan.num_microbatches)
        if plan.model_collectives:
            require_equal_rows(sizes)
        distinct = frozenset(sizes) - {0}
        values = variable_values(collective_call.signature.key.variables, collective_call.call.leaves)
        served = compiled.number, distinct, tuple(values.values())
        if served not in self._checked_sizes:
            request = f"microbatches of {sorted(distinct)} rows"
            require = functools.partial(
                self._compiler.require_one_graph_for, collective_call.signature, sorted(distinct), values
            )
            self._context.ranks.call_on_rank_0(request, require)
            self._checked_sizes.add(served)
        return [(compiled, sizes)]

    def _compile(
        self, collective_call: CollectiveCall, rows: int, refuses_mixed_rows: bool
    ) -> MicrobatchGroups:
        """Compile on rank 0, for all ranks, and evict the artifacts that were used longest ago."""
        key, version, call = (
            collective_call.signature.key,
            collective_call.signature.version,
            collective_call.call,
        )
        change = self._agreement.variables.change(call, key.mode)

        def compiled() -> tuple[MicrobatchGroups, dict[str, Any]]:
            whole = call if len(collective_call.rows) == 1 else call.sample(rows, None)
            with materialized(self._owned.tensors.unique().values()):
                groups = self._compiler.compile(collective_call.signature, whole, change, refuses_mixed_rows)
                return groups, self._compiler.cache.read(collective_call.signature)

        values = variable_values(key.variables, call.leaves)
        request = repr(
            (*key.without_fingerprint, key.fingerprint.digest, self._owned.trainable, version, rows, values)
        )
        groups, read = self._context.ranks.call_on_rank_0(request, compiled)
        self._agreement.plain_values[key.mode] = PlainValues(read)
        self._agreement.known_splits |= observed_splits(call)
        self._agreement.variables.note(call, key.mode, groups[0][0].artifact.plan.fixed_sizes)
        self._agreement.checked_calls.clear()
        self._compiler.cache.add(collective_call.signature, rows, groups)
        kept = {made.number: made.artifact for made in self._compiler.cache.compiled}
        self._linked.keep(kept.values())
        self._checked_sizes = {served for served in self._checked_sizes if served[0] in kept}
        return groups

    def run(
        self, collective_call: CollectiveCall, groups: MicrobatchGroups, on_started: OnStarted = nothing
    ) -> Mapping[str, Tensor]:
        """The results of a call, by their names in the plan."""
        if any(compiled.artifact.has_random_operators for compiled, _ in groups):
            advance_default_generator(collective_call.generator_after)
        on_started()
        if collective_call.signature.key.mode is Mode.TRAIN:
            return self._run_groups(collective_call, groups)
        with self._linked.unsharded([compiled.artifact.plan for compiled, _ in groups]):
            return self._run_groups(collective_call, groups)

    def _run_groups(self, collective_call: CollectiveCall, groups: MicrobatchGroups) -> Mapping[str, Tensor]:
        executions = [self._linked.execution(compiled.artifact) for compiled, _ in groups]
        if len(groups) > 1 and groups[0][0].artifact.plan.sync_spec.may_skip_step:
            raise InputError(
                "the microbatches of the batch have two sizes, and each needs a graph of its own, because "
                "the model makes a constant of their rows; so a step cannot be skipped as a whole. Pass "
                "batches that divide evenly, or compile without on_nan=... and in another precision than "
                "'fp16-mixed'"
            )
        batch_slices = self._batch_slices(collective_call, [sizes for _, sizes in groups])
        recorded = self._context.steps.recorded if collective_call.signature.key.mode is Mode.TRAIN else None
        parts = []
        for execution, batch_slice in zip(executions, batch_slices, strict=True):
            update = batch_slice is batch_slices[-1] and not self._context.steps.accumulates
            leaves = collective_call.call.leaves
            parts.append(execution.run(leaves, batch_slice, collective_call.seed, recorded, update))
        axes = groups[0][0].axes
        results = (
            parts[0] if len(parts) == 1 else merge_slices(groups[0][0].artifact.plan, parts, batch_slices)
        )
        return {name: axes[name].restore(x) if name in axes else x for name, x in results.items()}

    def _batch_slices(self, collective_call: CollectiveCall, groups: Sequence[list[int]]) -> list[BatchSlice]:
        """The rows and the loss weights of each group of microbatches."""
        call, every, batch = (
            collective_call.call,
            [size for sizes in groups for size in sizes],
            sum(collective_call.rows),
        )
        shares = None
        if collective_call.signature.key.mode is not Mode.FORWARD:
            shares = loss_weights(self._microbatch_weight, call.leaves, call.with_leaves, call.axes, every)
        values = variable_values(collective_call.signature.key.variables, call.leaves)
        replica = self._agreement.replica, self._agreement.num_replicas
        batch_slices, start, first = list[BatchSlice](), 0, 0
        for sizes in groups:
            own = None if shares is None else shares[first : first + len(sizes)]
            batch_slices.append(BatchSlice(sizes, batch, start, first, own, *replica, values))
            start, first = start + sum(sizes), first + len(sizes)
        return batch_slices


def output_of(compiled: CompiledArtifact, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """The model's output, put together of the results of these names."""
    assert compiled.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], compiled.output_spec)
