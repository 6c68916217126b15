"""The arguments and options that commands share."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipec.errors import InputError
from pipec.ir import Precision, ShardingLevel
from pipec.ir.argument_checks import MOST_MICROBATCHES, MOST_RANKS


class Kernels(StrEnum):
    """What ``pipec.compile`` takes as ``kernels``."""

    SOURCE = "source"
    INDUCTOR = "inductor"
    CUDAGRAPHS = "cudagraphs"
    AUTO = "auto"


class Recompute(StrEnum):
    """What ``pipec.compile`` takes as ``recompute``."""

    AUTO = "auto"
    NONE = "none"
    FULL = "full"


class Offload(StrEnum):
    """What ``pipec.compile`` takes as ``offload``."""

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"
    ALL = "all"


@dataclass(frozen=True)
class CompileOptions:
    """What the options say of replicas, of the end of a step, of its types and of the host: arguments of
    ``pipec.compile``.
    """

    stages: int | None = None
    replicas: str = "1"
    asynchronous: bool = False
    optimizer: str | None = None
    clip_grad_norm: float | None = None
    shard: ShardingLevel | None = None
    precision: Precision | None = None
    offload: Offload | None = None
    fused_gradients: bool = False


DEFAULT_COMPILE_OPTIONS = CompileOptions()
"""One pipeline, whose steps end with gradients."""


def parse_replicas(text: str) -> int | tuple[int, ...] | str:
    """``2``, ``3-2-1`` or ``auto``, as ``pipec.compile`` takes it. Raises InputError."""
    if text == "auto":
        return text
    parts = text.split("-")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(
            f"--replicas is {text!r}; expected a number such as 2, the numbers of all stages such as 3-2-1, "
            "or auto"
        )
    numbers = tuple(map(int, parts))
    return numbers if len(numbers) > 1 else numbers[0]


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="path/to/file.py:factory or package.module:factory; factory() returns a pipec.Example.",
    ),
]
Artifact = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that Pipeline.save or `pipec dump -o` wrote.")
]
Devices = Annotated[int, typer.Option("--devices", min=1, max=MOST_RANKS, help="Number of ranks.")]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine's device first, for a second or two.")
]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        help="How fast devices are, what they hold and how they are joined: a TOML or JSON file.",
    ),
]
ScheduleName = Annotated[
    str,
    typer.Option("--schedule", help="A name such as 1f1b or zb-h1, auto, or a .txt file of compute orders."),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        min=1,
        max=MOST_MICROBATCHES,
        help="How many a mini-batch is split into; default: the fastest found.",
    ),
]
RecomputeChoice = Annotated[
    Recompute, typer.Option("--recompute", help="auto recomputes as little as --memory-limit lets it.")
]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", help="Bytes per device, such as 16GiB.")]
OffloadName = Annotated[
    Offload | None,
    typer.Option("--offload", help="What waits in host memory; activations as --memory-limit asks."),
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Measured times, from `pipec profile`, to cut by.")
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--stages", min=1, help="Stages of a pipeline; with fewer than devices, they have replicas."
    ),
]
Replicas = Annotated[
    str,
    typer.Option(
        "--replicas", help="Ranks that share a stage: 2, those of each stage such as 3-2-1, or auto."
    ),
]
Asynchronous = Annotated[
    bool,
    typer.Option("--asynchronous", help="Let --schedule auto choose one without a flush: delayed gradients."),
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="Let the program update: a class of torch.optim such as AdamW, or module:factory.",
    ),
]
KernelsChoice = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        help="How ranks run their stages: auto takes the faster of source and inductor.",
    ),
]
ClipGradNorm = Annotated[
    float | None, typer.Option("--clip-grad-norm", help="The most that the norm of all gradients may be.")
]
ShardName = Annotated[
    ShardingLevel | None,
    typer.Option("--shard", help="What replicas keep only a share of, besides what stands before it."),
]
FusedGradients = Annotated[
    bool,
    typer.Option("--fused-gradients", help="Make gradients in fewer steps, with other last bits."),
]
PrecisionName = Annotated[
    Precision | None,
    typer.Option("--precision", help="Let operators compute with 16 bits beside float32 weights."),
]
Drawing = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Draw it: .html, .svg, .txt, or .json for Perfetto and Chrome."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the random inputs and tensors.")
]
IntHigh = Annotated[
    int, typer.Option("--int-high", min=1, max=2**63 - 1, help="Random integers are below this.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, max=10**9, help="How many steps to run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
