"""Plain values: what ``torch.save`` writes of them, ``torch.load`` reads without running any code."""

import io
import pickle
import re
from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError, InputError
from pipec.ir.argument_checks import short_repr
from pipec.runtime.messages.call_description import describe_leaf
from pipec.torch_compat import pytree

_MAX_BYTES = 2**20

torch.serialization.add_safe_globals([bytes])  # as which b"" is read


def plain(value: object, where: str) -> Any:
    """A copy of the value on the CPU that ``read`` gives back unchanged. ``where`` names it in errors.

    Raises:
        InputError: it contains something else than plain values, or a large tensor.
    """
    match value:
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
            return value
        case float():
            return float(value)
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(plain(each, f"{where}[{index}]") for index, each in enumerate(value))
        case dict() if type(value) in (dict, Counter):
            pairs = {plain(key, where): plain(each, f"{where}[{key!r}]") for key, each in value.items()}
            return type(value)(pairs)
        case Tensor() if value.nbytes <= _MAX_BYTES:
            return value.detach().cpu().resolve_conj().resolve_neg().as_subclass(Tensor).clone()
        case bytes() if len(value) <= _MAX_BYTES:
            return value
    raise InputError(
        f"{where} is {short_repr(value)}, a {type(value).__name__}; a checkpoint stores None, numbers, text, "
        "bytes, lists, tuples, dicts and tensors of at most 1 MiB. Convert it to these; a tensor that "
        "belongs to the model can be a buffer of it"
    )


def written(value: Any) -> bytes:
    """The file of a plain value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data: bytes) -> Any:
    """The value that ``written`` has made a file of. Raises CheckpointError for a damaged one."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (*DAMAGED_DATA_ERRORS, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(refusal(error)) from error


def refusal(error: BaseException) -> str:
    """Why ``torch.load`` has refused a file."""
    strange = re.search(r"GLOBAL (\S+)", str(error))
    return f"it names {strange[1]}, which is not run" if strange else str(error).partition("\n")[0]


def fields_of(value: Any) -> Any:
    """Dataclasses as dicts of their fields. ``asdict`` would count the items of a Counter."""
    if is_dataclass(value):
        return {field.name: fields_of(getattr(value, field.name)) for field in fields(value)}
    return [fields_of(each) for each in value] if type(value) is list else value


def describe(value: Any) -> str:
    """A text that is equal for equal values."""
    return str(pytree.tree_map(lambda x: describe_leaf(x) if isinstance(x, Tensor) else repr(x), value))
