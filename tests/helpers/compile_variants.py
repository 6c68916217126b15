"""Ways to cut and run a model, which is captured once for all of them: that takes most of the time."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_models import Factory
from torch import Tensor, nn
from unsplit_reference import Inputs, StepResult, assert_equal, unsplit_step

import pipec
from pipec.artifact.artifact import Artifact, write_artifact
from pipec.capture.model_call import ModelCall
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged_graph import StagedGraph
from pipec.graph import TrainingGraph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir import Schedule
from pipec.ir.batch_split import variable_values
from pipec.passes import Pass
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.ranks import Ranks
from pipec.schedules import make_schedule

SIZES = (3, 3, 2)
"""Rows of each microbatch: they need not be equal."""

SEED, TIMEOUT = 7, 240.0
OPTIONS = CompilerOptions(DEVICES["cpu"], equal_devices(4, DEVICES["cpu"].link))


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as it was at first, a mini-batch, and their graph before any pass. Nothing of it changes."""

    model: nn.Module
    inputs: Inputs
    graph: TrainingGraph


@functools.cache
def pipeline(factory: Factory) -> tuple[pipec.Pipeline, nn.Module, Captured]:
    """What ``pipec.compile`` makes for four devices, the model it trains, and what it captured on the way."""
    model, inputs = factory()
    trained = copy.deepcopy(model)
    pipe = pipec.compile(trained, devices=4, microbatches=len(SIZES)).prepare(**inputs)
    (staged, *_) = pipe._executions.compiler.cache.staged_graphs
    return pipe, trained, Captured(model, inputs, staged.captured)


def captured(factory: Factory) -> Captured:
    return pipeline(factory)[2]


@functools.cache
def cut_evenly(model: Captured, num_stages: int, recompute: bool) -> StagedGraph:
    everything = frozenset(range(num_stages)) if recompute else frozenset[int]()
    devices = equal_devices(num_stages, OPTIONS.device_model.link)
    return cut(model, AssignStages(CutStages(devices, model.graph.batch_size)), everything)


def cut(model: Captured, how: Pass, recompute: frozenset[int]) -> StagedGraph:
    """The captured graph through every pass, cut by ``how``. Some stages replay all they can."""
    staged = StagedGraph(model.graph, how, OPTIONS)
    values = staged.forward_values(model.graph.batch_size)
    replayed = frozenset(name for stage in recompute for name in values[stage])
    return staged.with_recompute(MarkRecompute(replayed)) if replayed else staged


@functools.cache
def compiled(model: Captured, num_stages: int, schedule: str, recompute: bool = False) -> Artifact:
    graph = cut_evenly(model, num_stages, recompute)
    return generated(graph, make_schedule(schedule, num_stages, len(SIZES)))


def generated(staged: StagedGraph, schedule: Schedule) -> Artifact:
    return staged.evaluate(schedule, max(SIZES)).artifact()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def save_with_tensors(artifact: Artifact, model: nn.Module, directory: Path) -> Path:
    write_artifact(artifact, directory, tensors_of(model))
    return directory


def tied_parameters(artifact: Artifact) -> frozenset[str]:
    """Parameters whose gradients are eager's to rounding: those that more than one stage uses.

    Of T5, whose table is tied to a scaled head, they are all, since on some processors no gradient has
    eager's bits.
    """
    stages = artifact.plan.stages
    if any("shared.weight" in stage.parameters for stage in stages):
        return frozenset(fqn for stage in stages for fqn in stage.parameters)
    return frozenset(fqn for stage in stages for fqn in stage.borrowed_parameters)


class TrainingRun:
    """An artifact on all ranks of this process, with a copy of the model whose parameters it trains."""

    def __init__(self, artifact: Artifact, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        tensors = tensors_of(self.model)
        self._variables = artifact.plan.variables
        self._execution = Execution(artifact, tensors, tensors, Ranks(artifact.plan.num_ranks, TIMEOUT))
        self._num_steps = 0

    def step(self, inputs: Inputs, sizes: Sequence[int] = SIZES) -> Tensor:
        leaves = ModelCall((), inputs).leaves
        batch = BatchSlice(sizes, sum(sizes), values=[variable_values(self._variables, leaves)] * len(sizes))
        loss = self._execution.run([leaves], batch, SEED + self._num_steps)["loss"]
        self._num_steps += 1
        return loss


def assert_same_bits(
    artifact: Artifact, model: Captured, inputs: Inputs | None = None, sizes: Sequence[int] = SIZES
) -> None:
    """A step leaves what one of the unsplit model leaves."""
    run, unsplit = TrainingRun(artifact, model.model), copy.deepcopy(model.model)
    inputs = inputs or model.inputs
    found = StepResult.of(run.step(inputs, sizes), run.model)
    expected = StepResult.of(unsplit_step(unsplit, inputs, sizes), unsplit)
    assert_equal(found, expected, tied_parameters(artifact))
