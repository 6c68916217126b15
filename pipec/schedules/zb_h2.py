"""ZB-H2: no bubble between the first and last compute of a rank (Qi et al., Zero Bubble, ICLR 2024)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, linear_placement, schedule_from_orders


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank s warms up with 2(p-s)-1 forwards; then B(j), W(j-2s), F in turn; then the remaining computes.

    For m of at least 2p-1 the span has a bubble of (p-1)(F+B-2W), none where the three cost the same, for
    2p-1 microbatches in flight on every rank: about twice the memory of 1F1B's first rank.
    """

    def order(rank: int) -> Iterable[Compute]:
        forward, backward, weight = (
            (phase, rank) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        builder = OrderBuilder(num_microbatches)
        builder.run(2 * (num_ranks - rank) - 1, forward)
        builder.run(min(2 * rank, num_microbatches), backward, forward)
        builder.run(num_microbatches - 2 * rank, backward, weight, forward)
        builder.finish(weight)
        return builder.computes

    return schedule_from_orders("zb-h2", num_microbatches, linear_placement(num_ranks), order)
