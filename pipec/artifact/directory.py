"""The result of a compilation, in memory and on disk: the plan, the stages' sources and the ranks' programs.

A saved artifact is a folder::

    plan.json             format, plan, and the SHA-256 of every other file
    stage_0.py ...        generated code
    rank_0.txt ...        programs
    constants.safetensors tensors the model made outside its parameters and buffers, if there are any
    tensors.safetensors   parameters and buffers, if asked for

Reading one unpickles nothing. A file that is missing, changed or of another format is refused before any
code of the artifact runs.
"""

import functools
import hashlib
import linecache
import re
import shutil
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import safetensors
import safetensors.torch
from torch import Tensor

from pipec.errors import ArtifactError
from pipec.ir import Plan, Program
from pipec.ir.text import format_program, parse_program

FORMAT = "pipec artifact 2"

PLAN, CONSTANTS, TENSORS = "plan.json", "constants.safetensors", "tensors.safetensors"


@dataclass(frozen=True, eq=False)
class Artifact:
    """``sources[stage]`` and ``programs[rank]``; ``constants`` by their name among the buffers.

    An artifact equals itself alone, so that what is made of one can be found by it.
    """

    plan: Plan
    sources: tuple[str, ...]
    programs: tuple[Program, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether any stage has random operators, whose functions take ``rng``."""
        return any(re.search(r"^def .*\brng\b.*:$", source, re.MULTILINE) for source in self.sources)

    def text(self) -> str:
        """Everything ranks must agree on, as one text."""
        programs = map(format_program, self.programs)
        return "\n".join([_PLAN.dump_json(self.plan).decode(), *self.sources, *programs])


@dataclass(frozen=True)
class _Header:
    format: str
    plan: Plan
    sha256: dict[str, str]


_PLAN = pydantic.TypeAdapter(Plan)
_HEADER = pydantic.TypeAdapter(_Header)


def stage_module(stage: int, source: str) -> types.ModuleType:
    """The module that the source of a stage defines.

    Tracebacks and debuggers show its lines under the name ``stage_N.py``.
    """
    filename = f"<pipec {_digest(source.encode())[:12]}>/stage_{stage}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"stage_{stage}")
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def write(artifact: Artifact, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the artifact, whole or not at all. An artifact that is there already is replaced.

    Raises:
        ArtifactError: the directory holds something else.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / PLAN).exists():
        raise ArtifactError(
            f"{directory} is not empty and holds no {PLAN}, so it is no artifact of pipec to replace; "
            "choose another directory"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        written = Path(scratch) / "artifact"
        written.mkdir()
        _write_files(artifact, written, tensors)
        if directory.exists():
            shutil.rmtree(directory)
        written.rename(directory)


def _write_files(artifact: Artifact, directory: Path, tensors: Mapping[str, Tensor] | None) -> None:
    for stage, source in enumerate(artifact.sources):
        (directory / f"stage_{stage}.py").write_text(source)
    for program in artifact.programs:
        (directory / f"rank_{program.rank}.txt").write_text(format_program(program))
    for name, values in ((CONSTANTS, artifact.constants), (TENSORS, tensors or {})):
        if values:
            safetensors.torch.save_file(
                {k: v.detach().cpu().contiguous() for k, v in values.items()}, directory / name
            )
    digests = {file.name: _digest(file.read_bytes()) for file in sorted(directory.iterdir())}
    header = _Header(FORMAT, artifact.plan, digests)
    (directory / PLAN).write_bytes(_HEADER.dump_json(header, indent=1))


def read(directory: Path) -> tuple[Artifact, dict[str, Tensor]]:
    """Read an artifact and the tensors saved with it, by FQN.

    Raises:
        ArtifactError: a file is missing, changed, unreadable or of another format; it is named.
    """
    header = _read_header(directory)
    for name, digest in header.sha256.items():
        _check_file(directory, name, digest)
    plan = header.plan
    programs = tuple(
        parse_program((directory / f"rank_{rank}.txt").read_text(), plan.links)
        for rank in range(plan.num_ranks)
    )
    sources = tuple((directory / f"stage_{stage.index}.py").read_text() for stage in plan.stages)
    constants = _read_tensors(directory / CONSTANTS) if CONSTANTS in header.sha256 else {}
    tensors = _read_tensors(directory / TENSORS) if TENSORS in header.sha256 else {}
    return Artifact(plan, sources, programs, constants), tensors


def _read_header(directory: Path) -> _Header:
    path = directory / PLAN
    if not path.is_file():
        raise ArtifactError(f"{directory} holds no {PLAN}: expected a folder written by Pipeline.save()")
    try:
        header = _HEADER.validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(
            f"{path} is not a plan of this format ({FORMAT!r}): {where}: {first['msg']}. "
            "Save the pipeline anew."
        ) from error
    if header.format != FORMAT:
        raise ArtifactError(
            f"{path} has format {header.format!r}, this version reads {FORMAT!r}. Save the pipeline anew."
        )
    expected = {f"stage_{stage.index}.py" for stage in header.plan.stages}
    expected |= {f"rank_{rank}.txt" for rank in range(header.plan.num_ranks)}
    if missing := expected - header.sha256.keys():
        raise ArtifactError(
            f"{path} lists no checksum of {', '.join(sorted(missing))}; it was edited or cut short"
        )
    return header


def _check_file(directory: Path, name: str, digest: str) -> None:
    path = directory / name
    if Path(name).name != name:
        raise ArtifactError(f"{directory / PLAN} names a file outside its folder: {name!r}")
    if not path.is_file():
        raise ArtifactError(f"{path} is missing; the artifact is incomplete")
    if _digest(path.read_bytes()) != digest:
        raise ArtifactError(
            f"{path} is not what was saved: its SHA-256 differs from the one in {PLAN}. "
            "Restore the file, or save the pipeline anew."
        )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{path} is no safetensors file: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
