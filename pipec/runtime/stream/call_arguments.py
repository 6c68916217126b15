"""Converts the items of an iterable of mini-batches to the arguments of a step."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pipec.errors import InputError
from pipec.ir.argument_checks import ArgumentRule


class CallArguments(NamedTuple):
    """The arguments of one step."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    target: Any = None


def call_arguments_of(batch: Any, takes_target: bool) -> CallArguments:
    """The arguments of a batch, which is anything that a DataLoader yields.

    A dict has keyword arguments, with ``target`` among them. If the step ``takes_target``, a pair is of
    inputs and target, where the inputs are one argument, a tuple of some, or a dict by name. Anything else
    has positional arguments.

    Raises:
        InputError: the step takes a target, and the batch is neither a dict nor a pair.
    """
    if isinstance(batch, Mapping):
        named = dict(batch)
        return CallArguments((), named, named.pop("target", None))
    if not takes_target:
        return CallArguments(tuple(batch) if isinstance(batch, tuple | list) else (batch,))
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        found = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
        raise InputError(
            f"a batch has {found}, but the pipeline has a loss_fn(output, target); expected a pair of inputs "
            "and target, or a dict of arguments with 'target' among them"
        )
    inputs, target = batch
    if isinstance(inputs, Mapping):
        return CallArguments((), dict(inputs), target)
    return CallArguments(tuple(inputs) if isinstance(inputs, tuple) else (inputs,), {}, target)


ITERABLE = ArgumentRule("an iterable of batches, such as a DataLoader", lambda x: isinstance(x, Iterable))
