"""GPipe: every forward, then every backward (Huang et al., 2019)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, linear_placement, schedule_from_orders


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank; its bubble is (p-1)(F+B+W) and every rank keeps all m microbatches in flight.

    Choose it if memory is no concern: it is the easiest to read.
    """

    def order(rank: int) -> Iterable[Compute]:
        builder = OrderBuilder(num_microbatches)
        builder.finish((Phase.FORWARD, rank), (Phase.BACKWARD, rank))
        return builder.computes

    return schedule_from_orders("gpipe", num_microbatches, linear_placement(num_ranks), order)
