"""Stops a stage when a condition fails."""

from torch import fx

from pipec.errors import InputError


@fx.node.has_side_effect
def require(condition: bool, message: str) -> None:
    """Stop the stage unless a condition holds that tracing assumed for a microbatch."""
    if not condition:
        raise InputError(message)
