"""What stops a stage."""

from torch import fx

from pipec.errors import InputError


@fx.node.has_side_effect
def require(condition: bool, message: str) -> None:
    """Stop the stage unless a condition holds that tracing took for granted of a microbatch."""
    if not condition:
        raise InputError(message)
