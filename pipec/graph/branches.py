"""The operator that stands for a branch: code went one way, because a tensor had a certain truth value."""

from torch import Tensor, fx, library, ops

_library = library.Library("pipec", "FRAGMENT")
_library.define("assume(Tensor condition, bool outcome, str branch) -> ()")

ASSUME = ops.pipec.assume.default
"""Fails unless the condition is as the outcome says. ``branch`` is the line of the model that asked."""

fx.node.has_side_effect(ASSUME)  # nothing reads it, and it must not be removed for that


@library.register_fake("pipec::assume", lib=_library)  # type: ignore[untyped-decorator]
def _nothing(condition: Tensor, outcome: bool, branch: str) -> None:
    pass


def is_assumption(node: fx.Node) -> bool:
    """Whether the node only checks that a condition is as it was when the model was captured."""
    return node.target is ASSUME
