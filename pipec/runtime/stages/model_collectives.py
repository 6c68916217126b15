"""A model collective of a microbatch, between two segments of a stage."""

from torch import Tensor

from pipec.ir import ModelCollective, Op
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.stages.bound_stage import Frame


class RunningCollective:
    """One collective of a round, as one of its replicas takes part in it, step after step.

    It finds the replica's own value in ``frame``, and puts what comes of it there instead.
    """

    def __init__(self, collective: ModelCollective, frame: Frame, group: CollectiveGroup) -> None:
        self._op, self._name = collective.op, collective.value.name
        self._frame, self._group = frame, group
        self._started: tuple[Tensor, CollectiveWait] | None = None

    def start(self) -> None:
        """Give the other replicas this one's value."""
        own: Tensor = self._frame.pop(self._name)
        joined = own.new_empty(self._shape(own))
        match self._op:
            case Op.ALL_REDUCE:
                wait = self._group.all_reduce(joined.copy_(own).view(-1))
            case Op.ALL_GATHER:
                wait = self._group.all_gather(joined.view(-1), own.contiguous().view(-1))
            case Op.REDUCE_SCATTER:
                wait = self._group.reduce_scatter(joined.view(-1), own.contiguous().view(-1))
            case _:
                raise AssertionError(f"no model collective is a {self._op}")
        self._started = joined, wait

    def _shape(self, own: Tensor) -> tuple[int, ...]:
        size = self._group.size
        match self._op:
            case Op.ALL_GATHER:
                return size * own.shape[0], *own.shape[1:]
            case Op.REDUCE_SCATTER:
                return own.shape[0] // size, *own.shape[1:]
        return own.shape

    def finish(self) -> None:
        """Wait for the other replicas, and put what came of their values into the frame."""
        assert self._started is not None, "what is waited for was started"
        (joined, wait), self._started = self._started, None
        wait()
        self._frame[self._name] = joined
