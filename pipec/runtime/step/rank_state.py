"""The state that the linked actions of one rank share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Payload, Plan, Sizes, StepPart, Value
from pipec.runtime.messages.transport import Transport
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.step.batch_counts import ReplicaCounts
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.non_finite import NonFinite
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.step_results import (
    ResultCollector,
    StepResults,
    has_rows,
    merge_replicas,
    zeros_of,
)
from pipec.runtime.step.stream_results import StreamResults
from pipec.runtime.step.tail import StageTail


@dataclass
class UpdateState:
    """The optimizer, the part of the step that runs, and the clipping factor.

    ``groups`` are the hyperparameters of a stream's updates; those of steps are the optimizer's own.
    ``table`` is what all ranks have found with the norm, and ``non_finite`` why the step is skipped.
    ``skipped`` has the stages of a stream whose next update is skipped, and ``begun`` the stages whose update
    has begun in this step.
    """

    updates: OptimizerUpdates | None = None
    part: StepPart = StepPart.WHOLE
    factor: Tensor | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    table: Tensor | None = None
    non_finite: NonFinite | None = None
    skipped: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in this step's backwards."""
        scaled = self.updates.loss_scale if self.updates else None
        return scaled.scale if scaled else 1.0

    def begin_step(self, part: StepPart = StepPart.WHOLE) -> None:
        self.part, self.factor, self.table, self.non_finite = part, None, None, None
        self.begun.clear()
        self.skipped.clear()


@dataclass(frozen=True)
class RankState:
    """The state on which the actions of one rank work.

    ``counts`` are those of the stages whose replicas sum them, and ``tails`` those of stages that have one.
    ``results`` are those of the step, or of the stream. ``sizes`` is set for each step: the number of samples
    in each microbatch, then that in the batch. A link that moves once per step has microbatch -1, and so
    finds the size of the batch at ``sizes[-1]``. ``values`` is set by ``use``: the other sizes that shapes
    have names for. ``received`` has what other ranks made of results, by name and rank; ``loss`` is the
    result that training differentiates.
    """

    number: int
    plan: Plan
    stages: Mapping[int, BoundStage]
    counts: Mapping[int, ReplicaCounts]
    tails: Mapping[int, StageTail]
    results: ResultCollector
    step_results: StepResults
    stream_results: StreamResults
    transport: Transport
    loss: Value | None
    update_state: UpdateState
    sizes: list[int]
    values: dict[str, int | float] = field(default_factory=dict)
    received: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _sizes_with: dict[int, Sizes] = field(default_factory=dict)

    def use(self, values: Mapping[str, int | float]) -> None:
        """Let names in shapes, other than that of the rows, stand for ``values``."""
        if values != self.values:
            self.values.clear()
            self.values.update(values)
            self._sizes_with.clear()

    def sizes_with(self, rows: int) -> Sizes:
        """What the names in the shape of a value with so many rows stand for: equal sizes are one object."""
        if rows not in self._sizes_with:
            self._sizes_with[rows] = {**self.values, "b": rows}
        return self._sizes_with[rows]


def merged_results(rank: RankState, batch_slice: BatchSlice, device: torch.device) -> dict[str, Tensor]:
    """The results of the batch, merged from those of all replicas.

    If replicas pass their own parts of the batch, a result with rows has this replica's rows.
    """
    plan, merged = rank.plan, dict[str, Tensor]()
    for made in (link for link in plan.links if link.payload is Payload.RESULT):
        ranks, tail = plan.placement[made.source], plan.stages[made.source].tail
        for value in made.values:
            if len(ranks) == 1 or (tail and value.name in tail.results):
                merged[value.name] = _made_by(rank, value, ranks[0], batch_slice)
            elif batch_slice.is_local and has_rows(value):
                own = _part(rank, value, ranks[batch_slice.replica], made.source, batch_slice)
                nothing = zeros_of(value, {**batch_slice.values, "b": 0}, device)
                merged[value.name] = nothing if own is None else own
            else:
                parts = [_part(rank, value, other, made.source, batch_slice) for other in ranks]
                merged[value.name] = merge_replicas(
                    value, parts, batch_slice.sizes, batch_slice.values, value.name in plan.summed_outputs
                )
    return merged


def _part(rank: RankState, value: Value, maker: int, stage: int, batch_slice: BatchSlice) -> Tensor | None:
    """A rank's part of a result; None if its microbatches have no rows."""
    if not any(batch_slice.sizes[each] for each in rank.plan.microbatches_on(stage, maker)):
        return None
    return _made_by(rank, value, maker, batch_slice)


def _made_by(rank: RankState, value: Value, maker: int, batch_slice: BatchSlice) -> Tensor:
    """What a rank made of a result."""
    if maker == rank.number:
        return rank.step_results.merged(value.name, batch_slice.sizes, batch_slice.values)
    return rank.received[value.name, maker]
