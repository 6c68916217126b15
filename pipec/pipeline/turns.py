"""The calls that all ranks make: what each was given is compared, sent or put together before anything runs.

With ``batch="local"`` each replica has a part of the batch. The ranks of a replica compare its rows among
themselves, and all ranks what the parts have in common. A rank that has joined has no rows and no arguments:
it learns from a rank that has some which call is made.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from pipec.capture.autocast import autocast, check_step
from pipec.capture.call import Call
from pipec.capture.known_calls import Form, KnownCalls
from pipec.capture.look import Look, same_objects
from pipec.capture.splitting import Batched, divide, positional_names, refuse_own_batches
from pipec.capture.state import State, around
from pipec.capture.variables import Variables
from pipec.compiler.captures import Kind, Signature, Turn
from pipec.compiler.compiler import Compiler
from pipec.errors import InputError, PipecError
from pipec.graph import ReadConstants
from pipec.ir import Mode
from pipec.pipeline.held import HeldModel
from pipec.runtime.holder import ModelTensors
from pipec.runtime.messages.agreement import Presence, Told
from pipec.runtime.messages.facts import Facts, differences, leaf_fact, tensor_kind
from pipec.runtime.randomness import next_seed
from pipec.runtime.stages.batch import dense
from pipec.runtime.step.execution import Ranks
from pipec.runtime.step.updates import Updates
from pipec.runtime.stream.batches import Given
from pipec.torch_compat import pytree


@dataclass(frozen=True)
class Asked:
    """The method of a pipeline that was called, with what decides a compilation."""

    method: str
    mode: Mode
    outputs: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} with outputs" if self.outputs else self.method


@dataclass(frozen=True, eq=False)
class _KnownState:
    """A state, and all that it was read of."""

    tensors: ModelTensors
    read_of: tuple[Any, ...]
    state: State


class TurnTaker(HeldModel):
    """Agrees with the other ranks on the next call."""

    def __init__(
        self,
        compiler: Compiler,
        tensors: ModelTensors,
        ranks: Ranks,
        batch: str,
        updates: Updates | None,
        batched: Batched | None,
    ) -> None:
        super().__init__(compiler, tensors, ranks, updates)
        self._batch = batch
        self._batched = batched
        self._split_before: dict[str, bool] = {}
        self._variables = Variables()
        self._read: dict[Mode, ReadConstants] = {}
        self._calls = KnownCalls()
        self._states: dict[Mode, _KnownState] = {}
        if batch == "local":
            self._remedy = _LIKE_PARTS

    @property
    def num_replicas(self) -> int:
        """The number of parts in which ranks pass a batch, for a ``DistributedSampler``.

        With ``batch="local"`` under ``torchrun`` these are the replicas of each stage. Else it is 1: every
        rank passes the whole batch.
        """
        replicas = self._compiler.autotuner.policy.replicas
        divides = self._batch == "local" and self._ranks.world.distributed
        return replicas if divides and isinstance(replicas, int) else 1

    @property
    def replica(self) -> int:
        """Which part of a batch this rank passes, from 0. Ranks of the same pipeline have the same."""
        return self._ranks.world.rank % self.num_replicas

    def _agreed(
        self, asked: Asked, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> Turn:
        """The call that all ranks make: what each of them was given, or what rank 0 was, or part of it.

        A rank that cannot use its arguments raises only when the others know. The seed, and the decision
        whether what was compiled is still right, are rank 0's.
        """
        self.drain()
        if not self._ranks.world.distributed:
            self._stop_here()
            look = self._watch.look()
            self._follow_model(look)
            call = self._checked(asked.mode, args, kwargs, target)
            kind = self._kind(asked, call, self._state(asked.mode, look))
            seed, after = next_seed()
            return Turn(
                call, Signature(kind, self._compiler.version(kind, call)), seed, after, (call.batch_size,)
            )
        call, refusal = Call((), {}), None
        if self._passes:
            try:
                call = self._checked(asked.mode, args, kwargs, target)
                call.signature()  # refuses what no stage can take
            except PipecError as error:
                refusal = error
        return self._together(asked, call, refusal)

    def _agreed_batch(self, given: Given) -> Turn:
        """The step that all ranks make with a batch of a stream."""
        return self._agreed(Asked("step", Mode.TRAIN), given.args, dict(given.kwargs), given.target)

    def _agree_to_end(self, why: str) -> None:
        self._require_same("step", {"batches": why})

    def _facts_of(self, given: Given) -> Facts:
        call = self._checked(Mode.TRAIN, given.args, dict(given.kwargs), given.target)
        return _facts_of_batch(call, Asked("step", Mode.TRAIN))

    def _is_right(self, signature: Signature) -> bool:
        """Whether what was compiled is right for the model as it is; rank 0 alone has guards."""
        look = self._watch.look()
        if self._replaced(look) or self._state(Mode.TRAIN, look) != signature.kind.state:
            return False
        return self._ranks.world.rank != 0 or self._compiler.is_right(signature)

    @property
    def _passes(self) -> bool:
        """Whether the arguments of this rank count."""
        return self._batch != "rank0" or self._ranks.world.rank == 0

    def _together(self, asked: Asked, call: Call, refusal: PipecError | None) -> Turn:
        look, part = self._watch.look(), Facts()
        state = self._state(asked.mode, look)
        facts = self._model_facts(asked, state, look)
        if refusal is not None:
            facts |= {"refused": str(refusal)}
        elif self._batch == "same":
            facts |= _facts_of_batch(call, asked)
        elif self._batch == "local":
            facts |= _facts_of_any_part(call, asked)
            part = _facts_of_rows(call, asked)
        kind = self._kind(asked, call, state) if self._passes and refusal is None else None
        seed, after = next_seed()
        notes = [seed, *self._notes(kind, call)] + ([call.batch_size, _digest(part)] if part else [])
        presence = Presence.OPTIONAL if self._batch == "local" else Presence.NEEDED
        every = self._require_same(asked.name, facts, notes, presence)
        self._stop_if_told(every)
        if refusal is not None:
            raise refusal
        rows = self._rows_of_parts(every, part) if self._batch == "local" else None
        if any(told.joined for told in every):
            _, call, every = self._told_the_joined(every, asked, call)
        if self._changes_model(every, look):
            return self._together(asked, call, None)
        if self._batch == "rank0":
            call = self._sent(asked, call)
            kind = self._kind(asked, call, state)
        assert kind is not None, "a rank whose arguments count, and are right, knows the kind of its call"
        return _turn(call, kind, every, after, rows)

    def _joined(self) -> tuple[Asked, Turn] | None:
        """The next call of the ranks that have rows, which this one has not; None if all have joined."""
        self._refuse_in_a_fork()
        own = {"batch": "none, for it has joined"}
        every = self._require_same("join", own, presence=Presence.JOINED)
        self._stop_if_told(every)
        if all(told.joined for told in every):
            return None
        rows = self._rows_of_parts(every, own)
        asked, call, every = self._told_the_joined(every)
        look = self._watch.look()
        if self._changes_model(every, look):
            return self._joined()
        kind = self._kind(asked, call, self._state(asked.mode, look))
        return asked, _turn(call, kind, every, next_seed()[1], rows)

    def _told_the_joined(
        self, every: Sequence[Told], asked: Asked | None = None, call: Call | None = None
    ) -> tuple[Asked, Call, list[Told]]:
        """The call that is made, on all ranks, and what each of them tells of it.

        All call this, those that have joined without arguments. They get a row, to know the types.
        """
        owner = next(rank for rank, told in enumerate(every) if told.notes[_ROWS])
        given: Any = None
        if asked and call:
            row, options = call.rows(0, 1), (asked.method, asked.mode, asked.outputs)
            given = options, self._accumulates, row.tree, row.split, row.unsure
        doing = "telling ranks that have joined what the others do"
        sent = self._ranks.agreement.from_rank(owner, doing, *pytree.tree_flatten(given))
        options, accumulates, (args, kwargs, target), split, unsure = pytree.tree_unflatten(*sent)
        asked = Asked(*options)
        if call is None:
            call, self._accumulates = Call(args, kwargs, target, split, unsure), accumulates
        if asked.method == "step" and self._updates is None:
            raise InputError(
                "some ranks have joined, but a step without them needs pipec.compile(..., optimizer=...): an "
                "optimizer outside of the programs would not make its update on ranks that have joined"
            )
        look = self._watch.look()
        state = self._state(asked.mode, look)
        notes = [next_seed()[0], *self._notes(self._kind(asked, call, state), call)]
        return asked, call, self._require_same(asked.name, self._model_facts(asked, state, look), notes)

    def _notes(self, kind: Kind | None, call: Call) -> list[int]:
        """What rank 0 finds of its guards, and whether parameters that this rank holds were switched."""
        whole = call if self._batch != "local" else None
        version = self._compiler.version(kind, whole) if kind and self._ranks.world.rank == 0 else 0
        return [version, hash(self._tensors.trained())]

    def _changes_model(self, every: Sequence[Told], look: Look) -> bool:
        """Whether the model is another one than before; every rank has followed it then."""
        return self._follow_model(look) or self._agree_on_trained([told.notes[_TRAINED] for told in every])

    def _rows_of_parts(self, every: Sequence[Told], part: Facts) -> tuple[int, ...]:
        """The rows of each replica. Raises InputError if the ranks of one passed different ones."""
        count = self.num_replicas
        told = [(each.joined, *each.notes[_ROWS:]) for each in every]
        if any(each != told[rank % count] for rank, each in enumerate(told)):
            self._ranks.agreement.refuse(part, lambda facts: _other_parts(facts, count))
        rows = tuple(each.notes[_ROWS] for each in every[:count])
        if not any(rows):
            raise InputError("no replica passed any rows; leave the call out on all ranks")
        return rows

    def _sent(self, asked: Asked, call: Call) -> Call:
        doing = f"sharing rank 0's batch of {asked.name}"
        given = call.tree, call.split, call.unsure
        sent = self._ranks.agreement.from_rank(0, doing, *pytree.tree_flatten(given))
        (args, kwargs, target), split, unsure = pytree.tree_unflatten(*sent)
        return Call(args, kwargs, target, split, unsure)

    def _kind(self, asked: Asked, call: Call, state: State) -> Kind:
        kind: Kind | None = call.remembered.get((asked, state))
        if kind is None:
            variables = self._variables.of(call, asked.mode)
            kind = Kind(asked.mode, call.signature(variables), asked.outputs, state, variables)
            call.remembered[asked, state] = kind
        return kind

    def _state(self, mode: Mode, look: Look) -> State:
        """The state of the model, and of torch: the very object of the last time if it is the same."""
        with autocast(self._compiler.precision, self._compiler.device):
            modes = around()
        tensors, layouts = self._tensors, self._emptied.layouts
        known = self._states.get(mode)
        if known and known.tensors is tensors and known.read_of == (look, modes, layouts):
            return known.state
        state = State.of(look, mode, self._emptied.shapes(tensors.unique()), modes)
        self._states[mode] = _KnownState(tensors, (look, modes, dict(layouts)), state)
        return state

    def _model_facts(self, asked: Asked, state: State, look: Look) -> Facts:
        """What the ranks must have in common before a call. That is also what the compiled code once read."""
        mode = asked.mode
        read = self._read.get(mode)
        changed = (read.changed(self._compiler.traced(mode)) if read else "") or "none"
        replaced = ", ".join(self._replaced(look)) or "none"
        facts = state.facts | {"replaced": replaced, "changed values": changed}
        return facts | (self._update_facts() if asked.method == "step" else {})

    def _checked(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        check_step(self._compiler.precision, self._compiler.device, mode)
        form, leaves = Form.of(self._compiler.model, args, kwargs, target, mode is Mode.FORWARD)
        like = self._calls.like(form) if form else None
        if like is None:
            like = self._checked_anew(mode, args, kwargs, target)
            if form and same_objects(
                leaves, pytree.tree_leaves((args, dict(sorted(kwargs.items())), target))
            ):
                self._calls.note(form, like)
            return like
        laid_out = like.rows_in_front([*map(dense, leaves)], like.batch_size)
        if not same_objects(laid_out, leaves):
            structure = pytree.tree_structure((args, dict(sorted(kwargs.items())), target))
            args, kwargs, target = pytree.tree_unflatten(laid_out, structure)
        return like.with_values(args, kwargs, target, laid_out)

    def _checked_anew(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        refuse_own_batches((args, kwargs, target))
        call = Call(*pytree.tree_map(dense, (args, kwargs, target)))
        call.check(self._compiler.model)
        call = self._divided(call)
        if mode is not Mode.FORWARD:
            call.check_target(needed=self._compiler.loss_fn is not None)
        return call

    def _divided(self, call: Call) -> Call:
        return divide(call, self._batched, positional_names(self._compiler.model), self._split_before)


_TRAINED, _ROWS = 2, 3
"""Where among the notes of a rank are the digest of what is trained and the rows of its part, if any."""


def _turn(
    call: Call, kind: Kind, every: Sequence[Told], after: Generator, rows: tuple[int, ...] | None
) -> Turn:
    """The turn that the ranks agreed on. What is drawn, and which capture is right, is rank 0's word."""
    seed, version, *_ = every[0].notes
    return Turn(call, Signature(kind, version), seed, after, rows or (call.batch_size,))


def _facts_of_batch(call: Call, asked: Asked) -> Facts:
    """What the ranks must have in common; where nothing is run, that does not include values."""
    facts = [leaf_fact(leaf, values=asked.method != "prepare") for leaf in call.leaves]
    return {"rows": str(call.batch_size), **dict(zip(call.paths, facts, strict=True))}


def _facts_of_any_part(call: Call, asked: Asked) -> Facts:
    """What the parts of a batch must have in common: the types of what is split, and all of the rest."""
    facts = [
        f"rows of {_kind_of_row(leaf)}" if split else leaf_fact(leaf, values=asked.method != "prepare")
        for leaf, split in zip(call.leaves, call.batched, strict=True)
    ]
    return dict(zip(call.paths, facts, strict=True))


def _kind_of_row(leaf: Tensor) -> str:
    layout = "" if leaf.is_contiguous() else f" with strides {list(leaf.stride())}"
    return tensor_kind(leaf.new_empty(leaf.shape[1:], device="meta")) + layout


def _facts_of_rows(call: Call, asked: Asked) -> Facts:
    """What the ranks of one replica must have in common besides."""
    split = dict(zip(call.paths, call.batched, strict=True))
    facts = _facts_of_batch(call, asked)
    return {path: fact for path, fact in facts.items() if split.get(path, True)}


def _digest(facts: Facts) -> int:
    digest = hashlib.blake2b(json.dumps(list(facts.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _other_parts(every: Sequence[Facts], count: int) -> str:
    """What is wrong if the ranks of a replica have these facts."""
    lines = [
        f"the ranks of replica {k} passed different parts of the batch:\n{found}"
        for k in range(count)
        if (found := differences(every[k::count], range(k, len(every), count)))
    ]
    return "\n".join(lines) + (
        "\nRanks of the same replica pass the same rows, and join together: make a DistributedSampler with "
        "num_replicas=pipe.num_replicas and rank=pipe.replica, and seed it alike on all ranks"
    )


_LIKE_PARTS = (
    'With batch="local" the parts of all replicas have the same structure, types and sizes but for their '
    "rows, and what is not split is the same. See that every rank makes its part in the same way; say what "
    "is split with batched=... if the sizes do not tell it apart"
)
