"""DualPipeV: a V whose ranks pair a forward of one stage with a backward of the other (DeepSeek, 2025)."""

from collections.abc import Iterable

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, schedule_from_orders, v_placement


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Rank s holds stages s and 2p-1-s; in the steady state each runs F of one next to B and W of the other.

    If the halves of a pair run one after the other, as here, the bubble is (p-1)(F+B-W) in stage times, where
    F and B cost the same and W no more. If they run as one compute of length F&B whose results are sent at
    its end, the bubble is (p-1)(F&B + B+W - 3W) for F of at most B.

    At most 2p+1 stage-microbatches are in flight. Suits stages whose communication, such as between experts,
    overlaps the other half of the pair.

    Raises:
        InputError: m is below 2p.
    """
    if num_microbatches < 2 * num_ranks:
        raise InputError(
            f"schedule 'dualpipe-v' needs at least twice as many microbatches as its {num_ranks} ranks, "
            f"got {num_microbatches}; take {2 * num_ranks} or more, or zb-v"
        )

    def order(rank: int) -> Iterable[Compute]:
        phases = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
        down_f, down_b, down_w = ((phase, rank) for phase in phases)
        up_f, up_b, up_w = ((phase, 2 * num_ranks - 1 - rank) for phase in phases)
        below = num_ranks - rank - 1
        builder = OrderBuilder(num_microbatches)
        builder.run(2 * below, down_f)
        builder.run(rank + 1, down_f, up_f)
        builder.run(below, up_b, up_w, up_f)
        builder.run(num_microbatches - 2 * num_ranks + rank + 1, down_f, up_b, up_w, up_f, down_b, down_w)
        builder.run(below, up_b, up_w, up_f, down_b, down_w)
        backwards = [(up_b, up_w), (down_b, down_w)] * (rank + 1)
        whole, split = backwards[: rank + 1], backwards[rank + 1 :]
        for backward in whole:
            builder.run(1, *backward)
        builder.run(1, *(inputs for inputs, _ in split))
        postponed = [*(weights for _, weights in split), *[down_w] * below]
        for weights in postponed[:below]:
            builder.run(1, weights, down_b)
        builder.run(1, *postponed[below:])
        return builder.computes

    return schedule_from_orders("dualpipe-v", num_microbatches, v_placement(num_ranks), order)
