"""Reads the items of an iterator ahead of their use, on a thread."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipec.errors import InputError
from pipec.runtime.processes.worker import Worker
from pipec.torch_compat import pytree


@dataclass(frozen=True)
class ReadItem:
    """One item of an iterator. An iterator that has no more gives ``error``: StopIteration, or its own."""

    value: Any = None
    error: BaseException | None = None


class ReadAhead:
    """The items of ``iterator`` by number, of which the first ``num_allowed`` were requested.

    Its code may draw random numbers, as that of the caller may between two items. So nothing is read but
    what was allowed, and between ``wait`` and the next ``request`` the iterator rests: the order in which
    both draw is the same in every run.

    Reading ends with an InputError if the iterator changes tensors of an item that may be in use.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._worker = Worker("pipec batches")
        self._items: dict[int, ReadItem] = {}
        self._versions: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        self.num_allowed = self._num_read = 0
        self._last: ReadItem | None = None
        self._changed = threading.Condition()

    def request(self, number: int) -> None:
        """Let the items up to this one be read, and return at once."""
        while self.num_allowed <= number:
            self.num_allowed += 1
            self._worker.submit(self._read)

    def wait(self) -> None:
        """Wait until all that was allowed has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_read == self.num_allowed)

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

    def release(self, number: int) -> None:
        """Let the iterator change the tensors of an item, which is no longer in use; after ``wait``."""
        self._versions.pop(number, None)

    def _require_unchanged(self) -> None:
        for number, tensors in self._versions.items():
            for reference, version in tensors:
                tensor = reference()
                if tensor is not None and tensor._version != version:
                    raise InputError(
                        f"the iterator changed a tensor of batch {number}, of shape {list(tensor.shape)}, to "
                        f"make batch {self._num_read}: a stream reads ahead, so that the batch may be in use "
                        "and the last losses wrong; yield new tensors, such as x.clone()"
                    )

    def _read(self) -> None:
        item = self._last
        if item is None:
            try:
                item = ReadItem(next(self._iterator))
                self._require_unchanged()
                self._versions[self._num_read] = [
                    (weakref.ref(leaf), leaf._version)
                    for leaf in pytree.tree_leaves(item.value)
                    if isinstance(leaf, Tensor) and not leaf.is_inference()
                ]
            except BaseException as error:  # which would else end the thread, and be lost
                item = self._last = ReadItem(error=error)
        with self._changed:
            if item.error is None:
                self._items[self._num_read] = item
            self._num_read += 1
            self._changed.notify_all()
