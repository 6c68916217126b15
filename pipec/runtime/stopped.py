"""How the ranks of a pipeline end together when one of them was sent a signal."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.ir.arguments import FUNCTION, check_arguments
from pipec.runtime.counted import Counted
from pipec.runtime.messages.agreement import Told
from pipec.runtime.processes.stops import STOPS, follow


class StoppedTogether(Counted):
    """Follows a signal of any rank before the next step, mini-batch or evaluation, on all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_stop: list[Callable[[], object]] = []

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank when all end because one was sent SIGTERM or SIGINT.

        All ranks have made the same steps then, and whatever they did together they can still do, such as
        saving a checkpoint. Afterwards every rank raises KeyboardInterrupt, or for SIGTERM SystemExit with
        status 143. Under ``torchrun`` a signal is noted from the first step on, whatever the rank does, and
        all ranks follow it before the next step, mini-batch or evaluation that they make. In one process
        that holds for SIGTERM once this has been called; Ctrl-C raises at once.
        """
        check_arguments({"call": FUNCTION}, locals())
        self._before_stop.append(call)
        if not self._ranks.world.distributed:
            STOPS.listen()

    def _stop_if_told(self, every: Sequence[Told]) -> None:
        """End on all ranks if one of them has been sent a signal."""
        STOPS.listen()
        if any(asked := [told.stop for told in every]):
            self._follow(asked)

    @property
    def _stops_here(self) -> bool:
        """Whether this process has been sent a signal, and runs all ranks."""
        return bool(STOPS.asked) and not self._ranks.world.distributed

    def _stop_here(self) -> None:
        if self._stops_here:
            self._follow([STOPS.asked])

    def _follow(self, asked: Sequence[int]) -> None:
        self.drain()
        follow(asked, self._num_steps, self._before_stop)
