"""How the ranks of a pipeline end together when one of them was sent a signal."""

from collections.abc import Callable, Sequence
from typing import Any

from pipec.ir.argument_checks import FUNCTION, check_arguments
from pipec.runtime.messages.agreement import RankReply
from pipec.runtime.processes.stop_signals import STOP_SIGNALS, exit_all_ranks
from pipec.runtime.step_counter import StepCounter


class SignalHandling(StepCounter):
    """Follows a signal of any rank before the next step, mini-batch or evaluation, on all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop_callbacks: list[Callable[[], object]] = []

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called on every rank when all end because one was sent SIGTERM or SIGINT.

        All ranks have made the same steps then, and whatever they did together they can still do, such as
        saving a checkpoint. Afterwards every rank raises KeyboardInterrupt, or for SIGTERM SystemExit with
        status 143. Under ``torchrun`` a signal is noted from the first step on, whatever the rank does, and
        all ranks follow it before the next step, mini-batch or evaluation that they make. In one process
        that holds for SIGTERM once this has been called; Ctrl-C raises at once.
        """
        check_arguments({"call": FUNCTION}, locals())
        self._stop_callbacks.append(call)
        if not self._ranks.world.is_distributed:
            STOP_SIGNALS.install()

    def _stop_if_requested(self, every: Sequence[RankReply]) -> None:
        """End on all ranks if one of them has been sent a signal."""
        STOP_SIGNALS.install()
        if any(asked := [told.stop for told in every]):
            self._follow(asked)

    @property
    def _is_stop_requested(self) -> bool:
        """Whether this process has been sent a signal, and runs all ranks."""
        return bool(STOP_SIGNALS.pending) and not self._ranks.world.is_distributed

    def _stop_here(self) -> None:
        if self._is_stop_requested:
            self._follow([STOP_SIGNALS.pending])

    def _follow(self, asked: Sequence[int]) -> None:
        self.drain()
        exit_all_ranks(asked, self._num_steps, self._stop_callbacks)
