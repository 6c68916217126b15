"""1F1B with a flush, also called PipeDream-Flush (Narayanan et al., 2019 and 2021)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, linear_placement, schedule_from_orders


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank; GPipe's bubble, (p-1)(F+B+W), with min(p-s, m) microbatches in flight on rank s.

    Rank s warms up with p-s-1 forwards, alternates one forward and one backward in the steady state,
    and cools down with the backwards that are left. The schedule to start with: least memory of all that
    keep a microbatch's backward whole.
    """

    def order(rank: int) -> Iterable[Compute]:
        forward, backward = (Phase.FORWARD, rank), (Phase.BACKWARD, rank)
        builder = OrderBuilder(num_microbatches)
        builder.run(num_ranks - rank - 1, forward)
        builder.run(num_microbatches, forward, backward)
        return builder.computes

    return schedule_from_orders("1f1b", num_microbatches, linear_placement(num_ranks), order)
