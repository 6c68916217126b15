"""Ends all ranks of a pipeline together when one of them was sent a signal."""

from collections.abc import Callable, Sequence

from pipec.runtime.messages.agreement import RankReply
from pipec.runtime.processes.stop_signals import STOP_SIGNALS, exit_all_ranks


class SignalHandling:
    """Finds a signal of any rank before the next step, mini-batch or evaluation, on all of them."""

    def __init__(self, is_distributed: bool) -> None:
        self._is_distributed = is_distributed
        self._callbacks: list[Callable[[], object]] = []

    def before_stop(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called when all ranks end."""
        self._callbacks.append(call)
        if not self._is_distributed:
            STOP_SIGNALS.install()

    def sent_to(self, every: Sequence[RankReply]) -> list[int]:
        """The signal that each rank has been sent, or 0."""
        STOP_SIGNALS.install()
        return [told.stop for told in every]

    def sent_here(self) -> int:
        """The signal that this process has been sent, if it runs all ranks, or 0."""
        return 0 if self._is_distributed else STOP_SIGNALS.pending

    def exit(self, asked: Sequence[int], num_steps: int) -> None:
        """End all ranks, which were sent these signals."""
        exit_all_ranks(asked, num_steps, self._callbacks)
