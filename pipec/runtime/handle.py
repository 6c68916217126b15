"""What a user holds of a pipeline, compiled or loaded: its tensors, and the artifacts linked to them."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipec.artifact.directory import Artifact
from pipec.errors import InputError
from pipec.ir import Plan, Program, ranks_of
from pipec.runtime.execution import Execution, Ranks
from pipec.runtime.recording import RecordedStep


class Handle(nn.Module):
    """Runs artifacts on the tensors that it holds under the model's own names.

    A subclass registers the tensors, and sets ``_trained`` to the artifact that ``step`` runs.
    """

    def __init__(self, ranks: Ranks, trained: Artifact | None = None) -> None:
        super().__init__()
        self._ranks = ranks
        self._trained = trained
        self._seed = ranks.agreed_seed()
        self._num_steps = 0
        self._executions: dict[Artifact, Execution] = {}
        self._recorded: list[RecordedStep] | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """What each rank executes in one step; each prints as text, one instruction a line."""
        return self._artifact.programs

    def source(self, stage: int) -> str:
        """The generated Python of a stage."""
        sources = self._artifact.sources
        if not 0 <= stage < len(sources):
            raise InputError(f"there is no stage {stage}: the pipeline has stages 0 to {len(sources) - 1}")
        return sources[stage]

    @contextlib.contextmanager
    def record(self) -> Iterator[list[RecordedStep]]:
        """Note when every instruction runs, in the steps that are made inside a ``with``.

        The list is filled when the ``with`` ends. It then has the times of every rank, so all ranks record,
        or none.
        """
        steps: list[RecordedStep] = []
        self._recorded = []
        try:
            yield steps
            recorded = self._recorded
        finally:
            self._recorded = None
        steps += self._ranks.gathered(recorded)

    @property
    def _artifact(self) -> Artifact:
        if self._trained is None:
            raise InputError(
                "the pipeline is not compiled yet: call step(...), or prepare(...) with the arguments of step"
            )
        return self._trained

    def _execution(self, artifact: Artifact) -> Execution:
        """The artifact linked to the tensors, made at the first call."""
        if artifact not in self._executions:
            tensors = self._tensors_by_fqn()
            if meta := [fqn for fqn, tensor in tensors.items() if tensor.is_meta]:
                raise InputError(
                    f"{meta[0]} and {len(meta) - 1} other tensors are on the meta device and hold no values. "
                    "Call to_empty(device=...) and then load_state_dict(...) on the pipeline; or save the "
                    "artifact with tensors=True"
                )
            self._executions[artifact] = Execution(artifact, tensors, tensors, self._ranks)
        return self._executions[artifact]

    def _tensors_by_fqn(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """``to_empty`` and its kin call this. It may replace tensors, so artifacts are linked anew."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._executions.clear()
        return self


def homes(plan: Plan, devices: Mapping[int, torch.device]) -> dict[str, torch.device | None]:
    """By FQN, the device of each tensor of the model: that of the first stage that holds it.

    ``devices`` has the ranks of this process; a tensor that lives in another process has no device here.
    """
    found: dict[str, torch.device | None] = {}
    for stage in plan.stages:
        held_by = (devices.get(rank) for rank in ranks_of(plan.placement, stage.index))
        device = next(filter(None, held_by), None)
        for fqn in stage.parameters + stage.buffers:
            found.setdefault(fqn, device)
    return found
