"""ZB-H1: 1F1B with weight gradients moved into its bubbles (Qi et al., Zero Bubble, ICLR 2024)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, linear_placement, schedule_from_orders


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose rank s runs W(j) directly after B(j+s), and the weight gradients left over at the end.

    For m of at least 2p-1 and W of at most F and B the span has a bubble of (p-1)(F+B-W), a third of that of
    1F1B where the three cost the same, with the memory of 1F1B's first rank, p microbatches, on every rank.
    """

    def order(rank: int) -> Iterable[Compute]:
        forward, backward, weight = (
            (phase, rank) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        builder = OrderBuilder(num_microbatches)
        builder.run(num_ranks - rank - 1, forward)
        builder.run(rank, forward, backward)
        builder.run(num_microbatches - rank, forward, backward, weight)
        builder.finish(weight)
        return builder.computes

    return schedule_from_orders("zb-h1", num_microbatches, linear_placement(num_ranks), order)
