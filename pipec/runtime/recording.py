"""Which steps of a training are recorded, and what is told of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipec.artifact.artifact import Artifact
from pipec.runtime.step.timestamps import RecordedStep


@dataclass
class Recording:
    """Every ``every``-th step from step ``first`` on, and the update that follows it, if it is made apart.

    ``numbers[k]`` is the number of the step that ``steps[k]`` is, or a part of, and ``artifacts[k]`` what ran
    it. Where the microbatches of a step need several artifacts, it is None for all but the last. ``notes``
    tells what was special about a step, recorded or not, by its number. ``compile_seconds`` were spent on
    compilation so far.
    """

    every: int
    first: int
    compile_seconds: Callable[[], float] = lambda: 0.0
    steps: list[RecordedStep] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    artifacts: list[Artifact | None] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._compiled = self.compile_seconds()
        self._update_is_due = True

    def of_step(self, number: int) -> list[RecordedStep] | None:
        """Where a step adds its timestamps; None if it is not recorded."""
        return self.steps if (number - self.first) % self.every == 0 else None

    def of_update(self) -> list[RecordedStep] | None:
        """As ``of_step``, for an update alone: one of steps of which some were recorded."""
        return self.steps if self._update_is_due else None

    def count_step(self, number: int, trained: Artifact | None) -> None:
        """Number what a step has added."""
        self._update_is_due |= self._give_number(number, trained)
        if (compiled := self.compile_seconds()) > self._compiled:
            self._compiled = compiled
            self.note(number, "compiled")

    def count_update(self, number: int, trained: Artifact | None) -> None:
        """Number what the update after step ``number``, or of it, has added."""
        self._give_number(number, trained)
        self._update_is_due = self.every == 1

    def _give_number(self, number: int, trained: Artifact | None) -> bool:
        added = len(self.steps) - len(self.numbers)
        self.numbers += [number] * added
        self.artifacts += [None] * (added - 1) + [trained] * bool(added)
        return added > 0

    def drop_unfinished(self) -> None:
        """Drop what a step has added that failed later on."""
        del self.steps[len(self.numbers) :]

    def note(self, number: int, text: str) -> None:
        """Tell what was special about a step."""
        earlier = self.notes.get(number, "").split(", ") if number in self.notes else []
        self.notes[number] = ", ".join(dict.fromkeys([*earlier, text]))
