"""The versions of a stage's weights that microbatches in flight still read."""

from collections.abc import Collection, Sequence

from torch import Tensor


class WeightVersions:
    """The latest version, which is the model's parameters, and copies of earlier ones.

    ``latest`` is the list object of the stage. Updates change parameters in place. After an update, the
    ``behind`` versions before the new one may still be read. Weights that an update does not change are
    shared by all versions.

    One more is held until the stage reads a version again. If a stage has nothing in flight, the first stage
    may be so many updates behind it, and after a failure all stages need a version that each of them holds.
    The microbatch that the stage reads a version for next has passed the first stage, which has updated.
    """

    def __init__(self, latest: Sequence[Tensor], behind: int) -> None:
        self._latest = latest
        self._behind = behind
        self.begin()

    @property
    def oldest(self) -> int:
        """The first version that may still be read."""
        return self.number - self._behind

    def begin(self) -> None:
        """Make the current parameters version 0."""
        self.number = 0
        self._stashed: dict[int, list[Tensor]] = {}
        self._is_changing = False

    def of(self, number: int) -> Sequence[Tensor]:
        """The weights of a version, which is read."""
        self._free(self.oldest)
        return self._latest if number == self.number else self._stashed[number]

    def stash(self, changing: Collection[int]) -> None:
        """Keep the current version: copy the weights at these indices, before an update changes them."""
        self._stashed[self.number] = list(self._latest)
        copies = {index: self._latest[index].detach().clone() for index in changing}
        for weights in self._stashed.values():
            for index, copy in copies.items():
                if weights[index] is self._latest[index]:
                    weights[index] = copy

    def begin_update(self) -> None:
        """Note that the current weights change, and are no version until ``advance``."""
        self._is_changing = True

    def advance(self) -> None:
        """Make the current parameters the next version."""
        self.number += 1
        self._is_changing = False
        self._free(self.oldest - 1)

    def _free(self, oldest: int) -> None:
        for number in [each for each in self._stashed if each < oldest]:
            del self._stashed[number]

    @property
    def held(self) -> set[int]:
        """The versions in memory. While an update runs, the parameters themselves are no version."""
        return {*self._stashed} if self._is_changing else {*self._stashed, self.number}

    def restore(self, number: int) -> None:
        """Copy a held version into the parameters; versions count on from its number."""
        for latest, weight in zip(self._latest, self._stashed.get(number, ()), strict=False):
            if latest is not weight:
                latest.detach().copy_(weight)
        self.number, self._is_changing = number, False
        self._stashed.clear()
