"""Branches on values of tensors: a graph follows those of the captured call and checks their conditions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, library, ops

from pipec.primitives import require

_library = library.Library("pipec", "FRAGMENT")
_library.define("check_branch(Tensor condition, bool outcome, str branch) -> ()")

CHECK_BRANCH = ops.pipec.check_branch.default
"""Fails unless the condition equals ``outcome``. ``branch`` is the line of the model that branches."""

fx.node.has_side_effect(CHECK_BRANCH)  # so that it is not removed as dead code


@library.register_fake("pipec::check_branch", lib=_library)  # type: ignore[untyped-decorator]
def _check_branch_fake(condition: Tensor, outcome: bool, branch: str) -> None:
    pass


def is_branch_check(node: fx.Node) -> bool:
    """Whether the node only checks that a condition has the value it had at capture."""
    return node.target is CHECK_BRANCH


def is_check(node: fx.Node) -> bool:
    """Whether the node only checks an assumption of the capture."""
    return is_branch_check(node) or node.target is require


@dataclass(frozen=True)
class InputBranches:
    """The branches that depend on the arguments of ``step`` alone, which are checked before each step.

    ``graph`` computes their conditions from the leaves at ``positions``. Each condition has the ``outcome``
    and the ``branch`` of its ``check_branch``.
    """

    graph: fx.Graph
    positions: tuple[int, ...]
    outcomes: tuple[bool, ...]
    branches: tuple[str, ...]

    def changed(self, leaves: Sequence[Any], sizes: Mapping[sympy.Symbol, float]) -> str:
        """The first branch that a call with these leaves takes differently, in words; empty if none."""
        arguments = [torch.as_tensor(leaves[position]) for position in self.positions]
        if not self.branches or any(argument.is_meta for argument in arguments):
            return ""
        conditions = _run_graph(self.graph, arguments, sizes)
        for condition, outcome, branch in zip(conditions, self.outcomes, self.branches, strict=True):
            if bool(condition) is not outcome:
                return f"{branch} changed from {outcome} to {not outcome}"
        return ""


NO_INPUT_BRANCHES = InputBranches(fx.Graph(), (), (), ())
"""The input branches of a graph that has none."""


def _run_graph(
    graph: fx.Graph, arguments: Sequence[Tensor], sizes: Mapping[sympy.Symbol, float]
) -> Sequence[Tensor]:
    """The results of a graph, on the device of its arguments."""
    remaining = iter(arguments)
    device = arguments[0].device if arguments else torch.device("cpu")
    values: dict[fx.Node, Any] = {}

    def value_of(argument: Any) -> Any:
        match argument:
            case fx.Node():
                return values[argument]
            case sympy.Basic():
                return int(argument.subs(sizes))
            case torch.device():
                return device
        return argument

    for node in graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(remaining)
            case "call_function":
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value_of)
                values[node] = node.target(*args, **kwargs)
    conditions: Any = graph.output_node().args[0]
    return [values[node] for node in conditions]
