"""1F1B with a flush, also called PipeDream-Flush (Narayanan et al., 2019 and 2021)."""

from pipec.ir import Compute, Phase, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank; GPipe's bubble, (p-1)(F+B+W), with min(p-s, m) microbatches in flight on rank s.

    Rank s warms up with p-s-1 forwards, alternates one forward and one backward in the steady state,
    and cools down with the backwards that are left.
    """

    def order(rank: int) -> tuple[Compute, ...]:
        forwards = [Compute(Phase.FORWARD, rank, mb) for mb in range(num_microbatches)]
        backwards = [Compute(Phase.BACKWARD, rank, mb) for mb in range(num_microbatches)]
        warmup = min(num_ranks - rank - 1, num_microbatches)
        steady = [cell for pair in zip(forwards[warmup:], backwards, strict=False) for cell in pair]
        return (*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :])

    placement = tuple(range(num_ranks))
    return Schedule("1f1b", num_microbatches, placement, tuple(order(rank) for rank in placement))
