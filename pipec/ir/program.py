"""Instructions, and the program of them that one rank executes in one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from pipec.ir.values import SCHEDULED_PHASES, Link, Phase, Value


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
    AVERAGE_BUFFERS = "average_buffers"
    GRAD_NORM = "grad_norm"
    STAGE_NORM = "stage_norm"
    CHECK = "check"
    STASH = "stash"
    UPDATE = "update"
    PAUSE = "pause"
    UNSHARD = "unshard"
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
    WAIT_AVERAGE_BUFFERS = "wait_average_buffers"
    WAIT_UNSHARD = "wait_unshard"
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
    """The properties of an op, for code that treats several ops equally.

    ``phase`` is the phase that a compute runs; other kinds have none. An op that is ``timed`` is an event of
    a timeline, and one that is ``per_microbatch`` works on a microbatch. An op that ``carries_link`` moves
    the values of a link. If it ``has_peer``, another rank takes part. If it ``fills_slot``, it puts what a
    microbatch receives into a buffer slot. A wait ``awaits`` the end of what another op has started.
    """

    kind: OpKind
    phase: Phase | None = None
    timed: bool = False
    per_microbatch: bool = False
    carries_link: bool = False
    has_peer: bool = False
    fills_slot: bool = False
    awaits: Op | None = None


_LOCAL = (Op.PRECOMPUTE, Op.STAGE_NORM, Op.CHECK, Op.STASH, Op.PAUSE)

_STARTS: Mapping[Op, OpTraits] = {
    Op.RECV: OpTraits(OpKind.RECEIVE, carries_link=True, has_peer=True, fills_slot=True),
    Op.SEND: OpTraits(OpKind.SEND, timed=True, carries_link=True, has_peer=True),
    Op.MOVE: OpTraits(OpKind.SEND, carries_link=True, fills_slot=True),
    Op.ACCUMULATE: OpTraits(OpKind.ACCUMULATE, per_microbatch=True),
    Op.FREE: OpTraits(OpKind.RELEASE, per_microbatch=True),
    Op.OFFLOAD: OpTraits(OpKind.COPY, timed=True, per_microbatch=True),
    Op.PREFETCH: OpTraits(OpKind.COPY, timed=True, per_microbatch=True),
    Op.SUM_COUNTS: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.GATHER_ROWS: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.TAIL: OpTraits(OpKind.STEP_COMPUTE, timed=True),
    Op.REDUCE_GRAD: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.AVERAGE_BUFFERS: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.GRAD_NORM: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.UNSHARD: OpTraits(OpKind.COLLECTIVE, timed=True),
    Op.ALL_REDUCE: OpTraits(OpKind.COLLECTIVE, timed=True, per_microbatch=True),
    Op.ALL_GATHER: OpTraits(OpKind.COLLECTIVE, timed=True, per_microbatch=True),
    Op.REDUCE_SCATTER: OpTraits(OpKind.COLLECTIVE, timed=True, per_microbatch=True),
    **{op: OpTraits(OpKind.LOCAL) for op in _LOCAL},
    Op.UPDATE: OpTraits(OpKind.STEP_COMPUTE, timed=True),
    Op.RESHARD: OpTraits(OpKind.RELEASE),
    **{
        Op(phase): OpTraits(OpKind.COMPUTE, phase=phase, timed=True, per_microbatch=True)
        for phase in SCHEDULED_PHASES
    },
}

WAIT_OF: Mapping[Op, Op] = {
    started: Op(f"wait_{started}")
    for started in (
        *(Op.RECV, Op.OFFLOAD, Op.PREFETCH, Op.SUM_COUNTS, Op.GATHER_ROWS),
        *(Op.REDUCE_GRAD, Op.AVERAGE_BUFFERS),
        *(Op.UNSHARD, Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER),
    )
}
"""For each op that returns before what it starts has ended, the op that waits for this."""

TRAITS: Mapping[Op, OpTraits] = {
    **_STARTS,
    **{
        wait: replace(_STARTS[started], kind=OpKind.WAIT, timed=False, fills_slot=False, awaits=started)
        for started, wait in WAIT_OF.items()
    },
}
"""The traits of all ops. A new op is a row of ``_STARTS``, and of ``WAIT_OF`` if it has to be awaited."""


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
    average_buffers let the replicas of ``stage`` agree on the buffers that its forwards changed
    grad_norm       sum the squared norms of all gradients over all ranks, and what is not finite
    stage_norm      compute the norm of the gradients of ``stage``, by which its next update is clipped
    check           skip the next updates if a loss or a gradient was found that is not finite
    stash           keep the weights of ``stage`` as ``version``, before an update changes them
    update          run the optimizer on this rank's share of ``stage``, once its gradients are complete
    pause           wait until the script has requested the mini-batch of ``microbatch``
    unshard         start to gather the parameters of ``bucket`` from the replicas of ``stage``
    reshard         free the gathered parameters of ``bucket``
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
    read the result; both are named ``value.name``. The ranks are on ``num_hosts`` hosts, as for a bucket, and
    the collective takes ``seconds``.
    """

    op: Op
    phase: Phase
    segment: int
    value: Value
    num_hosts: int = 1
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
