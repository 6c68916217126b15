"""ZB-V: no bubble with the memory of 1F1B, on a V of two stages per rank (Qi et al., 2024)."""

from collections.abc import Iterable

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, schedule_from_orders, v_placement


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank s holds stages s and 2p-1-s; forward, input and weight gradients of both alternate.

    If F, B and W of a stage all cost the same the span has no bubble, and the makespan is p-1 of them
    longer. At most 2p stage-microbatches are in flight, which take as much memory as p in a pipeline with one
    stage per rank. Suits stages whose three phases cost about the same.
    """
    padded = max(num_microbatches, 2 * num_ranks - 1)

    def order(rank: int) -> Iterable[Compute]:
        phases = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        down_f, down_b, down_w = ((phase, rank) for phase in phases)
        up_f, up_b, up_w = ((phase, 2 * num_ranks - 1 - rank) for phase in phases)
        below = num_ranks - rank
        builder = OrderBuilder(padded)
        builder.run(2 * below - 1, down_f)
        builder.run(rank, up_f, down_f)
        builder.run(below, up_f, up_b, up_w)
        builder.run(padded - num_ranks, down_f, down_b, down_w, up_f, up_b, up_w)
        builder.run(rank, down_b, up_b)
        builder.run(below, down_b, down_w)
        builder.finish(up_w, down_w)
        return builder.computes.where(builder.computes.microbatches < num_microbatches)

    return schedule_from_orders("zb-v", num_microbatches, v_placement(num_ranks), order)
