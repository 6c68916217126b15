"""The checkpoints of a run: made every so many steps, the last few kept, the newest gone on from."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from pipec.checkpoint.directory import remove, tidy
from pipec.checkpoint.together import once
from pipec.console import log
from pipec.errors import CheckpointError
from pipec.ir.arguments import FLAG, NONE, PATH, check_arguments, instance, whole
from pipec.pipeline.checkpointed import CheckpointedModel

_NAME = re.compile(r"step-\d{8,}")


class Checkpoints:
    """Writes ``step-00000500`` and so on into a directory, which belongs to one run.

    >>> checkpoints = pipec.Checkpoints("run", every=500, keep=3)
    >>> checkpoints.resume(pipe, scheduler=scheduler)
    >>> for x, target in batches[pipe.num_steps :]:
    ...     loss = pipe.step(x, target=target)
    ...     scheduler.step()
    ...     checkpoints.step(pipe, scheduler=scheduler)

    ``every`` is a number of steps. ``keep`` is how many checkpoints stay; None: all. With ``asynchronous``
    training goes on while they are written, as ``save_checkpoint`` says. Every rank calls the methods.
    """

    def __init__(
        self, directory: str | Path, *, every: int, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        check_arguments(CHECKPOINTS, locals())
        self._directory = Path(directory).resolve()
        self._every, self._keep, self._asynchronous = every, keep, asynchronous
        self._own: set[str] = set()

    def resume(
        self,
        pipe: CheckpointedModel,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
    ) -> Any:
        """Go on from the newest checkpoint, if there is any; returns its ``extra``, else None.

        Raises:
            CheckpointError: it is damaged. The one before is loaded once this one is deleted.
        """
        check_arguments(CHECKPOINTS, {"pipe": pipe})
        pipe.finish_saving()
        names = once(pipe.ranks, f"looking into {self._directory}", self._names)
        self._own = set(names)
        if not names:
            return None
        newest = self._directory / names[-1]
        extra = pipe.load_checkpoint(newest, optimizer=optimizer, scheduler=scheduler)
        log(f"pipec: goes on after step {pipe.num_steps}, from {newest}")
        return extra

    def step(
        self,
        pipe: CheckpointedModel,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        extra: Any = None,
    ) -> None:
        """Save, if that is due after this step. The arguments are those of ``save_checkpoint``."""
        if pipe.num_steps % self._every == 0:
            self.save(pipe, optimizer=optimizer, scheduler=scheduler, extra=extra)

    def save(
        self,
        pipe: CheckpointedModel,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        extra: Any = None,
    ) -> None:
        """Save now, then remove those that are not to be kept.

        Raises:
            CheckpointError: it cannot be written, or the one before could not be; or the directory has
                checkpoints of another run.
        """
        check_arguments(CHECKPOINTS, {"pipe": pipe})
        pipe.finish_saving()
        once(pipe.ranks, f"saving to {self._directory}", self._require_own)
        name = f"step-{pipe.num_steps:08}"
        companions = {"optimizer": optimizer, "scheduler": scheduler, "extra": extra}
        pipe.start_saving(self._directory / name, companions, self._asynchronous, self._thin)
        self._own.add(name)

    def _names(self) -> list[str]:
        """The names of the checkpoints, the oldest first."""
        if not self._directory.exists():
            return []
        tidy(self._directory)
        return sorted(
            (path.name for path in self._directory.iterdir() if _NAME.fullmatch(path.name)),
            key=lambda name: int(name.removeprefix("step-")),
        )

    def _require_own(self) -> None:
        if other := [name for name in self._names() if name not in self._own]:
            raise CheckpointError(
                f"{self._directory} has {other[0]} and {len(other) - 1} other checkpoints that this run has "
                "neither written nor found when it resumed: another run writes there, or they are left from "
                "one. Call resume(...) first to go on from them, choose another directory, or delete them"
            )

    def _thin(self) -> None:
        for name in self._names()[: -self._keep] if self._keep else []:
            remove(self._directory / name)


CHECKPOINTS = {
    "directory": PATH,
    "every": whole(1, 2**63 - 1),
    "keep": whole(1, 2**63 - 1) | NONE,
    "asynchronous": FLAG,
    "pipe": instance("what pipec.compile returned", CheckpointedModel),
}
"""What each argument must be."""
