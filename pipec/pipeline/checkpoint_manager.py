"""The checkpoints of a run: written every so many steps, the last few kept, the newest resumed from."""

import functools
import re
import weakref
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from pipec.checkpoint.all_ranks import call_on_rank_0
from pipec.console import notice
from pipec.errors import CheckpointError
from pipec.ir.argument_checks import FLAG, NONE, PATH, check_arguments, instance, integer_between
from pipec.pipeline.pipeline import Pipeline
from pipec.saved_folders import clean_up, remove_folder

_NAME = re.compile(r"step-\d{8,}")


class CheckpointManager:
    """Writes ``step-00000500`` and so on into a directory, which belongs to one run.

    >>> checkpoints = pipec.CheckpointManager("run", every=500, keep=3)
    >>> checkpoints.resume(pipe, scheduler=scheduler)
    >>> for x, target in batches[pipe.num_steps :]:
    ...     loss = pipe.step(x, target=target)
    ...     scheduler.step()
    ...     checkpoints.step(pipe, scheduler=scheduler)

    ``every`` is a number of steps. ``keep`` is how many checkpoints stay; None: all. With ``asynchronous``
    training goes on while they are written, as ``save_checkpoint`` says. Every rank calls the methods. If any
    rank is sent SIGTERM or SIGINT, as before a machine is taken away, all of them save before they end; see
    ``Pipeline.before_stop``.
    """

    def __init__(
        self, directory: str | Path, *, every: int, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        check_arguments(MANAGER_ARGUMENTS, locals())
        self._directory = Path(directory).resolve()
        self._every, self._keep, self._asynchronous = every, keep, asynchronous
        self._own: set[str] = set()
        self._saved = 0
        self._latest: tuple[int, dict[str, Any]] | None = None
        self._watched: weakref.ref[Pipeline] | None = None

    def resume(
        self,
        pipe: Pipeline,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
    ) -> Any:
        """Go on from the newest checkpoint, if there is any; returns its ``extra``, else None.

        Raises:
            CheckpointError: it is damaged. The one before is loaded once this one is deleted.
        """
        check_arguments(MANAGER_ARGUMENTS, {"pipe": pipe})
        pipe.finish_saving()
        self._watch(pipe)
        names = call_on_rank_0(pipe.ranks, f"looking into {self._directory}", self._tidied)
        self._own = set(names)
        if not names:
            return None
        newest = self._directory / names[-1]
        extra = pipe.load_checkpoint(newest, optimizer=optimizer, scheduler=scheduler)
        self._saved = pipe.num_steps
        written = datetime.fromtimestamp(newest.stat().st_mtime)
        notice(f"goes on after step {pipe.num_steps}, from {newest}, written on {written:%Y-%m-%d at %H:%M}")
        return extra

    def step(
        self,
        pipe: Pipeline,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        extra: Any = None,
    ) -> None:
        """Save, if that is due after this step. It takes the arguments of ``save_checkpoint``."""
        self._watch(pipe)
        given = {"optimizer": optimizer, "scheduler": scheduler, "extra": extra}
        self._latest = pipe.num_steps, given
        if pipe.num_steps % self._every == 0:
            self.save(pipe, **given)

    def save(
        self,
        pipe: Pipeline,
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
        check_arguments(MANAGER_ARGUMENTS, {"pipe": pipe})
        pipe.finish_saving()
        call_on_rank_0(pipe.ranks, f"saving to {self._directory}", self._require_own)
        name = f"step-{pipe.num_steps:08}"
        pipe.save_checkpoint(
            self._directory / name,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            asynchronous=self._asynchronous,
            then=self._thin,
        )
        self._own.add(name)
        self._saved = pipe.num_steps

    def _watch(self, pipe: Pipeline) -> None:
        """Let all ranks save before a signal ends them."""
        if self._watched is None or self._watched() is not pipe:
            self._watched = weakref.ref(pipe)
            pipe.before_stop(functools.partial(self._save_before_stop, self._watched))

    def _save_before_stop(self, watched: "weakref.ref[Pipeline]") -> None:
        pipe = watched()
        if pipe is None or pipe.num_steps == 0:
            return
        if pipe.num_steps != self._saved:
            number, given = self._latest or (-1, {})
            if number != pipe.num_steps - pipe._stream.num_undelivered:
                notice(
                    f"step {pipe.num_steps} is not saved, because the script has not come to "
                    f"checkpoints.step(...) after it; there is step {self._saved}"
                )
                return
            pipe._stream.keep_last_position()  # for so says the script's extra
            self.save(pipe, **given)
        pipe.finish_saving()
        notice(f"step {pipe.num_steps} is saved to {self._directory}")

    def _names(self) -> list[str]:
        """The names of the checkpoints, the oldest first."""
        found = (path.name for path in self._directory.glob("step-*") if _NAME.fullmatch(path.name))
        return sorted(found, key=lambda name: int(name.removeprefix("step-")))

    def _tidied(self) -> list[str]:
        """The names, after the remains of killed runs were removed."""
        clean_up(self._directory)
        return self._names()

    def _require_own(self) -> None:
        if other := [name for name in self._tidied() if name not in self._own]:
            raise CheckpointError(
                f"{self._directory} has {other[0]} and {len(other) - 1} other checkpoints that this run has "
                "neither written nor found when it resumed: another run writes there, or they are left from "
                "one. Call resume(...) first to go on from them, choose another directory, or delete them"
            )

    def _thin(self) -> None:
        for name in self._names()[: -self._keep] if self._keep else []:
            remove_folder(self._directory / name)


MANAGER_ARGUMENTS = {
    "directory": PATH,
    "every": integer_between(1, 2**63 - 1),
    "keep": integer_between(1, 2**63 - 1) | NONE,
    "asynchronous": FLAG,
    "pipe": instance("what pipec.compile returned", Pipeline),
}
"""What each argument must be."""
