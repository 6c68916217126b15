"""What the arguments of a pipeline's methods must be. Those of the model are the model's own."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from pipec.ir.argument_checks import (
    FLAG,
    FUNCTION,
    NONE,
    NUMBER,
    PATH,
    ArgumentRule,
    instance,
    integer_between,
)
from pipec.runtime.stream.call_arguments import ITERABLE


def _several(given: object) -> list[object]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _are_optimizers(given: object) -> bool:
    return all(isinstance(each, Optimizer) for each in _several(given))


def _are_schedulers(given: object) -> bool:
    methods = ("state_dict", "load_state_dict", "step")
    return all(hasattr(each, method) for each in _several(given) for method in methods)


def _is_trace(given: object) -> bool:
    from pipec.timeline.trace import Trace

    return isinstance(given, Trace)


METHOD_ARGUMENTS = {
    "after_update": FUNCTION | NONE,
    "all_ranks": FLAG,
    "asynchronous": FLAG,
    "batches": ITERABLE,
    "call": FUNCTION,
    "directory": PATH,
    "max_norm": NUMBER,
    "norm_type": NUMBER,
    "resume": FLAG | NONE,
    "stage": instance("the number of a stage", int),
    "mode": FLAG,
    "outputs": FLAG,
    "optimizer": ArgumentRule("the optimizer that the script steps, or a list of them", _are_optimizers)
    | NONE,
    "scheduler": ArgumentRule("an LR scheduler, or a list of them", _are_schedulers) | NONE,
    "every": integer_between(1, 10**9),
    "model_only": FLAG,
    "model": instance("an nn.Module", nn.Module),
    "path": PATH | NONE,
    "state_dict": instance("a mapping of names to tensors", Mapping),
    "tensors": FLAG,
    "then": FUNCTION | NONE,
    "trace": ArgumentRule("what the with of trace() gave", _is_trace) | NONE,
}
