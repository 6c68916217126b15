"""Plan a workload on a topology: which operators form a stage, on how many replicas, on which devices.

**What is optimal.** Stages are differences of consecutive downsets: no operator is on an earlier stage than
one it must follow. Each stage gets one to ``max_replicas`` members of one kind (equal devices or equal
groups) of the group it is in; in a hierarchy a member that is a group again holds a pipeline of its own, and
replicas hold the same one. Over all such plans that fit in memory, the slowest stage is as fast as possible
under the cost model (see ``pipec.planner.cost_model``). Devices may stay unused. Of plans that are equally
fast, the one on the fewest devices of the outermost group is taken; of these the one that communicates least
in sum; inside a group the same rule decides again.

Memory: a replica holds the resident bytes of its stage once, and the saved bytes for each microbatch in
flight; the devices that follow count whether they are used or not.

**How.** Operators that some best plan keeps together are merged (``merge``); a lower bound that ignores which
boundaries contain which tells how fast a plan can be and which boundaries it may use (``bounds``); dynamic
programming over these, level by level, is exact (``hierarchy``). If its result is above the limit for which
the boundaries were chosen, the limit is raised and it runs again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipec.errors import InfeasibleError, PlanError
from pipec.planner.boundaries import Boundaries, Vector, boundaries
from pipec.planner.bounds import Potentials, devices_around, least_seconds
from pipec.planner.cost_model import CostModel
from pipec.planner.hierarchy import Chosen, Hierarchy
from pipec.planner.merge import Merged, merge
from pipec.planner.partition import exact_grid, transfer_seconds
from pipec.planner.ranges import Indices, Ranges, cuts_suffice, ranges
from pipec.planner.topology import Topology, group
from pipec.planner.workload import Workload, program_order

_MOST_STEPS = 10**8
"""Pairs of boundaries times pairs of devices that are searched without working out bounds first."""

_SLACKS = (1e-9, 1e-3, 1e-2, 1e-1, math.inf)
"""By how much the limit may exceed the lower bound, one attempt each."""


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """``operators`` on every one of ``devices``, each of which takes its share of the microbatches.

    Seconds are per microbatch, divided by the replicas, communication included.
    """

    operators: tuple[int, ...]
    devices: tuple[int, ...]
    seconds: float
    communication_seconds: float
    memory_bytes: float

    @property
    def replicas(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in the order the forward visits them."""

    stages: tuple[PlacedStage, ...]

    @property
    def seconds(self) -> float:
        """Of a microbatch, in the steady state: the slowest stage's."""
        return max(stage.seconds for stage in self.stages)


def place(
    workload: Workload, topology: Topology, model: CostModel, max_replicas: int | None = None
) -> Placement:
    """The best plan.

    PlanError if the workload is malformed or has too many independent operators to search all of it;
    InfeasibleError if no plan fits in memory.
    """
    program_order(workload)
    most = min(max_replicas or len(topology.devices), model.microbatches_per_update or math.inf)
    problem = _Problem(workload, topology, model, int(most), _may_run_out(workload, topology, model))
    stages = problem.solve()
    if not stages:
        raise _infeasible(replace(problem, limits_memory=False))
    return Placement(stages)
