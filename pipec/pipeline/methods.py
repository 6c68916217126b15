"""What the arguments of a pipeline's methods must be. Those of the model are the model's own."""

from collections.abc import Mapping

from torch import nn

from pipec.ir.arguments import FLAG, FUNCTION, NONE, PATH, instance
from pipec.timeline.trace import Trace

METHODS = {
    "after_update": FUNCTION | NONE,
    "all_ranks": FLAG,
    "directory": PATH,
    "mode": FLAG,
    "model": instance("an nn.Module", nn.Module),
    "path": PATH | NONE,
    "state_dict": instance("a mapping of names to tensors", Mapping),
    "tensors": FLAG,
    "trace": instance("what the with of trace() gave", Trace) | NONE,
}
