"""Reading a checkpoint: everything is checked in every process before anything is changed in any."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipec.checkpoint.directory import found
from pipec.checkpoint.document import DOCUMENT, Document, read_document, scheduler_kind
from pipec.checkpoint.hugging_face import weight_files
from pipec.checkpoint.manifest import MANIFEST, Manifest, check_file, read_manifest
from pipec.checkpoint.optimizers import (
    OptimizerState,
    groups_of,
    load_state,
    merged,
    parse_state,
    require_same_groups,
    tensor_names,
)
from pipec.checkpoint.tensors import TensorFiles, TensorKind
from pipec.checkpoint.together import on_all, require_equal
from pipec.checkpoint.training import PROFILE, Training
from pipec.checkpoint.values import decoded
from pipec.console import log
from pipec.cost.profile import Profile, load_profile
from pipec.errors import CheckpointError, InputError
from pipec.runtime.messages.facts import listed


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose files are known to be what was written. They stay open."""

    document: Document
    digest: str
    weights: TensorFiles
    state: TensorFiles


def load(directory: Path, training: Training) -> tuple[Document, str]:
    """Let a training go on from a checkpoint; returns what it says, and its digest. Every process calls it.

    Raises:
        CheckpointError: it is damaged or incomplete, or it is of another training. Nothing was changed then.
        InputError: the optimizer or the scheduler is missing.
    """
    ranks, place = training.ranks, found(directory)
    doing = f"loading {directory}"
    digests = on_all(ranks, doing, lambda: _check_sums(place, training))
    require_equal(digests, f"the checkpoint {directory}", "let every rank see the same folder")
    opened: list[Opened] = []

    def check() -> Any:
        opened.append(_open(place, digests[0]))
        return _check(opened[0], training, place)

    every = [parse_state(each) for each in on_all(ranks, doing, check)]
    (checkpoint,) = opened
    document = checkpoint.document
    if document.optimizer is not None:
        groups = merged(every, list(training.shapes)).groups
        require_same_groups(document.optimizer.groups, groups)
    _tell_of_frozen(document, training)

    def change() -> None:
        _fill(training, checkpoint.weights)
        if document.optimizer is not None:
            assert training.optimizers is not None
            load_state(training.optimizers, document.optimizer, checkpoint.state, training.names)
        for scheduler, saved in zip(training.schedulers, document.schedulers, strict=True):
            scheduler.load_state_dict(decoded(saved.state))
        document.random.restore(ranks.world.rank, ranks.world.size)

    on_all(ranks, f"{doing}, of which a part may have been loaded,", change)
    return document, checkpoint.digest


def profile_of(directory: Path) -> Profile | None:
    """The profile that the stages of a training were cut by, if there was one. A process calls it alone.

    Raises:
        CheckpointError: it is damaged.
    """
    place = found(directory)
    manifest = _manifest(place)
    if PROFILE not in manifest.files:
        return None
    check_file(place, PROFILE, manifest.files[PROFILE])
    return load_profile(place / PROFILE)


def load_weights(directory: Path, training: Training) -> None:
    """Take the weights alone, of a checkpoint or of a folder that ``save_pretrained`` wrote.

    Raises:
        CheckpointError: they are not those of this model. Nothing was changed then.
    """
    ranks, place = training.ranks, found(directory)
    doing = f"loading the weights of {directory}"
    on_all(ranks, doing, lambda: (place / MANIFEST).exists() and _check_sums(place, training))
    opened: list[TensorFiles] = []

    def check() -> None:
        opened.append(_open_weights(place))
        _require_weights(place, _without_equal(opened[0], training, place), training, training.ties)

    on_all(ranks, doing, check)
    on_all(ranks, f"{doing}, of which a part may have been loaded,", lambda: _fill(training, opened[0]))


def _check_sums(place: Path, training: Training) -> str:
    """Check this process's share of the files; returns the digest of the checkpoint."""
    manifest = _manifest(place)
    world = training.ranks.world
    names = sorted(manifest.files)[world.rank :: world.size]
    with ThreadPoolExecutor(_MOST_AT_A_TIME) as pool:
        list(pool.map(lambda name: check_file(place, name, manifest.files[name]), names))
    return manifest.digest


_MOST_AT_A_TIME = 4
"""Files that a process sums up."""


def _manifest(place: Path) -> Manifest:
    if not place.is_dir():
        raise CheckpointError(f"{place} is not there; expected the folder of a checkpoint")
    if not (place / MANIFEST).exists() and (place / DOCUMENT).exists():
        raise CheckpointError(f"{place / MANIFEST} is missing; the checkpoint is incomplete")
    if not (place / MANIFEST).exists():
        weight_files(place)
        raise CheckpointError(
            f"{place} holds weights alone, as save_pretrained(...) writes them. It has no state of an "
            "optimizer or a scheduler, no number of steps, no random state and no checksums. To start a new "
            "training from them, pass weights_alone=True"
        )
    return read_manifest(place)


def _open(place: Path, digest: str) -> Opened:
    manifest = read_manifest(place)
    names = [name for name in manifest.files if name.startswith("optimizer-")]
    document, weights = read_document(place / DOCUMENT), _open_weights(place)
    opened = Opened(document, digest, weights, TensorFiles([place / name for name in names]))
    if read_manifest(place).digest != digest:
        raise CheckpointError(f"{place} was replaced by another checkpoint while it was read; load it again")
    return opened


def _open_weights(place: Path) -> TensorFiles:
    files = weight_files(place)
    opened = TensorFiles([place / file for file in sorted(files)])
    listed_there = {name for names in files.values() for name in names}
    if listed_there and (strange := sorted(listed_there ^ opened.kinds.keys())):
        raise CheckpointError(f"{place}: {listed(strange)} is in the index or in the files alone")
    return opened


def _check(opened: Opened, training: Training, place: Path) -> Any:
    """Compare with what there is here; returns the groups of this process's optimizers."""
    document = opened.document
    if document.ties is None:
        kinds = _without_equal(opened.weights, training, place)
        _require_weights(place, kinds, training, training.ties)
    else:
        _require_ties(document.ties, opened, training, place)
        _require_weights(place, opened.weights.kinds, training, {})
    _require_companions(document, training, place)
    referred = [] if document.optimizer is None else tensor_names(document.optimizer)
    if strange := sorted({*referred} ^ opened.state.kinds.keys()):
        raise CheckpointError(f"{place}: {listed(strange)} is in {DOCUMENT} or in the files alone")
    groups = [] if training.optimizers is None else groups_of(training.optimizers, training.names)
    return asdict(OptimizerState(groups))


def _require_ties(ties: Mapping[str, str], opened: Opened, training: Training, place: Path) -> None:
    """Raise CheckpointError where other tensors are tied than in the model that was saved."""
    same_names = {*ties, *opened.weights.kinds} == {*training.ties, *training.kinds}
    if same_names and ties != training.ties:
        other = sorted(name for name, _ in ties.items() ^ training.ties.items())
        raise CheckpointError(
            f"{place}: {listed(other)} is tied to another parameter there or here alone; load it into the "
            "model that was saved"
        )


def _without_equal(weights: TensorFiles, training: Training, place: Path) -> dict[str, TensorKind]:
    """The tensors that are there, each of tied ones once. Some write them under all of their names.

    Raises:
        CheckpointError: they differ there.
    """
    found = dict(weights.kinds)
    for other, first in training.ties.items():
        if other in found and first in found:
            if not torch.equal(weights[other], weights[first]):
                raise CheckpointError(f"{place}: {other} and {first} differ there, and are tied in the model")
            del found[other]
    return found


def _require_weights(
    place: Path, kinds: Mapping[str, TensorKind], training: Training, ties: Mapping[str, str]
) -> None:
    """Raise CheckpointError unless the tensors are those of the model, under one of their tied names."""
    training.require_memory()
    names = _stored_names(kinds, training, ties)
    if missing := [name for name in training.kinds if name not in names]:
        raise CheckpointError(f"{place} is of another model: it has no {listed(missing)}")
    if strange := sorted(kinds.keys() - names.values()):
        raise CheckpointError(f"{place} is of another model, which has {listed(strange)} besides")
    for name, kind in training.kinds.items():
        if kinds[names[name]] != kind:
            raise CheckpointError(
                f"{place}: {name} is {kinds[names[name]]} there and {kind} in the model; load it into a "
                "model of the same sizes and types, which .to(dtype) may change afterwards"
            )


def _stored_names(
    kinds: Mapping[str, TensorKind], training: Training, ties: Mapping[str, str]
) -> dict[str, str]:
    """Under which of its names each tensor of the model is there."""
    tied = {first: other for other, first in ties.items() if other in kinds}
    known = {name: name if name in kinds else tied.get(name) for name in training.kinds}
    return {name: stored for name, stored in known.items() if stored is not None}


def _require_companions(document: Document, training: Training, place: Path) -> None:
    """Raise InputError for an optimizer or a scheduler that is there or here alone, or of another class."""
    kinds = [] if document.optimizer is None else [group.optimizer for group in document.optimizer.groups]
    if document.optimizer is not None and training.optimizers is None:
        raise InputError(
            f"{place} has the state of {', '.join(dict.fromkeys(kinds))}; pass that as optimizer=..., or "
            "weights_alone=True to leave its state and start anew"
        )
    if document.optimizer is None and training.optimizers is not None:
        raise InputError(
            f"{place} has no state of an optimizer, for none was passed to save_checkpoint; leave out "
            "optimizer=..., or pass weights_alone=True to start one anew"
        )
    saved = [each.kind for each in document.schedulers]
    own = [scheduler_kind(each) for each in training.schedulers]
    if saved != own:
        raise InputError(
            f"{place} has the state of {', '.join(saved) or 'no scheduler'}, and scheduler is "
            f"{', '.join(own) or 'None'}; pass the scheduler that was saved, made as it was"
        )


def _tell_of_frozen(document: Document, training: Training) -> None:
    if document.frozen is None:
        return
    for names, now in (
        (sorted({*document.frozen} - {*training.frozen}), "was frozen when it was saved, and is trained now"),
        (sorted({*training.frozen} - {*document.frozen}), "was trained when it was saved, and is frozen now"),
    ):
        if names:
            log(f"pipec: in the checkpoint, {listed(names)} {now}")


@torch.no_grad()
def _fill(training: Training, weights: TensorFiles) -> None:
    """Copy what this process has of each tensor out of the files, one after the other."""
    names = _stored_names(weights.kinds, training, training.ties)
    for part in training.parts:
        value = weights[names[part.name]].reshape(-1)[part.start : part.stop]
        part.memory.copy_(value.view(part.memory.shape))
