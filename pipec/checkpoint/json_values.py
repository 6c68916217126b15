"""Encodes plain values as JSON and decodes them unchanged: a tuple stays a tuple, and 1.0 stays a float.

JSON has numbers, text, lists and dicts with text as keys. Everything else is a dict with one key that starts
with ``$``, such as ``{"$tuple": [0.9, 0.999]}``.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipec.errors import CheckpointError, InputError
from pipec.ir.argument_checks import short_repr

_MARK = "$"


def encode_value(value: object, where: str) -> Any:
    """The value as JSON. ``where`` describes it in errors, for a person.

    Raises:
        InputError: it contains something that could not be decoded unchanged.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if type(value) is list:
        return [encode_value(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": encode_value(list(value), where)}
    if type(value) in (dict, Counter):
        return _encode_mapping(value, where)  # type: ignore[arg-type]
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return {"$tensor": [_type_name(value), encode_value(value.item(), where)]}
    if isinstance(value, Tensor) and value.nbytes <= _MAX_BYTES:
        return {"$array": [_type_name(value), list(value.shape), _text(_bytes_of(value))]}
    if isinstance(value, bytes) and len(value) <= _MAX_BYTES:
        return {"$bytes": _text(value)}
    raise InputError(
        f"{where} is {short_repr(value)}, a {type(value).__name__}; a checkpoint stores None, numbers, text, "
        "bytes, lists, tuples, dicts and tensors of at most 1 MiB. Convert it to these; a tensor that "
        "belongs to the model can be a buffer of it"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    plain = all(type(key) is str and not key.startswith(_MARK) for key in value)
    if plain and type(value) is dict:
        return {key: encode_value(each, f"{where}[{key!r}]") for key, each in value.items()}
    pairs = [
        [encode_value(key, where), encode_value(each, f"{where}[{key!r}]")] for key, each in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$items": pairs}


def _type_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _bytes_of(value: Tensor) -> bytes:
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


_MAX_BYTES = 2**20


def decode_value(value: Any) -> Any:
    """The value that ``encode_value`` encoded. Raises CheckpointError for a damaged encoding."""
    if isinstance(value, list):
        return [decode_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, *others = value or [""]
    if not kind.startswith(_MARK):
        return {key: decode_value(each) for key, each in value.items()}
    try:
        assert not others
        return _KINDS[kind](value[kind])
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise CheckpointError(f"found {short_repr(value)}, which does not encode a value") from error


def _array(type_name: str, shape: list[int], data: str) -> Tensor:
    dtype, decoded = getattr(torch, type_name), bytearray(base64.b64decode(data))
    return (torch.frombuffer(decoded, dtype=dtype) if decoded else torch.empty(0, dtype=dtype)).reshape(shape)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda inner: tuple(decode_value(inner)),
    "$items": lambda pairs: {decode_value(key): decode_value(each) for key, each in pairs},
    "$counter": lambda pairs: Counter({decode_value(key): decode_value(each) for key, each in pairs}),
    "$bytes": base64.b64decode,
    "$array": lambda inner: _array(*inner),
    "$tensor": lambda inner: torch.tensor(decode_value(inner[1]), dtype=getattr(torch, inner[0])),
}
