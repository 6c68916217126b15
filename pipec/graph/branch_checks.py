"""Branches on values of tensors: a graph follows the way that the captured call took, and checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, library, ops

from pipec.primitives import check_row_independence, require

_library = library.Library("pipec", "FRAGMENT")
_library.define("check_branch(Tensor condition, bool outcome, str branch) -> ()")

CHECK_BRANCH = ops.pipec.check_branch.default
"""Fails unless the condition equals ``outcome``. ``branch`` is the line of the model that asked."""

fx.node.has_side_effect(CHECK_BRANCH)  # nothing reads it, and it must not be removed for that


@library.register_fake("pipec::check_branch", lib=_library)  # type: ignore[untyped-decorator]
def _nothing(condition: Tensor, outcome: bool, branch: str) -> None:
    pass


def is_branch_check(node: fx.Node) -> bool:
    """Whether the node only checks that a condition has the value it had at capture."""
    return node.target is CHECK_BRANCH


def is_check(node: fx.Node) -> bool:
    """Whether the node only checks an assumption of the capture."""
    return is_branch_check(node) or node.target in (require, check_row_independence)


@dataclass(frozen=True)
class InputBranches:
    """The branches that follow from the arguments of ``step`` alone, which are checked before each step.

    ``graph`` computes their conditions; its arguments are the leaves at ``positions``. ``outcomes`` and
    ``branches`` are those of the ``check_branch`` of each.
    """

    graph: fx.Graph
    positions: tuple[int, ...]
    outcomes: tuple[bool, ...]
    branches: tuple[str, ...]

    def changed(self, leaves: Sequence[Any], sizes: Mapping[sympy.Symbol, float]) -> str:
        """The first branch that goes the other way in a step with these leaves; empty if none does."""
        arguments = [torch.as_tensor(leaves[position]) for position in self.positions]
        if not self.branches or any(argument.is_meta for argument in arguments):
            return ""
        found = _computed(self.graph, arguments, sizes)
        for condition, outcome, branch in zip(found, self.outcomes, self.branches, strict=True):
            if bool(condition) is not outcome:
                return f"{branch} was {outcome} and is {not outcome}"
        return ""


NO_INPUT_BRANCHES = InputBranches(fx.Graph(), (), (), ())
"""Those of a graph without such branches."""


def _computed(
    graph: fx.Graph, arguments: Sequence[Tensor], sizes: Mapping[sympy.Symbol, float]
) -> Sequence[Tensor]:
    """The results of a graph, on the device of its arguments."""
    given = iter(arguments)
    device = arguments[0].device if arguments else torch.device("cpu")
    known: dict[fx.Node, Any] = {}

    def value_of(read: Any) -> Any:
        match read:
            case fx.Node():
                return known[read]
            case sympy.Basic():
                return int(read.subs(sizes))
            case torch.device():
                return device
        return read

    for node in graph.nodes:
        match node.op:
            case "placeholder":
                known[node] = next(given)
            case "call_function":
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value_of)
                known[node] = node.target(*args, **kwargs)
    conditions: Any = graph.output_node().args[0]
    return [known[node] for node in conditions]
