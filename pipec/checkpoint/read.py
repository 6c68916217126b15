"""Reading a checkpoint: every process checks everything before any process changes anything."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipec.checkpoint.all_ranks import call_on_all_ranks, require_equal
from pipec.checkpoint.hugging_face import weight_files
from pipec.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointMetadata,
    parse_metadata,
    restore_random_state,
    scheduler_class_name,
)
from pipec.checkpoint.optimizer_state import (
    OptimizerState,
    load_state,
    merge_states,
    param_groups_of,
    require_same_groups,
    tensor_names,
)
from pipec.checkpoint.shards import TensorSpec, open_tensors
from pipec.checkpoint.training_state import TrainingState
from pipec.console import notice
from pipec.errors import CheckpointError, InputError
from pipec.runtime.messages.call_description import format_names
from pipec.saved_folders import CHECKSUMS, SavedFolder, find_folder


def saved_folder(place: Path) -> SavedFolder:
    """The checksums of a checkpoint.

    Raises:
        CheckpointError: they are missing or damaged, or it is no checkpoint.
    """
    if not place.is_dir():
        raise CheckpointError(f"{place} does not exist; expected the folder of a checkpoint")
    if not (place / CHECKSUMS).exists() and not (place / METADATA_FILE).exists():
        weight_files(place)
        raise CheckpointError(
            f"{place} has only weights, as save_pretrained(...) writes them. It has no state of an "
            "optimizer or a scheduler, no number of steps, no random state and no checksums. To start a new "
            "training from the weights, pass model_only=True"
        )
    return SavedFolder(place, CheckpointError, "Restore the file, or load an earlier checkpoint")


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The contents of a checkpoint, whose files stay readable when they are replaced."""

    metadata: CheckpointMetadata
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, folder: SavedFolder) -> "OpenedCheckpoint":
        """Open a checkpoint whose files were checked. Raises CheckpointError for files that do not fit."""
        place = folder.path
        indices = [path.name for path in place.glob("*.index.json")]
        folder.require([METADATA_FILE, *indices, *weight_files(place)])
        metadata = parse_metadata((place / METADATA_FILE).read_bytes(), place / METADATA_FILE)
        state = open_tensors(place / name for name in folder.sums if name.startswith("optimizer-"))
        referred = [] if metadata.optimizer is None else tensor_names(metadata.optimizer)
        if strange := sorted({*referred} ^ state.keys()):
            raise CheckpointError(
                f"{place}: {format_names(strange)} is in {METADATA_FILE} or the files, not both"
            )
        return cls(metadata, open_weights(place), state)


def open_weights(place: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in a folder that ``save_pretrained`` wrote."""
    files = weight_files(place)
    opened = open_tensors(place / file for file in sorted(files))
    listed = {name for names in files.values() for name in names}
    if listed and (strange := sorted(listed ^ opened.keys())):
        raise CheckpointError(
            f"{place}: {format_names(strange)} is in either the index or the files, but not in both"
        )
    return opened


def load(directory: Path, training: TrainingState) -> tuple[CheckpointMetadata, str]:
    """Resume a training from a checkpoint; returns its metadata and digest. Every process calls it.

    Raises:
        CheckpointError: it is damaged, incomplete, or of another training. Nothing was changed.
        InputError: the optimizer or the scheduler is missing.
    """
    ranks, place = training.ranks, find_folder(directory)
    activity = f"loading {directory}"
    digests = call_on_all_ranks(ranks, activity, lambda: _check_files(place, training))
    require_equal(digests, f"the checkpoint {directory}", "let every rank see the same folder")
    opened: list[tuple[OpenedCheckpoint, dict[str, str]]] = []

    def check() -> OptimizerState:
        checkpoint = OpenedCheckpoint.of(saved_folder(place))
        if saved_folder(place).digest != digests[0]:
            raise CheckpointError(
                f"{place} was replaced by another checkpoint while it was read; load it again"
            )
        opened.append(
            (checkpoint, _stored_names(place, checkpoint.weights, training, checkpoint.metadata.ties))
        )
        _require_companions(checkpoint.metadata, training, place)
        groups = [] if training.optimizers is None else param_groups_of(training.optimizers, training.names)
        return OptimizerState(groups)

    every = call_on_all_ranks(ranks, activity, check)
    ((checkpoint, names),) = opened
    metadata = checkpoint.metadata
    if metadata.optimizer is not None:
        require_same_groups(metadata.optimizer.groups, merge_states(every, [*training.names.values()]).groups)
    _log_frozen_changes(metadata, training)

    def change() -> None:
        _fill(training, checkpoint.weights, names)
        if metadata.optimizer is not None:
            assert training.optimizers is not None
            load_state(training.optimizers, metadata.optimizer, checkpoint.state, training.names)
        for scheduler, saved in zip(training.schedulers, metadata.schedulers, strict=True):
            scheduler.load_state_dict(saved.state)
        restore_random_state(metadata.random, ranks.world.rank, ranks.world.size)

    call_on_all_ranks(ranks, f"{activity}, part of which may have been loaded,", change)
    return metadata, digests[0]


def load_weights(directory: Path, training: TrainingState) -> None:
    """Load only the weights, from a checkpoint or from a folder that ``save_pretrained`` wrote.

    Raises:
        CheckpointError: the weights do not fit this model. Nothing was changed.
    """
    ranks, place = training.ranks, find_folder(directory)
    activity = f"loading the weights of {directory}"
    opened: list[tuple[dict[str, Tensor], dict[str, str]]] = []

    def check() -> None:
        weights = open_weights(place)
        opened.append((weights, _stored_names(place, weights, training, None)))

    if any(call_on_all_ranks(ranks, activity, (place / CHECKSUMS).exists)):
        call_on_all_ranks(ranks, activity, lambda: _check_files(place, training))
    call_on_all_ranks(ranks, activity, check)
    call_on_all_ranks(
        ranks, f"{activity}, part of which may have been loaded,", lambda: _fill(training, *opened[0])
    )


def _check_files(place: Path, training: TrainingState) -> str:
    """Check this process's share of the files; returns the digest of the checkpoint."""
    folder, world = saved_folder(place), training.ranks.world
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(folder.check, sorted(folder.sums)[world.rank :: world.size]))
    return folder.digest


def _stored_names(
    place: Path, weights: Mapping[str, Tensor], training: TrainingState, ties: Mapping[str, str] | None
) -> dict[str, str]:
    """The name under which each tensor of the model is stored. Some libraries write tied ones several times.

    Raises:
        CheckpointError: these are not the model's tensors, or not tied as in the checkpoint. ``ties`` of the
            checkpoint are None if unknown.
    """
    training.require_memory()
    same_names = {*(ties or ()), *weights} == {*training.ties, *training.specs}
    if ties is not None and same_names and ties != training.ties:
        differing = sorted(name for name, _ in ties.items() ^ training.ties.items())
        raise CheckpointError(
            f"{place}: {format_names(differing)} is tied to another parameter either in the checkpoint or in "
            "the model, not in both; load it into the model that was saved"
        )
    aliases = {name: [name] for name in training.specs}
    for alias, canonical in training.ties.items():
        aliases[canonical].append(alias)
    stored = {name: [each for each in every if each in weights] for name, every in aliases.items()}
    if missing := [name for name, found in stored.items() if not found]:
        raise CheckpointError(
            f"{place} is of another model: it has no {format_names(missing)}. Load it into the model it is of"
        )
    if strange := sorted(weights.keys() - {each for found in stored.values() for each in found}):
        raise CheckpointError(
            f"{place} is of another model, which has {format_names(strange)} besides. Load it into that one"
        )
    for name, (first, *others) in stored.items():
        found, spec = TensorSpec.of(weights[first]), training.specs[name]
        if found != spec:
            raise CheckpointError(
                f"{place}: {name} is {found} in the file and {spec} in the model; load it into "
                "a model of the same sizes and types, which .to(dtype) may change afterwards"
            )
        for other in others:
            if not torch.equal(weights[other], weights[first]):
                raise CheckpointError(
                    f"{place}: {other} and {first} differ in the file, but are tied in the model"
                )
    return {name: found[0] for name, found in stored.items()}


def _require_companions(metadata: CheckpointMetadata, training: TrainingState, place: Path) -> None:
    """Raise InputError unless optimizer and schedulers were both saved and passed, of the same classes."""
    kinds = [] if metadata.optimizer is None else [group.optimizer for group in metadata.optimizer.groups]
    if metadata.optimizer is not None and training.optimizers is None:
        raise InputError(
            f"{place} has the state of {', '.join(dict.fromkeys(kinds))}; pass that as optimizer=..., or "
            "model_only=True to ignore its state and start a new training"
        )
    if metadata.optimizer is None and training.optimizers is not None:
        raise InputError(
            f"{place} has no state of an optimizer: none was passed to save_checkpoint. Leave out "
            "optimizer=..., or pass model_only=True to start a new one"
        )
    saved = [each.class_name for each in metadata.schedulers]
    own = [scheduler_class_name(each) for each in training.schedulers]
    if saved != own:
        raise InputError(
            f"{place} has the state of {', '.join(saved) or 'no scheduler'}, and scheduler is "
            f"{', '.join(own) or 'None'}; pass a scheduler made like the saved one"
        )


def _log_frozen_changes(metadata: CheckpointMetadata, training: TrainingState) -> None:
    if metadata.frozen is None:
        return
    for names, now in (
        (sorted({*metadata.frozen} - {*training.frozen}), "was frozen when it was saved, and is trained now"),
        (sorted({*training.frozen} - {*metadata.frozen}), "was trained when it was saved, and is frozen now"),
    ):
        if names:
            notice(f"in the checkpoint, {format_names(names)} {now}")


@torch.no_grad()
def _fill(training: TrainingState, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Copy this process's part of each tensor from the files, one tensor after the other."""
    for part in training.parts:
        value = weights[names[part.name]].reshape(-1)[part.start : part.stop]
        part.memory.copy_(value.view(part.memory.shape))
