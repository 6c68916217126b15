"""The seconds of a stage for a microbatch, from its operators, its replicas and its links.

**PIPEC** models pipec's runtime. Sends are asynchronous and receives are posted one compute ahead, so
communication overlaps compute. In the steady state a stage is therefore as slow as the slower of two things:

* *busy*: the forward and backward of its operators, and its share of the all-reduce of its parameters;
* *link*: the values that cross its first downset, one message at a time. Links are full duplex: while the
  activation of one microbatch goes forward, the gradient of another comes back. A value takes the longer of
  these two messages. A value that several downsets separate from its reader is charged at each of them.

For example, a stage that computes for 5 ms, behind a value of which 3 ms go forward and 2 ms come back,
takes 5 ms; behind one of 7 ms and 2 ms it takes 7 ms.

A stage on m replicas handles m microbatches at a time. Its operators and its link take 1/m of the seconds
for each microbatch. An all-reduce sends P parameter bytes over a link of B bytes per second in
``passes * (m - 1) * P / (m * B)`` seconds. Published graphs are planned for PipeDream's asynchronous steps,
in which m microbatches share an all-reduce; those of captured models for steps of which all microbatches do.
Inside a group that is replicated itself these count as shared by the microbatches of all groups.

**PIPEDREAM** is the cost that PipeDream's published optimizer minimises (msr-fiddle/pipedream,
optimizer_graph_hierarchical.py). It differs in two ways: activation and gradient share the link one after the
other, and the all-reduce passes twice as often.

**MAX_LOAD** is the cost that Tarnawski et al. minimise (NeurIPS 2020). Nothing overlaps: a stage takes the
sum of its operators and of every value that it shares with other stages, each value once.

In a hierarchy, a group of devices acts as one device of the level above. The group is busy as long as the
slowest stage of the best pipeline inside it, and it pays for the links of its own level as a stage does. So
the first stage inside a group has no link to pay for under PIPEC and PIPEDREAM. Under MAX_LOAD a stage also
pays inside the group for values that leave the group, on their way to its border.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipec.hardware.topology import Level
from pipec.planner.operator_graph import Transfer


def one_f_one_b(later_devices: int) -> int:
    """The number of microbatches in flight on a replica under 1F1B.

    ``later_devices`` is the number of devices of later stages for each replica, rounded up. Without
    replication the result is the number of stages from this one on. With it, the result is PipeDream's NOAM
    for the stages from this one on (Narayanan et al., SOSP 2019, section 3.2).
    """
    return 1 + later_devices


@dataclass(frozen=True, slots=True)
class CostModel:
    """The parameters in which the models above differ.

    ``overlap``: communication overlaps compute. ``full_duplex``: activations and gradients overlap each
    other. ``all_reduce_passes``: see above. ``first_shares_links``: the first stage of a group all-reduces
    over as many links at a time as the level below has members. ``in_flight``: the microbatches in flight on
    a replica, a non-decreasing function of the later devices for each replica. ``step_microbatches``: the
    number of microbatches that share an all-reduce; None: one of each replica.
    """

    overlap: bool
    full_duplex: bool
    all_reduce_passes: float
    first_shares_links: bool = False
    in_flight: Callable[[int], int] = one_f_one_b
    step_microbatches: int | None = None

    def value_seconds(self, value: Transfer, level: Level) -> float:
        """The seconds for which a value's activation and gradient occupy a link of ``level``."""
        sizes = [size for size in (value.forward_bytes, value.backward_bytes) if size]
        messages = [level.message_link.seconds(size) for size in sizes]
        return max(messages, default=0.0) if self.full_duplex else sum(messages)

    def all_reduce_seconds_per_byte(self, replicas: int, bytes_per_second: float) -> float:
        """Seconds per microbatch for each parameter byte of a stage, without latency."""
        once = self.all_reduce_passes * (replicas - 1) / (replicas * bytes_per_second)
        return once / (self.step_microbatches or replicas)

    def all_reduce_latency(self, replicas: int, level: Level) -> float:
        """Seconds per microbatch: a ring takes 2 (m - 1) steps."""
        return 2 * (replicas - 1) * level.latency_seconds / (self.step_microbatches or replicas)

    def links_of_first(self, levels: Sequence[Level], level: int) -> int:
        """The number of links over which the first stage of a group all-reduces at a time."""
        return levels[level - 1].size if self.first_shares_links and level > 0 else 1


PIPEC = CostModel(overlap=True, full_duplex=True, all_reduce_passes=2)
PIPEDREAM = CostModel(overlap=True, full_duplex=False, all_reduce_passes=4, first_shares_links=True)
MAX_LOAD = CostModel(overlap=False, full_duplex=False, all_reduce_passes=2)
