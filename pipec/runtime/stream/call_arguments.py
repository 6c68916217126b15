"""Converts the items of an iterable of mini-batches to the arguments of a step."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor

from pipec.errors import InputError
from pipec.ir.argument_checks import ArgumentRule, short_repr


class CallArguments(NamedTuple):
    """The arguments of one step."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    target: Any = None


class GivenMicrobatches(NamedTuple):
    """Microbatches, each of which is a batch of its own, as a DataLoader yields it, and their weights."""

    microbatches: Any
    weights: Any = None

    @classmethod
    def of(cls, microbatches: Any, weights: Any) -> Self:
        """With the items of an iterable, which may yield them once."""
        is_iterable = isinstance(microbatches, Iterable) and not isinstance(microbatches, _NO_LIST)
        return cls([*microbatches] if is_iterable else microbatches, weights)

    def calls(self, takes_target: bool) -> list[CallArguments]:
        """The arguments of each microbatch. Raises InputError if there are none, or some do not fit."""
        if not isinstance(self.microbatches, list):
            found = type(self.microbatches).__name__
            raise InputError(f"microbatches is a {found}; expected a list of microbatches")
        calls = list[CallArguments]()
        for number, each in enumerate(self.microbatches):
            with in_microbatch(number):
                is_read = isinstance(each, CallArguments)
                calls.append(each if is_read else call_arguments_of(each, takes_target))
        if not calls:
            raise InputError("microbatches is empty; pass at least one, or leave out the call")
        return calls

    def loss_weights(self, count: int) -> tuple[float, ...]:
        """The weight of each microbatch's loss. Raises InputError unless they are ``count`` numbers."""
        if self.weights is None:
            return (1 / count,) * count
        if isinstance(self.weights, str) and self.weights == "sum":
            return (1.0,) * count
        try:
            found = tuple(map(float, self.weights))
        except (TypeError, ValueError):
            found = (math.nan,)
        if not all(map(math.isfinite, found)):
            raise InputError(
                f"weights is {short_repr(self.weights)}; expected a finite number for each microbatch, "
                "'sum', or None for the mean"
            )
        if len(found) != count:
            raise InputError(f"weights has {len(found)} numbers for {count} microbatches; pass one for each")
        return found


_NO_LIST = (Mapping, str, Tensor)

StepArguments = CallArguments | GivenMicrobatches
"""What a step may be given."""


def step_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, outputs: bool, microbatches: Any, weights: Any
) -> StepArguments:
    """What a step was given: a batch, or ``microbatches`` with their ``weights``.

    Raises:
        InputError: both, or outputs of given microbatches.
    """
    if microbatches is None:
        named = {} if weights is None else {"weights": weights}
        return CallArguments(args, {**kwargs, **named}, target)
    if args or kwargs or target is not None:
        given = ", ".join([*("an argument" for _ in args[:1]), *kwargs, *["target"] * (target is not None)])
        raise InputError(f"step was given microbatches, and {given} as well; pass the one or the other")
    if outputs:
        raise InputError(
            "outputs of given microbatches are not returned, because their sizes may differ; leave outputs "
            "out, or call the pipeline for the output of a batch"
        )
    return GivenMicrobatches.of(microbatches, weights)


@contextlib.contextmanager
def in_microbatch(number: int) -> Iterator[None]:
    """Let an InputError inside a ``with`` name the given microbatch in which something is wrong."""
    try:
        yield
    except InputError as error:
        raise InputError(f"microbatches[{number}]: {error}") from error


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
