"""Reading a checkpoint: every process checks everything before any process changes anything."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pipec.checkpoint.all_ranks import call_on_all_ranks, require_equal
from pipec.checkpoint.hugging_face import weight_files
from pipec.checkpoint.manifest import MANIFEST, Manifest, check_file, read_manifest
from pipec.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointMetadata,
    read_metadata,
    restore_random_state,
    scheduler_class_name,
)
from pipec.checkpoint.optimizer_state import (
    OptimizerState,
    load_state,
    merge_states,
    param_groups_of,
    parse_state,
    require_same_groups,
    tensor_names,
)
from pipec.checkpoint.plain_values import as_text, from_text
from pipec.checkpoint.safetensors_files import TensorFiles, TensorSpec
from pipec.checkpoint.staging_directory import find_checkpoint
from pipec.checkpoint.training_state import PROFILE, TrainingState
from pipec.console import notice
from pipec.cost.profile import Profile, load_profile
from pipec.errors import CheckpointError, InputError
from pipec.runtime.messages.call_description import format_names


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files were checked and stay open."""

    metadata: CheckpointMetadata
    digest: str
    weights: TensorFiles
    state: TensorFiles


def load(directory: Path, training: TrainingState) -> tuple[CheckpointMetadata, str]:
    """Resume a training from a checkpoint; returns its metadata and digest. Every process calls it.

    Raises:
        CheckpointError: it is damaged, incomplete, or of another training. Nothing was changed.
        InputError: the optimizer or the scheduler is missing.
    """
    ranks, place = training.ranks, find_checkpoint(directory)
    activity = f"loading {directory}"
    digests = call_on_all_ranks(ranks, activity, lambda: _check_sums(place, training))
    require_equal(digests, f"the checkpoint {directory}", "let every rank see the same folder")
    opened: list[OpenedCheckpoint] = []

    def check() -> str:
        opened.append(_open(place, digests[0]))
        return _check(opened[0], training, place)

    every = [parse_state(from_text(each)) for each in call_on_all_ranks(ranks, activity, check)]
    (checkpoint,) = opened
    metadata = checkpoint.metadata
    if metadata.optimizer is not None:
        groups = merge_states(every, list(training.shapes)).groups
        require_same_groups(metadata.optimizer.groups, groups)
    _log_frozen_changes(metadata, training)

    def change() -> None:
        _fill(training, checkpoint.weights)
        if metadata.optimizer is not None:
            assert training.optimizers is not None
            load_state(training.optimizers, metadata.optimizer, checkpoint.state, training.names)
        for scheduler, saved in zip(training.schedulers, metadata.schedulers, strict=True):
            scheduler.load_state_dict(saved.state)
        restore_random_state(metadata.random, ranks.world.rank, ranks.world.size)

    call_on_all_ranks(ranks, f"{activity}, part of which may have been loaded,", change)
    return metadata, checkpoint.digest


def load_saved_profile(directory: Path) -> Profile | None:
    """The profile by which the stages were cut, if there was one. One process may call it alone.

    Raises:
        CheckpointError: it is damaged.
    """
    place = find_checkpoint(directory)
    manifest = _manifest(place)
    if PROFILE not in manifest.files:
        return None
    check_file(place, PROFILE, manifest.files[PROFILE])
    return load_profile(place / PROFILE)


def load_weights(directory: Path, training: TrainingState) -> None:
    """Load only the weights, from a checkpoint or from a folder that ``save_pretrained`` wrote.

    Raises:
        CheckpointError: the weights do not fit this model. Nothing was changed.
    """
    ranks, place = training.ranks, find_checkpoint(directory)
    activity = f"loading the weights of {directory}"
    call_on_all_ranks(ranks, activity, lambda: (place / MANIFEST).exists() and _check_sums(place, training))
    opened: list[TensorFiles] = []

    def check() -> None:
        opened.append(_open_weights(place))
        _require_weights(place, _without_equal(opened[0], training, place), training, training.ties)

    call_on_all_ranks(ranks, activity, check)
    call_on_all_ranks(
        ranks, f"{activity}, part of which may have been loaded,", lambda: _fill(training, opened[0])
    )


def _check_sums(place: Path, training: TrainingState) -> str:
    """Check this process's share of the files; returns the digest of the checkpoint."""
    manifest = _manifest(place)
    world = training.ranks.world
    names = sorted(manifest.files)[world.rank :: world.size]
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        list(pool.map(lambda name: check_file(place, name, manifest.files[name]), names))
    return manifest.digest


_MAX_CONCURRENT = 4
"""Files that a process hashes at the same time."""


def _manifest(place: Path) -> Manifest:
    if not place.is_dir():
        raise CheckpointError(f"{place} does not exist; expected the folder of a checkpoint")
    if not (place / MANIFEST).exists() and (place / METADATA_FILE).exists():
        raise CheckpointError(
            f"{place / MANIFEST} is missing; the checkpoint is incomplete. Load an older one"
        )
    if not (place / MANIFEST).exists():
        weight_files(place)
        raise CheckpointError(
            f"{place} has only weights, as save_pretrained(...) writes them. It has no state of an "
            "optimizer or a scheduler, no number of steps, no random state and no checksums. To start a new "
            "training from the weights, pass model_only=True"
        )
    return read_manifest(place)


def _open(place: Path, digest: str) -> OpenedCheckpoint:
    manifest = read_manifest(place)
    names = [name for name in manifest.files if name.startswith("optimizer-")]
    metadata, weights = read_metadata(place / METADATA_FILE), _open_weights(place)
    opened = OpenedCheckpoint(metadata, digest, weights, TensorFiles([place / name for name in names]))
    if read_manifest(place).digest != digest:
        raise CheckpointError(f"{place} was replaced by another checkpoint while it was read; load it again")
    return opened


def _open_weights(place: Path) -> TensorFiles:
    files = weight_files(place)
    opened = TensorFiles([place / file for file in sorted(files)])
    listed = {name for names in files.values() for name in names}
    if listed and (strange := sorted(listed ^ opened.specs.keys())):
        raise CheckpointError(
            f"{place}: {format_names(strange)} is in either the index or the files, but not in both"
        )
    return opened


def _check(opened: OpenedCheckpoint, training: TrainingState, place: Path) -> str:
    """Check that a checkpoint fits the training; returns the groups of this process's optimizers, as text."""
    metadata = opened.metadata
    if metadata.ties is None:
        kinds = _without_equal(opened.weights, training, place)
        _require_weights(place, kinds, training, training.ties)
    else:
        _require_ties(metadata.ties, opened, training, place)
        _require_weights(place, opened.weights.specs, training, {})
    _require_companions(metadata, training, place)
    referred = [] if metadata.optimizer is None else tensor_names(metadata.optimizer)
    if strange := sorted({*referred} ^ opened.state.specs.keys()):
        raise CheckpointError(
            f"{place}: {format_names(strange)} is in {METADATA_FILE} or the files, not both"
        )
    groups = [] if training.optimizers is None else param_groups_of(training.optimizers, training.names)
    return as_text(asdict(OptimizerState(groups)))


def _require_ties(
    ties: Mapping[str, str], opened: OpenedCheckpoint, training: TrainingState, place: Path
) -> None:
    """Raise CheckpointError unless the same tensors are tied as in the model that was saved."""
    same_names = {*ties, *opened.weights.specs} == {*training.ties, *training.specs}
    if same_names and ties != training.ties:
        other = sorted(name for name, _ in ties.items() ^ training.ties.items())
        raise CheckpointError(
            f"{place}: {format_names(other)} is tied to another parameter either in the checkpoint or in "
            "the model, not in both; load it into the model that was saved"
        )


def _without_equal(weights: TensorFiles, training: TrainingState, place: Path) -> dict[str, TensorSpec]:
    """The stored tensors, tied ones once. Some libraries write a tied tensor under all of its names.

    Raises:
        CheckpointError: the values under these names differ.
    """
    found = dict(weights.specs)
    for other, first in training.ties.items():
        if other in found and first in found:
            if not torch.equal(weights[other], weights[first]):
                raise CheckpointError(
                    f"{place}: {other} and {first} differ in the file, but are tied in the model"
                )
            del found[other]
    return found


def _require_weights(
    place: Path, kinds: Mapping[str, TensorSpec], training: TrainingState, ties: Mapping[str, str]
) -> None:
    """Raise CheckpointError unless these are the model's tensors, each under one of its tied names."""
    training.require_memory()
    names = _stored_names(kinds, training, ties)
    if missing := [name for name in training.specs if name not in names]:
        raise CheckpointError(
            f"{place} is of another model: it has no {format_names(missing)}. Load it into the model it is of"
        )
    if strange := sorted(kinds.keys() - names.values()):
        raise CheckpointError(
            f"{place} is of another model, which has {format_names(strange)} besides. Load it into that one"
        )
    for name, kind in training.specs.items():
        if kinds[names[name]] != kind:
            raise CheckpointError(
                f"{place}: {name} is {kinds[names[name]]} in the file and {kind} in the model; load it into "
                "a model of the same sizes and types, which .to(dtype) may change afterwards"
            )


def _stored_names(
    kinds: Mapping[str, TensorSpec], training: TrainingState, ties: Mapping[str, str]
) -> dict[str, str]:
    """The name under which each tensor of the model is stored."""
    tied = {first: other for other, first in ties.items() if other in kinds}
    stored_names = {name: name if name in kinds else tied.get(name) for name in training.specs}
    return {name: stored for name, stored in stored_names.items() if stored is not None}


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
def _fill(training: TrainingState, weights: TensorFiles) -> None:
    """Copy this process's part of each tensor from the files, one tensor after the other."""
    names = _stored_names(weights.specs, training, training.ties)
    for part in training.parts:
        value = weights[names[part.name]].reshape(-1)[part.start : part.stop]
        part.memory.copy_(value.view(part.memory.shape))
