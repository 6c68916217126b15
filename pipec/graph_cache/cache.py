"""Capture a call, or read what another process captured of the same call of the same model.

What decides a capture is told in two ways, and a kept graph is used only if both agree. Its name is a mark of
all that can be seen beforehand: versions, the files of all imported modules, the model's classes, tensors and
attributes, the call, and torch's switches. In the file stand besides the code that was traced, and every
place that it read, each with a mark of what was there. Both are looked up among the living objects, so that
it does not matter how an attribute, a global or a function came to be another one. What cannot be compared
is captured anew in every process; the log says why.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipec.capture import tracer
from pipec.capture.attributes import readable_values
from pipec.capture.call import Call
from pipec.capture.step import Step, model_names, step_of
from pipec.graph import Assumptions, TrainingGraph
from pipec.graph_cache import files, folder
from pipec.graph_cache.code import require_code, traced_code
from pipec.graph_cache.document import read_graph, write_graph
from pipec.graph_cache.key import key_of
from pipec.graph_cache.marks import UnfaithfulError, forget_classes, tensor_mark
from pipec.graph_cache.readings import KeptGuards, Reading, readings
from pipec.ir import Mode
from pipec.torch_compat import Guards, Place

log = logging.getLogger("pipec")

_imported_by_capture: set[str] = set()


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    mode: Mode,
    call: Call,
    canonical: Mapping[str, str],
    device: torch.device,
    batch: Call,
    **options: Any,
) -> TrainingGraph:
    """As ``pipec.capture.capture``, whose ``options`` these are.

    ``batch`` has no part in the name of what is kept: its values decide branches alone, and a graph with
    branches is not kept.
    """

    def captured() -> TrainingGraph:
        return tracer.capture(model, loss_fn, mode, call, canonical, device, batch=batch, **options)

    where = folder.cache_folder()
    if where is None:
        return captured()
    forget_classes()
    step = step_of(model, loss_fn, mode, call, options["outputs"], options.get("variables", ()))
    modules = files.imported() - _imported_by_capture
    try:
        _require_unchanged(modules)
        named = {"mode": mode, "canonical": sorted(canonical.items()), **options}
        key = key_of(step, call, device, {name: repr(value) for name, value in named.items()}, modules)
    except UnfaithfulError as error:
        log.debug("no captured graph is kept: %s", error)
        return captured()
    known = _loaded(where, key, step, canonical)
    return known if known is not None else _captured_and_kept(captured, where, key, canonical)


def _require_unchanged(modules: set[str]) -> None:
    if changed := files.changed_since_start(modules):
        raise UnfaithfulError(f"the file of {changed[0]} was changed since this process began")


def _loaded(where: Path, key: str, step: Step, canonical: Mapping[str, str]) -> TrainingGraph | None:
    """The graph of this name, if what it was made of is what is here."""
    document = folder.load(where, key)
    if document is None:
        return None
    try:
        graph = _read(document, step, canonical)
    except UnfaithfulError as error:
        log.debug("the captured graph %s is not used: %s", key, error)
        return None
    except (LookupError, TypeError, ValueError) as error:
        log.warning("the captured graph %s cannot be read, and is made again: %r", key, error)
        return None
    log.info("the graph of an earlier process is used instead of a capture: %s", where / f"{key}.json")
    for warning in document["warnings"]:
        log.warning("%s", warning)
    return graph


def _captured_and_kept(
    captured: Callable[[], TrainingGraph], where: Path, key: str, canonical: Mapping[str, str]
) -> TrainingGraph:
    before = files.imported()
    with _warnings_noted() as warnings:
        graph = captured()
    new = files.imported() - before
    _imported_by_capture.update(new)
    try:
        _require_unchanged(new)
        document = _written(graph, canonical, new)
    except UnfaithfulError as error:
        log.debug("the captured graph is not kept: %s", error)
        return graph
    folder.store(where, key, {**document, "warnings": warnings})
    return graph


def _written(graph: TrainingGraph, canonical: Mapping[str, str], imported: set[str]) -> dict[str, Any]:
    """What is kept of a graph, and of what it was made of.

    Raises:
        UnfaithfulError: another process could not tell whether it would capture the same.
    """
    step, guards = graph.assumptions.traced, graph.assumptions.guards
    if not isinstance(guards, Guards) or not isinstance(step, Step):
        raise UnfaithfulError("nothing tells what the model's code read")
    if guards.foreign:
        raise UnfaithfulError(f"{guards.foreign[0]} ran while the model was traced")
    tensors = [(place, tensor_mark(tensor)) for place, (tensor, _) in graph.assumptions.versions.items()]
    return {
        "files": {name: [files.path_of(name), digest] for name, digest in files.digests(imported).items()},
        "code": traced_code(guards.code),
        "readings": [asdict(each) for each in readings(guards.read, step)],
        "tensors": [[place.root, [list(each) for each in place.steps], mark] for place, mark in tensors],
        "batched": list(step.batched),
        "graph": write_graph(graph, model_names(step, canonical)[1]),
    }


def _read(document: Mapping[str, Any], step: Step, canonical: Mapping[str, str]) -> TrainingGraph:
    """The graph of a document, about which it takes for granted what the capture did.

    Raises:
        UnfaithfulError: what it was made of is not what is here.
    """
    for name, (path, digest) in document["files"].items():
        if files.file_digest(path) != digest:
            raise UnfaithfulError(f"the file of {name} is another one")
    require_code(document["code"])
    step.batched = tuple(document["batched"])
    guards = KeptGuards([Reading(**each) for each in document["readings"]], step)
    places = []
    for root, steps, mark in document["tensors"]:
        places.append(Place(root, tuple((kind, key) for kind, key in steps)))
        if _mark_at(places[-1], step) != mark:
            raise UnfaithfulError(f"{places[-1]} is another tensor")
    graph = read_graph(document["graph"], model_names(step, canonical)[1])
    return replace(graph, assumptions=Assumptions.of(step, guards, places, readable_values))


def _mark_at(place: Place, step: Step) -> str:
    try:
        return tensor_mark(place.value(step))
    except (LookupError, AttributeError, TypeError) as error:
        raise UnfaithfulError(f"{place} is gone") from error


@contextmanager
def _warnings_noted() -> Iterator[list[str]]:
    """The warnings of a block, which whoever uses what it made should read as well."""
    noted: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield noted
    finally:
        log.removeHandler(handler)
