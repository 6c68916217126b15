"""Packs data of a page as text: JSON with columns of numbers beside it, compressed, in base64.

A step of a million cells is a few numbers per cell, and these hardly differ from cell to cell. A column is
stored as differences, in the smallest type that holds them; ``page/columns.js`` reads it.
"""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Column:
    """Integers. Where there is a ``divisor``, they stand for the numbers that they are divided by it."""

    numbers: NDArray[np.int64]
    divisor: float = 1

    @classmethod
    def of(cls, numbers: Any) -> "Column":
        return cls(np.asarray(numbers, np.int64))

    @property
    def array(self) -> str:
        """The smallest array of JavaScript that holds the numbers."""
        if self.divisor == 1:
            for bits in (8, 16, 32):
                if not self.numbers.size or _fits(self.numbers, bits - 1):
                    return f"Int{bits}Array"
        return "Float64Array"


def pack(data: Mapping[str, object]) -> str:
    """``data``, which may contain columns, as text that ``page/columns.js`` reads. Deterministic."""
    chunks: list[bytes] = []

    def reference(value: object) -> object:
        if not isinstance(value, Column):
            raise TypeError(f"{type(value).__name__} cannot be packed")
        differences = np.diff(value.numbers, prepend=0)
        width = next(width for width in _WIDTHS if not differences.size or _fits(differences, 8 * width - 1))
        planes = differences.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T
        chunks.append(planes.tobytes())  # equal bytes stand together, which makes half the size
        return {_REFERENCE: [sum(map(len, chunks[:-1])), len(differences), width, value.divisor, value.array]}

    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=reference).encode()
    packed = len(text).to_bytes(4, "little") + text + b"".join(chunks)
    return base64.b64encode(gzip.compress(packed, 6, mtime=0)).decode("ascii")


_REFERENCE = "#column"
"""The key under which JSON says where a column is. No value or category has such a name."""

_WIDTHS = (1, 2, 4, 6)
"""Bytes of a difference. Numbers of JavaScript are exact up to 53 bits: enough for 140 TB in six bytes."""


def _fits(numbers: NDArray[np.int64], bits: int) -> bool:
    return bool(-(1 << bits) <= numbers.min() and numbers.max() < 1 << bits)
