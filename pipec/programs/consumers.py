"""Which compute reads each message: the first one that runs a phase for which the link brings values."""

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, Instructions, Ints

_UNREAD = np.iinfo(np.int32).max


def first_readers(computes: Instructions, messages: Instructions) -> Ints:
    """For each message, sent or received, the index of the compute that reads it first, or -1.

    ``computes`` has every compute of a step. The computes of one rank stand in the order in which they run.
    """
    links = messages.links
    targets = np.array([*(link.target for link in links), -1])
    num_stages = max(int(computes.stages.max(initial=-1)), int(targets.max())) + 1
    num_microbatches = max(int(each.microbatches.max(initial=-1)) for each in (computes, messages)) + 1
    numbers = _numbers(computes, num_stages, num_microbatches)
    found = np.full(len(messages), _UNREAD, np.int32)
    for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
        reads = np.array([*(op.phase in link.payload.readers for link in links), False])
        at = np.flatnonzero(reads[messages.link_numbers])
        stages, microbatches = targets[messages.link_numbers[at]], messages.microbatches[at]
        found[at] = np.minimum(found[at], numbers[OP_CODE[op], stages, microbatches])
    return np.where(found == _UNREAD, -1, found)


def _numbers(computes: Instructions, num_stages: int, num_microbatches: int) -> Ints:
    """The index of each compute at [op, stage, microbatch]; at microbatch -1 that of the stage's first."""
    numbers = np.full((len(OP_CODE), num_stages, num_microbatches + 1), _UNREAD, np.int32)
    numbers[computes.ops, computes.stages, computes.microbatches] = np.arange(len(computes))
    numbers[..., -1] = numbers[..., :-1].min(axis=2, initial=_UNREAD)
    return numbers
