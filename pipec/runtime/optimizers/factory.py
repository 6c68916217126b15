"""Calls a user's factory as for the unsplit model, checks the optimizers, and reads their groups by name."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.errors import InputError
from pipec.ir.argument_checks import short_repr

Named = list[tuple[str, Tensor]]

Factory = Callable[[Named], Optimizer | Sequence[Optimizer]]
"""Takes the ``(name, parameter)`` pairs of the whole model, as ``torch.optim`` does; returns an optimizer.

It may return several, for example Muon for the matrices and AdamW for the rest.
"""

ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)


_EXAMPLE = (
    "pass something to be called with (name, parameter) pairs, such as "
    "functools.partial(torch.optim.AdamW, lr=1e-3)"
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the update of each element depends on that element's own gradient and state alone.

    Such an optimizer can update any part of a tensor. Torch's own classes are known; a user's class, and a
    subclass of torch's, declares it with the attribute ``pipec_elementwise = True``.
    """
    return type(optimizer) in ELEMENTWISE or getattr(optimizer, "pipec_elementwise", False) is True


def dummy_parameter(parameter: Tensor, device: torch.device | str = "meta") -> nn.Parameter:
    """A parameter with the shape, dtype and attributes of another, in the memory of one element at most.

    Its value is NaN, which shows up if a factory reads values.
    """
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    if one.is_floating_point() or one.is_complex():
        one.fill_(math.nan)
    return parameter_on(one.expand(parameter.shape), parameter)


def parameter_on(memory: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter in ``memory`` with the attributes of ``like``, such as a model's ``no_weight_decay``."""
    parameter = nn.Parameter(memory, requires_grad=like.requires_grad)
    vars(parameter).update(vars(like))
    return parameter


def call_factory(factory: Factory, parameters: Mapping[str, Tensor]) -> tuple[Optimizer, ...]:
    """The optimizers that the factory makes of these parameters.

    Raises:
        InputError: the factory raises or returns something else, its groups do not contain each parameter
            once, or the optimizer needs a closure.
    """
    if not callable(factory):
        raise InputError(f"optimizer= takes a factory, not the {type(factory).__name__} itself; {_EXAMPLE}")
    try:
        made = factory(list(parameters.items()))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise InputError(f"the optimizer factory {_name(factory)} raised {raised}; {_EXAMPLE}") from error
    optimizers = (made,) if isinstance(made, Optimizer) else _sequence(made)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise InputError(
            f"the optimizer factory {_name(factory)} returned {short_repr(made)}; expected a "
            f"torch.optim.Optimizer or a list of them; {_EXAMPLE}"
        )
    _require_each_once(factory, optimizers, parameters)
    if closures := [each for each in optimizers if _needs_closure(each)]:
        raise InputError(
            f"{type(closures[0]).__name__} evaluates the model several times per update, which a step's "
            "program cannot; compile without optimizer=..., or use an optimizer whose step() needs no closure"
        )
    return optimizers


def group_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of each group's parameters, found by identity: not every factory passes names on."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _require_each_once(
    factory: Factory, optimizers: Iterable[Optimizer], parameters: Mapping[str, Tensor]
) -> None:
    taken = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    known = {id(parameter): name for name, parameter in parameters.items()}
    if foreign := [each for each in taken if id(each) not in known]:
        raise InputError(
            f"the optimizer factory {_name(factory)} optimizes a tensor of shape {list(foreign[0].shape)} "
            "that was not passed to it. Build the groups from the (name, parameter) pairs of the call, not "
            "from a model or tensors outside it"
        )
    counts = Counter(known[id(each)] for each in taken)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InputError(
            f"the optimizer factory {_name(factory)} gave {twice[0]} to more than one group or optimizer; "
            "expected each parameter in one"
        )
    left = [name for name, each in parameters.items() if each.requires_grad and name not in counts]
    if left:
        raise InputError(
            f"the optimizer factory {_name(factory)} left out {left[0]} and {len(left) - 1} other parameters "
            "that have gradients. Freeze them with requires_grad_(False) before compile, which also saves "
            "their backward; or give them a group with lr=0"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    arguments = inspect.signature(optimizer.step).parameters.values()
    return any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments)


def _sequence(made: object) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, list | tuple) else ()


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", None) or repr(factory)
