"""Keeps compiled calls for later processes: their keys, their form on disk, and what a process makes of them.

Dynamo traces in each process, which gives this process's own guards. What follows is a function of the key:
the trace as text, the call, the options, torch's state, and the versions of all that takes part. A call on a
graph that is known, such as an evaluation after a step, has the text of that graph in its key.
"""

import base64
import copy
import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import sympy
import torch
from torch import Tensor, fx

import pipec
from pipec import torch_compat
from pipec.artifact.artifact import Artifact
from pipec.artifact.plan_rules import check_plan, check_tensors
from pipec.artifact.verification import verify_artifact
from pipec.capture.trace_text import TraceText, UnknownValueError, describe
from pipec.compiler.candidate import Candidate
from pipec.compiler.disk_cache import DiskCache
from pipec.compiler.microbatch_groups import CompiledArtifact
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.staged_graph import StagedGraph
from pipec.console import notice
from pipec.errors import DAMAGED_DATA_ERRORS, PipecError
from pipec.graph import Assignment, TrainingGraph
from pipec.graph.size_text import format_guard
from pipec.ir import Mode, Placement, Plan, Sizes, SyncSpec
from pipec.ir.batch_axis import BatchAxis
from pipec.ir.json_form import dump_json, parse_json
from pipec.ir.text_format import format_program, holds, parse_program
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.follow_placement import FollowPlacement
from pipec.passes.pass_dump import requested_pass_dumps
from pipec.schedules import foreign_schedule
from pipec.torch_compat import pytree

log = logging.getLogger("pipec")

FORMAT = "pipec compiled call 1"

DAMAGED = (PipecError, safetensors.SafetensorError, *DAMAGED_DATA_ERRORS)


@dataclass(frozen=True)
class Decisions:
    """What a call decided for later ones: the fields in which a candidate differs from the one before."""

    source: str
    num_ranks: int
    replicas: int | tuple[int, ...]
    is_synchronous_only: bool
    num_microbatches: int | None
    adjacent_pipelines: bool
    placement: Placement | None
    cut: FollowPlacement | None
    tunes_replicas: bool
    tunes_shard: bool
    sync_spec: SyncSpec

    @classmethod
    def of(cls, decided: Candidate) -> "Decisions":
        policy = decided.policy
        return cls(
            str(policy.source),
            policy.num_ranks,
            policy.replicas,
            policy.is_synchronous_only,
            decided.num_microbatches,
            decided.adjacent_pipelines,
            decided.placement,
            decided.cut,
            decided.tunes_replicas,
            decided.tunes_shard,
            decided.options.sync_spec,
        )

    def applied(self, candidate: Candidate) -> Candidate:
        """The candidate with these decisions."""
        policy = replace(
            candidate.policy,
            source=self.source,
            num_ranks=self.num_ranks,
            replicas=self.replicas,
            is_synchronous_only=self.is_synchronous_only,
        )
        return replace(
            candidate,
            policy=policy,
            options=replace(candidate.options, sync_spec=self.sync_spec),
            num_microbatches=self.num_microbatches,
            adjacent_pipelines=self.adjacent_pipelines,
            placement=self.placement,
            cut=self.cut,
            tunes_replicas=self.tunes_replicas,
            tunes_shard=self.tunes_shard,
        )


@dataclass(frozen=True)
class Cut:
    """A cut graph: its stages, the sizes for which it is valid, and the options in which cuts may differ."""

    stages: tuple[int, ...]
    num_stages: int
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    split: tuple[int, ...]
    sync_spec: SyncSpec
    has_profile: bool
    guards: tuple[str, ...]
    symbols: tuple[str, ...]

    @classmethod
    def of(cls, staged: StagedGraph) -> "Cut":
        graph, options = staged.graph, staged.options
        if isinstance(graph, RestoredGraph):
            restored: Cut = graph.kept.cut
            return restored
        return cls(
            *(graph.assignment.stages, graph.assignment.num_stages, graph.assignment.ranks),
            *(graph.assignment.replicas, tuple(sorted(graph.assignment.split))),
            *(options.sync_spec, options.profile is not None),
            tuple(format_guard(guard, graph.symbols) for guard in graph.guards),
            tuple(dict.fromkeys(graph.variable_symbols.values())),
        )

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.stages, self.num_stages, self.ranks, self.replicas, frozenset(self.split))

    def options(self, options: CompilerOptions) -> CompilerOptions:
        profile = options.profile if self.has_profile else None
        return replace(options, sync_spec=self.sync_spec, profile=profile)


@dataclass(frozen=True)
class StoredCall:
    """A compiled call as it is on disk, with what was logged, each with its level, and the warnings.

    ``traced`` has the names that constants have in the trace, if they are tensors of the program; it is None
    if that is not known.
    """

    format: str
    key: str
    plan: Plan
    sources: tuple[str, ...]
    programs: tuple[str, ...]
    constants: str
    traced: Mapping[str, str] | None
    axes: Mapping[str, BatchAxis]
    decisions: Decisions
    cut: Cut
    said: tuple[tuple[int, str], ...]
    warned: tuple[str, ...]

    @functools.cached_property
    def artifact(self) -> Artifact:
        """The artifact, verified as one that is loaded. Raises one of ``DAMAGED`` if it is damaged."""
        where = Path("the compilation cache")
        check_plan(self.plan, where)
        programs = tuple(parse_program(text, self.plan.links) for text in self.programs)
        constants = safetensors.torch.load(base64.b64decode(self.constants)) if self.constants else {}
        check_tensors(self.plan, constants, where)
        artifact = Artifact(self.plan, self.sources, programs, constants)
        verify_artifact(artifact)
        for guard in self.cut.guards:
            holds(guard, {"b": 2, **self.plan.planned_sizes})
        return artifact

    def graph(
        self, mode: Mode, text: str, output_spec: pytree.TreeSpec | None, constants: Mapping[str, Tensor]
    ) -> "RestoredGraph":
        """What takes the place of the graph; the guards of the model are still missing.

        ``constants`` are those of this process, by name.
        """
        return RestoredGraph(
            fx.GraphModule(torch.nn.Module(), fx.Graph()),
            mode,
            (),
            (),
            self.plan.microbatch_size,
            variables=self.plan.variables,
            planned_sizes=self.plan.planned_sizes,
            variable_symbols={sympy.Symbol(name): name for name in self.cut.symbols},
            output_spec=output_spec,
            constants={name: constants.get(name, x) for name, x in self.artifact.constants.items()},
            repeated=self.plan.repeated,
            text=text,
            kept=self,
        )


@dataclass(frozen=True)
class RestoredGraph(TrainingGraph):
    """A graph of which this process has the trace alone: it has no nodes, and the guards of this process.

    ``recapture`` makes the graph itself, as it was cut; None if this must begin anew.
    """

    recapture: Callable[[], TrainingGraph] | None = None
    kept: Any = field(kw_only=True)

    def is_valid_for(self, microbatch_size: int, values: Sizes | None = None) -> bool:
        if not microbatch_size:
            return True
        sizes = {"b": microbatch_size, **self.planned_sizes, **(values or {})}
        if any(sizes[name] != size for name, size in self.fixed_sizes.items()):
            return False
        return all(holds(guard, sizes) for guard in self.kept.cut.guards)

    def recaptured(self, lookup: "Lookup | None") -> TrainingGraph | None:
        """The graph itself, captured again; None if it, or this process, is not the same any more."""
        return None if lookup and not lookup.is_of_process(self) else self._recaptured

    @functools.cached_property
    def _recaptured(self) -> TrainingGraph | None:
        """The graph itself, captured again in silence."""
        try:
            with _muted():
                graph = self.recapture() if self.recapture else None
        except PipecError as error:
            log.debug("a graph cannot be captured again: %s", error)
            return None
        return graph if graph is not None and graph.text == self.text else None


@contextmanager
def _muted() -> Iterator[None]:
    """Log nothing from this thread."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread  # a record has no thread with logging.logThreads = False

    log.filters.insert(0, is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


class RestoredStages(StagedGraph):
    """The stages of a restored graph. Only ``graph``, ``captured`` and ``options`` are there."""

    def __init__(self, graph: RestoredGraph, options: CompilerOptions) -> None:
        self.graph = self.captured = self._restored = graph
        self.options, self._uncut, self._known, self._dumps = options, None, {}, []

    def recaptured(self, lookup: "Lookup | None") -> StagedGraph | None:
        """The cut graph itself, or None if it is not the same any more."""
        graph, cut = self._restored.recaptured(lookup), self._restored.kept.cut
        if graph is None:
            return None
        return StagedGraph(graph, AssignStages(cut.assignment), cut.options(self.options))


class Lookup:
    """Looks up one call, and notes what its compilation says, to keep it.

    ``process_text`` says what the compilation reads of this process, and ``request_text`` all else, besides
    the graph and the candidate. The text of a graph ends with a digest of the former, from when it was
    captured.
    """

    def __init__(
        self,
        cache: DiskCache,
        process_text: Callable[[], str],
        request_text: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._cache: DiskCache | None = cache
        self._warn, self._thread = warn, threading.get_ident()
        self._times = [time.perf_counter()]
        self._request = self._text = ""
        self._key: str | None = None
        self._tensors: Mapping[str, Tensor] | None = None
        self._said: list[tuple[int, str]] = []
        self._warned: list[str] = []
        try:
            process = process_text()
            self._request = request_text()
        except Exception as error:  # whatever fails, the call is compiled
            self._refuse(str(error))
            self._cache, process = None, f"unknown: {error}"
        self._process = hashlib.sha256(process.encode()).hexdigest()

    def without_cache(self) -> "Lookup":
        """A lookup that gives graphs the same texts, and neither finds nor keeps anything."""
        lookup = copy.copy(self)
        lookup._cache = None
        return lookup

    def is_of_process(self, graph: TrainingGraph) -> bool:
        """Whether a graph was captured while this process was as it is now."""
        return graph.text.endswith(self._process)

    def warn(self, warning: str) -> None:
        self._warned.append(warning)
        self._warn(warning)

    def filter(self, record: logging.LogRecord) -> bool:
        is_own = threading.get_ident() == self._thread  # others tell the progress
        if record.levelno >= logging.INFO and is_own:
            self._said.append((record.levelno, record.getMessage()))
        return True

    @contextmanager
    def listening(self) -> Iterator["Lookup"]:
        """Note what is logged meanwhile, before filters of the script change or drop it."""
        log.filters.insert(0, self)
        try:
            yield self
        finally:
            log.removeFilter(self)

    def find_traced(
        self, candidate: Candidate, mode: Mode, trace: Callable[[], TraceText]
    ) -> tuple[str, RestoredGraph | None]:
        """The text of a trace, and what takes the place of its graph if it was kept."""
        self._key = None
        try:
            found = trace()
        except Exception as error:
            self._refuse(str(error) if isinstance(error, UnknownValueError) else repr(error))
            return "", None
        text = f"{found.text}\n{self._process}"
        kept = self.find(candidate, text)
        self._tensors = found.tensors
        if kept is None or kept.traced is None or not {*kept.traced.values()} <= found.tensors.keys():
            return text, None
        constants = {name: found.tensors[traced] for name, traced in kept.traced.items()}
        return text, kept.graph(mode, text, found.output_spec, constants)

    def find(self, candidate: Candidate, text: str, known: StagedGraph | None = None) -> StoredCall | None:
        """The call that was kept for a graph of this text, which was cut as the ``known`` one, if any."""
        self._key, self._text, self._tensors, self._said, self._warned = None, text, None, [], []
        if self._cache is None or not text:
            return None
        self._times.append(time.perf_counter())
        try:
            if foreign := foreign_schedule(str(candidate.policy.source)):
                raise UnknownValueError(f"the schedule {foreign} is not pipec's own")
            cut = describe(Cut.of(known) if known else None)
            self._key = "\n".join([FORMAT, self._process, self._request, describe(candidate), cut, text])
        except Exception as error:
            self._refuse(str(error) if isinstance(error, UnknownValueError) else repr(error))
            return None
        data = self._cache.read(self._key)
        return None if data is None else self._parsed(data)

    def repeat(self, kept: StoredCall) -> None:
        """Say again what compiling the call said."""
        for level, message in kept.said:
            log.log(level, "%s", message)
        for warning in kept.warned:
            self._warn(warning)
        begun, traced = self._times[0], self._times[-1]
        notice(
            "traced in %.1f s, and read from the compilation cache in %.1f s",
            traced - begun,
            time.perf_counter() - traced,
        )

    def _parsed(self, data: bytes) -> StoredCall | None:
        assert self._cache is not None
        try:
            kept = parse_json(StoredCall, data)
            if kept.format != FORMAT or kept.key != self._key:
                return None
            assert kept.artifact
        except DAMAGED as error:
            log.debug("an entry of the compilation cache is damaged: %s", error)
            return None
        return kept

    def keep(
        self,
        candidate: Candidate,
        decided: Candidate,
        staged: StagedGraph,
        compiled: CompiledArtifact,
    ) -> None:
        """Keep what was compiled on the graph that was looked up last, if all of it has a form on disk."""
        graph, artifact = staged.captured, compiled.artifact
        if not graph.text:
            self._refuse("Dynamo has not traced it for any number of rows")
        elif graph.batch is None or graph.input_branches.branches:
            self._refuse("its graph depends on the values of arguments, or on their number of rows")
        elif self._cache is not None and self._key is not None and graph.text == self._text:
            try:
                kept = StoredCall(
                    FORMAT,
                    self._key,
                    artifact.plan,
                    artifact.sources,
                    tuple(map(format_program, artifact.representative_programs)),
                    _encoded(artifact.constants),
                    _traced(staged.graph.constants, self._tensors),
                    compiled.axes,
                    Decisions.of(decided),
                    Cut.of(staged),
                    tuple(self._said),
                    tuple(self._warned),
                )
                data = dump_json(kept).encode()
                lost = _lost(parse_json(StoredCall, data), candidate, decided, staged, artifact)
            except Exception as error:
                lost = f"it has no form on disk: {error!r}"
            if lost:
                self._refuse(lost)
            else:
                self._cache.write(self._key, data)

    def _refuse(self, reason: str) -> None:
        if self._cache is not None:
            _say_once(f"a compiled call is not kept in the compilation cache: {reason}")


@functools.cache
def _say_once(message: str) -> None:
    log.info("%s", message)


def _lost(
    read: StoredCall, candidate: Candidate, decided: Candidate, staged: StagedGraph, artifact: Artifact
) -> str:
    """What is not the same in the form on disk; empty if nothing is lost."""
    restored = read.decisions.applied(candidate)
    same = {
        "programs": [*artifact.representative_programs] == [*read.artifact.programs],
        "plan": read.plan == artifact.plan,
        "decisions": replace(restored, cut=None) == replace(decided, cut=None),
        "options of the cut": read.cut.options(candidate.options) == staged.options,
        "assignment": read.cut.assignment == staged.graph.assignment,
        "constants": all(
            describe(x) == describe(read.artifact.constants[name]) for name, x in artifact.constants.items()
        ),
    }
    return next((f"its {what} would not be the same" for what, is_same in same.items() if not is_same), "")


def _traced(
    constants: Mapping[str, Tensor], tensors: Mapping[str, Tensor] | None
) -> Mapping[str, str] | None:
    """The names of constants in the trace, if they are tensors of it; None if the trace is not known."""
    if tensors is None:
        return None if constants else {}
    names = {id(tensor): name for name, tensor in tensors.items()}
    return {name: names[id(x)] for name, x in constants.items() if id(x) in names}


def _encoded(constants: Mapping[str, Tensor]) -> str:
    held = {name: tensor.detach().contiguous() for name, tensor in constants.items()}
    return base64.b64encode(safetensors.torch.save(held)).decode() if held else ""


def process_text(gpu: bool) -> str:
    """The versions and the settings on which every compilation depends. Raises UnknownValueError."""
    if replaced := torch_compat.replaced_code():
        raise UnknownValueError(replaced)
    if requested_pass_dumps():
        raise UnknownValueError("the graph after each pass is dumped")
    return "\n".join(
        f"{name}: {describe(value)}"
        for name, value in {
            **torch_compat.global_state(gpu),
            "pipec": _source_digest(),
        }.items()
    )


def _source_digest() -> str:
    """A digest of pipec's own source. Raises UnknownValueError if it changed since pipec was imported."""
    folder = Path(pipec.__file__).parent
    paths = sorted(folder.rglob("*.py"))
    for path in paths:
        if path.stat().st_ctime > pipec._IMPORTED:  # a copy may keep its time of modification
            raise UnknownValueError(f"{path} changed after it was imported")
    return _digest_of_files(folder, tuple(paths))


@functools.cache
def _digest_of_files(folder: Path, paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(
            f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()
