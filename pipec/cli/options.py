"""The arguments and options that commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipec.ir.arguments import MOST_MICROBATCHES, MOST_RANKS


class Recompute(StrEnum):
    """What ``pipec.compile`` takes as ``recompute``."""

    AUTO = "auto"
    NONE = "none"
    FULL = "full"


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
    Recompute, typer.Option("--recompute", help="auto recomputes on the ranks that --memory-limit forces to.")
]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", help="Bytes per device, such as 16GiB.")]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Measured times, from `pipec profile`, to cut by.")
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
