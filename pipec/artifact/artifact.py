"""The result of a compilation, in memory and on disk: the plan, the stages' sources and the ranks' programs.

A saved artifact is a folder::

    SHA256SUMS            the SHA-256 of every other file, as sha256sum writes and checks it
    plan.json             format, plan, and the options of ``pipec.compile`` that it was made with
    stage_0.py ...        generated code
    rank_0.txt ...        programs
    constants.safetensors tensors that the model created outside its parameters and buffers, if any
    tensors.safetensors   parameters and buffers, if requested
    eval_step, forward    folders as this one for evaluations, if any were compiled; without tensors

Reading an artifact unpickles nothing. Before any of its code runs, a missing or changed file, another
format, and a plan that contradicts itself or its files are refused. This does not protect against people who
can write to the folder; docs/artifacts.md describes what does.
"""

import ctypes
import functools
import hashlib
import itertools
import linecache
import os
import re
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from pipec.artifact.plan_rules import check_plan, check_tensors
from pipec.errors import DAMAGED_DATA_ERRORS, ArtifactError
from pipec.ir import Mode, Plan, Program
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.json_form import dump_json, parse_json
from pipec.ir.text_format import format_program, parse_program
from pipec.torch_compat import pytree

FORMAT = "pipec artifact 8"

CHECKSUMS, PLAN, CONSTANTS, TENSORS = (
    "SHA256SUMS",
    "plan.json",
    "constants.safetensors",
    "tensors.safetensors",
)


MODE_FOLDERS = {Mode.LOSS: "eval_step", Mode.FORWARD: "forward"}
"""Where a saved artifact has those of evaluations."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """``sources[stage]`` and ``programs[rank]``; ``constants`` are named as buffers are.

    ``representative_programs`` are those of the ranks that represent all, to predict a step. If there are
    more ranks, ``make_programs`` makes the programs of all when they are first needed. ``options`` records
    those of ``pipec.compile``, as plain values and names; nothing is made of them. ``ties`` maps the other
    names of a tied tensor to its first, and ``unsaved`` buffers are in no state dict. ``output_spec`` and
    ``axes`` are those of a ``CompiledArtifact``. A saved artifact has these.
    An artifact equals only itself, so that it can be the key of a cache.
    """

    plan: Plan
    sources: tuple[str, ...]
    representative_programs: Sequence[Program]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    make_programs: Callable[[], Sequence[Program]] | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    unsaved: Sequence[str] = ()
    output_spec: str | None = None
    axes: Mapping[str, BatchAxis] = field(default_factory=dict)

    @functools.cached_property
    def programs(self) -> Sequence[Program]:
        """The program of each rank."""
        all_there = len(self.representative_programs) == self.plan.num_ranks
        return self.representative_programs if all_there or not self.make_programs else self.make_programs()

    def __getstate__(self) -> Mapping[str, object]:
        """The state for another process, with the programs of all ranks."""
        return {**self.__dict__, "representative_programs": self.programs, "make_programs": None}

    @functools.cached_property
    def has_random_operators(self) -> bool:
        """Whether the functions of any stage take ``rng``, for random operators."""
        return any('frame["rng"]' in source for source in self.sources)

    def canonical_text(self) -> str:
        """All that ranks must agree on, as one text."""
        programs = map(format_program, self.programs)
        return "\n".join([dump_json(self.plan), *self.sources, *programs])


@dataclass(frozen=True, eq=False)
class CompiledArtifact:
    """An artifact, and the structure of the model's output.

    ``axes`` maps results whose rows were moved to the front to the dimension where the model has them.
    ``number`` identifies the artifact on every rank.
    """

    artifact: Artifact
    output_spec: pytree.TreeSpec | None
    axes: Mapping[str, BatchAxis]
    number: int = field(default_factory=itertools.count().__next__)

    def as_saved(self, ties: Mapping[str, str], unsaved: Sequence[str]) -> Artifact:
        """The artifact with what a reader needs. Raises NotImplementedError for unknown structures."""
        spec = None if self.output_spec is None else pytree.dump_structure(self.output_spec)
        return replace(self.artifact, ties=ties, unsaved=unsaved, output_spec=spec, axes=self.axes)

    @classmethod
    def of(cls, artifact: Artifact) -> "CompiledArtifact":
        """A saved artifact."""
        try:
            spec = None if artifact.output_spec is None else pytree.load_structure(artifact.output_spec)
        except (*DAMAGED_DATA_ERRORS, NotImplementedError) as error:
            raise ArtifactError(
                f"output_spec of plan.json names no structure of outputs: {type(error).__name__}: {error}; "
                "save the artifact once more"
            ) from error
        return cls(artifact, spec, artifact.axes)


MicrobatchGroups = list[tuple[CompiledArtifact, list[int]]]
"""The artifact of each group of consecutive microbatches of a call, and the sizes of the microbatches."""


@dataclass(frozen=True)
class _Header:
    format: str
    plan: Plan
    options: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    unsaved: Sequence[str] = ()
    output_spec: str | None = None
    axes: Mapping[str, BatchAxis] = field(default_factory=dict)


def load_stage_module(stage: int, source: str) -> types.ModuleType:
    """The module defined by the source of a stage; tracebacks show its lines as ``stage_N.py``.

    Raises:
        ArtifactError: the code cannot be loaded, for example after it was edited.
    """
    filename = f"<pipec {_digest(source.encode())[:12]}/stage_{stage}.py>"  # debuggers keep such a name
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"stage_{stage}")
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
    except Exception as error:
        raise ArtifactError(f"stage_{stage}.py cannot be loaded: {type(error).__name__} {error}") from error
    return module


def write_artifact(
    artifact: Artifact,
    directory: Path,
    tensors: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Artifact] = MappingProxyType({}),
) -> None:
    """Write the artifact, whole or not at all. It replaces an artifact at the same place.

    ``others`` are written to folders of these names inside of it.

    Raises:
        ArtifactError: the directory has other contents, or cannot be written.
    """
    try:
        _replace(artifact, directory, tensors, others)
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise ArtifactError(f"{directory} cannot be written: {error}") from error


def _replace(
    artifact: Artifact,
    directory: Path,
    tensors: Mapping[str, Tensor] | None,
    others: Mapping[str, Artifact],
) -> None:
    if directory.exists() and any(directory.iterdir()) and not (directory / PLAN).exists():
        raise ArtifactError(
            f"{directory} is not empty and has no {PLAN}, so it is not an artifact of pipec; "
            "choose another directory"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        written = Path(scratch) / "artifact"
        written.mkdir()
        _write_files(artifact, written, tensors)
        for name, other in others.items():
            (written / name).mkdir()
            _write_files(other, written / name, None)
        if directory.exists():
            _exchange(written, directory)
        else:
            written.rename(directory)


def _exchange(first: Path, second: Path) -> None:
    """Exchange two folders of one file system: at once where it can, else one after the other."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    if rename is not None and not rename(here, os.fsencode(first), here, os.fsencode(second), exchange):
        return
    aside = first.with_name(f"{first.name}.previous")
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise


def _write_files(artifact: Artifact, directory: Path, tensors: Mapping[str, Tensor] | None) -> None:
    for stage, source in enumerate(artifact.sources):
        (directory / f"stage_{stage}.py").write_text(source, encoding="utf-8")
    for program in artifact.programs:
        (directory / f"rank_{program.rank}.txt").write_text(format_program(program), encoding="utf-8")
    for name, values in ((CONSTANTS, artifact.constants), (TENSORS, tensors or {})):
        if values:
            safetensors.torch.save_file(
                {k: v.detach().cpu().contiguous() for k, v in values.items()}, directory / name
            )
    own = {name: getattr(artifact, name) for name in ("plan", "options", *_SAVED)}
    own["plan"] = replace(artifact.plan, checked="")  # how closely a run agreed is not the plan's
    header = _Header(FORMAT, **own)
    (directory / PLAN).write_text(dump_json(header, indent=1), encoding="utf-8")
    sums = [f"{_digest(file.read_bytes())}  {file.name}\n" for file in sorted(directory.iterdir())]
    (directory / CHECKSUMS).write_text("".join(sums))


def read_artifact(directory: Path) -> tuple[Artifact, dict[str, Tensor]]:
    """Read an artifact and the tensors saved with it, by FQN.

    Raises:
        ArtifactError: a file is missing, changed, unreadable or of another format, or the plan contradicts
            itself.
    """
    path = directory / PLAN
    if not path.is_file():
        raise ArtifactError(f"{directory} holds no {PLAN}: expected a folder written by Pipeline.save()")
    present = _check_sums(directory)
    header = _read_header(path)
    plan = header.plan
    check_plan(plan, path)
    expected = [f"stage_{stage.index}.py" for stage in plan.stages]
    expected += [f"rank_{rank}.txt" for rank in range(plan.num_ranks)]
    expected += [name for name in (CONSTANTS, TENSORS) if (directory / name).exists()]
    if missing := sorted({*expected} - present):
        raise ArtifactError(
            f"{directory / CHECKSUMS} lists no {', '.join(missing)}; it was edited or cut short"
        )
    programs = tuple(
        parse_program(_read_text(directory / f"rank_{rank}.txt"), plan.links)
        for rank in range(plan.num_ranks)
    )
    sources = tuple(_read_text(directory / f"stage_{stage.index}.py") for stage in plan.stages)
    constants = _read_tensors(directory / CONSTANTS) if CONSTANTS in present else {}
    tensors = _read_tensors(directory / TENSORS) if TENSORS in present else {}
    check_tensors(plan, {**tensors, **constants}, directory)
    saved = {name: getattr(header, name) for name in _SAVED}
    return Artifact(plan, sources, programs, constants, header.options, **saved), tensors


_SAVED = ("ties", "unsaved", "output_spec", "axes")


def _check_sums(directory: Path) -> set[str]:
    """Check all files against their checksums; returns their names. Raises ArtifactError."""
    names = set()
    for line in _read_text(directory / CHECKSUMS).splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            raise ArtifactError(
                f"{directory / CHECKSUMS}: found {line[:80]!r}, expected a SHA-256 and a name"
            )
        _check_file(directory, match["name"], match["digest"])
        names.add(match["name"])
    if PLAN not in names:
        raise ArtifactError(f"{directory / CHECKSUMS} lists no {PLAN}; it was edited or cut short")
    return names


_SUM = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](?P<name>.+)")


def _read_header(path: Path) -> _Header:
    try:
        header = parse_json(_Header, path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is not a plan of this format ({FORMAT!r}): {error}. Save the pipeline again."
        ) from error
    if header.format != FORMAT:
        raise ArtifactError(
            f"{path} has format {header.format!r}, this version reads {FORMAT!r}. Save the pipeline again."
        )
    return header


def _check_file(directory: Path, name: str, digest: str) -> None:
    path = directory / name
    if Path(name).name != name:
        raise ArtifactError(f"{directory / CHECKSUMS} names a file outside its folder: {name!r}")
    try:
        found = _digest(path.read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path} is missing, which {CHECKSUMS} lists; the artifact is incomplete, or {CHECKSUMS} damaged"
        ) from error
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise ArtifactError(f"{path}, which {CHECKSUMS} lists, cannot be read: {error}") from error
    if found != digest:
        raise ArtifactError(
            f"{path} is not what was saved: its SHA-256 differs from the one in {CHECKSUMS}. Restore "
            f"the file, save the pipeline again, or if you meant to change it: "
            f"`sha256sum *.* > {CHECKSUMS}` in that folder"
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing; the artifact is incomplete") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{path} is not a safetensors file: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
