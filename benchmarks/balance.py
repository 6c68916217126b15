"""How even four stages are: cut at equal layer counts, by the cost formulas, and by a measured profile.

Every cut is judged by a second profile, which none of them has seen: the seconds of the slowest stage's
operators, forward and backward, over the mean. 1.00 is a perfect balance. Transfers are left out, and links
are taken to be endlessly fast where pipec cuts, so that balance is all it is after. All models take two to
three minutes, and ``--cases U-Net`` a quarter of one.
"""

import argparse
import itertools
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from models import UNet
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

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
CONTEXT, VOCABULARY, WIDTH = 128, 4096, 256
PIXELS = 64


@dataclass(frozen=True)
class Case:
    """A model with a microbatch, and the modules that count as its layers, in the order they run."""

    name: str
    make: Callable[[], pipec.Example]
    layers: Sequence[str]


def gpt2() -> pipec.Example:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=8, n_head=8)
    return pipec.Example(GPT2LMHeadModel(config), kwargs=_text())


def t5() -> pipec.Example:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=4 * WIDTH, num_layers=4, decoder_start_token_id=0
    )
    return pipec.Example(T5ForConditionalGeneration(config), kwargs=_text())


def resnet50() -> pipec.Example:
    images = torch.randn(ROWS, 3, PIXELS, PIXELS)
    labels = torch.randint(1000, (ROWS,))
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return pipec.Example(model, kwargs={"pixel_values": images, "labels": labels})


def unet() -> pipec.Example:
    images = torch.randn(ROWS, 3, PIXELS, PIXELS)
    return pipec.Example(UNet(width=32, depth=4), (images,), target=images, loss_fn=nn.functional.mse_loss)


def _text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT))
    return {"input_ids": tokens, "labels": tokens}


CASES = {
    case.name: case
    for case in (
        Case("GPT-2", gpt2, [f"transformer.h.{k}" for k in range(8)]),
        Case("T5", t5, [f"{half}.block.{k}" for half in ("encoder", "decoder") for k in range(4)]),
        Case(
            "ResNet-50",
            resnet50,
            [
                f"resnet.encoder.stages.{s}.layers.{k}"
                for s, num in enumerate((3, 4, 6, 3))
                for k in range(num)
            ],
        ),
        Case("U-Net", unet, [*(f"down.{k}" for k in range(4)), "middle", *(f"up.{k}" for k in range(4))]),
    )
}


@dataclass(frozen=True)
class Row:
    """Slowest stage over the mean, for each way to cut."""

    model: str
    operators: int
    equal_layers: float
    formulas: float
    profile: float


def measure(case: Case) -> Row:
    torch.manual_seed(0)
    example = case.make()
    call = ModelCall(example.args, dict(example.kwargs), example.target)
    canonical = ModelTensors.of(example.model).canonical
    graph = capture(CaptureRequest(example.model, example.loss_fn, Mode.TRAIN, call, canonical))
    seen, judge = (
        profile_graph(copy_graph(graph), example.model, call, torch.device("cpu")) for _ in range(2)
    )
    return Row(
        case.name,
        len(judge.operators),
        equal_layers=imbalance(judge, list(layer_stages(judge, case.layers))),
        formulas=imbalance(judge, planned_stages(graph, None)),
        profile=imbalance(judge, planned_stages(graph, seen)),
    )


def layer_stages(profile: Profile, layers: Sequence[str]) -> Iterator[int]:
    """The stage of each operator: what is between two layers goes with the one before."""
    stage = 0
    for operator in profile.operators:
        for index, layer in enumerate(layers):
            if f"{operator.module}.".startswith(f"{layer}."):
                stage = max(stage, index * STAGES // len(layers))
        yield stage


def planned_stages(graph: TrainingGraph, profile: Profile | None) -> list[int]:
    """The stage of each operator after pipec's passes."""
    devices = equal_devices(STAGES, LinkModel(math.inf, 0.0))
    cut = AssignStages(CutStages(devices, ROWS))
    options = CompilerOptions(DEVICES["cpu"], devices, profile=profile)
    staged = run_passes(copy_graph(graph), make_passes(options, cut, MarkRecompute()))
    stage_of = {node.meta["operator"]: node.meta["stage"] for node in staged.nodes if "stage" in node.meta}
    return list(itertools.accumulate((stage_of.get(op, 0) for op in range(len(graph.operators))), max))


def imbalance(profile: Profile, stages: Sequence[int]) -> float:
    seconds = [0.0] * STAGES
    for operator, stage in zip(profile.operators, stages, strict=True):
        seconds[stage] += sum(node.seconds for node in operator.nodes)
    return max(seconds) * STAGES / sum(seconds)


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| model | operators | equal layer counts | cost formulas | measured profile |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {row.model} | {row.operators} | {row.equal_layers:.2f} | {row.formulas:.2f} "
            f"| {row.profile:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead of JSON")
    args = parser.parse_args()

    torch.set_num_threads(1)
    rows = [measure(CASES[name]) for name in pipec.progress(args.cases, "profiling")]
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread"
    if args.markdown:
        print(f"{markdown(rows)}\n\n{machine}; {STAGES} stages, microbatches of {ROWS} rows")
    else:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
