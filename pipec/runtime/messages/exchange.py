"""Exchanges besides the messages of programs: rank 0 decides about calls, and ranks broadcast tensors.

All ranks call each method in the same order. Before every call of the pipeline each rank sends rank 0 a
digest of what it was called with, and some numbers. Rank 0 compares the digests, decides what all ranks do,
and answers with that, or with the error that all raise. Only if digests differ do ranks also exchange the
descriptions themselves. These bytes go over the connections to rank 0: a rank waits for one that is between
two calls as long as that one lives.
"""

import contextlib
import functools
import hashlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from pipec.errors import InputError, TransportError
from pipec.runtime.messages.call_description import CallDescription, describe_leaf
from pipec.runtime.messages.cpu import CpuConnections
from pipec.runtime.messages.distributed_transport import (
    DistributedTransport,
    result_or_error,
    unpickled,
)
from pipec.runtime.processes.star import PacketKind
from pipec.runtime.processes.stop_signals import STOP_SIGNALS

S = TypeVar("S")

_TAG = 2**31 - 2
"""The tag of tensors that are broadcast; messages of a program have the small numbers of its links."""

MismatchMessage = Callable[[Sequence[CallDescription]], str]
"""Makes the error's text from the description of every rank."""


class CallRole(IntEnum):
    """Whether all ranks make a call, or ranks that have joined need not; or that this rank has joined."""

    REQUIRED = 0
    OPTIONAL = 1
    JOINED = 2


class RankNote(NamedTuple):
    """What rank 0 is told of a rank's call: a digest of its description, and what may differ.

    ``stop`` is the pending stop signal, 0 for none.
    """

    digest: bytes
    role: int
    stop: int
    numbers: Sequence[float]

    @property
    def joined(self) -> bool:
        """Whether the rank has joined."""
        return self.role == CallRole.JOINED


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer, and the pending stop signal of each rank, if any rank has one."""

    value: Any
    stops: list[int]


Decide = Callable[[Sequence[RankNote]], Any]
"""Decides on rank 0 what all ranks do; raises an error that all raise."""


def no_decision(notes: Sequence[RankNote]) -> None:
    """Nothing, once all ranks make the call."""
    return None


class Exchange:
    """This process's side of the exchanges. Errors that not all ranks raise close ``transport``."""

    def __init__(self, transport: DistributedTransport) -> None:
        self._transport = transport
        self._peers = [peer for peer in range(transport.num_ranks) if peer != transport.rank]

    def require_same_call(
        self,
        activity: str,
        call_description: CallDescription,
        mismatch_message: MismatchMessage,
        decide: Decide = no_decision,
        numbers: Sequence[float] = (),
        call_role: CallRole = CallRole.REQUIRED,
    ) -> Answer:
        """Rank 0's answer, once it has found that every rank has the same ``call_description``.

        The description of a rank that has joined differs, and matches if the other ranks can do without it.

        Raises:
            InputError: the descriptions differ. Every rank raises it, and stays usable.
            PipecError: ``decide`` raised it on rank 0. Every rank raises it.
            TransportError: some rank does not call this.
        """
        own = pickle.dumps((_digest(call_description), int(call_role), STOP_SIGNALS.pending, numbers))
        answer = functools.partial(_answer, decide)
        reply = self._transport.star.start_consulting(own, PacketKind.CALL, activity, answer)()
        result, error = pickle.loads(reply)
        if error is not None:
            raise error
        if result is None:
            self.raise_mismatch(call_description, mismatch_message)
        return result  # type: ignore[no-any-return]

    def raise_mismatch(
        self, call_description: CallDescription, mismatch_message: MismatchMessage
    ) -> NoReturn:
        """Raise InputError, which says how the descriptions differ, on every rank. All ranks call this."""
        every = self._transport.star.all_gather(call_description, "comparing calls")
        raise InputError(mismatch_message(every))

    def start_comparison(self, activity: str, call_description: CallDescription) -> Callable[[], bool]:
        """Send ``call_description`` asynchronously; returns a function that says whether all ranks continue.

        The function waits for rank 0's answer; comparisons end in the order in which they start. Ranks
        continue if all descriptions are equal, and no rank has a pending stop signal.
        """
        digest = _digest(call_description)
        own, expected = digest + bytes([STOP_SIGNALS.pending]), digest + b"\0"
        wait = self._transport.star.start_comparing(
            own, activity, lambda every: bytes([{*every} == {expected}])
        )
        return lambda: wait() == b"\1"

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
                with self._together_with(peer, activity) as gloo:
                    gloo.send([flat], peer, _TAG)
                    gloo.drain()
            return tensor
        received = torch.empty(tensor.numel(), dtype=tensor.dtype)
        with self._together_with(owner, activity) as gloo:
            gloo.wait(gloo.receive([received], owner, _TAG))
        return received.view(tensor.shape)

    def broadcast_pytree(
        self,
        owner: int,
        activity: str,
        leaves: Sequence[object],
        structure: S,
        to: Sequence[int] | None = None,
    ) -> tuple[list[object], S]:
        """The leaves of the owner, and their structure, on the ranks ``to``, or on all."""
        rank = self._transport.rank
        readers = [peer for peer in (range(self._transport.num_ranks) if to is None else to) if peer != owner]
        if rank != owner and rank not in readers:
            return [*leaves], structure
        share = functools.partial(self.broadcast_tensor, owner, activity, to=readers)
        if rank == owner:
            layouts = [_like(leaf, "meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            text = torch.frombuffer(bytearray(pickle.dumps((layouts, structure))), dtype=torch.uint8)
            share(torch.tensor([len(text)]))
            share(text)
            return [share(x) if isinstance(x, Tensor) else x for x in leaves], structure
        text = share(torch.empty(int(share(torch.tensor([0]))), dtype=torch.uint8))
        layouts, structure = unpickled(text.numpy().tobytes())
        made = [_like(x, "cpu") if isinstance(x, Tensor) else x for x in layouts]
        return [x.copy_(share(x)) if isinstance(x, Tensor) else x for x in made], structure

    def broadcast_from_rank_0(
        self, tensors: Mapping[str, Tensor], keepers: Mapping[str, Sequence[int]]
    ) -> dict[int, list[str]]:
        """Copy rank 0's values to the ranks that keep a tensor: its ``keepers``, or all if it has none.

        Rank 0 digests all tensors, every other rank those that it keeps. Returns, by rank, the names of
        tensors that differed.
        """
        rank, every = self._transport.rank, range(self._transport.num_ranks)
        own = {
            name: "" if tensor.is_meta else describe_leaf(tensor)
            for name, tensor in tensors.items()
            if rank in (0, *keepers.get(name, every))
        }
        digests = self._transport.star.all_gather(own, "comparing the values of tensors")
        differing: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            found = {other: digests[other][name] for other in every if name in digests[other]}
            others = [other for other, digest in found.items() if digest != found[0]]
            if not others or "" in found.values():  # the digest of a tensor without values
                continue
            sent = self.broadcast_tensor(0, f"taking over {name}", tensor, others)
            if rank in others:
                tensor.detach().copy_(sent)
            for other in others:
                differing[other].append(name)
        return dict(differing)

    @contextlib.contextmanager
    def _together_with(self, peer: int, activity: str) -> Iterator[CpuConnections]:
        """Yield connections for CPU tensors; an error names the peer and is sent to the other ranks."""
        try:
            together = f"{activity}, together with rank {peer}"
            with self._transport.error_context(together, peer):
                yield self._transport.gloo
        except TransportError as error:
            self._transport.fail(error)
            raise


def _answer(decide: Decide, every: Sequence[bytes]) -> bytes:
    """Rank 0's answer to the notes of all ranks, or an error; neither if their digests differ."""
    notes = [RankNote(*pickle.loads(each)) for each in every]
    is_required = any(note.role == CallRole.REQUIRED for note in notes)
    if len({note.digest for note in notes if is_required or not note.joined}) > 1:
        return pickle.dumps((None, None))
    stops = [note.stop for note in notes]
    return pickle.dumps(result_or_error(lambda: Answer(decide(notes), stops if any(stops) else [])))


def _digest(call_description: CallDescription) -> bytes:
    return hashlib.blake2b(repr([*call_description.items()]).encode(), digest_size=16).digest()


def _like(tensor: Tensor, device: str) -> Tensor:
    """An uninitialised tensor with the same layout in memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
