"""Compiles the calls of a model: rank 0 finds or makes what executes a call, and tells the other ranks.

With ``batch="local"`` each replica has a part of the batch. The ranks of a replica compare its rows; all
ranks compare types and sizes. A rank that has joined has no rows and no arguments: a rank that has some tells
it which call is made.
"""

import copy
import functools
import hashlib
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipec.artifact.artifact import Artifact, MicrobatchGroups
from pipec.capture.autocast import autocast, check_autocast
from pipec.capture.batch_inputs import (
    BatchedOption,
    lists_as_tensors,
    observed_splits,
    positional_names,
    refuse_nested_batches,
    sequence_first_spec,
    with_batch_axes,
)
from pipec.capture.block_masks import refuse_moved_rows, with_mask_arguments
from pipec.capture.foreign_code import refuse_active_mode, refuse_unusual_arguments
from pipec.capture.model_call import ModelCall, call_of_microbatches, refuse_input_gradients, whole_microbatch
from pipec.capture.variable_history import VariableHistory
from pipec.compiler.batch_equivalence import check_local_batch
from pipec.compiler.compile_cache import CaptureKey, CaptureSignature, is_valid_for
from pipec.compiler.compiler import Compiler, CompileRequest
from pipec.console import logger
from pipec.errors import (
    CaptureError,
    FailingModelError,
    InputError,
    MixedRowsError,
    PipecError,
    TargetRowsError,
)
from pipec.graph import Fingerprint, ModelSnapshot, PlainValues, TrainingGraph, same_objects, torch_values
from pipec.ir import Mode, Sizes
from pipec.ir.batch_split import (
    repeated_tensors,
    replica_microbatch_sizes,
    require_equal_rows,
    variable_values,
)
from pipec.runtime.absent_tensors import is_absent, materialized
from pipec.runtime.call_agreement import CallAgreement
from pipec.runtime.executions import STEP, Call, CallRequest, Executions, MakeExecutions, values_in
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_argument,
    describe_leaf,
    describe_microbatches,
    describe_tensor,
)
from pipec.runtime.messages.exchange import Answer, CallRole, RankNote
from pipec.runtime.model_tensors import ModelTensors
from pipec.runtime.random_seeds import peek_seed
from pipec.runtime.step.microbatch_weight import MicrobatchWeight
from pipec.runtime.step_state import StepState
from pipec.runtime.stream.call_arguments import CallArguments, GivenMicrobatches, StepArguments, in_microbatch
from pipec.runtime.tensors import Tensors
from pipec.runtime.wrappers import refuse_functional_call
from pipec.torch_compat import pytree
from pipec.torch_compat.foreign_classes import active_mode


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """A call with arguments that the model can take, as it was in ``snapshot``.

    ``described`` is what must be equal on all ranks, without the values of tensors. ``form`` is all that was
    read of the arguments, and of torch, but for these values; None if more may be read. ``last`` is the last
    call of its mode, if that had the same form and the same model.
    """

    call: ModelCall
    fingerprint: Fingerprint
    snapshot: ModelSnapshot
    described: CallDescription
    form: list[Any] | None = None
    last: "CompiledCall | None" = None


@dataclass(frozen=True)
class Decision:
    """Rank 0's decision how to run a call.

    ``groups`` has the number of an artifact and the microbatch sizes of each group; None if it is still to be
    compiled. ``rows[k]`` is the number of rows of replica k if each replica passes its own part of the batch;
    otherwise ``rows`` has one entry, all rows. ``values`` are the sizes and numbers that may vary, of the
    batch, or of each given microbatch. With ``is_checked``, a call that was compiled before is
    compared with the model itself once more.
    """

    seed: int
    rows: Sequence[int]
    values: Sequence[Sizes]
    groups: Sequence[tuple[int, list[int]]] | None
    is_checked: bool = False

    def is_as(self, other: "Decision") -> bool:
        """Whether both run the same artifacts on batches of the same sizes."""
        return (self.rows, self.values, self.groups) == (other.rows, other.values, other.groups)


@dataclass(frozen=True, kw_only=True)
class CompiledCall(Call):
    """A call of a model, and the ``decision`` how to run it. Rank 0 has its ``signature`` and ``graphs``."""

    checked: CheckedCall
    decision: Decision
    signature: CaptureSignature | None
    graphs: Sequence[TrainingGraph] = ()

    def runs(self, rows: Sequence[int]) -> bool:
        """Whether its artifacts run these rows, and the code of the model reads what it read before."""
        return self.decision.rows == rows and not any(x.reads.difference() for x in self.graphs)


class CompiledExecutions(Executions):
    """Makes each call of a model one of all ranks, compiled and placed.

    Args:
        batch: "same", "rank0" or "local", as ``pipec.compile`` says.
        batched: which arguments are split, as ``pipec.compile`` says.
    """

    def __init__(
        self,
        tensors: Tensors,
        agreement: CallAgreement,
        steps: StepState,
        compiler: Compiler,
        batch: str,
        batched: BatchedOption | None,
        microbatch_weight: MicrobatchWeight | None,
    ) -> None:
        super().__init__(tensors, agreement, steps, microbatch_weight)
        self.compiler, self.model = compiler, compiler.model
        self.loss_path = compiler.settings.loss_path
        self.batch, self.batched = batch, batched
        self.known_splits: dict[str, bool] = {}
        self.variables = VariableHistory()
        self._plain_values: dict[Mode, PlainValues] = {}
        self._last: dict[Mode, CompiledCall] = {}
        self._takes_masks = False
        self._batch_axis_is_known = self._refuses_mixed_rows = False
        self._takes_lists: bool | None = None
        self._made: dict[int, Artifact] = {}
        self._last_made: dict[Mode, int] = {}
        self._valid_sizes: set[tuple[int, frozenset[int], tuple[float, ...]]] = set()
        self._snapshot = ModelSnapshot(compiler.model)
        self._known_tensors = self._snapshot.tensors
        self.has_target = compiler.settings.loss_fn is not None
        self.compile_seconds = compiler.stopwatch.seconds

    @property
    def may_differentiate(self) -> bool:
        return not (self.has_target or self.may_be_asynchronous or self.batch == "local")

    @property
    def may_be_asynchronous(self) -> bool:
        return self.compiler.decided.policy.may_be_asynchronous

    @property
    def num_replicas(self) -> int:
        replicas = self.compiler.decided.policy.replicas
        divides = self.batch == "local" and self.agreement.is_distributed
        return replicas if divides and isinstance(replicas, int) else 1

    @property
    def memory_bytes(self) -> Sequence[float]:
        return [device.memory_bytes for device in self.compiler.decided.options.topology.devices]

    def copied(self, model: nn.Module) -> MakeExecutions:
        def make(tensors: Tensors, agreement: CallAgreement, steps: StepState) -> Executions:
            compiler = self.compiler.of(model)
            made = CompiledExecutions(
                tensors, agreement, steps, compiler, self.batch, self.batched, self._microbatch_weight
            )
            made.known_splits = dict(self.known_splits)
            made.variables = copy.deepcopy(self.variables)
            return made

        return make

    def agree(self, request: CallRequest, arguments: StepArguments) -> CompiledCall:
        """The call that all ranks make, with its executions.

        One that differs from the last of its mode in the values of tensors alone runs as that did, unless
        rank 0 finds that the model has read other values.
        """
        self.drain()
        self.agreement.begin(self.drain)
        last, checked = self._last.get(request.mode), None
        self._snapshot = self._snapshot.current()
        if last is not None and last.request == request and last.checked.snapshot is self._snapshot:
            checked = self._like_last(request.mode, arguments)
        if checked is not None:
            call = self._agree_on(request, checked)
        elif isinstance(arguments, GivenMicrobatches):
            call = self._agree(request, arguments)
        else:
            call = self._agree_on_lists(request, arguments)
        if not call.linked:
            call = self.linked(call)
            self._remember(call)
        return call

    def _agree_on_lists(self, request: CallRequest, arguments: CallArguments) -> CompiledCall:
        """The call that all ranks make, in which a list may have a number for each row.

        If the model cannot take such a list in a microbatch, it gets a tensor of the microbatch's numbers.
        """
        agree = self._agree if self._batch_axis_is_known else self._agree_on_axis
        may_convert = self.batch == "same" and self._takes_lists is not True
        given = arguments.args, dict(arguments.kwargs), arguments.target
        tensors = lists_as_tensors(given) if may_convert else None
        if tensors is None:
            return agree(request, arguments)
        converted = CallArguments(*tensors)
        if self._takes_lists is False:
            return agree(request, converted)
        try:
            call = agree(request, arguments)
        except (InputError, CaptureError) as failure:
            self._takes_lists = False
            try:
                return agree(request, converted)
            except (FailingModelError, CaptureError):
                self._takes_lists = None
                raise failure from None
        self._takes_lists = True
        return call

    def _agree_on_axis(self, request: CallRequest, arguments: CallArguments) -> CompiledCall:
        """The call that all ranks make, with its batch dimension found.

        It is dimension 0, unless the user says otherwise, or rows along dimension 0 depend on one another and
        do not along dimension 1. Tensors with as many rows as the batch are split, unless that is wrong.
        """
        others = self._other_splits(request, arguments) if self.batch == "same" else []
        call = self._explore(request, arguments, others) if others else self._agree(request, arguments)
        self._batch_axis_is_known = True
        return call

    def _other_splits(self, request: CallRequest, arguments: CallArguments) -> list[BatchedOption]:
        """What ``batched`` may be instead, the likelier first."""
        others = list[BatchedOption]()
        try:
            unclear = self.check_call(request.mode, arguments).ambiguous_leaves
        except PipecError:
            unclear = {}
        names = [*dict.fromkeys(unclear.values())]
        for whole in dict.fromkeys([*((name,) for name in names[:_MAX_TRIED]), tuple(names)]):
            others += [{**(self.batched or {}), **dict.fromkeys(whole)}] if whole else []
        if self.batched is None and (other := sequence_first_spec(ModelCall(*arguments))) is not None:
            others.append(other)
        return others

    def _explore(
        self, request: CallRequest, arguments: CallArguments, others: Sequence[BatchedOption]
    ) -> CompiledCall:
        """The call split as it seems, or else as the first of ``others`` that computes each row by itself."""
        given, why = self.batched, cast(PipecError | None, None)
        self._refuses_mixed_rows = True
        try:
            for split in (given, *others):
                may_help = isinstance(why, MixedRowsError | TargetRowsError) or None in (split or {}).values()
                if why is not None and not may_help:
                    continue
                self.batched = split
                try:
                    call = self._agree(request, arguments)
                except (InputError, CaptureError) as error:
                    why = why or error
                    continue
                if why is not None:
                    listed = ", ".join(f"{name!r}: {word!r}" for name, word in (split or {}).items())
                    logger.warning(
                        "the batch is split with batched={%s}. Otherwise: %s", listed, _reason(why)
                    )
                return call
        finally:
            self._refuses_mixed_rows = False
        self.batched = given
        if not isinstance(why, MixedRowsError):
            assert why is not None, "the call was refused"
            raise why from None
        return self._agree(request, arguments)

    def _like_last(self, mode: Mode, arguments: StepArguments) -> CheckedCall | None:
        """The call of a mode, if it differs from the last one in the values of tensors alone."""
        last = self._last.get(mode)
        if last is None or isinstance(arguments, GivenMicrobatches):
            return None
        leaves, form = self._form(arguments)
        if form is None or form != last.checked.form:
            return None
        (args, kwargs, target), before = arguments, last.checked.call
        call = replace(before, args=args, kwargs=dict(kwargs), target=target)
        vars(call).update({**vars(before), **vars(call), "leaves": leaves})  # what was read of the last one
        return replace(last.checked, call=call, last=last)

    def _agree(self, request: CallRequest, arguments: StepArguments) -> CompiledCall:
        """The call that all ranks make, with the arguments of every rank, of rank 0, or of its replica."""
        call, form, refusal = ModelCall((), {}), None, None
        self._snapshot = self._snapshot.current()
        if not self.agreement.is_distributed:
            self._adopt()
            call, form = self._model_call(request.mode, arguments)
        elif self.batch != "rank0" or self.ranks.world.rank == 0:
            try:
                call, form = self._model_call(request.mode, arguments)
                call.signature()  # refuses what no stage can take
            except PipecError as error:
                refusal = error
        checked = replace(self._as_now(request, call), form=form)
        return self._agree_on(request, checked, refusal)

    def _agree_on(
        self,
        request: CallRequest,
        checked: CheckedCall,
        refusal: PipecError | None = None,
        rows: tuple[int, ...] = (),
    ) -> CompiledCall:
        """The call, which rank 0 has decided how to run. ``rows`` are known where some ranks have joined."""
        call = checked.call
        if not self.agreement.is_distributed:
            decision, signature = self._decide(request, checked, (call.batch_size,))
            return self._made_call(request, checked, decision, signature)
        description, numbers = self._describe_call(request, checked.described), list[int]()
        is_local = self.batch == "local" and not rows
        if refusal is not None:
            description |= {"refused": str(refusal)}
        elif self.batch == "same":
            description |= _describe_batch(call, request)
        elif is_local:
            description |= _describe_types(call, request)
            numbers = [call.batch_size, _digest(_describe_batch(call, request))]
        found: CaptureSignature | None = None

        def decide(notes: Sequence[RankNote]) -> Any:
            nonlocal found
            if refusal is not None:
                return None
            if unusual := self._unusual(notes, is_local):
                return unusual
            every = rows or (self._rows(notes) if is_local else (call.batch_size,))
            decision, found = self._decide(request, checked, every)
            return {"decision": vars(decision)}

        call_role = CallRole.OPTIONAL if is_local else CallRole.REQUIRED
        answer = self.agreement.require_same_call(request.name, description, decide, numbers, call_role)
        self.agreement.exit_on_signal(self.drain, answer.stops)
        if refusal is not None:
            raise refusal
        if "owner" in answer.value:
            return self._inform_joined_ranks(answer, request, call)
        if self._adopt():
            return self._agree_on(request, self._as_now(request, call), None, rows)
        if self.batch == "rank0":
            checked = replace(checked, call=self._sent(request, call), form=None, last=None)
        return self._made_call(request, checked, Decision(**answer.value["decision"]), found)

    def _as_now(self, request: CallRequest, call: ModelCall) -> CheckedCall:
        """A call of the model as it was looked at."""
        fingerprint = self._fingerprint(request.mode)
        described = self._describe_model(request.mode, fingerprint) if self.agreement.is_distributed else {}
        return CheckedCall(call, fingerprint, self._snapshot, described)

    def next_call_of_others(self) -> CompiledCall | None:
        """The next call of the ranks that have rows, on one that has joined; None if all have joined."""
        self._snapshot = self._snapshot.current()
        answer = self.agreement.require_same_call(
            "join",
            {"batch": "none, for it has joined"},
            lambda notes: self._unusual(notes, is_local=True),
            numbers=[0, 0],
            call_role=CallRole.JOINED,
        )
        self.agreement.exit_on_signal(self.drain, answer.stops)
        if "all joined" in answer.value:
            return None
        self._adopt()
        return self.linked(self._inform_joined_ranks(answer))

    def _unusual(self, notes: Sequence[RankNote], is_local: bool) -> dict[str, Any]:
        """What all ranks do before they make the call; empty if nothing. Rank 0 decides it.

        Raises InputError if ranks of the same replica passed different rows.
        """
        if is_local:
            count = self.num_replicas
            parts = [(note.joined, *note.numbers) for note in notes]
            for rank, each in enumerate(parts):
                if each != parts[rank % count]:
                    raise InputError(
                        f"the ranks of replica {rank % count} passed different parts of the batch: rank "
                        f"{rank} has other rows than rank {rank % count}. Ranks of the same replica pass the "
                        "same rows, and join together: make a DistributedSampler with "
                        "num_replicas=pipe.num_replicas and rank=pipe.replica, and seed it alike on all ranks"
                    )
            if all(note.joined for note in notes):
                return {"all joined": True}
            rows = self._rows(notes)
            if any(note.joined for note in notes):
                owner = next(rank for rank, note in enumerate(notes) if note.numbers[0])
                return {"owner": owner, "rows": rows}
        return {"model changed": True} if self._replaced_names() else {}

    def _rows(self, notes: Sequence[RankNote]) -> tuple[int, ...]:
        """The rows of each replica. Raises InputError if there are none."""
        rows = tuple(int(note.numbers[0]) for note in notes[: self.num_replicas])
        if not any(rows):
            raise InputError("no replica passed any rows; leave the call out on all ranks")
        return rows

    def _inform_joined_ranks(
        self,
        answer: Answer,
        request: CallRequest | None = None,
        call: ModelCall | None = None,
    ) -> CompiledCall:
        """The call, on all ranks, some of which have joined.

        Every rank calls this; ranks that have joined pass no arguments, and get a row, to know the types.
        """
        owner, rows = answer.value["owner"], tuple(answer.value["rows"])
        given: Any = None
        if request and call:
            row, options = call.rows(0, 1), (request.method, request.mode, request.outputs)
            given = options, self.steps.accumulates, row.tree, *_properties(row)
        activity = "telling ranks that have joined what the others do"
        sent = self.ranks.exchange.broadcast_pytree(owner, activity, *pytree.tree_flatten(given))
        options, accumulates, (args, kwargs, target), *form = pytree.tree_unflatten(*sent)
        request = CallRequest(*options)
        if call is None:
            call = ModelCall(args, kwargs, target, *form)
            self.steps.accumulates = accumulates
        if request.method == "step" and self.steps.updates is None:
            raise InputError(
                "some ranks have joined, but a step without them needs pipec.compile(..., optimizer=...): an "
                "optimizer outside of the programs would not make its update on ranks that have joined"
            )
        self._snapshot = self._snapshot.current()
        return self._agree_on(request, self._as_now(request, call), rows=rows)

    def _decide(
        self, request: CallRequest, checked: CheckedCall, rows: Sequence[int]
    ) -> tuple[Decision, CaptureSignature]:
        """What runs a call, if it was compiled, and the call's signature. Rank 0 calls this."""
        call, last = checked.call, checked.last
        if last is not None and last.signature is not None and last.runs(rows):
            if request.mode is Mode.OUTPUTS:
                self._require_room(last.first)
            is_checked = self._is_checked_again(request, last.graphs)
            seed = peek_seed() if last.draws else 0
            return replace(last.decision, seed=seed, is_checked=is_checked), last.signature
        variables = self.variables.of(call, request.mode)
        key = CaptureKey(
            request.mode, call.signature(variables), request.outputs, checked.fingerprint, variables
        )
        whole = call if self.batch != "local" else None
        signature = CaptureSignature(key, self.compiler.cache.version(key, whole))
        values = [variable_values(key.variables, part.leaves) for part in call.parts]
        size = rows[0] if len(rows) == 1 else self._rows_to_compile(rows)
        found = self.compiler.cache.find(signature, size, call)
        if found is not None and len(rows) > 1:
            self._require_one_graph(found, signature, rows, values[0])
        if request.mode is Mode.OUTPUTS and found is not None:
            self._require_room(found[0][0])
        groups = None if found is None else [(made.number, sizes) for made, sizes in found]
        is_checked = found is not None and self._is_checked_again(request, self._graphs_of(signature))
        return Decision(peek_seed(), rows, values, groups, is_checked), signature

    def _require_room(self, artifact: Artifact) -> None:
        """Raise InputError if some rank cannot hold a step beside the forwards that wait for backwards."""
        waiting = [_memory_needs(held) for forward in self._forwards for held in forward.artifacts]
        if not waiting or math.inf in self.memory_bytes:
            return
        for rank, ((peak, _), limit) in enumerate(
            zip(_memory_needs(artifact), self.memory_bytes, strict=True)
        ):
            held = sum(needs[rank][1] for needs in waiting)
            if peak + held > limit:
                raise InputError(
                    f"rank {rank} has {limit:.3g} bytes; {len(waiting)} forwards that wait for a backward "
                    f"hold {held:.3g} there, and this call needs {peak:.3g}. Call backward() before the next "
                    'forward, drop outputs that have none, or pass recompute="full" or fewer rows'
                )

    def _made_call(
        self,
        request: CallRequest,
        checked: CheckedCall,
        decision: Decision,
        signature: CaptureSignature | None,
    ) -> CompiledCall:
        """The call with its executions, which are compiled and placed."""
        call, last, numbers = checked.call, checked.last, decision.groups
        if numbers is None:
            numbers = self._compile(request, call, decision, signature)
        elif decision.is_checked:
            self._check_again(call, signature, numbers[0][1])
        if last is not None and last.decision.is_as(decision) and not self.tensors.needs_placement:
            self.trained = last.trained or self.trained
            leaves, with_leaves, seed = [call.leaves], call.with_leaves, decision.seed
            return replace(last, leaves=leaves, with_leaves=with_leaves, seed=seed, checked=checked)
        groups = [(self._made[number], sizes) for number, sizes in numbers]
        trained = None
        if request.mode.trains:
            self.trained = trained = min((x for x, _ in groups), key=lambda x: len(x.plan.fixed_sizes))
        if decision.groups is None or self.tensors.needs_placement:
            self.tensors.place(groups[0][0].plan)
        if len(decision.rows) > 1:
            groups = self._of_local_batch(groups, decision.rows)
        return CompiledCall(
            request,
            [part.leaves for part in call.parts],
            call.with_leaves,
            call.axes,
            sum(decision.rows),
            decision.values,
            groups,
            decision.seed,
            (self.replica, self.num_replicas) if len(decision.rows) > 1 else (0, 1),
            call.weights,
            trained=trained,
            checked=checked,
            decision=replace(decision, groups=numbers),
            signature=signature,
        )

    def _remember(self, made: CompiledCall) -> None:
        """Let the next call of the same form run as this one, unless its values may lead to branches."""
        self._last.pop(made.request.mode, None)
        given, graphs = made.checked.call, self._graphs_of(made.signature)
        if made.checked.form is None or any(graph.input_branches.branches for graph in graphs):
            return
        call = replace(given, args=(), kwargs={}, target=None)
        vars(call).update({name: getattr(given, name) for name in ("paths", "axes", "batched", "batch_size")})
        self._last[made.request.mode] = replace(
            made,
            leaves=(),
            with_leaves=call.with_leaves,
            linked=() if callable(self._microbatch_weight) else made.linked,
            checked=replace(made.checked, call=call, last=None),
            graphs=graphs,
        )

    def _graphs_of(self, signature: CaptureSignature | None) -> Sequence[TrainingGraph]:
        """The graphs of a call, on rank 0."""
        return [] if signature is None else [x.graph for x in self.compiler.cache.get(signature).graphs]

    def _is_checked_again(self, request: CallRequest, graphs: Sequence[TrainingGraph]) -> bool:
        """Whether a step that was compiled before is compared with the model itself once more.

        Without a proof that is done more and more seldom: before the steps 2, 3, 5, 9, 17 and so on.
        """
        settings, number = self.compiler.settings, self.steps.num_steps
        is_due = bool(settings.check_every) and number % settings.check_every == 0
        is_due |= number & (number - 1) == 0 and not all(x.findings.is_proved for x in graphs)
        return is_due and settings.checks and request.mode.trains

    def _check_again(self, call: ModelCall, signature: CaptureSignature | None, sizes: Sequence[int]) -> None:
        """Compare a few rows of a step with the model itself, on rank 0. All ranks raise what it finds."""

        def check() -> None:
            assert signature is not None, "rank 0 has decided"
            tensors = self.tensors.names.unique()
            unknown = [fqn for fqn, tensor in tensors.items() if is_absent(tensor)]
            with materialized(tensors.values()):
                self.compiler.check(CompileRequest(self.compiler, signature, call, unknown=unknown), sizes)

        self.ranks.call_on_rank_0("checking a step", check)

    def _rows_to_compile(self, rows: Sequence[int]) -> int:
        """The rows of the batch; with ``batch="local"``, as if all replicas had as many as the largest."""
        if len(rows) == 1:
            return rows[0]
        return max(len(rows) * max(rows), self.compiler.decided.num_microbatches or 0)

    def _of_local_batch(self, groups: MicrobatchGroups, rows: Sequence[int]) -> MicrobatchGroups:
        """The artifact for the microbatches of all replicas, each of which splits its own rows."""
        compiled, _ = groups[0]
        plan = compiled.plan
        check_local_batch(plan, self.num_replicas)
        sizes = replica_microbatch_sizes(rows, plan.num_microbatches)
        if plan.model_collectives:
            require_equal_rows(sizes)
        return [(compiled, sizes)]

    def _require_one_graph(
        self, groups: MicrobatchGroups, signature: CaptureSignature, rows: Sequence[int], values: Sizes
    ) -> None:
        """Refuse parts of a batch whose microbatches have sizes that one graph cannot serve."""
        compiled, _ = groups[0]
        distinct = frozenset(replica_microbatch_sizes(rows, compiled.plan.num_microbatches)) - {0}
        served = compiled.number, distinct, tuple(values.values())
        if served not in self._valid_sizes:
            self.compiler.require_one_graph_for(signature, sorted(distinct), values)
            self._valid_sizes.add(served)

    def _compile(
        self,
        request: CallRequest,
        call: ModelCall,
        decision: Decision,
        signature: CaptureSignature | None,
    ) -> list[tuple[int, list[int]]]:
        """Compile on rank 0, for all ranks, which drop the artifacts that it has evicted."""

        def compiled() -> tuple[MicrobatchGroups, list[int], dict[str, Any], dict[str, bool]]:
            assert signature is not None, "rank 0 has decided"
            mode, rows = request.mode, self._rows_to_compile(decision.rows)
            whole = call if len(decision.rows) == 1 else call.sample(rows, None)
            change = self.variables.change(call, mode)
            tensors = self.tensors.names.unique()
            unknown = [fqn for fqn, tensor in tensors.items() if is_absent(tensor)]
            with materialized(tensors.values()):
                groups = self.compiler.compile(
                    CompileRequest(
                        self.compiler, signature, whole, change, self._refuses_mixed_rows, call, unknown
                    )
                )
                read = self.compiler.cache.read(signature)
            if len(decision.rows) > 1:
                self._require_one_graph(groups, signature, decision.rows, decision.values[0])
            self.variables.note(call, mode, groups[0][0].plan.fixed_sizes)
            self.compiler.cache.add(signature, rows, groups)
            kept = [made.number for made in self.compiler.cache.compiled]
            self._valid_sizes = {served for served in self._valid_sizes if served[0] in kept}
            return groups, kept, read, observed_splits(call)

        groups, kept, read, splits = self.ranks.call_on_rank_0(f"compiling {request.name}", compiled)
        self._plain_values[request.mode] = PlainValues(read)
        self._last.clear()
        self.known_splits |= splits
        made = self._made | {compiled.number: compiled for compiled, _ in groups}
        self._made = {number: made[number] for number in kept}
        if len(groups) == 1:
            self._last_made[request.mode] = groups[0][0].number
        self.keep(self._made.values())
        return [(compiled.number, sizes) for compiled, sizes in groups]

    def saved(self) -> dict[Mode, Artifact]:
        if self._takes_masks:
            raise InputError(
                "a step that gets a BlockMask cannot be saved, for the function of the mask is not in the "
                "artifact; make the mask in forward()"
            )
        last = {mode: self._made.get(number) for mode, number in self._last_made.items()}
        return {mode: each for mode, each in last.items() if each} | {self.artifact.plan.mode: self.artifact}

    def matching(self, first: Call, arguments: StepArguments) -> Call | None:
        assert isinstance(first, CompiledCall)
        call, (artifact, _), values = self.check_call(Mode.TRAIN, arguments), first.groups[0], first.values
        if call.batch_size != first.checked.call.batch_size:
            return None
        variables = artifact.plan.variables if call.given else ()
        if call.signature(variables) != first.checked.call.signature(variables):
            return None
        if call.given:
            try:
                values = [values_in(artifact.plan, part.leaves) for part in call.parts]
            except InputError:  # of sizes that were equal until now
                return None
            if not all(is_valid_for(artifact.plan, {1}, each) for each in values):
                return None
        leaves = [part.leaves for part in call.parts]
        return replace(
            first,
            leaves=leaves,
            with_leaves=call.with_leaves,
            values=values,
            weights=call.weights,
            linked=(),
        )

    def describe_batch(self, arguments: StepArguments) -> CallDescription:
        return _describe_batch(self.check_call(Mode.TRAIN, arguments), STEP)

    def is_valid(self, call: Call) -> bool:
        """Whether the compiled code is valid for the model as it is now. Rank 0 alone has guards."""
        assert isinstance(call, CompiledCall)
        self._snapshot = self._snapshot.current()
        if self._replaced_names() or self._fingerprint(Mode.TRAIN) != call.checked.fingerprint:
            return False
        return call.signature is None or self.compiler.cache.is_valid(call.signature)

    def _replaced_names(self) -> list[str]:
        """The names whose tensors the model has replaced, added or removed."""
        known, tensors = self._known_tensors, self._snapshot.tensors
        if tensors is known or same_objects(tensors, known):
            return []
        return self.tensors.names.names_differing(ModelTensors.of(self.compiler.model))

    def describe_model(self) -> CallDescription:
        self._snapshot = self._snapshot.current()
        return {"replaced": ", ".join(self._replaced_names()) or "none"}

    def adopt_model_changes(self) -> None:
        """Take over tensors that the model was given."""
        self._snapshot = self._snapshot.current()
        self._adopt()

    def _adopt(self) -> bool:
        """Take over tensors that the model had been given when it was looked at; whether there were any."""
        names = self._replaced_names()
        if names:
            model = ModelTensors.of(self.compiler.model)
            model.refuse_shared_memory()
            refuse_functional_call()
            self.unshard()
            self.tensors.replace(model, names)
            self.follow_tensors()
        return bool(names)

    def follow_tensors(self) -> None:
        """Run with the tensors that the pipeline owns by now."""
        self.compiler.canonical = self.tensors.canonical
        self._snapshot = self._snapshot.current()
        self._known_tensors = self._snapshot.tensors
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._last.clear()

    def _sent(self, request: CallRequest, call: ModelCall) -> ModelCall:
        activity = f"sharing rank 0's batch of {request.name}"
        trees = [part.tree for part in call.parts]
        contiguous = pytree.tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, trees)
        given = contiguous, call.weights, *_properties(call)
        sent = self.ranks.exchange.broadcast_pytree(0, activity, *pytree.tree_flatten(given))
        trees, weights, *form = pytree.tree_unflatten(*sent)
        calls = [ModelCall(*tree, *form) for tree in trees]
        return call_of_microbatches(calls, weights) if weights else calls[0]

    def _fingerprint(self, mode: Mode) -> Fingerprint:
        """The values of the model and of torch; the same object as last time if nothing has changed."""
        with autocast(self.compiler.settings.precision, self.compiler.settings.device):
            return self._snapshot.fingerprint(mode, torch_values())

    def _describe_model(self, mode: Mode, fingerprint: Fingerprint) -> CallDescription:
        """What must be equal on all ranks of the model, in which no tensors were replaced."""
        if not mode.trains:
            return fingerprint.digest
        frozen = ", ".join(self.tensors.names.frozen()) or "none"
        return fingerprint.digest | {"frozen parameters": describe_argument(frozen)}

    def _describe_call(self, request: CallRequest, described: CallDescription) -> CallDescription:
        """What must be equal on all ranks before a call, values that the traced code reads among them."""
        read = self._plain_values.get(request.mode)
        changed = (read.difference(self.compiler.traced(request.mode)) if read else "") or "none"
        replaced = ", ".join(self._replaced_names()) or "none"
        changes = described | {"replaced": replaced, "changed values": changed}
        return changes | (self.agreement.describe_updates() if request.method == "step" else {})

    def check_call(self, mode: Mode, arguments: StepArguments) -> ModelCall:
        """The arguments of a call, batch first. Raises InputError if the model cannot take them."""
        checked = self._like_last(mode, arguments)
        return self._model_call(mode, arguments)[0] if checked is None else checked.call

    def _model_call(self, mode: Mode, arguments: StepArguments) -> tuple[ModelCall, list[Any] | None]:
        """The arguments of a call, batch first, and their form; see ``CheckedCall``."""
        check_autocast(self.compiler.settings.precision, self.compiler.settings.device, mode)
        refuse_active_mode()
        if isinstance(arguments, GivenMicrobatches):
            return self._given_call(mode, arguments), None
        _, form = self._form(arguments)
        kwargs = dict(arguments.kwargs)
        call = self._new_call(mode, arguments.args, kwargs, arguments.target)
        return call, form if call.kwargs is kwargs else None  # None where rows were put in front

    def _form(self, arguments: CallArguments) -> tuple[list[Any], list[Any] | None]:
        """The leaves of arguments, and their form; see ``CheckedCall``."""
        args, kwargs, target = arguments
        leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items())), target))
        kinds, forward = [*map(_kind, leaves)], self.compiler.model.forward
        if None in kinds:
            return leaves, None
        code, order = getattr(forward, "__func__", forward), [*kwargs]
        repeated, splits = repeated_tensors(leaves), {**self.known_splits}
        of_torch = active_mode(), torch_values()
        return leaves, [code, structure, order, kinds, repeated, self.batched, splits, of_torch]

    def _given_call(self, mode: Mode, arguments: GivenMicrobatches) -> ModelCall:
        if self.batch == "local":
            raise InputError(
                "given microbatches are the same list on every rank, and replicas take them in turn: pass "
                'batch="same" or "rank0" to pipec.compile'
            )
        calls = list[ModelCall]()
        for number, (args, kwargs, target) in enumerate(arguments.calls(self.has_target)):
            with in_microbatch(number):
                calls.append(self._new_call(mode, args, dict(kwargs), target, is_given=True))
        return call_of_microbatches(calls, arguments.loss_weights(len(calls)))

    def _new_call(
        self,
        mode: Mode,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        is_given: bool = False,
    ) -> ModelCall:
        args, kwargs, target = self._with_mask_arguments((args, kwargs, target))
        refuse_nested_batches((args, kwargs, target))
        refuse_unusual_arguments({"args": args, "kwargs": kwargs, "target": target})
        given = ModelCall(args, kwargs, target)
        if mode.trains:
            refuse_input_gradients(given)
        call = replace(given, repeated=repeated_tensors(given.leaves))
        call.check(self.compiler.model)
        call = call.in_order_for(self.compiler.model)
        try:
            return self._checked_target(mode, whole_microbatch(call) if is_given else self._divided(call))
        except InputError:
            if is_given or not mode.has_loss or not self._is_never_split:
                raise
        whole = self._checked_target(mode, whole_microbatch(call))
        return call_of_microbatches([whole], (1.0,))

    def _with_mask_arguments(self, arguments: Any) -> Any:
        found = with_mask_arguments(arguments)
        self._takes_masks |= found is not arguments
        if found is not arguments and self.batch != "same":
            raise InputError(
                "a BlockMask has a function, which cannot be sent to other ranks: pass the same batch on "
                'every rank, with batch="same", or make the mask in forward()'
            )
        return found

    @property
    def _is_never_split(self) -> bool:
        """Whether there is one microbatch, so that tensors need not have the same rows."""
        return self.compiler.decided.recorded_options["microbatches"] == 1 and self.batch != "local"

    def _divided(self, call: ModelCall) -> ModelCall:
        names = positional_names(self.compiler.model)
        divided = with_batch_axes(call, self.batched, names, self.known_splits)
        refuse_moved_rows(divided.tree, divided.axes, divided.paths)
        return divided

    def _checked_target(self, mode: Mode, call: ModelCall) -> ModelCall:
        if mode.has_loss:
            call.check_target(needed=self.compiler.settings.loss_fn is not None)
        return call


@functools.lru_cache(maxsize=32)
def _memory_needs(artifact: Artifact) -> Sequence[tuple[float, float]]:
    """For each rank, the peak bytes of a step, and what it holds while a script computes the loss."""
    from pipec.plan.predictions import plan_memory
    from pipec.programs.rank_memory import waiting_bytes

    peaks = (each.peak_bytes for each in plan_memory(artifact.plan, artifact.programs))
    held = (waiting_bytes(artifact.plan, each) for each in artifact.programs)
    return [*zip(peaks, held, strict=True)]


def _kind(leaf: object) -> Hashable:
    """What a check reads of an argument; None if it may read more."""
    if type(leaf) in (int, float, bool, str, NoneType):
        return type(leaf), leaf or str(leaf)  # -0.0 equals 0.0
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or vars(leaf):
        return None
    if leaf.is_nested or leaf.is_conj() or leaf.is_neg():
        return None
    return leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad


def _properties(call: ModelCall) -> tuple[Any, ...]:
    """What a call has besides its arguments."""
    splits = call.split, call.ambiguous_leaves
    return *splits, call.strided, call.keyword_order, call.repeated


def _describe_batch(call: ModelCall, request: CallRequest) -> CallDescription:
    """What must be equal on all ranks: rows, types and sizes, and values unless nothing is run."""
    described = list[CallDescription]()
    for part in call.parts:
        leaves = [describe_leaf(leaf, values=request.method != "prepare") for leaf in part.leaves]
        described.append(dict(zip(call.paths, leaves, strict=True)))
    rows = {} if call.given else {"rows": str(call.batch_size)}
    return rows | describe_microbatches(described, call.weights) | _describe_form(call)


def _describe_types(call: ModelCall, request: CallRequest) -> CallDescription:
    """What must be equal in the parts of a batch: the types of tensors that are split, and all others."""
    leaves = [
        f"rows of {_row_type(leaf)}" if split else describe_leaf(leaf, values=request.method != "prepare")
        for leaf, split in zip(call.leaves, call.batched, strict=True)
    ]
    return dict(zip(call.paths, leaves, strict=True)) | _describe_form(call)


def _describe_form(call: ModelCall) -> CallDescription:
    """What must be equal on all ranks besides the arguments, because the code that they run depends on it."""
    repeated = [f"{call.paths[position]} is {call.paths[first]}" for position, first in call.repeated]
    return {"the same tensor": ", ".join(repeated) or "nothing"}


def _row_type(leaf: Tensor) -> str:
    layout = "" if leaf.is_contiguous() else f" with strides {list(leaf.stride())}"
    return describe_tensor(leaf.new_empty(leaf.shape[1:], device="meta")) + layout


def _digest(description: CallDescription) -> int:
    digest = hashlib.blake2b(json.dumps(list(description.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_MAX_TRIED = 6
"""How many arguments are tried to be whole by themselves, before all of them are."""


def _reason(error: PipecError) -> str:
    """The line of an error that says what is wrong."""
    lines = str(error).splitlines()
    return lines[1 if isinstance(error, MixedRowsError) and len(lines) > 1 else 0].strip()
