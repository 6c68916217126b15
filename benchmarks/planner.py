"""How good plans are: even stages, the number of microbatches, and a model of 101 billion parameters.

    python benchmarks/planner.py balance          # four stages, cut in three ways
    python benchmarks/planner.py microbatches     # what the search takes, and everything that it chose from
    python benchmarks/planner.py large            # 80 layers of width 10,240 on 64 devices, on meta

``balance`` judges every cut by a second profile, which none of the cuts has seen: the seconds of the slowest
stage's operators, forward and backward, over the mean. Transfers are left out, and links are endlessly fast
where pipec cuts. ``microbatches`` runs two ranks of one thread, also under torchrun, 1F1B, with the models of
``step_time.py``. All ways to run take turns of four steps, of which the first does not count.
"""

import argparse
import functools
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from common import medians_of_turns, row, table
from step_time import CASES, RANKS
from step_time import Case as Trained
from torch import Tensor
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
from pipec.runtime import world
from pipec.runtime.model_tensors import ModelTensors

# even stages

STAGES, ROWS = 4, 2
CONTEXT, VOCABULARY, WIDTH, PIXELS = 128, 4096, 256, 64


@dataclass(frozen=True)
class Cut:
    """A model with a microbatch, and the modules that count as its layers, in the order they run."""

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
    images, labels = torch.randn(ROWS, 3, PIXELS, PIXELS), torch.randint(1000, (ROWS,))
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return pipec.Example(model, kwargs={"pixel_values": images, "labels": labels})


def _text() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT))
    return {"input_ids": tokens, "labels": tokens}


CUTS = {
    "GPT-2": Cut(gpt2, [f"transformer.h.{k}" for k in range(8)]),
    "T5": Cut(t5, [f"{half}.block.{k}" for half in ("encoder", "decoder") for k in range(4)]),
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


# the number of microbatches


def compiled(case: Trained, microbatches: int | None) -> pipec.Pipeline:
    inputs, target = case.batch()
    pipe = pipec.compile(case.model(), RANKS, loss_fn=case.loss_fn, microbatches=microbatches)
    return pipe.prepare(inputs, target=target)


def microbatches(cases: Sequence[str], rounds: int) -> Iterator[str]:
    yield from table("model", "microbatches", "predicted ms", "measured ms", "/ fastest", numbers_from=2)
    for case in cases:
        searched = compiled(CASES[case], None)
        taken = searched.plan.num_microbatches
        expected = {x.num_microbatches: x.seconds for x in searched.plan.alternatives if x.replicas == (1, 1)}
        expected[taken] = searched.simulate().makespan
        pipes = {
            count: searched if count == taken else compiled(CASES[case], count) for count in sorted(expected)
        }
        inputs, target = CASES[case].batch()

        def step(pipe: pipec.Pipeline, inputs: Tensor = inputs, target: Tensor = target) -> None:
            pipe.zero_grad()
            pipe.step(inputs, target=target)

        steps = {str(count): functools.partial(step, pipe) for count, pipe in pipes.items()}
        found = medians_of_turns(steps, rounds)
        for count, seconds in expected.items():
            name, ms = f"{count}, taken" if count == taken else count, 1e3 * found[str(count)]
            yield row(
                case, name, f"{1e3 * seconds:.0f}", f"{ms:.0f}", f"{1e-3 * ms / min(found.values()):.2f}"
            )


# a large plan


def large(num_devices: int, num_layers: int, batch: int = 64, context: int = 2048) -> Iterator[str]:
    """Wall-clock seconds of each step; processor seconds and peak memory include imports."""
    config = GPT2Config(
        vocab_size=51200,
        n_positions=context,
        n_embd=10240,
        n_layer=num_layers,
        n_head=80,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        tokens = torch.empty(batch, context, dtype=torch.int64)
    pipe = pipec.compile(model, devices=num_devices, microbatches=batch)
    seconds = dict(pipe.prepare(input_ids=tokens, labels=tokens).compile_seconds)
    started = time.perf_counter()
    pipec.log(pipe.plan)
    seconds["simulate and print"] = time.perf_counter() - started
    yield from table("step", "seconds")
    for name, value in seconds.items():
        yield row(name, f"{value:.1f}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield row("**processor seconds of the process**", f"{used.ru_utime + used.ru_stime:.1f}")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    yield f"\n{num_parameters:,} parameters, {used.ru_maxrss / 2**20:.2f} GiB at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["balance", "microbatches", "large"])
    parser.add_argument("--models", nargs="+", choices=CUTS, default=[*CUTS], help="of balance")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--rounds", type=int, default=4, help="of microbatches")
    parser.add_argument("--devices", type=int, default=64, help="of large")
    parser.add_argument("--layers", type=int, default=80, help="of large")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "balance": lambda: balance(args.models),
        "microbatches": lambda: microbatches(args.cases, args.rounds),
        "large": lambda: large(args.devices, args.layers),
    }
    lines = "\n".join(parts[args.part]())
    if world().rank == 0:
        print(lines)


if __name__ == "__main__":
    main()
