"""Reads the items of an iterator ahead of their use, on a thread."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipec.runtime.processes.worker import Worker


@dataclass(frozen=True)
class ReadItem:
    """One item of an iterator. An iterator that has no more gives ``error``: StopIteration, or its own."""

    value: Any = None
    error: BaseException | None = None


class ReadAhead:
    """The items of ``iterator`` by number.

    Its code may draw random numbers, as that of the caller may between two items. So nothing is read but
    what was allowed, and between ``wait`` and the next ``request`` the iterator rests: the order in which
    both draw is the same in every run.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._worker = Worker("pipec batches")
        self._items: dict[int, ReadItem] = {}
        self._num_allowed = self._num_read = 0
        self._last: ReadItem | None = None
        self._changed = threading.Condition()

    def request(self, number: int) -> None:
        """Let the items up to this one be read, and return at once."""
        while self._num_allowed <= number:
            self._num_allowed += 1
            self._worker.submit(self._read)

    def wait(self) -> None:
        """Wait until all that was allowed has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_read == self._num_allowed)

    def item(self, number: int) -> ReadItem:
        """A requested item, once it has been read. Items after the last one repeat its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_read > number)
            if number in self._items:
                return self._items[number]
            assert self._last is not None, "what was forgotten is not asked for"
            return self._last

    def forget(self, number: int) -> None:
        """Drop an item."""
        self._items.pop(number, None)

    def _read(self) -> None:
        item = self._last
        if item is None:
            try:
                item = ReadItem(next(self._iterator))
            except BaseException as error:  # which would else end the thread, and be lost
                item = self._last = ReadItem(error=error)
        with self._changed:
            if item.error is None:
                self._items[self._num_read] = item
            self._num_read += 1
            self._changed.notify_all()
