"""Writing a checkpoint: every process writes its part of the tensors, and rank 0 the rest."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.all_ranks import RankCalls, call_on_all_ranks, call_on_rank_0, require_equal
from pipec.checkpoint.file_layout import (
    Checksums,
    TensorWrite,
    assign_files,
    open_writers,
    weight_index,
    write_small_files,
    write_tensors,
)
from pipec.checkpoint.hugging_face import index_name, write_config
from pipec.checkpoint.manifest import FileChecksum
from pipec.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointMetadata,
    SchedulerState,
    plain_position,
)
from pipec.checkpoint.optimizer_state import merge_states, parse_state, state_shards
from pipec.checkpoint.plain_values import as_text, describe, from_text, plain
from pipec.checkpoint.safetensors_files import TensorWriter
from pipec.checkpoint.shards import SavedTensor, TensorShard, assign_writers, gather_shards
from pipec.checkpoint.staging_directory import StagingDirectory, require_replaceable
from pipec.checkpoint.training_state import PROFILE, TrainingState
from pipec.errors import InputError
from pipec.runtime.step.ranks import BackgroundRanks


def begin_checkpoint(
    directory: Path,
    training: TrainingState,
    extra: Any,
    own: dict[Path, str],
    copies: bool,
    then: Callable[[], object],
) -> Callable[[], None]:
    """Begin a checkpoint; returns a function that writes it. Every process calls both.

    ``own`` has the digests of the checkpoints that this run wrote or loaded, and may replace. ``then`` is
    called on rank 0 when the checkpoint is complete. If the tensors are copied (``copies``), the function may
    run in another thread while the training goes on. At any time, ``directory`` has either the previous
    checkpoint or this one.

    Raises:
        CheckpointError: it cannot be written, or the directory has other contents. The previous one stays.
        InputError: a value cannot be saved, or differs from rank to rank.
    """
    draft = CheckpointDraft(directory, training, extra, own.get(directory))
    rank_calls: RankCalls = training.ranks
    if copies:
        rank_calls = background_ranks = training.ranks.in_background()
        tensors = _while_all_live(background_ranks, draft.copies())
    else:
        tensors = draft.tensors()

    def write() -> None:
        own[directory] = draft.complete(rank_calls, tensors)
        call_on_rank_0(rank_calls, f"tidying up after saving to {directory}", then)

    return write


def _while_all_live(
    background_ranks: BackgroundRanks, tensors: Iterable[TensorWrite]
) -> Iterator[TensorWrite]:
    """The tensors. Raises if another process has ended, so that this one can end, too."""
    for each in tensors:
        background_ranks.check()
        yield each


class CheckpointDraft:
    """A checkpoint that has been begun: a folder beside its place, with open files.

    The files' threads start here: a process that is ending can wait for threads, but cannot start any.
    """

    def __init__(
        self, directory: Path, training: TrainingState, extra: Any, known_digest: str | None
    ) -> None:
        metadata, state = _document(training, extra)
        loads: dict[int, int] = {}
        self._parts = {"model": training.parts, "optimizer": state}
        self._stored = {
            name: assign_writers(parts, training.ranks, loads) for name, parts in self._parts.items()
        }
        self._files = {family: assign_files(family, stored) for family, stored in self._stored.items()}
        self._directory, self._known_digest = directory, known_digest
        self._writers: dict[str, TensorWriter] = {}
        self._ranks, self._rank = training.ranks, training.ranks.world.rank
        self._place = StagingDirectory(directory)
        self._activity = f"saving to {directory}"
        self._texts = {
            METADATA_FILE: metadata.file(),
            index_name(training.model): weight_index(self._files["model"]),
        }

        def begin() -> str:
            require_replaceable(directory, known_digest)
            path = self._place.make()
            write_config(training.model, Path(path))
            if training.profile is not None:
                training.profile.save(Path(path) / PROFILE)
            return path

        with self._discarded_on_failure():
            self._partial = Path(call_on_rank_0(training.ranks, self._activity, begin))
        self._writers = open_writers(self._partial, self._own_files())

    def tensors(self) -> Iterator[TensorWrite]:
        """The tensors that this process writes, each with its file. Every process must iterate to the end."""
        for family, files in self._files.items():
            file_of = {each.name: file for file, stored in files.items() for each in stored}
            for each, tensor in gather_shards(self._stored[family], self._parts[family], self._ranks):
                yield file_of[each.name], each, tensor

    def copies(self) -> list[TensorWrite]:
        """Copies of ``tensors()`` in host memory that nothing else uses."""
        own = [(file, each) for file, stored in self._own_files().items() for each in stored]
        memory: dict[tuple[str, str], Tensor] = {}

        def make_room() -> None:
            for file, each in own:
                memory[file, each.name] = torch.empty(each.spec.shape, dtype=each.spec.torch_dtype)

        with self._discarded_on_failure():
            call_on_all_ranks(self._ranks, f"copying what is to be saved to {self._directory}", make_room)
            copies = []
            for file, each, tensor in self.tensors():
                copy = memory[file, each.name].copy_(tensor.view(each.spec.shape))
                copies.append((file, each, copy))
            return copies

    def complete(self, rank_calls: RankCalls, tensors: Iterable[TensorWrite]) -> str:
        """Write the tensors, and rename the folder to the checkpoint's name; returns its digest."""
        with self._discarded_on_failure():
            every = call_on_all_ranks(rank_calls, self._activity, lambda: self._write(tensors))
            sums = {name: FileChecksum(*each) for own in every for name, each in own.items()}
            return call_on_rank_0(rank_calls, self._activity, lambda: self._publish(sums))  # type: ignore[no-any-return]

    def _own_files(self) -> dict[str, list[SavedTensor]]:
        every = {file: stored for files in self._files.values() for file, stored in files.items()}
        return {file: stored for file, stored in every.items() if stored[0].writer == self._rank}

    def _write(self, tensors: Iterable[TensorWrite]) -> dict[str, Any]:
        """Write this process's files, sending tensors to other writers; returns the files' checksums."""
        sums = write_tensors(self._writers, tensors)
        return {file: astuple(each) for file, each in sums.items()}

    def _publish(self, sums: Checksums) -> str:
        """Write the small files and the manifest, and rename the folder, on rank 0; returns the digest."""
        digest = write_small_files(self._partial, sums, self._texts)
        require_replaceable(self._directory, self._known_digest)
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


def _document(training: TrainingState, extra: Any) -> tuple[CheckpointMetadata, list[TensorShard]]:
    """The metadata, equal on all processes, and this process's tensors of the optimizers' state."""
    state: list[TensorShard] = []

    def describe_own() -> str:
        nonlocal state
        training.require_memory()
        optimizer = None
        if training.optimizers is not None:
            optimizer, state = state_shards(training.optimizers, training.names, training.shapes)
        return as_text(
            {
                "random": torch.get_rng_state(),
                "optimizer": None if optimizer is None else asdict(optimizer),
                "schedulers": [asdict(SchedulerState.of(each)) for each in training.schedulers],
                "position": plain_position(training.position),
                "extra": describe(plain(extra, "extra")),
            }
        )

    texts = call_on_all_ranks(training.ranks, "describing the training", describe_own)
    every = [from_text(each) for each in texts]
    require_equal([each["extra"] for each in every], "extra", "pass the same value on every rank")
    described = [describe(each["schedulers"]) for each in every]
    require_equal(described, "the scheduler", "let the same schedulers step on every rank")
    found = [parse_state(each["optimizer"]) for each in every if each["optimizer"] is not None]
    if found and len(found) < len(every):
        raise InputError("some ranks passed an optimizer and others did not; pass it on every rank")
    optimizer = merge_states(found, list(training.shapes)) if found else None
    return (
        CheckpointMetadata(
            training.num_steps,
            dict(training.ties),
            list(training.frozen),
            [each["random"] for each in every],
            optimizer,
            [SchedulerState(**each) for each in every[0]["schedulers"]],
            [each["position"] for each in every[: training.num_replicas]],
            plain(extra, "extra"),
            training.loss_scale,
        ),
        state,
    )
