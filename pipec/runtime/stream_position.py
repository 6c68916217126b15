"""The position in a stream of mini-batches, from which another process continues with the same bits.

Batches are read ahead of their use. Reading may draw random numbers, as the steps in between do, so the state
of torch's generator is recorded before each batch is read. To resume, the iteration begins as it did then,
batches that were trained on are skipped, and batches that had been read ahead are read with the same state.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.runtime.step.stream_results import BatchResult


class ReadState(NamedTuple):
    """The state of torch's generator, and of the loader, just before a batch was read."""

    generator: Tensor
    loader: Any


@dataclass(frozen=True)
class StreamPosition:
    """A position after ``num_batches``; the losses of the last ``undelivered`` are still to be returned.

    ``begun`` and ``first`` are states of torch's generator: when the iteration began, and before its first
    batch. ``own`` are the states of the loader's own generators when it began. ``ahead`` has torch's state
    before each batch that was read ahead, and ``loader`` the loader's ``state_dict``, if it has one, before
    the first of these.
    """

    num_batches: int
    undelivered: Sequence[BatchResult]
    begun: Tensor
    first: Tensor
    own: Sequence[Tensor]
    ahead: Sequence[Tensor]
    loader: Any


class ResumableReader(Iterator[Any]):
    """Reads batches, from a ``position`` on if there is one.

    ``undelivered`` are results of a former run, whose losses come first. ``has_ended_early`` says that the
    loop ended before it was given all losses.
    """

    def __init__(self, batches: Iterable[Any], position: StreamPosition | None) -> None:
        self._batches, self._position = batches, position
        self._has_state = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self._own = _own_generators(batches)
        self._read_states = deque[ReadState]()
        self._first: Tensor | None = None
        self.undelivered = deque(position.undelivered if position else ())
        self.has_ended_early = False
        self._num_before = position.num_batches if position else 0
        self._num_delivered = self._num_before - len(self.undelivered)
        self._again = deque(position.ahead if position else ())
        now = torch.get_rng_state()
        if position is not None:
            torch.set_rng_state(position.begun)
            for generator, state in zip(self._own, position.own, strict=False):
                generator.set_state(state)
            if self._loader_resumes:
                batches.load_state_dict(position.loader)  # type: ignore[attr-defined]
        self._begun = torch.get_rng_state()
        self._own_begun = [generator.get_state() for generator in self._own]
        self._iterator = iter(batches)
        if position is not None:
            torch.set_rng_state(now)

    def __next__(self) -> Any:
        if self._first is None:
            self._begin()
        if not self._again:
            return self._read()
        now = torch.get_rng_state()
        torch.set_rng_state(self._again.popleft())
        try:
            return self._read()
        finally:
            torch.set_rng_state(now)

    def count_delivered(self) -> None:
        """Count a loss that the loop is given."""
        self._num_delivered += 1
        if self._num_delivered > self._num_before:
            self._read_states.popleft()

    def leave(self, completed: Sequence[BatchResult]) -> None:
        """The loop has ended without the losses of ``completed`` batches."""
        self.undelivered.extend(completed)
        for _ in completed:
            self._read_states.popleft()
        self.has_ended_early = bool(self.undelivered)

    def position(self, completed: Sequence[BatchResult]) -> StreamPosition:
        """The position. ``completed`` batches were trained on since the last loss that was given."""
        states, loader = list(self._read_states)[len(completed) :], None
        if self._has_state:
            loader = states[0].loader if states else self._batches.state_dict()  # type: ignore[attr-defined]
        first = self._begun if self._first is None else self._first
        undelivered = [*self.undelivered, *completed]
        ahead = [*(state.generator for state in states), *self._again]
        num_batches = self._num_delivered + len(undelivered)
        return StreamPosition(num_batches, undelivered, self._begun, first, self._own_begun, ahead, loader)

    @property
    def _loader_resumes(self) -> bool:
        return self._has_state and self._position is not None and self._position.loader is not None

    def _begin(self) -> None:
        """Skip the batches that were trained on, unless the loader does so by itself."""
        self._first = now = torch.get_rng_state()
        if (position := self._position) is None:
            return
        self._first = position.first
        if self._loader_resumes:
            return
        torch.set_rng_state(position.first)
        try:
            for number in range(position.num_batches):
                if next(self._iterator, _NOTHING) is _NOTHING:
                    raise InputError(
                        f"the checkpoint was made after {position.num_batches} batches of a stream, and now "
                        f"there are {number}; pass the same batches as then, or resume=False to begin anew"
                    )
        finally:
            torch.set_rng_state(now)

    def _read(self) -> Any:
        loader = self._batches.state_dict() if self._has_state else None  # type: ignore[attr-defined]
        self._read_states.append(ReadState(torch.get_rng_state(), loader))
        return next(self._iterator)


def _own_generators(batches: Iterable[Any]) -> list[torch.Generator]:
    """The generators with which a loader of torch shuffles, if it was given any."""
    generators = (getattr(each, "generator", None) for each in (batches, getattr(batches, "sampler", None)))
    return list(dict.fromkeys(each for each in generators if isinstance(each, torch.Generator)))


_NOTHING = object()
