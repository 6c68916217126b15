"""1F1B with a flush, also called PipeDream-Flush (Narayanan et al., 2019 and 2021)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.orders import OrderWriter, ordered, straight_placement


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank; GPipe's bubble, (p-1)(F+B+W), with min(p-s, m) microbatches in flight on rank s.

    Rank s warms up with p-s-1 forwards, alternates one forward and one backward in the steady state,
    and cools down with the backwards that are left. The schedule to start with: least memory of all that
    keep a microbatch's backward whole.
    """

    def order(rank: int) -> Iterable[Compute]:
        forward, backward = (Phase.FORWARD, rank), (Phase.BACKWARD, rank)
        writer = OrderWriter(num_microbatches)
        writer.run(num_ranks - rank - 1, forward)
        writer.run(num_microbatches, forward, backward)
        return writer.cells

    return ordered("1f1b", num_microbatches, straight_placement(num_ranks), order)
