"""Lives of cells: which event may follow which, and where the events of a rank break this.

A life is a regular expression in which each event occurs once, such as ``(recv wait | move) read*``. Such an
expression is *local*: a sequence of events matches it if its first event, its last event and each pair of
neighbours are allowed (Berry and Sethi 1986, "From regular expressions to deterministic automata"). So one
look into a table of pairs checks all events of all cells at once::

    cell  event  position        recv wait read   end
    a     recv   3            -   x                       a life may not begin with a wait: cell b is wrong,
    a     wait   7            recv     x                  at position 5
    a     read   8            wait          x      x
    b     wait   5            read          x      x
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir.columns import Ints

AT_START = -1
"""The position of an event before the first instruction."""

_EVENT_BITS = 4


@dataclass(frozen=True)
class Life:
    """``allowed[before, event]`` says whether an event may follow the one before.

    Row ``len(events)`` stands for the begin of a life, column ``len(events)`` for its end.
    """

    events: Sequence[str]
    allowed: NDArray[np.bool_]

    def missing_before(self, before: int, event: int) -> Sequence[int]:
        """The events that may come next after ``before`` and lead to ``event``, if possible at once."""
        found = [k for k in self.after(before) if k not in (before, event) and self._leads_to(k, event)]
        return [k for k in found if self.allowed[k, event]] or found

    def missing_behind(self, event: int) -> Sequence[int]:
        """The events that may follow an event, and end the life if possible at once."""
        found = [k for k in self.after(event) if k != event]
        return [k for k in found if self.allowed[k, -1]] or found

    def later(self, event: str) -> Sequence[int]:
        """The other events that may still come in a life that has had an event."""
        return self._later[self.events.index(event)]

    @cached_property
    def _later(self) -> Sequence[Sequence[int]]:
        every = range(len(self.events))
        return [[k for k in every if k != event and self._leads_to(event, k)] for event in every]

    def after(self, before: int) -> Sequence[int]:
        """The events that may follow an event."""
        found: list[int] = np.flatnonzero(self.allowed[before, : len(self.events)]).tolist()
        return found

    def _leads_to(self, event: int, other: int) -> bool:
        reached, pending = {event}, [event]
        while pending:
            new = {*self.after(pending.pop())} - reached
            reached |= new
            pending += new
        return other in reached


@functools.cache
def life(pattern: str) -> Life:
    """The life that a regular expression describes: of ``a b``, ``a | b``, ``a?``, ``a*`` and ``a+``."""
    events = re.findall(r"\w+", pattern)
    assert len({*events}) == len(events) < 1 << _EVENT_BITS, pattern
    tokens = re.findall(r"\w+|[()|?*+]", pattern)
    allowed = np.zeros((len(events) + 1,) * 2, bool)
    outside = len(events)

    def allow(befores: set[int], afters: set[int]) -> None:
        for before in befores:
            allowed[before, [*afters]] = True

    def alternatives() -> tuple[bool, set[int], set[int]]:
        may_be_empty, first, last = sequence()
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            empty, other_first, other_last = sequence()
            may_be_empty, first, last = may_be_empty or empty, first | other_first, last | other_last
        return may_be_empty, first, last

    def sequence() -> tuple[bool, set[int], set[int]]:
        may_be_empty, first, last = True, set[int](), set[int]()
        while tokens and tokens[0] not in "|)":
            empty, begins, ends = factor()
            allow(last, begins)
            first |= begins if may_be_empty else set()
            last = ends | (last if empty else set())
            may_be_empty &= empty
        return may_be_empty, first, last

    def factor() -> tuple[bool, set[int], set[int]]:
        if (token := tokens.pop(0)) == "(":
            found = alternatives()
            tokens.pop(0)
        else:
            found = False, {events.index(token)}, {events.index(token)}
        while tokens and tokens[0] in "?*+":
            mark = tokens.pop(0)
            empty, first, last = found
            allow(last if mark != "?" else set(), first)
            found = empty or mark != "+", first, last
        return found

    _, first, last = alternatives()
    allow({outside}, first)
    allow(last, {outside})
    return Life(events, allowed)


@dataclass(frozen=True)
class Accesses:
    """Events in the lives of cells, by cell and position: ascending numbers with the bits of all three.

    ``named`` has the keys of cells; those of numbers are places in it.
    """

    codes: Ints
    shift: int
    named: Ints | None = None

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Ints, Ints]]) -> "Accesses":
        """Those of ``parts``, each an event with the keys of cells and the positions of instructions."""
        keys = [keys.astype(np.int64, copy=False) for _, keys, _ in parts]
        shift = int(max(positions.max(initial=0) for *_, positions in parts) + 1).bit_length() + _EVENT_BITS
        named = None
        if max(int(each.max(initial=0)) for each in keys) >= 1 << 63 - shift:
            named, places = np.unique(np.concatenate(keys), return_inverse=True)
            keys = np.split(places.reshape(-1), np.cumsum([each.size for each in keys])[:-1])
        codes = np.concatenate(
            [
                (each << shift) + ((positions - AT_START).astype(np.int64) << _EVENT_BITS) + event
                for each, (event, _, positions) in zip(keys, parts, strict=True)
            ]
        )
        codes.sort(kind="stable")  # parts are mostly ascending, and this sort merges them
        return cls(codes, shift, named)

    @cached_property
    def events(self) -> Ints:
        found: Ints = (self.codes & (1 << _EVENT_BITS) - 1).astype(np.uint8)
        return found

    @cached_property
    def keys(self) -> Ints:
        places: Ints = self.codes >> self.shift
        return places if self.named is None else self.named[places]

    def position(self, place: int) -> int:
        """The position of an event."""
        return int(self.codes[place] >> _EVENT_BITS & (1 << self.shift - _EVENT_BITS) - 1) + AT_START

    def count(self, events: Sequence[int]) -> int:
        """How many accesses are one of these events."""
        return sum(int(np.count_nonzero(self.events == event)) for event in events)

    def violations(self, life: Life) -> Sequence[tuple[int, int]]:
        """The events that may not follow those before, as places; and places where lives end too early.

        Each is the place of an event and the place of the one before, or -1; at an end they are the same.
        """
        outside, events = len(life.events), self.events
        before = np.empty_like(events)
        before[1:] = events[:-1]
        firsts = np.append(0, np.flatnonzero((self.codes[1:] ^ self.codes[:-1]) >> self.shift) + 1)
        before[firsts] = outside
        wrong = np.flatnonzero(~life.allowed.reshape(-1).take(before * np.uint8(outside + 1) + events))
        ends = np.append(firsts[1:], events.size) - 1
        unfinished = ends[~life.allowed[:, outside].take(events[ends])]
        found = [(place, -1 if before[place] == outside else place - 1) for place in wrong.tolist()]
        found += [(place, place) for place in unfinished.tolist()]
        return sorted(found, key=lambda pair: (self.position(pair[0]), pair))
