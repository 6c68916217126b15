"""Writing a checkpoint: every process writes its part of the tensors, and rank 0 the rest."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.all_ranks import RankCalls, call_on_all_ranks, call_on_rank_0, require_equal
from pipec.checkpoint.hugging_face import index_name, write_config
from pipec.checkpoint.metadata import METADATA_FILE, CheckpointMetadata, SchedulerState, plain_position
from pipec.checkpoint.optimizer_state import merge_states, state_shards
from pipec.checkpoint.plain_values import describe, fields_of, plain
from pipec.checkpoint.shards import (
    SavedTensor,
    TensorShard,
    assign_files,
    assign_writers,
    gather_shards,
    weight_index,
    write_tensors,
)
from pipec.checkpoint.training_state import TrainingState
from pipec.errors import CheckpointError, InputError
from pipec.runtime.step.ranks import BackgroundRanks
from pipec.saved_folders import (
    CHECKSUMS,
    SavedFolder,
    StagingFolder,
    find_folder,
    sync_file,
    write_checksums,
    write_file,
)

OwnTensors = Iterable[tuple[SavedTensor, Tensor]]
"""The tensors that this process writes."""


def begin_checkpoint(
    directory: Path,
    training: TrainingState,
    extra: Any,
    own: dict[Path, str],
    copies: bool,
    then: Callable[[], object] | None,
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
    ranks, activity, known = training.ranks, f"saving to {directory}", own.get(directory)
    metadata, state = _document(training, extra)
    loads: dict[int, int] = {}
    weights, states = (assign_writers(each, ranks, loads) for each in (training.parts, state))
    index = assign_files("model", weights)
    files = index | assign_files("optimizer", states)
    staging = StagingFolder(directory)

    def begin() -> str:
        require_replaceable(directory, known)
        folder = staging.make()
        write_config(training.model, folder)
        return str(folder)

    with staging.discarded_on_failure():
        folder = Path(call_on_rank_0(ranks, activity, begin))
        tensors: OwnTensors = itertools.chain(
            gather_shards(weights, training.parts, ranks), gather_shards(states, state, ranks)
        )
        rank_calls: RankCalls = ranks
        if copies:
            rank_calls = background = ranks.in_background()
            own_tensors = [each for each in [*weights, *states] if each.writer == ranks.world.rank]
            tensors = _while_all_live(background, _copied(training, activity, own_tensors, tensors))

    def publish(sums: dict[str, str]) -> str:
        sums |= {file.name: sync_file(file) for file in folder.glob("*.json")}
        small = {METADATA_FILE: metadata.file(), index_name(training.model): weight_index(index)}
        sums |= {name: write_file(folder / name, data) for name, data in small.items()}
        digest = write_checksums(folder, sums)
        require_replaceable(directory, known)
        staging.publish()
        return digest

    def write() -> None:
        with staging.discarded_on_failure():
            every = call_on_all_ranks(
                rank_calls, activity, lambda: write_tensors(folder, files, ranks.world.rank, tensors)
            )
            sums = {name: digest for each in every for name, digest in each.items()}
            own[directory] = call_on_rank_0(rank_calls, activity, lambda: publish(sums))
        if then is not None:
            call_on_rank_0(rank_calls, f"tidying up after saving to {directory}", then)

    return write


def require_replaceable(directory: Path, known_digest: str | None) -> None:
    """Refuse to replace anything but the checkpoint ``known_digest``, which this run wrote or loaded.

    Raises:
        CheckpointError: the directory holds something else.
    """
    place = find_folder(directory)
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / CHECKSUMS).is_file() or not (place / METADATA_FILE).is_file():
        raise CheckpointError(f"{place} exists and is not a checkpoint of pipec; choose another directory")
    if SavedFolder(place, CheckpointError, "Choose another directory").digest != known_digest:
        raise CheckpointError(
            f"{place} has a checkpoint that this run has neither written nor loaded: another run writes "
            "to it, or has written it. Load it first to go on from it, choose another directory, "
            "or delete it"
        )


def _copied(
    training: TrainingState, activity: str, own: list[SavedTensor], tensors: OwnTensors
) -> list[tuple[SavedTensor, Tensor]]:
    """Copies of the tensors in host memory that nothing else uses. Raises if any process lacks the room."""
    memory: list[Tensor] = []

    def make_room() -> None:
        memory.extend(torch.empty(each.spec.shape, dtype=each.spec.dtype) for each in own)

    call_on_all_ranks(training.ranks, f"copying what is to be saved, {activity},", make_room)
    return [(each, room.copy_(x)) for room, (each, x) in zip(memory, tensors, strict=True)]


def _while_all_live(
    background_ranks: BackgroundRanks, tensors: OwnTensors
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """The tensors. Raises if another process has ended, so that this one can end, too."""
    for each in tensors:
        background_ranks.check()
        yield each


def _document(training: TrainingState, extra: Any) -> tuple[CheckpointMetadata, list[TensorShard]]:
    """The metadata, equal on all processes, and this process's tensors of the optimizers' state."""
    state: list[TensorShard] = []

    def describe_own() -> dict[str, Any]:
        training.require_memory()
        optimizer = None
        if training.optimizers is not None:
            optimizer, tensors = state_shards(training.optimizers, training.names, training.specs)
            state.extend(tensors)
        return {
            "random": torch.get_rng_state(),
            "optimizer": optimizer,
            "schedulers": [SchedulerState.of(each) for each in training.schedulers],
            "position": plain_position(training.position),
            "extra": describe(plain(extra, "extra")),
        }

    every = call_on_all_ranks(training.ranks, "describing the training", describe_own)
    require_equal([each["extra"] for each in every], "extra", "pass the same value on every rank")
    described = [describe(fields_of(each["schedulers"])) for each in every]
    require_equal(described, "the scheduler", "let the same schedulers step on every rank")
    found = [each["optimizer"] for each in every if each["optimizer"]]
    if found and len(found) < len(every):
        raise InputError("some ranks passed an optimizer and others did not; pass it on every rank")
    metadata = CheckpointMetadata(
        num_steps=training.num_steps,
        ties=dict(training.ties),
        frozen=list(training.frozen),
        random=[each["random"] for each in every],
        optimizer=merge_states(found, [*training.names.values()]) if found else None,
        schedulers=every[0]["schedulers"],
        positions=[each["position"] for each in every[: training.num_replicas]],
        extra=plain(extra, "extra"),
        loss_scale=training.loss_scale,
    )
    return metadata, state
