"""The calls that all ranks make together: before anything runs, they compare their arguments or get rank 0's.

With ``batch="local"`` each replica has a part of the batch. The ranks of a replica compare its rows; all
ranks compare types and sizes. A rank that has joined has no rows and no arguments: a rank that has some tells
it which call is made.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from pipec.capture.autocast import autocast, check_autocast
from pipec.capture.batch_inputs import BatchedOption, positional_names, refuse_nested_batches, with_batch_axes
from pipec.capture.call_cache import CallCache, CallKey
from pipec.capture.foreign_code import refuse_active_mode, refuse_unusual_arguments
from pipec.capture.model_call import ModelCall, refuse_input_gradients
from pipec.capture.variable_history import VariableHistory
from pipec.compiler.compile_cache import CaptureKey, CaptureSignature
from pipec.compiler.compiler import Compiler
from pipec.console import warn
from pipec.errors import InputError, PipecError
from pipec.graph import Fingerprint, ModelSnapshot, PlainValues, same_objects, torch_values
from pipec.ir import Mode
from pipec.ir.batch_split import repeated_tensors
from pipec.pipeline.owned_tensors import OwnedTensors
from pipec.runtime.messages.agreement import CallRole, RankReply
from pipec.runtime.messages.call_description import (
    CallDescription,
    describe_differences,
    describe_leaf,
    describe_tensor,
)
from pipec.runtime.pipeline_context import PipelineContext
from pipec.runtime.random_seeds import peek_seed
from pipec.runtime.sharded_loaders import dropped_parts_warning
from pipec.runtime.stream.call_arguments import CallArguments
from pipec.torch_compat import pytree


@dataclass(frozen=True)
class CallRequest:
    """The method of a pipeline that was called, with what decides a compilation."""

    method: str
    mode: Mode
    outputs: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} with outputs" if self.outputs else self.method


@dataclass(frozen=True)
class CollectiveCall:
    """A call that all ranks make, with its signature and random seed.

    ``generator_after`` is torch's default generator after drawing the seed. ``rows[k]`` is the number of rows
    of replica k if each replica passes its own part of the batch; otherwise ``rows`` has one entry, all rows.
    """

    call: ModelCall
    signature: CaptureSignature
    seed: int
    generator_after: Generator
    rows: tuple[int, ...]


class CallAgreement:
    """Makes each call of a pipeline one of all ranks: the same arguments, seed and compiled code.

    Args:
        batch: "same", "rank0" or "local", as ``pipec.compile`` says.
        batched: which arguments are split, as ``pipec.compile`` says.
    """

    def __init__(
        self,
        context: PipelineContext,
        compiler: Compiler,
        owned: OwnedTensors,
        batch: str,
        batched: BatchedOption | None,
    ) -> None:
        self._context, self._ranks, self._compiler, self._owned = context, context.ranks, compiler, owned
        self.batch, self.batched = batch, batched
        self.known_splits: dict[str, bool] = {}
        self.variables = VariableHistory(
            expects_lengths=compiler.decided.dynamic and context.ranks.kernels == "source"
        )
        self.plain_values: dict[Mode, PlainValues] = {}
        self.checked_calls = CallCache()
        self._has_looked_for_parts = False

    @property
    def num_replicas(self) -> int:
        """The number of parts in which ranks pass a batch."""
        replicas = self._compiler.decided.policy.replicas
        divides = self.batch == "local" and self._context.is_distributed
        return replicas if divides and isinstance(replicas, int) else 1

    @property
    def replica(self) -> int:
        """The part of a batch that this rank passes, from 0."""
        return self._ranks.world.rank % self.num_replicas

    def agree(
        self, request: CallRequest, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> CollectiveCall:
        """The call that all ranks make, with the arguments of every rank, of rank 0, or of its replica.

        A rank that cannot use its arguments raises only when the others know. Rank 0 gives the seed, and
        decides whether the compiled code is still valid.
        """
        self._context.drain()
        if not self._context.is_distributed:
            self._context.exit_on_signal()
            snapshot = self._owned.snapshot()
            self._owned.adopt_model_changes(snapshot)
            call = self.check_call(request.mode, args, kwargs, target)
            key = self._capture_key(request, call, self._fingerprint(request.mode, snapshot))
            seed, after = peek_seed()
            return CollectiveCall(
                call,
                CaptureSignature(key, self._compiler.cache.version(key, call)),
                seed,
                after,
                (call.batch_size,),
            )
        call, refusal = ModelCall((), {}), None
        if self._has_arguments:
            try:
                call = self.check_call(request.mode, args, kwargs, target)
                call.signature()  # refuses what no stage can take
            except PipecError as error:
                refusal = error
        return self._agree_across_ranks(request, call, refusal)

    def describe_batch(self, arguments: CallArguments) -> CallDescription:
        """What must be equal on all ranks of a batch of a stream."""
        call = self.check_call(Mode.TRAIN, arguments.args, dict(arguments.kwargs), arguments.target)
        return _describe_batch(call, CallRequest("step", Mode.TRAIN))

    def is_valid(self, signature: CaptureSignature) -> bool:
        """Whether the compiled code is valid for the model as it is now. Rank 0 alone has guards."""
        snapshot = self._owned.snapshot()
        if self._owned.replaced_names(snapshot):
            return False
        if self._fingerprint(Mode.TRAIN, snapshot) != signature.key.fingerprint:
            return False
        return self._ranks.world.rank != 0 or self._compiler.cache.is_valid(signature)

    @property
    def _has_arguments(self) -> bool:
        """Whether the arguments of this rank count."""
        return self.batch != "rank0" or self._ranks.world.rank == 0

    def _agree_across_ranks(
        self, request: CallRequest, call: ModelCall, refusal: PipecError | None
    ) -> CollectiveCall:
        snapshot, part = self._owned.snapshot(), CallDescription()
        fingerprint = self._fingerprint(request.mode, snapshot)
        description = self._describe_model(request, fingerprint, snapshot)
        if refusal is not None:
            description |= {"refused": str(refusal)}
        elif self.batch == "same":
            description |= _describe_batch(call, request)
        elif self.batch == "local":
            description |= _describe_types(call, request)
            part = _describe_rows(call, request)
        key = (
            self._capture_key(request, call, fingerprint) if self._has_arguments and refusal is None else None
        )
        seed, after = peek_seed()
        reply_values = [seed, *self._reply_values(key, call)] + (
            [call.batch_size, _digest(part)] if part else []
        )
        call_role = CallRole.OPTIONAL if self.batch == "local" else CallRole.REQUIRED
        replies = self._context.require_same_call(request.name, description, reply_values, call_role)
        self._context.exit_on_signal(replies)
        if refusal is not None:
            raise refusal
        rows = self._rows_per_replica(replies, part) if self.batch == "local" else None
        if any(reply.joined for reply in replies):
            _, call, replies = self._inform_joined_ranks(replies, request, call)
        if self._changes_model(replies, snapshot):
            return self._agree_across_ranks(request, call, None)
        if self.batch == "rank0":
            self._warn_of_dropped_parts()
            call = self._sent(request, call)
            key = self._capture_key(request, call, fingerprint)
        assert key is not None, "a rank whose arguments count, and are right, knows the key of its call"
        return _collective_call(call, key, replies, after, rows)

    def next_call_of_others(self) -> tuple[CallRequest, CollectiveCall] | None:
        """The next call of the ranks that have rows, on one that has joined; None if all have joined."""
        self._context.refuse_fork()
        own = {"batch": "none, for it has joined"}
        replies = self._context.require_same_call("join", own, call_role=CallRole.JOINED)
        self._context.exit_on_signal(replies)
        if all(reply.joined for reply in replies):
            return None
        rows = self._rows_per_replica(replies, own)
        request, call, replies = self._inform_joined_ranks(replies)
        snapshot = self._owned.snapshot()
        if self._changes_model(replies, snapshot):
            return self.next_call_of_others()
        key = self._capture_key(request, call, self._fingerprint(request.mode, snapshot))
        return request, _collective_call(call, key, replies, peek_seed()[1], rows)

    def _inform_joined_ranks(
        self, replies: Sequence[RankReply], request: CallRequest | None = None, call: ModelCall | None = None
    ) -> tuple[CallRequest, ModelCall, list[RankReply]]:
        """The call, on all ranks, and their replies to it.

        Every rank calls this; ranks that have joined pass no arguments, and get a row, to know the types.
        """
        owner = next(rank for rank, reply in enumerate(replies) if reply.reply_values[_ROWS])
        given: Any = None
        if request and call:
            row, options = call.rows(0, 1), (request.method, request.mode, request.outputs)
            given = options, self._context.steps.accumulates, row.tree, *_form(row)
        activity = "telling ranks that have joined what the others do"
        sent = self._ranks.agreement.broadcast_pytree(owner, activity, *pytree.tree_flatten(given))
        options, accumulates, (args, kwargs, target), *form = pytree.tree_unflatten(*sent)
        request = CallRequest(*options)
        if call is None:
            call = ModelCall(args, kwargs, target, *form)
            self._context.steps.accumulates = accumulates
        if request.method == "step" and self._context.updates is None:
            raise InputError(
                "some ranks have joined, but a step without them needs pipec.compile(..., optimizer=...): an "
                "optimizer outside of the programs would not make its update on ranks that have joined"
            )
        snapshot = self._owned.snapshot()
        fingerprint = self._fingerprint(request.mode, snapshot)
        reply_values = [
            peek_seed()[0],
            *self._reply_values(self._capture_key(request, call, fingerprint), call),
        ]
        description = self._describe_model(request, fingerprint, snapshot)
        return request, call, self._context.require_same_call(request.name, description, reply_values)

    def _reply_values(self, key: CaptureKey | None, call: ModelCall) -> list[int]:
        """The version that rank 0's guards choose, and a hash of the requires_grad flags of this rank."""
        whole = call if self.batch != "local" else None
        version = self._compiler.cache.version(key, whole) if key and self._ranks.world.rank == 0 else 0
        return [version, hash(self._owned.tensors.requires_grad_flags())]

    def _changes_model(self, replies: Sequence[RankReply], snapshot: ModelSnapshot) -> bool:
        """Whether the model's tensors or what is trained have changed. Every rank has followed then."""
        return self._owned.adopt_model_changes(snapshot) or self._owned.agree_on_trained(
            [reply.reply_values[_TRAINED] for reply in replies]
        )

    def _rows_per_replica(self, replies: Sequence[RankReply], part: CallDescription) -> tuple[int, ...]:
        """The rows of each replica. Raises InputError if the ranks of a replica passed different rows."""
        count = self.num_replicas
        parts = [(reply.joined, *reply.reply_values[_ROWS:]) for reply in replies]
        if any(each != parts[rank % count] for rank, each in enumerate(parts)):
            self._ranks.agreement.raise_mismatch(part, lambda every: _replica_mismatch(every, count))
        rows = tuple(reply.reply_values[_ROWS] for reply in replies[:count])
        if not any(rows):
            raise InputError("no replica passed any rows; leave the call out on all ranks")
        return rows

    def _warn_of_dropped_parts(self) -> None:
        """Warn once if a loader of this process takes a part of the data, and only rank 0's is used."""
        if not self._has_looked_for_parts and (warning := dropped_parts_warning()):
            warn(warning)
        self._has_looked_for_parts = True

    def _sent(self, request: CallRequest, call: ModelCall) -> ModelCall:
        activity = f"sharing rank 0's batch of {request.name}"
        contiguous = pytree.tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, call.tree)
        given = contiguous, *_form(call)
        sent = self._ranks.agreement.broadcast_pytree(0, activity, *pytree.tree_flatten(given))
        (args, kwargs, target), *form = pytree.tree_unflatten(*sent)
        return ModelCall(args, kwargs, target, *form)

    def _capture_key(self, request: CallRequest, call: ModelCall, fingerprint: Fingerprint) -> CaptureKey:
        key: CaptureKey | None = call.cache.get((request, fingerprint))
        if key is None:
            variables = self.variables.of(call, request.mode)
            key = CaptureKey(request.mode, call.signature(variables), request.outputs, fingerprint, variables)
            call.cache[request, fingerprint] = key
        return key

    def _fingerprint(self, mode: Mode, snapshot: ModelSnapshot) -> Fingerprint:
        """The values of the model and of torch; the same object as last time if nothing has changed."""
        with autocast(self._compiler.settings.precision, self._compiler.settings.device):
            return snapshot.fingerprint(mode, torch_values())

    def _describe_model(
        self, request: CallRequest, fingerprint: Fingerprint, snapshot: ModelSnapshot
    ) -> CallDescription:
        """What must be equal on all ranks before a call, values that the traced code reads among them."""
        mode = request.mode
        read = self.plain_values.get(mode)
        changed = (read.difference(self._compiler.traced(mode)) if read else "") or "none"
        replaced = ", ".join(self._owned.replaced_names(snapshot)) or "none"
        description = fingerprint.digest | {"replaced": replaced, "changed values": changed}
        return description | (self._context.describe_updates() if request.method == "step" else {})

    def check_call(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> ModelCall:
        """The arguments of a call, batch first. Raises InputError if the model cannot take them."""
        check_autocast(self._compiler.settings.precision, self._compiler.settings.device, mode)
        refuse_active_mode()
        key, leaves = CallKey.of(self._compiler.model, args, kwargs, target, mode is Mode.FORWARD)
        if mode is Mode.TRAIN and (key is None or any(map(_requires_grad, leaves))):
            refuse_input_gradients(ModelCall(args, kwargs, target))
        cached = self.checked_calls.get(key) if key else None
        if cached is None:
            cached = self._checked(mode, args, kwargs, target)
            if key and same_objects(leaves, pytree.tree_leaves((args, dict(sorted(kwargs.items())), target))):
                self.checked_calls.put(key, cached)
            return cached
        laid_out = cached.batch_first(leaves, cached.batch_size)
        if not same_objects(laid_out, leaves):
            structure = pytree.tree_structure((args, dict(sorted(kwargs.items())), target))
            args, kwargs, target = pytree.tree_unflatten(laid_out, structure)
        return cached.with_arguments(args, kwargs, target, laid_out)

    def _checked(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> ModelCall:
        refuse_nested_batches((args, kwargs, target))
        refuse_unusual_arguments({"args": args, "kwargs": kwargs, "target": target})
        given = ModelCall(args, kwargs, target).leaves
        call = ModelCall(args, kwargs, target, repeated=repeated_tensors(given))
        call.check(self._compiler.model)
        call = self._divided(call.in_order_for(self._compiler.model)).marked_as(given)
        if mode is not Mode.FORWARD:
            call.check_target(needed=self._compiler.settings.loss_fn is not None)
        return call

    def _divided(self, call: ModelCall) -> ModelCall:
        return with_batch_axes(call, self.batched, positional_names(self._compiler.model), self.known_splits)


def _form(call: ModelCall) -> tuple[Any, ...]:
    """What a call has besides its arguments."""
    splits = call.split, call.ambiguous_leaves
    return *splits, call.strided, call.keyword_order, call.marked, call.repeated


def _requires_grad(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


_TRAINED, _ROWS = 2, 3
"""Positions in ``reply_values``: a hash of the requires_grad flags; the rows of the rank's part, if any."""


def _collective_call(
    call: ModelCall,
    key: CaptureKey,
    replies: Sequence[RankReply],
    after: Generator,
    rows: tuple[int, ...] | None,
) -> CollectiveCall:
    """The call on which the ranks agreed. Rank 0 decides the seed, and which capture is valid."""
    seed, version, *_ = replies[0].reply_values
    return CollectiveCall(call, CaptureSignature(key, version), seed, after, rows or (call.batch_size,))


def _describe_batch(call: ModelCall, request: CallRequest) -> CallDescription:
    """What must be equal on all ranks: rows, types and sizes, and values unless nothing is run."""
    leaves = [describe_leaf(leaf, values=request.method != "prepare") for leaf in call.leaves]
    described = dict(zip(call.paths, leaves, strict=True))
    return {"rows": str(call.batch_size), **described, **_describe_form(call)}


def _describe_types(call: ModelCall, request: CallRequest) -> CallDescription:
    """What must be equal in the parts of a batch: the types of tensors that are split, and all others."""
    leaves = [
        f"rows of {_row_type(leaf)}" if split else describe_leaf(leaf, values=request.method != "prepare")
        for leaf, split in zip(call.leaves, call.batched, strict=True)
    ]
    return dict(zip(call.paths, leaves, strict=True)) | _describe_form(call)


def _describe_form(call: ModelCall) -> CallDescription:
    """What must be equal on all ranks besides the arguments, because the code that they run depends on it."""
    marked = [f"dimension {dim} of {call.paths[position]}" for position, dim in call.marked]
    repeated = [f"{call.paths[position]} is {call.paths[first]}" for position, first in call.repeated]
    described = {"marked as dynamic": marked, "the same tensor": repeated}
    return {name: ", ".join(each) or "nothing" for name, each in described.items()}


def _row_type(leaf: Tensor) -> str:
    layout = "" if leaf.is_contiguous() else f" with strides {list(leaf.stride())}"
    return describe_tensor(leaf.new_empty(leaf.shape[1:], device="meta")) + layout


def _describe_rows(call: ModelCall, request: CallRequest) -> CallDescription:
    """What must also be equal on the ranks of one replica: the rows of tensors that are split."""
    split = dict(zip(call.paths, call.batched, strict=True))
    description = _describe_batch(call, request)
    return {path: each for path, each in description.items() if split.get(path, True)}


def _digest(description: CallDescription) -> int:
    digest = hashlib.blake2b(json.dumps(list(description.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _replica_mismatch(every: Sequence[CallDescription], count: int) -> str:
    """How the descriptions differ on ranks of the same replica."""
    lines = [
        f"the ranks of replica {k} passed different parts of the batch:\n{found}"
        for k in range(count)
        if (found := describe_differences(every[k::count], range(k, len(every), count)))
    ]
    return "\n".join(lines) + (
        "\nRanks of the same replica pass the same rows, and join together: make a DistributedSampler with "
        "num_replicas=pipe.num_replicas and rank=pipe.replica, and seed it alike on all ranks"
    )


def local_batch_advice() -> str:
    """What to do if the parts of a batch do not fit together."""
    return (
        'With batch="local" the parts of all replicas have the same structure, types and sizes but for their '
        "rows, and what is not split is the same. See that every rank makes its part in the same way; say "
        "what is split with batched=... if the sizes do not tell it apart"
    )
