"""The rules for the results of a stream, which a script gets mini-batch by mini-batch, on every rank.

By requesting the results of a mini-batch, a script also decides how the updates are made that end with it.
So a rank reaches such an update, or has the last result of a mini-batch, only after its script has requested
that mini-batch, and therefore has all results of earlier ones.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from pipec.ir import Op, Payload, Stream, replica_counts
from pipec.ir.columns import OP_CODE
from pipec.programs.program_index import ProgramIndex, Violation


def pauses_in_order(step: ProgramIndex) -> Iterator[Violation]:
    """A rank pauses for one mini-batch after another, each time with all results of those before.

    A check of a mini-batch comes after its results. Refused::

    rank 1: ... update of mini-batch 1, pause for mini-batch 1
    rank 2: ... pause for mini-batch 1, wait_recv the results of mini-batch 0
    """
    stream = step.plan.sync_spec.stream
    if stream is None or not any(x.payload is Payload.MICROBATCH_RESULT for x in step.plan.links):
        return
    for rank in range(len(step.columns)):
        yield from _out_of_order(step, rank, stream)


def _out_of_order(step: ProgramIndex, rank: int, stream: Stream) -> Iterator[Violation]:
    columns, links = step.columns[rank], step.plan.links
    is_result = np.array([*(link.payload is Payload.MICROBATCH_RESULT for link in links), False])
    makers = [link.source for link in links if link.payload is Payload.MICROBATCH_RESULT]
    awaited = (columns.ops == OP_CODE[Op.WAIT_RECV]) & is_result[columns.link_numbers]
    made = (columns.ops == OP_CODE[Op.FORWARD]) & np.isin(columns.stages, makers) & (columns.segments <= 0)
    pauses, updates = columns.ops == OP_CODE[Op.PAUSE], columns.ops == OP_CODE[Op.UPDATE]
    replicas = replica_counts(step.plan.placement)
    last = step.plan.num_microbatches // stream.microbatches - 1
    num_requested, num_complete, results = 0, 0, Counter[int]()
    checks = columns.ops == OP_CODE[Op.CHECK]
    for number in np.flatnonzero(awaited | made | pauses | updates | checks).tolist():
        microbatch = int(columns.microbatches[number])
        batch, place = divmod(microbatch, stream.microbatches)
        if pauses[number]:
            if place or batch != num_requested:
                expected = num_requested * stream.microbatches
                yield Violation((rank, number), f"pauses for microbatch {microbatch}; expected {expected}")
            if num_complete < batch:
                what = f"pauses for mini-batch {batch} before it has the results of {num_complete}"
                yield Violation((rank, number), f"{what}, which the script waits for")
            num_requested += 1
            continue
        if updates[number] or checks[number]:
            behind = stream.microbatches_per_update(int(columns.stages[number]), replicas)
            batch = min((microbatch + behind) // stream.microbatches - 1, last)
            if checks[number] and num_complete <= batch:
                yield Violation((rank, number), f"checks mini-batch {batch} before it has all of its losses")
        else:
            results[batch] += 1
            if results[batch] < len(makers) * stream.microbatches:
                continue
            while results[num_complete] == len(makers) * stream.microbatches:
                num_complete += 1
        if batch >= num_requested:
            message = f"comes before the pause for mini-batch {batch}, whose request decides about it"
            yield Violation((rank, number), message)
