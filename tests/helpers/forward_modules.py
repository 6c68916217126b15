"""Makes a module of its forward, so that a model is no longer than what it computes."""

from collections.abc import Callable
from typing import Any

from torch import nn


def model(**parts: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorates the forward of a module: makes the class that has these parts as attributes.

    Each part is made anew for a module, by a function of the arguments of the class.
    """

    def init(self: nn.Module, *args: Any) -> None:
        nn.Module.__init__(self)
        for name, make in parts.items():
            setattr(self, name, make(*args))

    def with_forward(forward: Callable[..., Any]) -> Any:
        forward.__code__ = forward.__code__.replace(co_name="forward")  # which torch looks for in stacks
        about = {"__doc__": forward.__doc__, "__module__": forward.__module__}
        return type(forward.__name__, (nn.Module,), {"__init__": init, "forward": forward, **about})

    return with_forward
