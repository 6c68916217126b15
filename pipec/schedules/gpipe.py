"""GPipe: every forward, then every backward (Huang et al., 2019)."""

from pipec.ir import Compute, Phase, Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage per rank; its bubble is (p-1)(F+B+W) and every rank keeps all m microbatches in flight."""

    def order(rank: int) -> tuple[Compute, ...]:
        forwards = [Compute(Phase.FORWARD, rank, mb) for mb in range(num_microbatches)]
        backwards = [Compute(Phase.BACKWARD, rank, mb) for mb in range(num_microbatches)]
        return (*forwards, *backwards)

    placement = tuple(range(num_ranks))
    return Schedule("gpipe", num_microbatches, placement, tuple(order(rank) for rank in placement))
