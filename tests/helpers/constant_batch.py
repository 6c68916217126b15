"""Captures graphs for one number of rows alone, as those of models that make a constant of the batch."""

from collections.abc import Mapping
from typing import Any

from pipec.capture.tracer import FRONT_ENDS, FrontEnd


def constant_front_ends() -> Mapping[str, FrontEnd]:
    """Front ends that fail where the batch is to be symbolic."""
    return {name: _constant(front_end) for name, front_end in FRONT_ENDS.items()}


def _constant(front_end: FrontEnd) -> FrontEnd:
    def capture(module: Any, arguments: Any, symbolic: Any) -> Any:
        if symbolic:
            raise RuntimeError("the batch is a constant")
        return front_end(module, arguments, symbolic)

    return capture
