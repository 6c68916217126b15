"""Looped BFS: GPipe over several smaller stages on each rank (Lamy-Poirier, 2023)."""

from collections.abc import Iterable

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.order_builder import OrderBuilder, loop_placement, looped_name, schedule_from_orders


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Rank s holds stages s, s+p, ..., v of them; all microbatches go through one, then through the next.

    For m of at least p and with F, B and W of a whole rank the bubble is (p-1)(F+B+W)/v, as for interleaved
    1F1B, with every one of the v*m chunks in flight. Any m will do, and a stage's work is in one piece, which
    suits weights that are gathered before it and gradients that are reduced after it.

    Raises:
        InputError: v is below 1.
    """
    name = looped_name("looped-bfs", num_chunks)
    if num_chunks < 1:
        raise InputError(f"schedule {name!r} needs num_chunks of at least 1, got {num_chunks}")

    def order(rank: int) -> Iterable[Compute]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        builder = OrderBuilder(num_microbatches)
        builder.finish(*((Phase.FORWARD, stage) for stage in stages))
        builder.finish(*((Phase.BACKWARD, stage) for stage in reversed(stages)))
        return builder.computes

    return schedule_from_orders(name, num_microbatches, loop_placement(num_ranks, num_chunks), order)
