"""The rules for the results of a stream, which a script gets mini-batch by mini-batch, on every rank.

By requesting the results of a mini-batch, a script also decides how the updates are made that end with this
mini-batch. A rank reaches such an update, or the last result of a mini-batch, only after its script has
requested that mini-batch, and therefore has all results of earlier ones. ``result_waits`` passes these waits
to the proof that ranks finish.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipec.ir import Op, Payload, Stream, replica_counts
from pipec.ir.columns import OP_CODE
from pipec.programs.deadlock import WaitEdges
from pipec.programs.program_index import ProgramIndex
from pipec.programs.violation import Violation


class ResultWait(NamedTuple):
    """A rank reaches instruction ``number`` once its script has requested mini-batch ``requested``.

    ``num_available`` is the number of mini-batches whose results have all arrived or been sent by then.
    """

    number: int
    requested: int
    num_available: int


def results_before_wait(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits for its script while the script waits for results that are not even sent.

    Refused, because the script requests mini-batch 1 only when it has the results of mini-batch 0::

        rank 1: ... update of mini-batch 1, ... send the results of mini-batch 0 to rank 0
    """
    for rank in range(len(step.columns)):
        for pause in _pauses(step, rank):
            if pause.num_available < pause.requested:
                yield Violation(
                    (rank, pause.number),
                    f"this waits until mini-batch {pause.requested} is requested, but comes before the "
                    f"results of mini-batch {pause.num_available} are sent",
                )


def result_waits(step: ProgramIndex) -> WaitEdges:
    """A pause waits until the results of the previous mini-batch have been sent to the rank."""
    rows: list[tuple[int, int, int, int]] = []
    if step.plan.sync_spec.stream is not None:
        sent = _sent(step, step.plan.sync_spec.stream)
        for rank in range(len(step.columns)):
            for pause in _pauses(step, rank):
                rows += [(rank, pause.number, *site) for site in sent.get((rank, pause.requested - 1), ())]
    return WaitEdges(*np.array(rows, np.int32).reshape(-1, 4).T)


def _sent(step: ProgramIndex, stream: Stream) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By rank and mini-batch, the sites at which its results are sent to the rank."""
    sites: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in step.deliveries:
        if each.route.link.payload is Payload.MICROBATCH_RESULT:
            pairs = zip(each.route.microbatches.tolist(), each.sends.tolist(), strict=True)
            for microbatch, number in pairs:
                key = each.route.target, microbatch // stream.microbatches
                sites.setdefault(key, []).append((each.route.source, number))
    return sites


def _pauses(step: ProgramIndex, rank: int) -> Iterator[ResultWait]:
    """The places where a rank may wait for its script, in order."""
    stream, columns = step.plan.sync_spec.stream, step.columns[rank]
    if stream is None:
        return
    links = [link.payload is Payload.MICROBATCH_RESULT for link in step.plan.links]
    if not any(links):
        return
    makers = [link.source for link in step.plan.links if link.payload is Payload.MICROBATCH_RESULT]
    received = (columns.ops == OP_CODE[Op.RECV]) & np.array([*links, False])[columns.link_numbers]
    made = (columns.ops == OP_CODE[Op.FORWARD]) & np.isin(columns.stages, makers)
    updates, replicas = columns.ops == OP_CODE[Op.UPDATE], replica_counts(step.plan.placement)
    num_available, results = 0, Counter[int]()
    for number in np.flatnonzero(received | made | updates).tolist():
        microbatch = int(columns.microbatches[number])
        if updates[number]:
            behind = microbatch + stream.microbatches_per_update(int(columns.stages[number]), replicas)
            last = min(behind, step.plan.num_microbatches) // stream.microbatches - 1
            yield ResultWait(number, last, num_available)
            continue
        results[microbatch // stream.microbatches] += 1
        if results[num_available] == len(makers) * stream.microbatches:
            yield ResultWait(number, num_available, num_available)
        while results[num_available] == len(makers) * stream.microbatches:
            num_available += 1
