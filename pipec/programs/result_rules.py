"""What a script sees of a stream: the results of one mini-batch after the other, on every rank.

A script asks for results, and says by that how updates are to be made of which this mini-batch is the last. A
rank comes to neither such an update nor the last result of a mini-batch before its script has asked for it,
and so has all results of those before. ``result_waits`` tells that to those who prove that ranks finish.
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
    """A rank comes to instruction ``number`` once its script has asked for mini-batch ``asked``.

    ``known`` are the mini-batches of which it knows all results by then, or has them on their way.
    """

    number: int
    asked: int
    known: int


def results_before_wait(step: ProgramIndex) -> Iterator[Violation]:
    """No rank waits for its script while the script waits for results that are not even on their way."""
    for rank in range(len(step.columns)):
        for pause in _pauses(step, rank):
            if pause.known < pause.asked:
                found = f"comes before the results of mini-batch {pause.known} are on their way"
                what = f"what waits until mini-batch {pause.asked} is asked for"
                yield Violation((rank, pause.number), f"{what} {found}")


def result_waits(step: ProgramIndex) -> WaitEdges:
    """A pause waits until the results of the mini-batch before have been sent to the rank."""
    rows: list[tuple[int, int, int, int]] = []
    if step.sync_spec.stream is not None:
        sent = _sent(step, step.sync_spec.stream)
        for rank in range(len(step.columns)):
            for pause in _pauses(step, rank):
                rows += [(rank, pause.number, *site) for site in sent.get((rank, pause.asked - 1), ())]
    return WaitEdges(*np.array(rows, np.int32).reshape(-1, 4).T)


def _sent(step: ProgramIndex, stream: Stream) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By rank and mini-batch, where its results are sent to the rank."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in step.deliveries:
        if each.route.link.payload is Payload.MICROBATCH_RESULT:
            pairs = zip(each.route.microbatches.tolist(), each.sends.tolist(), strict=True)
            for microbatch, number in pairs:
                key = each.route.target, microbatch // stream.microbatches
                found.setdefault(key, []).append((each.route.source, number))
    return found


def _pauses(step: ProgramIndex, rank: int) -> Iterator[ResultWait]:
    """Where a rank may wait for its script, in order."""
    stream, columns = step.sync_spec.stream, step.columns[rank]
    if stream is None:
        return
    links = [link.payload is Payload.MICROBATCH_RESULT for link in step.links]
    if not any(links):
        return
    makers = [link.source for link in step.links if link.payload is Payload.MICROBATCH_RESULT]
    received = (columns.ops == OP_CODE[Op.RECV]) & np.array([*links, False])[columns.link_numbers]
    made = (columns.ops == OP_CODE[Op.FORWARD]) & np.isin(columns.stages, makers)
    updates, replicas = columns.ops == OP_CODE[Op.UPDATE], replica_counts(step.placement)
    known, learned = 0, Counter[int]()
    for number in np.flatnonzero(received | made | updates).tolist():
        microbatch = int(columns.microbatches[number])
        if updates[number]:
            behind = microbatch + stream.microbatches_per_update(int(columns.stages[number]), replicas)
            last = min(behind, step.num_microbatches) // stream.microbatches - 1
            yield ResultWait(number, last, known)
            continue
        learned[microbatch // stream.microbatches] += 1
        if learned[known] == len(makers) * stream.microbatches:
            yield ResultWait(number, known, known)
        while learned[known] == len(makers) * stream.microbatches:
            known += 1
