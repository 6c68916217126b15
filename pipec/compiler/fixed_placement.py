"""Where the first call of a model put stages and parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.graph import Operator
from pipec.ir import Placement
from pipec.passes.assignments.follow_placement import ParameterStages


@dataclass(frozen=True)
class FixedPlacement:
    """Where the first call put stages and parameters. Every later call follows it.

    ``placement`` is that of all schedules. ``parameter_stages`` are the stages that hold each parameter.
    ``ranks[k]`` is the rank that acts as rank k of a schedule. ``operator_stages`` has the stage of each
    operator.
    """

    placement: Placement
    parameter_stages: ParameterStages
    ranks: tuple[int, ...]
    operator_stages: Sequence[tuple[Operator, int]]
