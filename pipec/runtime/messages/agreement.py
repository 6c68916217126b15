"""Exchanges besides the messages of programs: ranks compare their calls, and broadcast tensors.

All ranks call each method in the same order. Before every call of the pipeline they exchange some bytes: a
digest of the arguments, and some numbers, such as rank 0's seed. Only if digests differ do they also
exchange the descriptions themselves. Ranks of one host have a socket for these bytes.
"""

import contextlib
import functools
import hashlib
import json
import pickle
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from pipec.errors import InputError, TransportError
from pipec.runtime.messages.call_description import CallDescription, full_digest
from pipec.runtime.messages.connections import Connections
from pipec.runtime.messages.distributed_transport import DistributedTransport
from pipec.runtime.messages.message_socket import MessageSocket
from pipec.runtime.processes.stop_signals import STOP_SIGNALS
from pipec.runtime.processes.whereabouts import note_call

S = TypeVar("S")

_TAG = 2**31 - 2
"""The tag of these messages; messages of a program have the small numbers of its links."""

_NUM_ANNOUNCEMENTS = 2**12
"""Tags of announcements."""

MismatchMessage = Callable[[Sequence[CallDescription]], str]
"""Makes the error's text from the description of every rank."""


class CallRole(IntEnum):
    """Whether all ranks make a call, or ranks that have joined need not; or that this rank has joined."""

    REQUIRED = 0
    OPTIONAL = 1
    JOINED = 2


@dataclass(frozen=True)
class RankReply:
    """A rank's message to the others with the digest of its call.

    ``joined`` says whether the rank has joined, ``stop`` is the pending stop signal, 0 for none, and
    ``reply_values`` are five numbers, 0 for none.
    """

    joined: bool
    stop: int
    reply_values: list[int]


class Agreement:
    """This process's side of the exchanges. Errors that not all ranks raise close ``transport``."""

    def __init__(self, transport: DistributedTransport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._peers = [peer for peer in range(transport.num_ranks) if peer != transport.rank]
        self._same_host = transport.connect_same_host()
        self._other_hosts = [peer for peer in self._peers if peer not in self._same_host]
        self._gloo = (
            transport.gloo_connections()
            if transport.device.type == "cuda"  # NCCL carries no CPU tensors
            else None
        )

    def require_same_call(
        self,
        activity: str,
        call_description: CallDescription,
        mismatch_message: MismatchMessage,
        reply_values: Sequence[int] = (),
        call_role: CallRole = CallRole.REQUIRED,
    ) -> list[RankReply]:
        """Check that every rank has the same ``call_description``; returns the reply of each.

        The description of a rank that has joined differs, and matches if the other ranks can do without it.

        Raises:
            InputError: the descriptions differ. Every rank raises it, and stays usable.
            TransportError: some rank does not call this.
        """
        note_call()
        padding = [0] * (_MAX_REPLY_VALUES - len(reply_values))
        own = _ROW.pack(*_digest(call_description), call_role, STOP_SIGNALS.pending, *reply_values, *padding)
        rows = [[*_ROW.unpack(row)] for row in self._all_gather_bytes(activity, own)]
        is_required = any(row[2] == CallRole.REQUIRED for row in rows)
        compared = [row[:2] for row in rows if is_required or row[2] != CallRole.JOINED]
        if any(each != compared[0] for each in compared):
            self.raise_mismatch(call_description, mismatch_message)
        return [RankReply(row[2] == CallRole.JOINED, row[3], row[4:]) for row in rows]

    def raise_mismatch(
        self, call_description: CallDescription, mismatch_message: MismatchMessage
    ) -> NoReturn:
        """Raise InputError, which says how the descriptions differ, on every rank. All ranks call this."""
        raise InputError(
            mismatch_message(
                [json.loads(text) for text in self._transport.all_gather_text(json.dumps(call_description))]
            )
        )

    def hosts(self) -> list[int]:
        """The host of each rank, on every rank: the lowest rank with which it can share memory."""
        own = min([self._transport.rank, *self._same_host])
        return [int(text) for text in self._transport.all_gather_text(str(own))]

    def all_gather_flags(self, own: Sequence[bool]) -> list[list[bool]]:
        """The flags of each rank, on every rank."""
        return [json.loads(text) for text in self._transport.all_gather_text(json.dumps(own))]

    def all_gather(self, activity: str, own: Tensor) -> list[Tensor]:
        """The tensor of each rank, on every rank. All have the same shape and type, and are on the CPU."""
        return self.start_all_gather(activity, own)()

    def _all_gather_bytes(self, activity: str, own: bytes) -> list[bytes]:
        """A few bytes of each rank, on every rank."""
        received = {self._transport.rank: own}
        for peer, socket in self._same_host.items():
            try:
                socket.send(own)
            except (TimeoutError, ConnectionError):
                with self._together_with(peer, activity):
                    raise
        wait = self._start_all_gather_bytes(activity, own) if self._other_hosts else dict
        for peer, socket in self._same_host.items():
            with self._together_with(peer, activity):
                received[peer] = self._receive(peer, socket, len(own))
        received |= wait()
        return [received[rank] for rank in range(len(received))]

    def _receive(self, peer: int, socket: MessageSocket, num_bytes: int) -> bytes:
        """The next message of a rank, which is waited for while it lives and is between two calls."""
        while True:
            try:
                return socket.receive(num_bytes)
            except TimeoutError:
                if not self._transport.has_time(peer):
                    raise

    def _start_all_gather_bytes(self, activity: str, own: bytes) -> Callable[[], dict[int, bytes]]:
        """Start to exchange bytes with ranks that share no memory with this one."""
        wait = self.start_all_gather(activity, torch.tensor([*own], dtype=torch.uint8), to=self._other_hosts)

        def received() -> dict[int, bytes]:
            rows = wait()
            return {peer: bytes(rows[peer].tolist()) for peer in self._other_hosts}

        return received

    def start_comparison(
        self, activity: str, number: int, call_description: CallDescription
    ) -> Callable[[], bool]:
        """Send ``call_description`` asynchronously; returns a function that says whether all ranks continue.

        The function waits for the other descriptions. Ranks continue if all descriptions are equal, and no
        rank has a pending stop signal. ``number`` counts announcements; ranks may be ahead of others by as
        many as there are tags.
        """
        own = torch.tensor([*_digest(call_description), STOP_SIGNALS.pending])
        expected = torch.tensor([*_digest(call_description), 0])
        wait = self.start_all_gather(activity, own, _TAG - 1 - number % _NUM_ANNOUNCEMENTS)
        return lambda: all(torch.equal(each, expected) for each in wait())

    def start_all_gather(
        self, activity: str, own: Tensor, tag: int = _TAG, to: Sequence[int] | None = None
    ) -> Callable[[], list[Tensor]]:
        """Start to exchange tensors with the ranks ``to``, or all; returns a function that waits for them."""
        rank = self._transport.rank
        received = [
            own if other == rank else torch.empty_like(own) for other in range(self._transport.num_ranks)
        ]
        waits = []
        for peer in self._peers if to is None else to:
            with self._together_with(peer, activity) as via:
                waits.append((peer, via.receive(received[peer], peer, tag)))
                via.send([own], peer, tag)

        def wait() -> list[Tensor]:
            for peer, work in waits:
                with self._together_with(peer, activity) as via:
                    via.wait(work)
            waits.clear()
            return received

        return wait

    def broadcast_tensor(
        self, owner: int, activity: str, tensor: Tensor, to: Sequence[int] | None = None
    ) -> Tensor:
        """The values of the owner's tensor, on the ranks ``to`` (None: on all); others keep their own."""
        rank, readers = self._transport.rank, self._peers if to is None else to
        if not tensor.numel() or (rank != owner and to is not None and rank not in to):
            return tensor
        if rank == owner:
            flat = tensor.detach().cpu().contiguous().flatten()
            for peer in readers:
                with self._together_with(peer, activity) as via:
                    via.send([flat], peer, _TAG)
                    via.drain()
            return tensor
        received = torch.empty(tensor.numel(), dtype=tensor.dtype)
        with self._together_with(owner, activity) as via:
            via.wait(via.receive(received, owner, _TAG))
        return received.view(tensor.shape)

    def broadcast_pytree(
        self, owner: int, activity: str, leaves: Sequence[object], structure: S
    ) -> tuple[list[object], S]:
        """The owner's leaves, tensors and plain values, and their structure, on every rank."""
        if self._transport.rank == owner:
            layouts = [_Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            text = torch.frombuffer(bytearray(pickle.dumps((layouts, structure))), dtype=torch.uint8)
            self.broadcast_tensor(owner, activity, torch.tensor([len(text)]))
            self.broadcast_tensor(owner, activity, text)
            return [
                self.broadcast_tensor(owner, activity, x) if isinstance(x, Tensor) else x for x in leaves
            ], structure
        size = int(self.broadcast_tensor(owner, activity, torch.tensor([0])))
        text = self.broadcast_tensor(owner, activity, torch.empty(size, dtype=torch.uint8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            layouts, structure = pickle.loads(text.numpy().tobytes())
        fetch = functools.partial(self.broadcast_tensor, owner, activity)
        return [x.filled(fetch) if isinstance(x, _Layout) else x for x in layouts], structure

    def broadcast_from_rank_0(self, tensors: Mapping[str, Tensor]) -> dict[int, list[str]]:
        """Copy rank 0's values to every rank; returns, by rank, the names of tensors that differed."""
        own = [full_digest(tensor) for tensor in tensors.values()]
        gathered = [json.loads(text) for text in self._transport.all_gather_text(json.dumps(own))]
        differing: dict[int, list[str]] = defaultdict(list)
        for (name, tensor), digests in zip(tensors.items(), zip(*gathered, strict=True), strict=True):
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if not others or "" in digests:  # the digest of a tensor without values
                continue
            sent = self.broadcast_tensor(0, f"taking over {name}", tensor, others)
            if self._transport.rank in others:
                tensor.detach().copy_(sent)
            for rank in others:
                differing[rank].append(name)
        return dict(differing)

    @contextlib.contextmanager
    def _together_with(self, peer: int, activity: str) -> Iterator[Connections]:
        """Yield the connections; an error names the peer and is sent to the other ranks."""
        try:
            together = f"{activity}, together with rank {peer}"
            with self._transport.error_context(together, peer) as connections:
                yield self._gloo or connections
        except TransportError as error:
            self._transport.fail(error)
            raise


_MAX_REPLY_VALUES = 5

_ROW = struct.Struct(f"={4 + _MAX_REPLY_VALUES}q")
"""A digest of the call's description, its role, the signal to stop, and the ``reply_values``."""


def _digest(call_description: CallDescription) -> tuple[int, ...]:
    text = repr([*call_description.items()]).encode()
    return struct.unpack("2q", hashlib.blake2b(text, digest_size=16).digest())


class _Layout:
    """The layout of a tensor in memory, without its values."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._stride, self._dtype = shape, stride, dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def filled(self, fetch: Callable[[Tensor], Tensor]) -> Tensor:
        """A tensor of this layout with the values that ``fetch`` returns."""
        tensor = torch.empty_strided(self._shape, self._stride, dtype=self._dtype)
        return tensor.copy_(fetch(tensor))
