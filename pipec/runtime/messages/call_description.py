"""Descriptions of a call's arguments: short texts and digests, equal on all ranks for equal arguments."""

import functools
import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipec.runtime.processes.judge import format_ranks

CallDescription = dict[str, str]
"""One rank's arguments and settings as text, by readable names."""


def describe_leaf(leaf: object, values: bool = True) -> str:
    """The type of an argument; for a tensor also its shape and, with ``values``, a digest of its values."""
    if isinstance(leaf, Tensor):
        return f"{describe_tensor(leaf)}, values {values_digest(leaf)}" if values else describe_tensor(leaf)
    return describe_argument(leaf)


def describe_microbatches(each: Sequence[CallDescription], weights: Sequence[float]) -> CallDescription:
    """The description of a step in given microbatches, if it has weights; else of the only call."""
    if not weights:
        return each[0]
    described = {"microbatches": str(len(each)), "weights": describe_argument(weights)}
    for number, own in enumerate(each):
        described |= {f"microbatches[{number}] {path}": value for path, value in own.items()}
    return described


def describe_tensor(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return kind if tensor.is_contiguous() else f"{kind} with strides {list(tensor.stride())}"


def describe_argument(value: object) -> str:
    """A text for an argument, the same in every process with the same argument.

    A file is described by its contents, and another object by its ``repr`` without addresses. So a loss of
    the same name may read other values on each rank: rank 0's is captured, and the next call, which compares
    what it reads, is refused.
    """
    if isinstance(value, Path) and value.is_file():
        return f"{value} ({hashlib.sha256(value.read_bytes()).hexdigest()[:8]})"
    if isinstance(value, set | frozenset):  # its order differs between processes
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return _short(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))


def _short(text: str) -> str:
    """The text itself; if it is long, its beginning and a digest of the whole."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_MAX_CHARACTERS = 80


def describe_differences(descriptions: Sequence[CallDescription], ranks: Sequence[int] | None = None) -> str:
    """A line for each entry that differs between ranks: ``x: float32[8] on rank 0; float32[4] on rank 1``.

    ``ranks`` are the ranks of the descriptions, by default all.
    """
    lines = []
    for name in dict.fromkeys(name for description in descriptions for name in description):
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, description in zip(ranks or range(len(descriptions)), descriptions, strict=True):
            ranks_by_value[description.get(name, "absent")].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {format_ranks(own)}" for value, own in ranks_by_value.items())
            lines.append(f"  {name}: {values}")
    rest = len(lines) - _MAX_LINES
    return "\n".join(lines[:_MAX_LINES] + ([f"  and {rest} more"] if rest > 0 else []))


_MAX_LINES = 8


def format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def values_digest(tensor: Tensor) -> str:
    """A digest of all of a tensor's values, whatever device they are on; "none" if it has none.

    Up to 64 kB it is their CRC. In a larger tensor, each row of 4,096 words of 4 bytes is first hashed to 8
    bytes: sum(word * key) modulo 2**64, with a random odd key for each position ("multilinear" in Lemire and
    Kaser, Strongly universal string hashing is fast, 2014). A row notices every change of one word, and any
    other change but for one in 2**32. For a tensor on a GPU, the host waits for these hashes.
    """
    if tensor.is_meta:
        return "none"
    flat = flat_memory(tensor).contiguous().view(torch.uint8)  # gaps of a slice with a step are not flat
    if flat.numel() > _CRC_BYTES:
        hashes = _row_hashes(flat)
        return hashlib.blake2b(hashes.cpu().numpy().data, digest_size=8).hexdigest()
    return f"{zlib.crc32(flat.cpu().numpy().data):08x}"


_CRC_BYTES, _ROW_WORDS = 2**16, 4096


def _row_hashes(flat: Tensor) -> Tensor:
    """The hash of each row of words of a vector of bytes; the last row is filled up with zeros."""
    row_bytes = 4 * _ROW_WORDS
    whole = flat.numel() // row_bytes * row_bytes
    rest = nn.functional.pad(flat[whole:], (0, row_bytes - (flat.numel() - whole)))
    keys = _keys(flat.device)
    hashes = []
    # on a CPU, blocks that fit into its cache; on a GPU, few launches
    for block in (*flat[:whole].split(row_bytes * (16 if flat.is_cpu else 2**14)), rest):
        aligned = block.clone() if block.storage_offset() % 4 else block
        hashes.append((aligned.view(torch.int32).view(-1, _ROW_WORDS) * keys).sum(1))
    return torch.cat(hashes)


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """The key of each word of a row, the same in all processes."""
    numbers = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_ROW_WORDS,), generator=numbers, device="cpu")
    return (drawn | 1).to(device)


def flat_memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of its memory, as a view where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(plain.ndim), key=plain.stride, reverse=True)
    return plain.permute(order).reshape(-1)
