"""Instructions, and the program of them that one rank executes in one step."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from pipec.ir.values import Link, Phase, Value


class Op(StrEnum):
    """The operation of an instruction. The compute ops have the names of the phases they run."""

    RECV = "recv"
    SEND = "send"
    MOVE = "move"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    ACCUMULATE = "accumulate"
    PRECOMPUTE = "precompute"
    FREE = "free"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    SUM_COUNTS = "sum_counts"
    GATHER_ROWS = "gather_rows"
    TAIL = "tail"
    REDUCE_GRAD = "reduce_grad"
    STORE = "store"
    AVERAGE_BUFFERS = "average_buffers"
    GRAD_NORM = "grad_norm"
    STAGE_NORM = "stage_norm"
    CHECK = "check"
    STASH = "stash"
    UPDATE = "update"
    HOST_UPDATE = "host_update"
    PAUSE = "pause"
    UNSHARD = "unshard"
    LOAD = "load"
    RESHARD = "reshard"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    WAIT_RECV = "wait_recv"
    WAIT_OFFLOAD = "wait_offload"
    WAIT_PREFETCH = "wait_prefetch"
    WAIT_SUM_COUNTS = "wait_sum_counts"
    WAIT_GATHER_ROWS = "wait_gather_rows"
    WAIT_REDUCE_GRAD = "wait_reduce_grad"
    WAIT_STORE = "wait_store"
    WAIT_AVERAGE_BUFFERS = "wait_average_buffers"
    WAIT_UNSHARD = "wait_unshard"
    WAIT_LOAD = "wait_load"
    WAIT_ALL_REDUCE = "wait_all_reduce"
    WAIT_ALL_GATHER = "wait_all_gather"
    WAIT_REDUCE_SCATTER = "wait_reduce_scatter"

    @property
    def traits(self) -> "OpTraits":
        return TRAITS[self]

    @property
    def phase(self) -> Phase | None:
        """The phase that a compute runs; None for every other op."""
        return TRAITS[self].phase


class OpKind(Enum):
    """The kinds of ops. A ``STEP_COMPUTE`` occupies its rank as a ``COMPUTE`` does, once a step."""

    RECEIVE = "receive"
    COLLECTIVE = "collective"
    STEP_COMPUTE = "step_compute"
    WAIT = "wait"
    COMPUTE = "compute"
    SEND = "send"
    ACCUMULATE = "accumulate"
    RELEASE = "release"
    COPY = "copy"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class OpTraits:
    """The row of an op: all that is said of it, for code that treats ops equally.

    ``fields`` are those that an instruction names, with a ``?`` where it may: "stage microbatch segment?".
    ``effects`` are the events in the life of cells that it causes, such as ``message.recv``; see ``CELLS``.
    ``phase`` is the phase that a compute runs; other kinds have none. An op that is ``timed`` is an event of
    a timeline. A wait ``awaits`` the end of what another op has started.
    """

    kind: OpKind
    fields: str
    effects: str
    phase: Phase | None = None
    timed: bool = False
    awaits: Op | None = None

    @property
    def per_microbatch(self) -> bool:
        """Whether it works on a microbatch."""
        return "microbatch" in self.fields.split() and "link" not in self.fields

    @property
    def carries_link(self) -> bool:
        """Whether it moves the values of a link."""
        return "link" in self.fields.split()

    @property
    def effect_parts(self) -> Sequence[tuple[str, str, str]]:
        """The effects as cell, event and the kind of instructions that have it, or ""."""
        return _effect_parts(self.effects)


@functools.cache
def _effect_parts(effects: str) -> Sequence[tuple[str, str, str]]:
    parts = (effect.partition(":") for effect in effects.split())
    return [(*what.split("."), kind) for what, _, kind in parts]  # type: ignore[misc]


CELLS: Mapping[str, tuple[str, str, str]] = {
    "forward": ("stage microbatch", "make read* free", "make"),
    "recomputed": ("stage microbatch", "make read*", "make"),
    "input_gradient": ("stage microbatch", "make read* free", "make"),
    "weight_gradient": ("stage microbatch", "make", "make"),
    "gradients": ("stage microbatch segment", "(make add)+", ""),
    "unadded": ("", "(make add | use)*", ""),
    "message": ("link microbatch peer", "(recv wait | move) read*", "recv move"),
    "returned": ("link microbatch peer", "recv wait accumulate | move", "recv move"),
    "sent": ("link microbatch peer", "send", "send"),
    "microbatch": ("stage microbatch", "use* free", "free"),
    "slot": ("link slot", "(fill free)+", ""),
    "collective": ("stage microbatch model_collective", "make start wait read", "read"),
    "offloaded": ("stage microbatch", "(offload away prefetch back)? read*", ""),
    "precomputed": ("stage version", "make read+", ""),
    "counts": ("stage", "sum wait read*", "sum"),
    "forwards": ("stage", "make* close*", ""),
    "rows": ("stage", "gather wait read", "gather"),
    "tail": ("stage", "run read*", "run"),
    "tail_gradients": ("stage", "run read*", "run"),
    "loss": ("", "make* pause read*", "pause"),
    "averaged": ("stage", "average read*", "average"),
    "buffers": ("stage", "average wait", "average"),
    "sum": ("stage", "add* close*", ""),
    "returned_sum": ("stage", "add* close*", ""),
    "bucket_sum": ("bucket", "(add* reduce)+", ""),
    "reduction": ("bucket", "(reduce wait)+ read*", "reduce"),
    "norm": ("", "norm read*", "norm"),
    "verdict": ("", "check read*", "check"),
    "updated": ("stage", "update read*", "update"),
    "gathered": ("bucket", "(unshard wait read* reshard pause?)+", ""),
    "shards": ("bucket", "unshard wait", "unshard"),
    "round": ("round bucket", "open add* (reduce wait)? check? norm? stash? update next?", "update"),
    "version": ("stage version", "make read* replace?", ""),
    "stashed": ("stage version", "stash read*", ""),
    "results": ("mini-batch", "have* close*", ""),
    "request": ("mini-batch", "pause read*", ""),
}
"""The cells that instructions of a rank read and change: the fields that name one, its life, and the event
that each of them has once that the plan demands; of a reduction, once a round where replicas sum each round.

A life is a regular expression of events, each of which it has once: so it says which event may follow which,
and the verifier looks nothing else up (``programs/lives.py``). An op that does not name a field of a cell
means all that belong to the fields it names: an update reads the sums of all buckets of its stage, and a
norm, which names no stage, those of all stages of its rank. An effect such as ``forwards.close:result`` is
one of instructions with such links, or with ``none``. A compute in segments reads before the first, makes
after the last, and adds after each; each segment reads weights. What a move reads is of the source of its
link.

A ``message`` is received or moved, then read; one that brings gradients of a tied weight is ``returned``, and
accumulated. ``forwards`` are all forwards of a stage, and ``sum`` all its gradients: what reads them comes
after the last. The ``loss`` is one that the script computes of the results: what makes these comes before the
pause, and what reads their gradients behind it. A ``version`` of the weights that is read after the next
update is ``stashed`` before. A ``round`` has the gradients of one update of a stream; what it does not need
is left out of its life. A compute makes ``gradients`` that are ``unadded`` until they are accumulated, before
the rank goes on. An instruction that changes no cell of the plan is refused.
"""

_READS = "message.read counts.read gathered.read precomputed.read version.read stashed.read"
_SEGMENTS = "collective.make collective.read"
_SAVED = "forward.read recomputed.read offloaded.read tail_gradients.read"
_MAKES = "gradients.make unadded.make"
_BACKWARD = f"{_READS} {_SEGMENTS} {_SAVED} loss.read input_gradient.make {_MAKES}"
_TRAINS = "weight_gradient.make round.add"
_READS_SENT = (
    "forward.read:activation/microbatch_result input_gradient.read:gradient sum.close:weight_gradient "
    "unadded.use:weight_gradient"
)


def _compute(phase: Phase, effects: str) -> OpTraits:
    return OpTraits(OpKind.COMPUTE, "stage microbatch segment? version?", effects, phase, timed=True)


def _copy(effects: str, fields: str = "stage microbatch") -> OpTraits:
    return OpTraits(OpKind.COPY, fields, effects, timed=True)


def _once(kind: OpKind, effects: str, fields: str = "stage") -> OpTraits:
    return OpTraits(kind, fields, effects, timed=True)


_UPDATES = (
    "sum.close returned_sum.close reduction.read norm.read verdict.read averaged.read updated.update "
    "unadded.use"
)
_ROUND = "stage microbatch?"
_MODEL_COLLECTIVE = OpTraits(
    OpKind.COLLECTIVE, "stage microbatch model_collective", "collective.start", timed=True
)

_STARTS: Mapping[Op, OpTraits] = {
    Op.RECV: OpTraits(
        OpKind.RECEIVE,
        "stage microbatch? link peer slot?",
        "message.recv returned.recv slot.fill unadded.use:weight_gradient loss.read:gradient/weight_gradient",
    ),
    Op.SEND: OpTraits(
        OpKind.SEND,
        "stage microbatch? link peer",
        f"{_READS_SENT} forwards.close:result tail.read:result loss.make:result gathered.read:weight "
        "sent.send",
        timed=True,
    ),
    Op.MOVE: OpTraits(
        OpKind.SEND,
        "stage microbatch? link slot?",
        f"{_READS_SENT} gathered.read:weight message.move returned.move "
        "returned_sum.add:weight_gradient bucket_sum.add:weight_gradient slot.fill",
    ),
    Op.FORWARD: _compute(
        Phase.FORWARD,
        f"{_READS} {_SEGMENTS} forward.make forwards.make loss.make results.have request.read unadded.use",
    ),
    Op.RECOMPUTE: _compute(
        Phase.RECOMPUTE, f"{_READS} forward.read offloaded.read recomputed.make unadded.use"
    ),
    Op.BACKWARD: _compute(Phase.BACKWARD, f"{_BACKWARD} {_TRAINS}"),
    Op.BACKWARD_INPUT: _compute(Phase.BACKWARD_INPUT, _BACKWARD),
    Op.BACKWARD_WEIGHT: _compute(
        Phase.BACKWARD_WEIGHT, f"{_READS} {_SEGMENTS} input_gradient.read {_TRAINS} {_MAKES}"
    ),
    Op.ACCUMULATE: OpTraits(
        OpKind.ACCUMULATE,
        "stage microbatch link? peer? segment?",
        "forward.read:none gradients.add:none unadded.add:none sum.add:none round.add:none "
        "returned.accumulate returned_sum.add:weight_gradient bucket_sum.add",
    ),
    Op.PRECOMPUTE: OpTraits(
        OpKind.LOCAL, f"{_ROUND} version?", "microbatch.use gathered.read precomputed.make"
    ),
    Op.FREE: OpTraits(OpKind.RELEASE, "stage microbatch", "forward.free input_gradient.free microbatch.free"),
    Op.OFFLOAD: _copy("forward.read offloaded.offload"),
    Op.PREFETCH: _copy("offloaded.prefetch loss.read"),
    Op.SUM_COUNTS: _once(OpKind.COLLECTIVE, "counts.sum"),
    Op.GATHER_ROWS: _once(OpKind.COLLECTIVE, "forwards.close rows.gather"),
    Op.TAIL: _once(
        OpKind.STEP_COMPUTE,
        "forwards.close rows.read counts.read gathered.read:tail tail.run tail_gradients.run",
    ),
    Op.REDUCE_GRAD: _once(
        OpKind.COLLECTIVE,
        "bucket_sum.reduce reduction.reduce round.reduce round.open round.next unadded.use",
        f"{_ROUND} bucket",
    ),
    Op.STORE: _copy("bucket_sum.reduce reduction.reduce unadded.use", "stage bucket"),
    Op.AVERAGE_BUFFERS: _once(OpKind.COLLECTIVE, "forwards.close averaged.average buffers.average"),
    Op.GRAD_NORM: _once(
        OpKind.COLLECTIVE, "sum.close returned_sum.close reduction.read norm.norm unadded.use", ""
    ),
    Op.STAGE_NORM: OpTraits(OpKind.LOCAL, _ROUND, "round.norm"),
    Op.CHECK: OpTraits(
        OpKind.LOCAL,
        "stage? microbatch?",
        "norm.read verdict.check round.check results.close request.read",
    ),
    Op.STASH: OpTraits(OpKind.LOCAL, f"{_ROUND} version?", "round.stash stashed.stash"),
    Op.UPDATE: _once(
        OpKind.STEP_COMPUTE,
        f"{_UPDATES} round.update round.open version.make version.replace request.read",
        f"{_ROUND} version?",
    ),
    Op.HOST_UPDATE: _copy(_UPDATES, "stage"),
    Op.PAUSE: OpTraits(
        OpKind.LOCAL, "microbatch?", "loss.pause gathered.pause results.close request.pause request.read"
    ),
    Op.UNSHARD: _once(OpKind.COLLECTIVE, "updated.read:late gathered.unshard shards.unshard", "stage bucket"),
    Op.LOAD: _copy("gathered.unshard", "stage bucket"),
    Op.RESHARD: OpTraits(OpKind.RELEASE, "stage bucket", "gathered.reshard"),
    **dict.fromkeys((Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER), _MODEL_COLLECTIVE),
}

_WAITS: Mapping[Op, str] = {
    Op.RECV: (
        "message.wait returned.wait loss.make:result/weight results.have request.read "
        "unadded.use:weight_gradient"
    ),
    Op.OFFLOAD: "offloaded.away loss.make",
    Op.PREFETCH: "offloaded.back",
    Op.SUM_COUNTS: "counts.wait loss.make",
    Op.GATHER_ROWS: "rows.wait",
    Op.REDUCE_GRAD: "reduction.wait round.wait",
    Op.STORE: "reduction.wait",
    Op.AVERAGE_BUFFERS: "buffers.wait loss.make",
    Op.UNSHARD: "gathered.wait shards.wait",
    Op.LOAD: "gathered.wait",
    **dict.fromkeys((Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER), "collective.wait"),
}
"""For each op that returns before what it starts has ended, the effects of the op that waits for this."""

WAIT_OF: Mapping[Op, Op] = {started: Op(f"wait_{started}") for started in _WAITS}
"""For each op that returns before what it starts has ended, the op that waits for this."""

TRAITS: Mapping[Op, OpTraits] = {
    **_STARTS,
    **{
        WAIT_OF[op]: OpTraits(OpKind.WAIT, _STARTS[op].fields.replace(" slot?", ""), effects, awaits=op)
        for op, effects in _WAITS.items()
    },
}
"""The rows of all ops. A new op is a row of ``_STARTS``, and of ``_WAITS`` if it has to be awaited."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program.

    =============== ==================================================================================
    op              meaning
    =============== ==================================================================================
    recv            post a receive of ``link`` from rank ``peer`` into buffer ``slot``; returns at once. On a
                    GPU it is launched behind the compute that follows
    send            start sending ``link`` to rank ``peer``; returns at once
    move            hand ``link`` to another stage of the same rank, into buffer ``slot``
    compute         run a phase of ``stage``; a backward keeps its gradients for ``accumulate``
    accumulate      add the gradients of the compute before, or those that ``link`` brought, to their sums
    precompute      compute what ``stage`` computes once of its weights, or of a version of them
    wait_...        wait for what an earlier instruction with the same fields has started: ``wait_recv`` for
                    the values of a link, ``wait_reduce_grad`` for a sum; and so on
    free            free the memory of ``stage`` for ``microbatch``: saved values, and slots received into
    offload         start to copy the offloaded part of the values that ``stage`` saved for
                    ``microbatch`` to host memory; ``wait_offload`` frees it on the device
    prefetch        start to copy it back
    sum_counts      start to sum the batch counts of ``stage`` over its replicas, each of which has its rows
    gather_rows     start to gather the inputs of the tail of ``stage`` from its replicas
    tail            run the tail of ``stage`` on the rows of all microbatches; it adds its own gradients
    reduce_grad     start to sum the gradients of ``bucket`` over the replicas of ``stage``
    store           start to copy the sums of the gradients of ``bucket`` to host memory, where its
                    parameters are
    average_buffers let the replicas of ``stage`` agree on the buffers that its forwards changed
    grad_norm       sum the squared norms of all gradients over all ranks, and what is not finite
    stage_norm      compute the norm of the gradients of ``stage``, by which its next update is clipped
    check           skip the next updates if a loss or a gradient was found that is not finite
    stash           keep the weights of ``stage`` as ``version``, before an update changes them
    update          run the optimizer on this rank's share of ``stage``, once its gradients are complete
    host_update     run it in host memory, where the parameters of ``stage`` are; the device goes on
    pause           wait for the script, until it has requested the mini-batch of ``microbatch``, or has
                    computed the loss of the results
    unshard         start to gather the parameters of ``bucket`` from the replicas of ``stage``
    load            start to copy the parameters of ``bucket`` from host memory
    reshard         free the gathered or loaded parameters of ``bucket``
    all_reduce      start to sum the value of ``model_collective`` over the microbatches of a round
    all_gather      start to concatenate the values of ``model_collective`` of a round
    reduce_scatter  start to sum the value of ``model_collective`` over a round; each replica gets its part
    =============== ==================================================================================

    ``stage`` is the stage that computes, sends, receives or frees. ``microbatch``, ``peer``, ``slot``,
    ``bucket``, ``segment`` and ``model_collective`` are -1 where they mean nothing; a link that moves once
    per step has no microbatch. Replicas of a stage start their collectives in the same order. With r
    replicas, microbatches 0 to r - 1 are the first round.

    A compute runs its phase as a whole if ``segment`` is -1, and only that segment of it otherwise. Messages
    of the phase are sent after its last segment, and received before the first.

    In an asynchronous schedule, ``version`` is the version of the weights that a compute reads, an update
    makes, or a stash keeps. A ``precompute`` names the first microbatch that reads that version. An update
    and what prepares it name the first of the microbatches whose gradients it uses.
    """

    op: Op
    stage: int
    microbatch: int = -1
    link: Link | None = None
    peer: int = -1
    slot: int = -1
    bucket: int = -1
    segment: int = -1
    model_collective: int = -1
    version: int = -1


@dataclass(frozen=True, slots=True)
class ModelCollective:
    """A collective ``op`` on a value of each replica of a stage, once for each round.

    A function of ``phase`` before segment ``segment`` makes the input of each replica, and that segment may
    read the result; both are named ``value.name``. The collective takes ``seconds``.
    """

    op: Op
    phase: Phase
    segment: int
    value: Value
    seconds: float = 0.0


ModelCollectives = Mapping[int, Sequence[ModelCollective]]
"""By stage, its model collectives, in the order in which a microbatch reaches them."""


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one rank in one step. Every peer, slot and microbatch is resolved.

    A periodic program has a ``period``: it is executed repeatedly, each time for microbatches that are later
    by this number. See ``pipec.ir.periodic_program``.
    """

    rank: int
    instructions: Sequence[Instruction]
    period: int = 0
