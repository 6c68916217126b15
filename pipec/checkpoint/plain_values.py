"""The plain values of a checkpoint, as ``torch.save`` writes them, read without running any code."""

import base64
import io
import pickle
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError, InputError
from pipec.ir.argument_checks import short_repr
from pipec.runtime.messages.call_description import describe_leaf
from pipec.torch_compat import pytree


def plain(value: object, where: str) -> Any:
    """A copy of the value on the CPU that ``read`` gives back unchanged.

    ``where`` describes it in errors, for a person.

    Raises:
        InputError: it contains something else than plain values, or a large tensor.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value)
    if type(value) is list or type(value) is tuple:
        inner = [plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
        return inner if type(value) is list else tuple(inner)
    if type(value) is dict or type(value) is Counter:
        pairs = {plain(key, where): plain(each, f"{where}[{key!r}]") for key, each in value.items()}
        return pairs if type(value) is dict else Counter(pairs)
    if isinstance(value, Tensor) and value.nbytes <= _MAX_BYTES:
        return value.detach().cpu().resolve_conj().resolve_neg().as_subclass(Tensor).clone()
    if isinstance(value, bytes) and len(value) <= _MAX_BYTES:
        return value
    raise InputError(
        f"{where} is {short_repr(value)}, a {type(value).__name__}; a checkpoint stores None, numbers, text, "
        "bytes, lists, tuples, dicts and tensors of at most 1 MiB. Convert it to these; a tensor that "
        "belongs to the model can be a buffer of it"
    )


_MAX_BYTES = 2**20


def written(value: Any) -> bytes:
    """The file of a plain value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data: bytes) -> Any:
    """The value that ``written`` has made a file of. Raises CheckpointError for a damaged one."""
    try:
        with torch.serialization.safe_globals([bytes]):  # as of b""
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (*DAMAGED_DATA_ERRORS, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(refusal(error)) from error


def refusal(error: Exception) -> str:
    """Why ``torch.load`` has refused a file."""
    strange = re.search(r"GLOBAL (\S+)", str(error))
    return f"it names {strange[1]}, which is not run" if strange else str(error).partition("\n")[0]


def as_text(value: Any) -> str:
    """A plain value for another process."""
    return base64.b64encode(written(value)).decode()


def from_text(text: str) -> Any:
    return read(base64.b64decode(text))


def describe(value: Any) -> str:
    """A text that is equal for equal values."""
    return str(pytree.tree_map(lambda x: describe_leaf(x) if isinstance(x, Tensor) else repr(x), value))
