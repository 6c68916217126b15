"""Writing a checkpoint: every process its part of the tensors, and rank 0 the rest."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from pipec.checkpoint.directory import Workplace, require_own
from pipec.checkpoint.document import DOCUMENT, Document, RandomStates, SchedulerState, random_state
from pipec.checkpoint.hugging_face import index_name, write_config
from pipec.checkpoint.manifest import FileSum, sum_of, write_file, write_manifest
from pipec.checkpoint.optimizers import merged, parse_state, parts_of
from pipec.checkpoint.parts import Part, Stored, agree_on, gathered
from pipec.checkpoint.tensors import TensorWriter
from pipec.checkpoint.together import on_all, once, require_equal
from pipec.checkpoint.training import PROFILE, Training
from pipec.checkpoint.values import encoded
from pipec.errors import InputError

Sums = dict[str, FileSum]


def save(directory: Path, training: Training, extra: Any, known: str | None) -> str:
    """Write a checkpoint, in place of the one with the digest ``known``; returns its own digest.

    Every process calls it. Whatever happens, ``directory`` holds the checkpoint before, or this one.

    Raises:
        CheckpointError: it cannot be written, or the directory holds something else. The one before stays.
        InputError: something of it cannot be saved, or differs from rank to rank.
    """
    ranks, place = training.ranks, Workplace(directory)
    document, state = _document(training, extra)
    loads: dict[int, int] = {}
    families = {
        "model": (agree_on(training.parts, ranks, loads), training.parts),
        "optimizer": (agree_on(state, ranks, loads), state),
    }
    doing = f"saving to {directory}"

    def begin() -> str:
        require_own(directory, known)
        return place.make()

    def finish() -> str:
        sums = {name: FileSum(*each) for own in every for name, each in own.items()}
        sums |= _write_rest(partial, document, training, families["model"][0])
        digest = write_manifest(partial, sums)
        require_own(directory, known)
        place.publish()
        return digest

    try:
        partial = Path(once(ranks, doing, begin))
        every = on_all(ranks, doing, lambda: _write_own(partial, families, training))
        return once(ranks, doing, finish)  # type: ignore[no-any-return]
    except BaseException:
        if ranks.world.rank == 0:
            place.discard()
        raise


def _document(training: Training, extra: Any) -> tuple[Document, list[Part]]:
    """What all processes agree on, and the tensors that this one has of the optimizers' state."""
    state: list[Part] = []

    def describe() -> dict[str, Any]:
        nonlocal state
        training.require_memory()
        optimizer = None
        if training.optimizers is not None:
            optimizer, state = parts_of(training.optimizers, training.names, training.shapes)
        return {
            "random": random_state(),
            "optimizer": None if optimizer is None else asdict(optimizer),
            "schedulers": [asdict(SchedulerState.of(each)) for each in training.schedulers],
            "extra": _digest(encoded(extra, "extra")),
        }

    every = on_all(training.ranks, "describing the training", describe)
    require_equal([each["extra"] for each in every], "extra", "collect on every rank what all of them have")
    schedulers = [each["schedulers"] for each in every]
    require_equal(schedulers, "the scheduler", "let the same schedulers step on every rank")
    found = [parse_state(each["optimizer"]) for each in every if each["optimizer"] is not None]
    if found and len(found) < len(every):
        raise InputError("some ranks passed an optimizer and others did not; pass it on every rank")
    optimizer = merged(found, list(training.shapes)) if found else None
    return (
        Document(
            training.num_steps,
            dict(training.ties),
            list(training.frozen),
            RandomStates.of([each["random"] for each in every]),
            optimizer,
            [SchedulerState(**each) for each in schedulers[0]],
            encoded(extra, "extra"),
        ),
        state,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


Families = dict[str, tuple[list[Stored], Sequence[Part]]]


def _files(family: str, stored: Sequence[Stored]) -> Iterator[tuple[str, Stored]]:
    """The file of each tensor. Each process that writes any has one file."""
    writers = sorted({each.writer for each in stored})
    for each in stored:
        number = writers.index(each.writer) + 1
        yield f"{family}-{number:05}-of-{len(writers):05}.safetensors", each


def _write_own(partial: Path, families: Families, training: Training) -> dict[str, Any]:
    """Write this process's files, and give the others what they write of its parts; the sums of the files."""
    ranks, writers = training.ranks, dict[str, TensorWriter]()
    for family, (stored, parts) in families.items():
        own = [(file, each) for file, each in _files(family, stored) if each.writer == ranks.world.rank]
        kinds = {each.name: each.kind for _, each in own}
        for file, _ in own[:1]:
            writers[file] = TensorWriter(partial / file, kinds)
        for tensor in gathered(stored, parts, ranks):
            writers[own[0][0]].write(tensor)
    return {file: astuple(writer.finish()) for file, writer in writers.items()}


def _write_rest(partial: Path, document: Document, training: Training, weights: Sequence[Stored]) -> Sums:
    """What rank 0 writes: the document, the profile, and what the libraries of Hugging Face look for."""
    files = {each.name: file for file, each in _files("model", weights)}
    size = sum(each.kind.num_bytes for each in weights)
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=1).encode()
    write_config(training.model, partial)
    if training.profile is not None:
        training.profile.save(partial / PROFILE)
    beside = {file.name: sum_of(file) for file in partial.glob("*.json")}
    return {
        **beside,
        index_name(training.model): write_file(partial / index_name(training.model), index),
        DOCUMENT: write_file(partial / DOCUMENT, document.text()),
    }
