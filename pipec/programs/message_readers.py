"""The reader of each message: the first compute that runs a phase which needs the values of the link."""

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, InstructionColumns, Ints

_UNREAD = np.iinfo(np.int32).max


def first_readers(
    computes: InstructionColumns, ranks: Ints, messages: InstructionColumns, targets: Ints
) -> Ints:
    """For each message, sent or received, the index of the compute that reads it first, or -1.

    ``computes`` has every compute of a step, and those of one rank in the order in which they run. ``ranks``
    are the ranks of computes, ``targets`` the ranks that receive messages.
    """
    links = messages.links
    stages = np.array([*(link.target for link in links), -1])
    num_stages = max(int(computes.stages.max(initial=-1)), int(stages.max())) + 1
    num_ranks = max(int(each.max(initial=-1)) for each in (ranks, targets)) + 1
    num_microbatches = max(int(each.microbatches.max(initial=-1)) for each in (computes, messages)) + 1
    first = np.full(len(messages), _UNREAD, np.int32)
    for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
        own = np.flatnonzero((computes.ops == OP_CODE[op]) & (computes.segments <= 0)).astype(np.int32)
        firsts = np.full((num_stages, num_microbatches + num_ranks), _UNREAD, np.int32)
        firsts[computes.stages[own], computes.microbatches[own]] = own
        np.minimum.at(firsts, (computes.stages[own], num_microbatches + ranks[own]), own)
        reads = np.array([*(op.phase in link.payload.readers for link in links), False])
        at = np.flatnonzero(reads[messages.link_numbers])
        once = messages.microbatches[at] < 0
        columns = np.where(once, num_microbatches + targets[at], messages.microbatches[at])
        first[at] = np.minimum(first[at], firsts[stages[messages.link_numbers[at]], columns])
    return np.where(first == _UNREAD, -1, first)
