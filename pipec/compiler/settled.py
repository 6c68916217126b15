"""Where the first call of a model put stages and parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.graph import Operator
from pipec.ir import Placement
from pipec.passes.follow_owners import Owners
from pipec.passes.steps_in_time import Divided


@dataclass(frozen=True)
class Settled:
    """Where the first call put stages and parameters. Every later call follows it.

    ``placement`` is the placement that schedules have. ``owners`` are the stages that hold each parameter.
    ``ranks[k]`` is the rank that really plays the part of rank k of a schedule. ``divided`` are the recurrent
    layers that several stages have parts of, and ``cut`` the stage of each operator.
    """

    placement: Placement
    owners: Owners
    ranks: tuple[int, ...]
    divided: Divided
    cut: Sequence[tuple[Operator, int]]
