"""Files for the libraries of Hugging Face: the index of weights, and the model's configuration."""

import copy
import json
from pathlib import Path
from typing import Any

from torch import nn

from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError

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
    for index, single in ((INDEX, SINGLE), (DIFFUSERS_INDEX, DIFFUSERS_SINGLE)):
        if (directory / index).is_file():
            return _indexed_files(directory / index)
        if (directory / single).is_file():
            return {single: set()}
    raise CheckpointError(
        f"{directory} has neither {INDEX} nor {SINGLE}; expected a checkpoint, or a folder that "
        "save_pretrained(...) wrote with safetensors"
    )


def _indexed_files(path: Path) -> dict[str, set[str]]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in found.items():
            files.setdefault(file, set()).add(name)
        strange = [file for file in files if Path(file).name != file]
    except DAMAGED_DATA_ERRORS as error:
        raise CheckpointError(f"{path} is not an index of weights: {error!r}") from error
    if strange:
        raise CheckpointError(f"{path} names a file outside its folder: {strange[0]!r}")
    return files
