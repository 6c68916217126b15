"""How the seconds of a stage follow from its operators, its replicas and its links.

A stage on m replicas handles m microbatches at a time, so each microbatch costs it 1/m of the sum (PIPEC) or
of the larger (PIPEDREAM) of

* ``busy``: its operators, and the all-reduce of its P parameter bytes over a link of B bytes per second,
  ``passes * (m - 1) * P / (m * B)`` seconds;
* ``link``: PIPEC: every value it exchanges with other stages, each once; PIPEDREAM: every value that crosses
  its first boundary.

A value takes its activation and its gradient over the link. In a hierarchy, a group of devices acts as one
device of the level above: it is busy as long as the slowest stage of the best pipeline inside it, and pays
for the links of its own level as a stage does. Inside a group, the first stage of PIPEDREAM has no link to
pay for, and the groups it is on all-reduce over as many links at a time as they have members; a stage of
PIPEC pays inside the group for values that leave it, too, on their way to its border.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipec.hardware.topology import Level


def one_f_one_b(later_devices: int) -> int:
    """Microbatches a replica holds at once under 1F1B, with so many later devices for each, rounded up.

    Without replication this is the number of stages from this one on. With it, it is PipeDream's NOAM
    (Narayanan et al., SOSP 2019, section 3.2) for the stages from this one on.
    """
    return 1 + later_devices


@dataclass(frozen=True, slots=True)
class CostModel:
    """``overlap``: transfers run beside the operators, and the larger counts.

    ``all_reduce_passes``: as above. ``first_shares_links``: the first stage of a group all-reduces over as
    many links at a time as the level below joins members.
    ``microbatches_per_update``: replicas all-reduce once for so many microbatches, all replicas together;
    None: each replica after each of its own. ``in_flight``: the microbatches a replica holds at once, of
    the number of later devices for each replica, rounded up; it must not fall.
    """

    overlap: bool
    all_reduce_passes: float
    first_shares_links: bool = False
    microbatches_per_update: int | None = None
    in_flight: Callable[[int], int] = one_f_one_b

    def all_reduce_seconds_per_byte(self, replicas: int, bytes_per_second: float) -> float:
        """Of one microbatch, for each parameter byte of a stage; bandwidth alone."""
        once = self.all_reduce_passes * (replicas - 1) / (replicas * bytes_per_second)
        return once / (self.microbatches_per_update or replicas)

    def links_of_first(self, levels: Sequence[Level], level: int) -> int:
        """How many links at a time the first stage of a group all-reduces over."""
        return levels[level - 1].size if self.first_shares_links and level > 0 else 1

    def all_reduce_latency(self, replicas: int, level: Level) -> float:
        """Of one microbatch: a ring takes 2 (m - 1) steps."""
        once = 2 * (replicas - 1) * level.latency_seconds
        return once / (self.microbatches_per_update or replicas)


PIPEC = CostModel(overlap=False, all_reduce_passes=2)
"""Sends and receives block the stage, links are full duplex: what pipec's runtime does."""

PIPEDREAM = CostModel(overlap=True, all_reduce_passes=4, first_shares_links=True)
"""What PipeDream's published optimizer minimises (msr-fiddle/pipedream, optimizer_graph_hierarchical.py)."""

COST_MODELS = {"pipec": PIPEC, "pipedream": PIPEDREAM}
