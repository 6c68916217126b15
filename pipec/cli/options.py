"""The arguments and options that commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

TARGET_HELP = "path/to/file.py:factory or package.module:factory; factory() returns a pipec.Example."


class Recompute(StrEnum):
    """What ``pipec.compile`` takes as ``recompute``."""

    AUTO = "auto"
    NONE = "none"
    FULL = "full"


Target = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)]
OptionalTarget = Annotated[str | None, typer.Argument(metavar="[TARGET]", help=TARGET_HELP)]
Artifact = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that Pipeline.save or `pipec dump -o` wrote.")
]
Devices = Annotated[int, typer.Option("--devices", min=1, help="Number of ranks.")]
Levels = Annotated[
    str | None,
    typer.Option(
        "--devices", help="Number of ranks; for a graph also by level, innermost first, such as 4x4."
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth", help="For a graph: bytes per second of each level, such as 12e9,1.25e9."),
]
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
PipeDreamGraph = Annotated[
    Path | None, typer.Option("--pipedream-graph", help="Plan a profile of PipeDream, a graph.txt.")
]
DnnPartitioning = Annotated[
    Path | None, typer.Option("--dnn-partitioning", help="Plan a graph of dnn-partitioning, a JSON file.")
]
CostModelName = Annotated[
    str | None, typer.Option("--cost-model", help="For a PipeDream graph: pipedream, the default, or pipec.")
]
ScheduleName = Annotated[
    str,
    typer.Option("--schedule", help="A name such as 1f1b or zb-h1, auto, or a .txt file of compute orders."),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches", min=1, help="How many a mini-batch is split into; default: the fastest found."
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
