"""Writing a checkpoint: every process its part of the tensors, and rank 0 the rest."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.directory import Workplace, require_own
from pipec.checkpoint.document import DOCUMENT, Document, RandomStates, SchedulerState, random_state
from pipec.checkpoint.folder import Destined, Sums, files_of, index_of, write_rest, write_tensors, writers_of
from pipec.checkpoint.hugging_face import index_name, write_config
from pipec.checkpoint.manifest import FileSum
from pipec.checkpoint.optimizers import merged, parse_state, parts_of
from pipec.checkpoint.parts import Part, Stored, agree_on, gathered
from pipec.checkpoint.positions import described
from pipec.checkpoint.tensors import TensorWriter
from pipec.checkpoint.together import Voices, on_all, once, require_equal
from pipec.checkpoint.training import PROFILE, Training
from pipec.checkpoint.values import encoded
from pipec.errors import InputError
from pipec.runtime.step.execution import Aside


def draft(
    directory: Path,
    training: Training,
    extra: Any,
    own: dict[Path, str],
    copies: bool,
    then: Callable[[], object],
) -> Callable[[], None]:
    """Begin a checkpoint. It may replace one that this run has ``own``, by the digest that is kept there.

    What this returns writes it; ``then`` is called in the first process when it is there. If this ``copies``
    what is to be written, another thread may do that while the training goes on. Every process calls both.
    Whatever happens, ``directory`` holds the checkpoint before, or this one.

    Raises:
        CheckpointError: it cannot be written, or the directory holds something else. The one before stays.
        InputError: something of it cannot be saved, or differs from rank to rank.
    """
    made = Draft(directory, training, extra, own.get(directory))
    voices: Voices = training.ranks
    if copies:
        voices = aside = training.ranks.aside()
        tensors = _while_all_live(aside, made.copies())
    else:
        tensors = made.tensors()

    def write() -> None:
        own[directory] = made.complete(voices, tensors)
        once(voices, f"tidying up after saving to {directory}", then)

    return write


def _while_all_live(aside: Aside, tensors: Iterable[Destined]) -> Iterator[Destined]:
    """The tensors, until another process ends: this one waits for the last of them before it ends, too."""
    for each in tensors:
        aside.check()
        yield each


class Draft:
    """A checkpoint that has been begun: a folder beside its place, with the files that are to be written.

    Their threads are there from now on: a process that ends can wait for them, and start no other.
    """

    def __init__(self, directory: Path, training: Training, extra: Any, known: str | None) -> None:
        document, state = _document(training, extra)
        loads: dict[int, int] = {}
        self._parts = {"model": training.parts, "optimizer": state}
        self._stored = {name: agree_on(parts, training.ranks, loads) for name, parts in self._parts.items()}
        self._files = {family: files_of(family, stored) for family, stored in self._stored.items()}
        self._directory, self._known = directory, known
        self._writers: dict[str, TensorWriter] = {}
        self._ranks, self._rank = training.ranks, training.ranks.world.rank
        self._place = Workplace(directory)
        self._doing = f"saving to {directory}"
        self._texts = {
            DOCUMENT: document.text(),
            index_name(training.model): index_of(self._files["model"]),
        }

        def begin() -> str:
            require_own(directory, known)
            path = self._place.make()
            write_config(training.model, Path(path))
            if training.profile is not None:
                training.profile.save(Path(path) / PROFILE)
            return path

        with self._discarded_on_failure():
            self._partial = Path(once(training.ranks, self._doing, begin))
        self._writers = writers_of(self._partial, self._own_files())

    def tensors(self) -> Iterator[Destined]:
        """Those that this process writes, with the file of each. Every process takes all of its own."""
        for family, files in self._files.items():
            file_of = {each.name: file for file, stored in files.items() for each in stored}
            for each, tensor in gathered(self._stored[family], self._parts[family], self._ranks):
                yield file_of[each.name], each, tensor

    def copies(self) -> list[Destined]:
        """The same in memory of the host that nothing else uses."""
        own = [(file, each) for file, stored in self._own_files().items() for each in stored]
        memory: dict[tuple[str, str], Tensor] = {}

        def make_room() -> None:
            for file, each in own:
                memory[file, each.name] = torch.empty(each.kind.shape, dtype=each.kind.torch_dtype)

        with self._discarded_on_failure():
            on_all(self._ranks, f"copying what is to be saved to {self._directory}", make_room)
            copies = []
            for file, each, tensor in self.tensors():
                copy = memory[file, each.name].copy_(tensor.view(each.kind.shape))
                copies.append((file, each, copy))
            return copies

    def complete(self, voices: Voices, tensors: Iterable[Destined]) -> str:
        """Write what is missing, and let the checkpoint come to its place; returns its digest."""
        with self._discarded_on_failure():
            every = on_all(voices, self._doing, lambda: self._write(tensors))
            sums = {name: FileSum(*each) for own in every for name, each in own.items()}
            return once(voices, self._doing, lambda: self._publish(sums))  # type: ignore[no-any-return]

    def _own_files(self) -> dict[str, list[Stored]]:
        every = {file: stored for files in self._files.values() for file, stored in files.items()}
        return {file: stored for file, stored in every.items() if stored[0].writer == self._rank}

    def _write(self, tensors: Iterable[Destined]) -> dict[str, Any]:
        """Write this process's files; the sums of them. The others are given what they write."""
        sums = write_tensors(self._writers, tensors)
        return {file: astuple(each) for file, each in sums.items()}

    def _publish(self, sums: Sums) -> str:
        """What rank 0 does last: the small files, the sums of all, and the renames."""
        digest = write_rest(self._partial, sums, self._texts)
        require_own(self._directory, self._known)
        self._place.publish()
        return digest

    @contextlib.contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for writer in self._writers.values():
                writer.abandon()
            if self._rank == 0:
                self._place.discard()
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
            "position": described(training.position),
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
            [each["position"] for each in every[: training.num_replicas]],
            encoded(extra, "extra"),
            training.loss_scale,
        ),
        state,
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
