"""Writing a folder for ``from_pretrained`` of transformers, of which every process writes its part."""

import json
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipec.checkpoint.all_ranks import call_on_all_ranks, call_on_rank_0
from pipec.checkpoint.file_layout import assign_files, open_writers, weight_index, write_tensors
from pipec.checkpoint.hugging_face import INDEX, SINGLE, is_of, write_config
from pipec.checkpoint.safetensors_files import tensor_spec
from pipec.checkpoint.shards import SavedTensor, assign_writers, gather_shards
from pipec.checkpoint.training_state import TrainingState
from pipec.errors import InputError
from pipec.runtime.messages.call_description import format_names


def save_pretrained(directory: Path, training: TrainingState) -> None:
    """Write weights and configuration under the names that transformers gives them. Every process calls it.

    A tensor is sent only where ranks have shards of it. Other files of the folder stay. The weights that were
    there stay, too, until the new ones are complete: then the index, which says where they are, is replaced.

    Raises:
        CheckpointError: a file cannot be written.
        InputError: the model is not one of transformers, or its weights are written together with others.
    """
    ranks, staging = training.ranks, directory / ".pretrained.partial"
    activity = f"saving to {directory}"
    stored = assign_writers(training.parts, ranks, {})
    ignored = _require_transformers(training.model)
    pieces = {each.name: _pieces(training.model, each) for each in stored if each.name not in ignored}
    _require_apart(training.model, stored, pieces)
    files = assign_files("model", [piece for own in pieces.values() for piece in own])
    suffix = call_on_rank_0(ranks, activity, lambda: _suffix(directory, files))
    files = {f"{Path(file).stem}{suffix}.safetensors": each for file, each in files.items()}
    file_of = {piece.name: file for file, contents in files.items() for piece in contents}

    def begin() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write_config(training.model, staging)
        (staging / INDEX).write_bytes(weight_index(files))

    def write() -> None:
        own = {file: each for file, each in files.items() if each[0].writer == ranks.world.rank}
        writers = open_writers(staging, own)
        try:
            write_tensors(
                writers,
                (
                    (file_of[piece.name], piece, values[piece.name])
                    for each, tensor in gather_shards(stored, training.parts, ranks)
                    if each.name in pieces
                    for values in [_reverted(training.model, {each.name: tensor.view(each.spec.shape)})]
                    for piece in pieces[each.name]
                ),
            )
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise

    def publish() -> None:
        for new in sorted(staging.iterdir(), key=lambda path: path.name == INDEX):
            new.replace(directory / new.name)
        (directory / SINGLE).unlink(missing_ok=True)
        for old in {*directory.glob("model-*-of-*.safetensors")} - {directory / file for file in files}:
            old.unlink(missing_ok=True)
        staging.rmdir()

    call_on_rank_0(ranks, activity, begin)
    call_on_all_ranks(ranks, activity, write)
    call_on_rank_0(ranks, activity, publish)


def _suffix(directory: Path, files: Iterable[str]) -> str:
    """What makes the names of files others than those that the folder has, to which its index refers."""
    return f"-{secrets.token_hex(4)}" if any((directory / file).exists() for file in files) else ""


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
    on_meta = torch.empty(stored.spec.shape, dtype=stored.spec.torch_dtype, device="meta")
    return [
        SavedTensor(name, tensor_spec(name, tensor.dtype, tensor.shape), stored.sources, stored.writer)
        for name, tensor in _reverted(model, {stored.name: on_meta}).items()
    ]


def _require_apart(model: Any, stored: Iterable[SavedTensor], pieces: dict[str, list[SavedTensor]]) -> None:
    """Raise InputError if files hold some tensors of the model as one."""
    on_meta = {
        each.name: torch.empty(each.spec.shape, dtype=each.spec.torch_dtype, device="meta")
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
