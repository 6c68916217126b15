"""The loss in a model's results: the one number that requires a gradient, or the one that is named."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipec.errors import InputError, NoLossError

LossKey = str | int
"""A key of a dict, an attribute, or a position in a tuple or list."""

LossPath = tuple[LossKey, ...]

UNKNOWN_LOSS = (
    'the model returns more than a tensor, and its loss neither as .loss nor under "loss"; say which of the '
    "results is the loss, such as loss_fn=0 or loss_fn='total' in pipec.compile"
)


def result_at(output: Any, path: LossPath) -> Any:
    """What the results of a model hold at a path."""
    for key in path:
        is_attribute = isinstance(key, str) and not isinstance(output, Mapping)
        output = getattr(output, key) if is_attribute else output[key]  # type: ignore[arg-type]
    return output


def find_loss(output: Any, given: LossPath | None) -> LossPath:
    """Where the loss is in the results of a model that were computed with gradients enabled.

    Raises:
        InputError: no result can be the loss (NoLossError), or several can.
    """
    if given is not None:
        _check_path(output, given)
        return given
    if (usual := _usual_path(output)) is not None:
        return usual
    every = dict(scalars(output))
    trained = {path: value for path, value in every.items() if value.requires_grad} or every
    found = {path: value for path, value in trained.items() if value.ndim == 0} or trained
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise NoLossError(
            f"the model returns no loss: its result is {_described(output)}, in which no tensor is one "
            "floating-point number. Pass what it computes its loss from, such as labels, or pass "
            "loss_fn=... to pipec.compile"
        )
    names = ", ".join(map(path_text, found))
    raise InputError(
        f"the model returns {len(found)} numbers that may be its loss: {names}. Say which one it is, as in "
        f"loss_fn={_as_option(next(iter(found)))} in pipec.compile, or return their sum as the loss; where "
        'the script computes the loss, pipe.as_module(outputs="differentiable") returns all of them'
    )


def scalars(output: Any, path: LossPath = (), depth: int = 5) -> Iterator[tuple[LossPath, Tensor]]:
    """The floating-point tensors of one element in the results of a model, each with its path."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and all(size == 1 for size in output.shape):
            yield path, output
    elif depth and not isinstance(output, nn.Module | type):
        for key, value in _parts(output):
            yield from scalars(value, (*path, key), depth - 1)


def path_text(path: LossPath) -> str:
    """``output[1]['ce']``"""
    return "output" + "".join(f"[{key!r}]" for key in path)


def _parts(output: Any) -> Iterator[tuple[LossKey, Any]]:
    if isinstance(output, Mapping):
        yield from ((key, value) for key, value in output.items() if isinstance(key, str | int))
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    else:
        yield from getattr(output, "__dict__", {}).items()


def with_loss(output: Any, path: LossPath | None, value: Tensor, loss: Tensor) -> Any:
    """The results of a model with ``loss`` in the place of its own, whose ``value`` it has.

    That is at ``path``; None: where a model usually has it, else where its value is.
    """
    if path is None:
        path = _usual_path(output)
    if path is None:
        path = next((each for each, x in scalars(output) if torch.equal(x.reshape(()), value)), ())
    return _with_result(output, path, loss)


def _with_result(output: Any, path: LossPath, result: Any) -> Any:
    if not path:
        return result
    key, *rest = path
    result = _with_result(result_at(output, (key,)), tuple(rest), result)
    if isinstance(output, tuple) and isinstance(key, str):
        return cast(Any, output)._replace(**{key: result})
    if isinstance(output, tuple):
        index = cast(int, key) % len(output)
        return tuple(result if i == index else each for i, each in enumerate(output))
    if isinstance(key, str) and not isinstance(output, Mapping):
        setattr(output, key, result)
    else:
        output[key] = result
    return output


def _usual_path(output: Any) -> LossPath | None:
    """Where a loss is that is the output itself, ``.loss`` or under ``"loss"``; None if it is elsewhere."""
    if isinstance(output, Tensor):
        return ()
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return ("loss",) if isinstance(loss, Tensor) else None


def _check_path(output: Any, path: LossPath) -> None:
    """Raise InputError unless there is a tensor of one element at the path."""
    try:
        found = result_at(output, path)
    except (AttributeError, LookupError, TypeError):
        found = None
    if not isinstance(found, Tensor):
        names = ", ".join(path_text(each) for each, _ in scalars(output)) or "none"
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise InputError(
            f"loss_fn is {_as_option(path)}, where the model returns {kind}; the numbers that it returns "
            f"are: {names}"
        )


def _described(output: Any) -> str:
    kind = type(output).__name__
    keys = [str(key) for key, _ in _parts(output)]
    return f"a {kind} of {', '.join(keys)}" if keys else f"a {kind}"


def _as_option(path: LossPath) -> str:
    return repr(path[0] if len(path) == 1 else path)


def loss_path_of(loss_fn: Callable[..., Any] | LossKey | LossPath | None) -> LossPath | None:
    """The place of the loss in the model's results, if the option ``loss_fn`` names it."""
    if loss_fn is None or callable(loss_fn):
        return None
    return loss_fn if isinstance(loss_fn, tuple) else (loss_fn,)
