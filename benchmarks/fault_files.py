"""Flipped bits and files cut short, in every file of an artifact and of a checkpoint: each must be found."""

import random
from collections.abc import Callable
from pathlib import Path

from fault_worlds import pipeline, prepared, step
from typer.testing import CliRunner

import pipec
from pipec.cli import app

ARTIFACT, CHECKPOINT = "artifact", "checkpoint"


def save_both(folder: Path) -> None:
    """Write an artifact and a checkpoint of a pipeline that has made a step."""
    pipe = prepared(devices=2)
    step(pipe)
    pipe.save(folder / ARTIFACT, tensors=True)
    pipe.save_checkpoint(folder / CHECKPOINT)


def damage(folder: Path, kind: str, count: int, seed: int, found: Path) -> None:
    """Damage one file after the other, ``count`` times, and let the whole be read.

    Each gives a line of ``found``: nothing if the error named the file, or what was there instead.
    """
    chosen, directory = random.Random(f"{seed} {kind}"), folder / kind
    said = checked if kind == ARTIFACT else loading()
    files = sorted(path for path in directory.iterdir() if path.stat().st_size)
    lines = []
    for number in range(count):
        path = files[number % len(files)]
        content = path.read_bytes()
        place = chosen.randrange(len(content))
        damaged = bytearray(content)
        if chosen.random() < 0.75:
            how, damaged[place] = f"a bit of byte {place} flipped", content[place] ^ 1 << chosen.randrange(8)
        else:
            how, damaged = f"cut to {place} bytes", damaged[:place]
        path.write_bytes(damaged)
        error = said(directory)
        path.write_bytes(content)
        lines.append("" if path.name in error else f"{path.name}, {how}: {error!r}")
    found.write_text("\n".join(lines) + "\n")


def checked(directory: Path) -> str:
    """The error with which ``pipec check`` ends; nothing if it finds none, or ends with a traceback."""
    result = CliRunner().invoke(app, ["check", str(directory)])
    return result.output if result.exit_code == 1 and isinstance(result.exception, SystemExit) else ""


def loading() -> Callable[[Path], str]:
    """What ``load_checkpoint`` raises, of pipec's own errors; nothing if it raises none."""
    pipe = pipeline(devices=2)

    def said(directory: Path) -> str:
        try:
            pipe.load_checkpoint(directory)
        except pipec.PipecError as error:
            return str(error)
        return ""

    return said
