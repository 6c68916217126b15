"""How even stages are that are cut at equal layer counts, by the cost formulas, and by a measured profile.

A second profile judges every cut, which none of the cuts has seen: the seconds of the slowest of four stages,
forward and backward, over the mean. Transfers are left out, and links are endlessly fast where pipec cuts.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from common import gpt2, row, t5, table
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.compiler.pass_list import CompilerOptions, make_passes
from pipec.cost.profile import Profile
from pipec.graph import TrainingGraph, copy_graph
from pipec.hardware.devices import DEVICES, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode
from pipec.passes import run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute
from pipec.profiler import profile_graph
from pipec.runtime.model_tensors import ModelTensors

STAGES, ROWS = 4, 2
CONTEXT, VOCABULARY, WIDTH, PIXELS = 128, 4096, 256, 64


@dataclass(frozen=True)
class Cut:
    """A model with a microbatch, and the modules that count as its layers, in the order they run."""

    make: Callable[[], pipec.Example]
    layers: Sequence[str]


def resnet50() -> pipec.Example:
    images, labels = torch.randn(ROWS, 3, PIXELS, PIXELS), torch.randint(1000, (ROWS,))
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return pipec.Example(model, kwargs={"pixel_values": images, "labels": labels})


def _text() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT))
    return {"input_ids": tokens, "labels": tokens}


CUTS = {
    "GPT-2": Cut(
        lambda: pipec.Example(gpt2(WIDTH, 8, VOCABULARY, CONTEXT), kwargs=_text()),
        [f"transformer.h.{k}" for k in range(8)],
    ),
    "T5": Cut(
        lambda: pipec.Example(t5(WIDTH, 4, VOCABULARY), kwargs=_text()),
        [f"{half}.block.{k}" for half in ("encoder", "decoder") for k in range(4)],
    ),
    "ResNet-50": Cut(
        resnet50,
        [f"resnet.encoder.stages.{s}.layers.{k}" for s, num in enumerate((3, 4, 6, 3)) for k in range(num)],
    ),
}


def balance(models: Sequence[str]) -> Iterator[str]:
    yield from table("model", "operators", "equal layer counts", "cost formulas", "measured profile")
    for name in models:
        torch.manual_seed(0)
        example = CUTS[name].make()
        call = ModelCall(example.args, dict(example.kwargs), example.target)
        canonical = ModelTensors.of(example.model).canonical
        graph = capture(CaptureRequest(example.model, example.loss_fn, Mode.TRAIN, call, canonical))
        seen, judge = (
            profile_graph(copy_graph(graph), example.model, call, torch.device("cpu")) for _ in range(2)
        )
        cuts = (layer_stages(judge, CUTS[name].layers), *(planned_stages(graph, x) for x in (None, seen)))
        cells = (f"{imbalance(judge, list(stages)):.2f}" for stages in cuts)
        yield row(name, len(judge.operators), *cells)


def layer_stages(profile: Profile, layers: Sequence[str]) -> Iterator[int]:
    """The stage of each operator: operators between two layers belong to the layer before."""
    stage = 0
    for operator in profile.operators:
        for index, layer in enumerate(layers):
            if f"{operator.module}.".startswith(f"{layer}."):
                stage = max(stage, index * STAGES // len(layers))
        yield stage


def planned_stages(graph: TrainingGraph, profile: Profile | None) -> Iterator[int]:
    """The stage of each operator after pipec's passes."""
    devices = equal_devices(STAGES, LinkModel(math.inf, 0.0))
    cut = AssignStages(CutStages(devices, ROWS))
    options = CompilerOptions(DEVICES["cpu"], devices, profile=profile)
    staged = run_passes(copy_graph(graph), make_passes(options, cut, MarkRecompute()))
    stage_of = {node.meta["operator"]: node.meta["stage"] for node in staged.nodes if "stage" in node.meta}
    return itertools.accumulate((stage_of.get(op, 0) for op in range(len(graph.operators))), max)


def imbalance(profile: Profile, stages: Sequence[int]) -> float:
    seconds = [0.0] * STAGES
    for operator, stage in zip(profile.operators, stages, strict=True):
        seconds[stage] += sum(node.seconds for node in operator.nodes)
    return max(seconds) * STAGES / sum(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CUTS, default=[*CUTS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for line in balance(args.models):
        print(line, flush=True)


if __name__ == "__main__":
    main()
