"""What the processes of a pipeline tell each other beside its messages: facts to compare, and whole tensors.

All ranks call each method in the same order. Before every call of the pipeline they exchange 16 bytes, a
digest of what each was given; only if digests differ do they also exchange the facts themselves.
"""

import contextlib
import functools
import hashlib
import json
import pickle
import re
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipec.errors import InputError, PipecError, TransportError
from pipec.runtime.connections import Connections, GlooConnections
from pipec.runtime.distributed import TorchDistributed

S = TypeVar("S")

Facts = dict[str, str]
"""What one rank holds, by the name that a person would call it."""

Refusal = Callable[[Sequence[Facts]], str]
"""Says what is wrong, and what to do, from the facts of every rank."""


class Agreement:
    """This process's part. Its errors close ``transport``, unless every rank raises the same one."""

    def __init__(self, transport: TorchDistributed, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._peers = [peer for peer in range(transport.num_ranks) if peer != transport.rank]
        self._gloo = (
            GlooConnections(transport.rank, transport.num_ranks, timeout)
            if transport.device.type == "cuda"  # whose connections carry no CPU tensors
            else None
        )

    def require(self, doing: str, facts: Facts, refusal: Refusal) -> None:
        """Check that every rank has the same ``facts``.

        Raises:
            InputError: they differ. Every rank raises it, and may go on.
            TransportError: some rank does not call this.
        """
        digest = hashlib.blake2b(json.dumps(list(facts.items())).encode(), digest_size=16).digest()
        digests = self.exchange(doing, torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        if not all(torch.equal(other, digests[0]) for other in digests):
            every = [json.loads(text) for text in self._transport.gather(json.dumps(facts))]
            raise InputError(refusal(every))

    def exchange(self, doing: str, own: Tensor) -> list[Tensor]:
        """The tensor of each rank, on every rank. All have the same shape and type, and are on the CPU."""
        rank = self._transport.rank
        found = [
            own if other == rank else torch.empty_like(own) for other in range(self._transport.num_ranks)
        ]
        waits = []
        for peer in self._peers:
            with self._together_with(peer, doing) as via:
                waits.append((peer, via.receive(found[peer], peer, _TAG)))
                via.send([own], peer, _TAG)
        for peer, work in waits:
            with self._together_with(peer, doing) as via:
                via.wait(work)
        return found

    def sent_by(self, owner: int, doing: str, tensor: Tensor, to: Sequence[int] | None = None) -> Tensor:
        """The values of the owner's tensor, on the ranks ``to`` (None: on all); others keep their own."""
        rank, readers = self._transport.rank, self._peers if to is None else to
        if not tensor.numel() or (rank != owner and to is not None and rank not in to):
            return tensor
        if rank == owner:
            flat = tensor.detach().cpu().contiguous().flatten()
            for peer in readers:
                with self._together_with(peer, doing) as via:
                    via.send([flat], peer, _TAG)
                    via.drain()
            return tensor
        received = torch.empty(tensor.numel(), dtype=tensor.dtype)
        with self._together_with(owner, doing) as via:
            via.wait(via.receive(received, owner, _TAG))
        return received.view(tensor.shape)

    def from_rank_0(self, doing: str, leaves: Sequence[object], structure: S) -> tuple[list[object], S]:
        """Rank 0's leaves, tensors and plain values, and their structure, on every rank."""
        if self._transport.rank == 0:
            layouts = [_Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            text = torch.frombuffer(bytearray(pickle.dumps((layouts, structure))), dtype=torch.uint8)
            self.sent_by(0, doing, torch.tensor([len(text)]))
            self.sent_by(0, doing, text)
            return [self.sent_by(0, doing, x) if isinstance(x, Tensor) else x for x in leaves], structure
        size = int(self.sent_by(0, doing, torch.tensor([0])))
        text = self.sent_by(0, doing, torch.empty(size, dtype=torch.uint8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            layouts, structure = pickle.loads(text.numpy().tobytes())
        fetch = functools.partial(self.sent_by, 0, doing)
        return [x.filled(fetch) if isinstance(x, _Layout) else x for x in layouts], structure

    def start_from_rank_0(self, tensors: Mapping[str, Tensor]) -> dict[int, list[str]]:
        """Give every rank the values of rank 0; by rank, the names of the tensors that had others."""
        mine = [whole_digest(tensor) for tensor in tensors.values()]
        every = [json.loads(text) for text in self._transport.gather(json.dumps(mine))]
        differing: dict[int, list[str]] = defaultdict(list)
        for (name, tensor), digests in zip(tensors.items(), zip(*every, strict=True), strict=True):
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if not others or "" in digests:  # of a tensor without values
                continue
            sent = self.sent_by(0, f"taking over {name}", tensor, others)
            if self._transport.rank in others:
                tensor.detach().copy_(sent)
            for rank in others:
                differing[rank].append(name)
        return dict(differing)

    @contextlib.contextmanager
    def _together_with(self, peer: int, doing: str) -> Iterator[Connections]:
        """Give the connections; an error names the peer, and tells the other ranks."""
        try:
            together = f"{doing}, together with rank {peer}"
            with self._transport.explaining(together) as connections, self._naming(peer, doing):
                yield self._gloo or connections
        except TransportError as error:
            self._transport.fail(error)
            raise

    @contextlib.contextmanager
    def _naming(self, peer: int, doing: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransportError(
                f"rank {self._transport.rank} was {doing}, and waited {self._timeout:g} s for rank {peer} "
                "to do the same. All ranks make the same calls in the same order: see that no `if rank == "
                "...`, exception or shorter loop keeps that rank from it"
            ) from error


_TAG = 2**31 - 2
"""Of these messages; those of a program have the small numbers of its links."""


class _Layout:
    """How a tensor lies in memory, without its values."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._stride, self._dtype = shape, stride, dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def filled(self, fetch: Callable[[Tensor], Tensor]) -> Tensor:
        """A tensor of this layout with the values that ``fetch`` brings."""
        tensor = torch.empty_strided(self._shape, self._stride, dtype=self._dtype)
        return tensor.copy_(fetch(tensor))


# facts


def leaf_fact(leaf: object, values: bool = True) -> str:
    """The type of an argument and, if it is a tensor, its shape and with ``values`` a digest of those."""
    if isinstance(leaf, Tensor):
        return f"{tensor_kind(leaf)}, values {sample_digest(leaf)}" if values else tensor_kind(leaf)
    return _identity(leaf)


def tensor_kind(tensor: Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return kind if tensor.is_contiguous() else f"{kind} with strides {list(tensor.stride())}"


def argument_fact(value: object) -> str:
    """What an argument of ``compile`` is, the same in every process that was given the same.

    A file is its contents, a function its name, its code and the values that it reads. Of other
    objects it is what they print, without addresses.
    """
    if isinstance(value, Path) and value.is_file():
        return f"{value} ({hashlib.sha256(value.read_bytes()).hexdigest()[:8]})"
    return _identity(value)


def _identity(value: object, depth: int = 4) -> str:
    if isinstance(value, Tensor):
        return leaf_fact(value)
    if depth and isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.items()]
        return f"partial({', '.join(_identity(part, depth - 1) for part in parts)})"
    if depth and isinstance(value, types.MethodType):
        return f"{_identity(value.__self__, depth - 1)}.{_identity(value.__func__, depth - 1)}"
    if depth and isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, set | frozenset):  # whose order is another in every process
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    return _short(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))


def _module(module: nn.Module) -> str:
    plain = [
        f"{name}={value}"
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str)
    ]
    held = [f"{name} {leaf_fact(tensor)}" for name, tensor in module.state_dict().items()]
    return _short(" ".join([repr(module), *plain, *held]))


def _function(function: types.FunctionType, depth: int) -> str:
    """Its name, and a digest of its code and of the numbers, tensors and functions that the code reads.

    Other objects that it reads, such as a device, may be other ones in each process.
    """
    code = function.__code__
    found = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    found += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    read: list[object] = [value for value in found if isinstance(value, _READ)]
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    values = [_identity(value, depth - 1) for value in read]
    digest = hashlib.sha256("\n".join([_code(code), *values]).encode()).hexdigest()[:8]
    return f"{function.__module__}.{function.__qualname__} ({digest})"


_READ = (int, float, complex, Tensor, nn.Module, types.FunctionType, functools.partial)


def _code(code: types.CodeType) -> str:
    consts = [_code(x) if isinstance(x, types.CodeType) else _identity(x, 0) for x in code.co_consts]
    return repr((code.co_code, code.co_names, consts))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _short(text: str) -> str:
    """The text itself; if it is long, its beginning and a digest of the whole."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


_MOST_CHARACTERS = 80


def differences(every: Sequence[Facts]) -> str:
    """A line for each fact that the ranks do not share: ``x: float32[8] on rank 0; float32[4] on rank 1``."""
    lines = []
    for name in dict.fromkeys(name for facts in every for name in facts):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(every):
            holders[facts.get(name, "absent")].append(rank)
        if len(holders) > 1:
            held = "; ".join(f"{fact} on {rank_names(ranks)}" for fact, ranks in holders.items())
            lines.append(f"  {name}: {held}")
    rest = len(lines) - _MOST_LINES
    return "\n".join(lines[:_MOST_LINES] + ([f"  and {rest} more"] if rest > 0 else []))


_MOST_LINES = 8


def rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def refused(error: PipecError) -> Facts:
    """What a rank tells the others instead of its arguments, if it cannot use them."""
    return {"refused": f"{error}"}


# digests of values


def sample_digest(tensor: Tensor) -> str:
    """A digest of a tensor's values: of all of them up to 64 kB, else of 4,096 that lie evenly in memory.

    Two large tensors that differ in a few elements alone may therefore have the same. Of a tensor on a GPU,
    the host waits for these few values.
    """
    if tensor.is_meta:
        return "none"
    flat = flat_memory(tensor)
    if flat.numel() * flat.element_size() > _HASHED_WHOLE:
        steps = torch.arange(_NUM_SAMPLES, device=flat.device)
        flat = flat[steps * (flat.numel() - 1) // (_NUM_SAMPLES - 1)]
    return hashlib.blake2b(flat.cpu().view(torch.uint8).numpy().data, digest_size=4).hexdigest()


_HASHED_WHOLE, _NUM_SAMPLES = 2**16, 4096


def whole_digest(tensor: Tensor) -> str:
    """As ``sample_digest``, with the sum over all of the memory: any one element that changes, changes it."""
    if tensor.is_meta:
        return ""
    flat = flat_memory(tensor)
    integers = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    total = integers.view(_INTEGERS[integers.element_size()]).sum(dtype=torch.int64)
    return f"{tensor_kind(tensor)} {sample_digest(tensor)} {int(total):x}"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flat_memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of its memory, as a view where that can be."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    order = sorted(range(plain.ndim), key=plain.stride, reverse=True)
    return plain.permute(order).reshape(-1)
