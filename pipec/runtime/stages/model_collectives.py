"""A model collective of a microbatch, between two segments of a stage."""

from torch import Tensor

from pipec.ir import ModelCollective, Op
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import Frame


class RunningCollective:
    """One replica's part in a model collective, reused in every step.

    It replaces the replica's value in ``frame`` by the result.
    """

    def __init__(self, collective: ModelCollective, frame: Frame, group: CollectiveGroup) -> None:
        self._op, self._name = collective.op, collective.value.name
        self._frame, self._group = frame, group
        self._started: tuple[Tensor, CollectiveWait] | None = None

    def start(self) -> None:
        """Start the collective with this replica's value."""
        own: Tensor = self._frame.pop(self._name)
        result = own.new_empty(self._shape(own))
        match self._op:
            case Op.ALL_REDUCE:
                wait = self._group.all_reduce(result.copy_(own).view(-1))
            case Op.ALL_GATHER:
                wait = self._group.all_gather(result.view(-1), own.contiguous().view(-1))
            case Op.REDUCE_SCATTER:
                wait = self._group.reduce_scatter(result.view(-1), own.contiguous().view(-1))
            case _:
                raise AssertionError(f"no model collective is a {self._op}")
        self._started = result, wait

    def _shape(self, own: Tensor) -> tuple[int, ...]:
        size = self._group.size
        match self._op:
            case Op.ALL_GATHER:
                return size * own.shape[0], *own.shape[1:]
            case Op.REDUCE_SCATTER:
                return own.shape[0] // size, *own.shape[1:]
        return own.shape

    def finish(self) -> None:
        """Wait for the collective, and put its result into the frame."""
        assert self._started is not None, "the collective was started"
        (result, wait), self._started = self._started, None
        wait()
        self._frame[self._name] = result
