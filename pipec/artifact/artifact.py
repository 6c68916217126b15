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
format, and an edited plan are refused. This does not protect against people who can write to the folder;
docs/artifacts.md describes what does.
"""

import functools
import hashlib
import itertools
import linecache
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from pipec.artifact.interface import Interface, interface_of, require_interface
from pipec.errors import DAMAGED_DATA_ERRORS, ArtifactError
from pipec.ir import Mode, Plan, Program
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.json_form import dump_json, parse_json
from pipec.ir.text_format import format_program, format_value, parse_program
from pipec.programs.verify import verify, verify_parts
from pipec.saved_folders import (
    CHECKSUMS,
    SavedFolder,
    StagingFolder,
    find_folder,
    write_checksums,
    write_file,
)
from pipec.torch_compat import pytree

FORMAT = "pipec artifact 9"

PLAN, CONSTANTS, TENSORS = "plan.json", "constants.safetensors", "tensors.safetensors"

MODE_FOLDERS = {Mode.OUTPUTS: "outputs", Mode.LOSS: "eval_step", Mode.FORWARD: "forward"}
"""Where a saved artifact has those of evaluations."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """``sources[stage]`` and ``programs[rank]``; ``constants`` are named as buffers are.

    ``representative_programs`` are those of the ranks that represent all, to predict a step. If there are
    more ranks, ``make_programs`` makes the programs of all when they are first needed. ``options`` records
    those of ``pipec.compile``, as plain values and names; nothing is made of them. ``output_spec`` is the
    structure of the model's output, and ``axes`` maps results whose rows were moved to the front to the
    dimension where the model has them. ``number`` identifies the artifact on every rank. A saved artifact has
    ``ties``, which map the other names of a tied tensor to its first, and the ``unsaved`` buffers, which are
    in no state dict. An artifact equals only itself, so that it can be the key of a cache.
    """

    plan: Plan
    sources: tuple[str, ...]
    representative_programs: Sequence[Program]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    make_programs: Callable[[], Sequence[Program]] | None = None
    output_spec: pytree.TreeSpec | None = None
    axes: Mapping[str, BatchAxis] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    ties: Mapping[str, str] = field(default_factory=dict)
    unsaved: Sequence[str] = ()

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

    def as_saved(self, ties: Mapping[str, str], unsaved: Sequence[str]) -> "Artifact":
        """The artifact with what a reader needs. Raises NotImplementedError for unknown structures."""
        if self.output_spec is not None:
            pytree.dump_structure(self.output_spec)
        return replace(self, ties=ties, unsaved=unsaved)

    def canonical_text(self) -> str:
        """All that ranks must agree on, as one text."""
        programs = map(format_program, self.programs)
        return "\n".join([dump_json(self.plan), *self.sources, *programs])


MicrobatchGroups = list[tuple[Artifact, list[int]]]
"""The artifact of each group of consecutive microbatches of a call, and the sizes of the microbatches."""


@dataclass(frozen=True)
class _Header:
    """The content of ``plan.json``, which nobody edits: ``sha256`` is that of the rest of it."""

    format: str
    sha256: str
    plan: Plan
    interfaces: Sequence[Interface]
    options: Mapping[str, Any]
    ties: Mapping[str, str]
    unsaved: Sequence[str]
    output_spec: str | None
    axes: Mapping[str, BatchAxis]


def load_stage_module(stage: int, source: str) -> types.ModuleType:
    """The module defined by the source of a stage; tracebacks show its lines as ``stage_N.py``.

    Raises:
        ArtifactError: the code cannot be loaded, for example after it was edited.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<pipec {digest}/stage_{stage}.py>"  # debuggers keep such a name
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
    staging = StagingFolder(directory)
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / PLAN).exists():
            raise ArtifactError(
                f"{directory} is not empty and has no {PLAN}, so it is not an artifact of pipec; "
                "choose another directory"
            )
        with staging.discarded_on_failure():
            _write_files(artifact, staging.make(), tensors)
            for name, other in others.items():
                (staging.path / name).mkdir()
                _write_files(other, staging.path / name, None)
            staging.publish()
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise ArtifactError(f"{directory} cannot be written: {error}") from error


def _write_files(artifact: Artifact, folder: Path, tensors: Mapping[str, Tensor] | None) -> None:
    plan = replace(artifact.plan, checked="")  # how closely a run agreed is not the plan's
    interfaces = [interface_of(source, f"stage {k}") for k, source in enumerate(artifact.sources)]
    spec = None if artifact.output_spec is None else pytree.dump_structure(artifact.output_spec)
    header = _Header(
        FORMAT, "", plan, interfaces, artifact.options, artifact.ties, artifact.unsaved, spec, artifact.axes
    )
    header = replace(header, sha256=_digest(header))
    files = {PLAN: dump_json(header, indent=1).encode()}
    files |= {f"stage_{stage}.py": source.encode() for stage, source in enumerate(artifact.sources)}
    files |= {f"rank_{each.rank}.txt": format_program(each).encode() for each in artifact.programs}
    for name, values in ((CONSTANTS, artifact.constants), (TENSORS, tensors or {})):
        if values:
            plain = {key: value.detach().cpu().contiguous() for key, value in values.items()}
            files[name] = safetensors.torch.save(plain)
    write_checksums(folder, {name: write_file(folder / name, data) for name, data in files.items()})


def read_artifact(directory: Path) -> tuple[Artifact, dict[str, Tensor]]:
    """Read and check an artifact, without running its code; returns it with the saved tensors, by FQN.

    Raises:
        ArtifactError: a file is missing, changed, unreadable or of another format.
        VerifyError: a program breaks a rule; the code of a stage does not compile, or has another interface.
    """
    directory = find_folder(directory)
    if not (directory / PLAN).is_file():
        raise ArtifactError(f"{directory} holds no {PLAN}: expected a folder written by Pipeline.save()")
    folder = SavedFolder(directory, ArtifactError, _REMEDY)
    folder.require([PLAN])
    for name in folder.sums:
        folder.check(name)
    header = _read_header(directory / PLAN)
    plan = header.plan
    stages = [f"stage_{stage.index}.py" for stage in plan.stages]
    ranks = [f"rank_{rank}.txt" for rank in range(plan.num_ranks)]
    optional = [name for name in (CONSTANTS, TENSORS) if (directory / name).exists()]
    folder.require([*stages, *ranks, *optional])
    programs = tuple(parse_program(_read_text(directory / name), plan.links) for name in ranks)
    sources = tuple(_read_text(directory / name) for name in stages)
    verify(plan, programs)
    verify_parts(plan, programs)
    for source, expected, name in zip(sources, header.interfaces, stages, strict=True):
        require_interface(source, expected, name)
    found = {name: _read_tensors(directory / name) for name in optional}
    constants, tensors = found.get(CONSTANTS, {}), found.get(TENSORS, {})
    for value in plan.parameters + plan.buffers:
        tensor = {**tensors, **constants}.get(value.name)
        if tensor is not None and (str(tensor.dtype), tuple(tensor.shape)) != (
            f"torch.{value.dtype}",
            value.shape,
        ):
            is_here = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ArtifactError(
                f"{directory}: the plan has {format_value(value)}, but the tensor is {is_here}"
            )
    artifact = Artifact(
        plan,
        sources,
        programs,
        constants,
        header.options,
        output_spec=_structure(header.output_spec),
        axes=header.axes,
        ties=header.ties,
        unsaved=header.unsaved,
    )
    return artifact, tensors


def _structure(text: str | None) -> pytree.TreeSpec | None:
    """A structure of outputs. Raises ArtifactError, as for one with a class that nothing has registered."""
    try:
        return None if text is None else pytree.load_structure(text)
    except (*DAMAGED_DATA_ERRORS, NotImplementedError) as error:
        raise ArtifactError(
            f"output_spec of {PLAN} names no structure of outputs: {type(error).__name__}: {error}; "
            "save the artifact once more"
        ) from error


_REMEDY = (
    "Restore the file, save the pipeline again, or if you meant to change it: "
    f"`sha256sum *.* > {CHECKSUMS}` in that folder"
)


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
    if header.sha256 != _digest(replace(header, sha256="")):
        raise ArtifactError(
            f"{path} is not the plan that was compiled: it was edited. The code of stages and the programs "
            "may be edited, but not the plan; restore it, or save the pipeline again"
        )
    return header


def _digest(header: _Header) -> str:
    return hashlib.sha256(dump_json(header).encode()).hexdigest()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{path} is not a safetensors file: {error}") from error
