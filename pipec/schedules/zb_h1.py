"""ZB-H1: 1F1B with weight gradients moved into its bubbles (Qi et al., Zero Bubble, ICLR 2024)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.orders import OrderWriter, ordered, straight_placement


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose rank s runs W(j) directly after B(j+s), and the weight gradients left over at the end.

    For m of at least 2p-1 and W of at most F and B the span has a bubble of (p-1)(F+B-W), a third of that of
    1F1B where the three cost the same, with the memory of 1F1B's first rank, p microbatches, on every rank.
    """

    def order(rank: int) -> Iterable[Compute]:
        forward, backward, weight = (
            (phase, rank) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        )
        writer = OrderWriter(num_microbatches)
        writer.run(num_ranks - rank - 1, forward)
        writer.run(rank, forward, backward)
        writer.run(num_microbatches - rank, forward, backward, weight)
        writer.finish(weight)
        return writer.cells

    return ordered("zb-h1", num_microbatches, straight_placement(num_ranks), order)
