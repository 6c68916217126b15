"""Folders of the libraries of Hugging Face: the index of weights, the configuration, ``save_pretrained``."""

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipec.checkpoint.all_ranks import call_on_all_ranks, call_on_rank_0
from pipec.checkpoint.shards import (
    SavedTensor,
    assign_files,
    assign_writers,
    gather_shards,
    tensor_spec,
    weight_index,
    write_tensors,
)
from pipec.checkpoint.training_state import TrainingState
from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError, InputError
from pipec.runtime.messages.call_description import format_names
from pipec.saved_folders import StagingFolder, find_folder, sync_file, write_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DIFFUSERS_INDEX, DIFFUSERS_SINGLE = (
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)


def is_of(library: str, model: nn.Module) -> bool:
    """Whether the class of a model, or one that it derives from, is of a library."""
    return any(base.__module__.partition(".")[0] == library for base in type(model).__mro__)


def index_name(model: nn.Module) -> str:
    """The name of the index for the library of a model; diffusers has its own."""
    return DIFFUSERS_INDEX if is_of("diffusers", model) else INDEX


@contextlib.contextmanager
def saved_by_this_process(model: nn.Module) -> Iterator[None]:
    """Let models of transformers save files inside a ``with``, although this is not rank 0 of the job.

    ``save_pretrained`` writes nothing on another one once torch.distributed is initialised (5.24).
    """
    models = [each for each in model.modules() if hasattr(each, "should_save_on_this_rank")]
    for each in models:
        vars(each)["should_save_on_this_rank"] = bool
    try:
        yield
    finally:
        for each in models:
            del vars(each)["should_save_on_this_rank"]


def write_config(model: Any, directory: Path) -> None:
    """Write the model's configuration, if it has one, for ``from_pretrained``."""
    if is_of("diffusers", model):
        model.save_config(directory)
    if is_of("transformers", model) and hasattr(model, "config"):
        from transformers.dynamic_module_utils import custom_object_save

        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        if type(model)._auto_class is not None:  # its code is not in transformers
            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)


def weight_files(directory: Path) -> dict[str, set[str]]:
    """The files of weights in a folder, each with its tensors' names by the index; none without an index.

    Raises:
        CheckpointError: there are none, or the index is damaged.
    """
    indices = [directory / name for name in (INDEX, DIFFUSERS_INDEX) if (directory / name).is_file()]
    singles = [name for name in (SINGLE, DIFFUSERS_SINGLE) if (directory / name).is_file()]
    if not indices and not singles:
        raise CheckpointError(
            f"{directory} has neither {INDEX} nor {SINGLE}; expected a checkpoint, or a folder that "
            "save_pretrained(...) wrote with safetensors"
        )
    files: dict[str, set[str]] = {}
    if not indices:
        return {singles[0]: set()}
    try:
        for name, file in json.loads(indices[0].read_bytes())["weight_map"].items():
            files.setdefault(file, set()).add(name)
        strange = [file for file in files if Path(file).name != file]
    except DAMAGED_DATA_ERRORS as error:
        raise CheckpointError(f"{indices[0]} is not an index of weights: {error!r}") from error
    if strange:
        raise CheckpointError(f"{indices[0]} names a file outside its folder: {strange[0]!r}")
    return files


def save_pretrained(directory: Path, training: TrainingState) -> None:
    """Write weights and configuration under the names that transformers gives them. Every process calls it.

    A tensor is sent only where ranks have shards of it. Other files of the folder stay: the new folder, which
    replaces it as a whole, has links to them.

    Raises:
        CheckpointError: a file cannot be written. The folder is as it was.
        InputError: the model is not one of transformers, or its weights are written together with others.
    """
    ranks, staging, activity = training.ranks, StagingFolder(directory), f"saving to {directory}"
    stored = assign_writers(training.parts, ranks, {})
    ignored = _require_transformers(training.model)
    pieces = {each.name: _pieces(training.model, each) for each in stored if each.name not in ignored}
    _require_apart(training.model, stored, pieces)
    files = assign_files("model", [piece for own in pieces.values() for piece in own])

    def begin() -> str:
        write_config(training.model, staging.make())
        return str(staging.path)

    def tensors() -> Iterator[tuple[SavedTensor, Tensor]]:
        for each, tensor in gather_shards(stored, training.parts, ranks):
            if each.name in pieces:
                values = _reverted(training.model, {each.name: tensor})
                yield from ((piece, values[piece.name]) for piece in pieces[each.name])

    def publish() -> None:
        for path in staging.path.glob("*.json"):
            sync_file(path)
        write_file(staging.path / INDEX, weight_index(files))
        if (old := find_folder(directory)).exists():
            weights = {SINGLE, *(path.name for path in old.glob("model-*-of-*.safetensors"))}
            _link_others(old, staging.path, weights)
        staging.publish()

    with staging.discarded_on_failure():
        folder = Path(call_on_rank_0(ranks, activity, begin))
        call_on_all_ranks(ranks, activity, lambda: write_tensors(folder, files, ranks.world.rank, tensors()))
        call_on_rank_0(ranks, activity, publish)


def _link_others(source: Path, target: Path, left_out: set[str]) -> None:
    """Let ``target`` have all else that is in ``source``: the same files, not copies, where it can."""

    def link(file: str, new: str) -> None:
        try:
            os.link(file, new, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(file, new, follow_symlinks=False)

    for path in source.iterdir():
        new = target / path.name
        if path.name in left_out or new.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new, symlinks=True, copy_function=link)
        else:
            link(str(path), str(new))


def _require_transformers(model: Any) -> set[str]:
    """The names of tensors that are not saved. Raises InputError for other models."""
    if not is_of("transformers", model) or is_of("peft", model):
        raise InputError(
            f"save_pretrained writes a model of transformers, and {type(model).__name__} is none; call "
            "pipe.as_module().save_pretrained(folder), which gathers on rank 0 what the model itself writes, "
            "or pipe.save_checkpoint(folder)"
        )
    return {*(model._keys_to_ignore_on_save or ())}


def _reverted(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model as files hold them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, state))


def _pieces(model: Any, stored: SavedTensor) -> list[SavedTensor]:
    """What a tensor becomes in files."""
    on_meta = torch.empty(stored.spec.shape, dtype=stored.spec.dtype, device="meta")
    return [
        SavedTensor(name, tensor_spec(name, tensor.dtype, tensor.shape), stored.sources, stored.writer)
        for name, tensor in _reverted(model, {stored.name: on_meta}).items()
    ]


def _require_apart(model: Any, stored: Iterable[SavedTensor], pieces: dict[str, list[SavedTensor]]) -> None:
    """Raise InputError if files hold some tensors of the model as one."""
    on_meta = {
        each.name: torch.empty(each.spec.shape, dtype=each.spec.dtype, device="meta")
        for each in stored
        if each.name in pieces
    }
    whole = {name: tuple(tensor.shape) for name, tensor in _reverted(model, on_meta).items()}
    apart = {piece.name: piece.spec.shape for own in pieces.values() for piece in own}
    if whole != apart:
        names = sorted(whole.keys() ^ apart.keys()) or [json.dumps(sorted(whole))]
        raise InputError(
            f"{format_names(names)} is made of several tensors of the model, which may be on several ranks; "
            "call pipe.as_module().save_pretrained(folder), which gathers the model on rank 0"
        )
