"""A saved artifact, ready to train: no model and no compiler, only the plan, the code and the programs."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipec.artifact.directory import Artifact, read
from pipec.errors import InputError
from pipec.ir import Input, Plan, Program, Value
from pipec.ir.batch import split_sizes
from pipec.ir.text import format_value
from pipec.runtime.batch import dense
from pipec.runtime.execution import Execution, Ranks
from pipec.runtime.holder import ModelTensors, hold
from pipec.runtime.launch import Devices
from pipec.runtime.recording import RecordedStep


def load(directory: str | Path, devices: Devices | None = None, timeout: float = 300.0) -> "LoadedPipeline":
    """Read what ``Pipeline.save`` wrote. ``devices``: how many, or which; None: one per rank of the plan.

    Tensors that were not saved are on the meta device until ``to_empty`` and ``load_state_dict`` give them
    values.

    Raises:
        ArtifactError: the directory does not hold an intact artifact of this format.
        InputError: the devices do not match the ranks of the plan.
    """
    artifact, tensors = read(Path(directory))
    num_ranks = artifact.plan.num_ranks
    ranks = Ranks(devices if devices is not None else num_ranks, timeout)
    if ranks.count != num_ranks:
        raise InputError(
            f"the artifact in {directory} is for {num_ranks} ranks, but devices asks for {ranks.count}"
        )
    return LoadedPipeline(artifact, tensors, ranks)


class LoadedPipeline(nn.Module):
    """An artifact with its tensors under their original names; made by :func:`pipec.load`."""

    def __init__(self, artifact: Artifact, tensors: dict[str, Tensor], ranks: Ranks) -> None:
        super().__init__()
        self._artifact = artifact
        self._ranks = ranks
        self._execution: Execution | None = None
        self._num_steps = 0
        self._recorded: list[RecordedStep] | None = None
        self._seed = ranks.agreed_seed()
        hold(self, _tensors_of(artifact.plan, tensors, artifact.constants, ranks), copies=False)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """As ``Pipeline.step``, for arguments of the shapes the artifact was compiled for.

        Raises InputError before anything is sent when they are not.
        """
        leaves = [dense(leaf) for leaf in pytree.tree_leaves((args, dict(sorted(kwargs.items())), target))]
        plan = self._artifact.plan
        batch = _batch_size(plan, leaves)
        for given in plan.inputs:
            _check(given, leaves, batch)
        execution = self._execution or self._link()
        sizes = split_sizes(batch, plan.num_microbatches)
        if not plan.dynamic_batch and set(sizes) != {plan.microbatch_size}:
            raise InputError(
                f"this artifact takes microbatches of exactly {plan.microbatch_size} rows, so a batch of "
                f"{plan.microbatch_size * plan.num_microbatches}; the batch has {batch}"
            )
        results = execution.run(leaves, sizes, batch, self._seed, self._num_steps, self._recorded)
        self._num_steps += 1
        return results["loss"]

    @contextlib.contextmanager
    def record(self) -> Iterator[list[RecordedStep]]:
        """Note when every instruction of the steps made inside runs; the list then has all ranks' times."""
        steps: list[RecordedStep] = []
        self._recorded = []
        try:
            yield steps
            recorded = self._recorded
        finally:
            self._recorded = None
        steps += self._ranks.gathered(recorded)

    @property
    def plan(self) -> Plan:
        return self._artifact.plan

    @property
    def programs(self) -> tuple[Program, ...]:
        return self._artifact.programs

    def source(self, stage: int) -> str:
        """The generated Python of a stage."""
        return self._artifact.sources[stage]

    def _link(self) -> Execution:
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        if meta := [fqn for fqn, tensor in tensors.items() if tensor.is_meta]:
            raise InputError(
                f"{meta[0]} and {len(meta) - 1} other tensors hold no values: the artifact was saved without "
                "them. Call to_empty(device=...) and load_state_dict(...), or save with tensors=True."
            )
        self._execution = Execution(self._artifact, tensors, tensors, self._ranks)
        return self._execution

    def _apply(self, fn: Any, recurse: bool = True) -> "LoadedPipeline":
        """What ``to_empty`` is made of: it may replace tensors, so the program is linked anew."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._execution = None
        return self


def _tensors_of(
    plan: Plan, saved: Mapping[str, Tensor], constants: Collection[str], ranks: Ranks
) -> ModelTensors:
    """The tensors of this process's stages, on their devices; on meta if they were not saved."""
    homes: dict[str, torch.device | None] = {}
    for stage in plan.stages:
        device = ranks.devices.get(plan.placement[stage.index])
        for fqn in stage.parameters + stage.buffers:
            homes.setdefault(fqn, device)
    made = {
        value.name: _make(value, saved.get(value.name), home)
        for value in plan.parameters + plan.buffers
        if value.name not in constants and (home := homes[value.name]) is not None
    }
    parameters = {
        v.name: nn.Parameter(made[v.name], made[v.name].is_floating_point())
        for v in plan.parameters
        if v.name in made
    }
    buffers = {v.name: made[v.name] for v in plan.buffers if v.name in made}
    return ModelTensors(parameters, buffers, frozenset(buffers), {fqn: fqn for fqn in made})


def _make(value: Value, saved: Tensor | None, device: torch.device) -> Tensor:
    if saved is not None:
        return saved.to(device)
    return torch.empty([int(d) for d in value.shape], dtype=getattr(torch, value.dtype), device="meta")


def _batch_size(plan: Plan, leaves: Sequence[Any]) -> int:
    for given in plan.inputs:
        if given.batched and given.position < len(leaves) and isinstance(leaves[given.position], Tensor):
            return int(leaves[given.position].shape[0])
    expected = ", ".join(f"{given.path} ({format_value(given.value)})" for given in plan.inputs)
    raise InputError(f"the arguments hold no batch; expected {expected}")


def _check(given: Input, leaves: Sequence[Any], batch: int) -> None:
    leaf = leaves[given.position] if given.position < len(leaves) else None
    expected = tuple(batch if size == "b" else size for size in given.value.shape)
    found = f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
    if (
        not isinstance(leaf, Tensor)
        or leaf.shape != expected
        or str(leaf.dtype) != f"torch.{given.value.dtype}"
    ):
        raise InputError(f"{given.path} is {found}; expected torch.{given.value.dtype} of shape {expected}")
