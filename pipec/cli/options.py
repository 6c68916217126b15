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
Artifact = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that Pipeline.save or `pipec dump -o` wrote.")
]
Devices = Annotated[int, typer.Option("--devices", min=1, help="Number of ranks.")]
ScheduleName = Annotated[str, typer.Option("--schedule", help="gpipe or 1f1b.")]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches", min=1, help="How many a mini-batch is split into; default: up to 4 a rank."
    ),
]
RecomputeChoice = Annotated[
    Recompute, typer.Option("--recompute", help="auto recomputes on the ranks that --memory-limit forces to.")
]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", help="Bytes per device, such as 16GiB.")]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Measured times, from `pipec profile`, to cut by.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
