"""Checkpoints to and from folders of ``torch.distributed.checkpoint``, by one process, tensor by tensor.

Such a folder has a model's tensors under ``model``, and an optimizer's, as that library's ``get_state_dict``
returns them, under ``optim``. The rest of a checkpoint of pipec is stored as one file, ``pipec.metadata``, so
that it can be converted back.
"""

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from pipec.checkpoint.all_ranks import as_pipec_error
from pipec.checkpoint.file_layout import (
    TensorWrite,
    assign_files,
    open_writers,
    weight_index,
    write_small_files,
    write_tensors,
)
from pipec.checkpoint.hugging_face import INDEX, weight_files
from pipec.checkpoint.manifest import check_file, read_manifest
from pipec.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointMetadata,
    parse_metadata,
    read_metadata,
)
from pipec.checkpoint.optimizer_state import OptimizerState, ParamGroup, tensor_names
from pipec.checkpoint.plain_values import plain
from pipec.checkpoint.safetensors_files import TensorFiles
from pipec.checkpoint.shards import SavedTensor
from pipec.checkpoint.staging_directory import StagingDirectory, find_checkpoint, require_replaceable
from pipec.checkpoint.torch_checkpoint import METADATA, TorchCheckpoint, model_and_optimizer_entries
from pipec.errors import CheckpointError, InputError, PipecError


@dataclass(frozen=True)
class Conversion:
    """A folder that was written. ``skipped_entries`` of the source have no place in a checkpoint."""

    kind: str
    metadata: CheckpointMetadata
    num_tensors: int
    num_bytes: int
    skipped_entries: list[str]


def convert(source: Path, target: Path, optimizer: str | None, num_steps: int | None) -> Conversion:
    """Convert a folder of ``torch.distributed.checkpoint`` to a checkpoint, or a checkpoint to a folder.

    ``optimizer`` is the name of the optimizer's class and ``num_steps`` the number of steps so far. A folder
    contains neither, unless it was converted from a checkpoint.

    Raises:
        CheckpointError: the source is damaged or neither of the two, or the target exists.
        InputError: the optimizer's class is missing, or is passed although it is known.
    """
    require_replaceable(target, None)
    is_torch_folder = (source / METADATA).is_file()
    if not is_torch_folder and (optimizer is not None or num_steps is not None):
        raise InputError("a checkpoint of pipec has its optimizer and its steps; leave out both options")
    try:
        if is_torch_folder:
            return _imported(TorchCheckpoint.open(source), target, optimizer, num_steps)
        return _exported(find_checkpoint(source), target)
    except PipecError:
        raise
    except Exception as error:
        raise as_pipec_error(error, f"converting {source}") from error


def open_checkpoint(place: Path) -> tuple[CheckpointMetadata, TensorFiles, TensorFiles]:
    """The metadata, weights and optimizer's state of a checkpoint, after all of its files were checked.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    if not (place / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{place} is neither a checkpoint of pipec nor a folder of torch.distributed.checkpoint: it has "
            f"no {METADATA_FILE} and no {METADATA}. Pass the folder that save_checkpoint or dcp.save wrote"
        )
    manifest = read_manifest(place)
    for name, expected in sorted(manifest.files.items()):
        check_file(place, name, expected)
    state = [place / name for name in manifest.files if name.startswith("optimizer-")]
    weights = [place / name for name in sorted(weight_files(place))]
    return read_metadata(place / METADATA_FILE), TensorFiles(weights), TensorFiles(state)


def _exported(source: Path, target: Path) -> Conversion:
    metadata, weights, state = open_checkpoint(source)
    tied = {other: weights[first] for other, first in (metadata.ties or {}).items()}
    nested: dict[str, Any] = {"model": dict(weights) | tied, "pipec": {"metadata": metadata.file()}}
    if metadata.optimizer is not None:
        nested["optim"] = {
            "state": {
                name: {key: state[x] if isinstance(x, str) else x[0] for key, x in entries.items()}
                for name, entries in metadata.optimizer.state.items()
            },
            "param_groups": [
                {**group.hyperparameters, "params": list(group.names)} for group in metadata.optimizer.groups
            ],
        }
    with _staged(target) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # not needed here
        dcp.save(nested, checkpoint_id=partial, no_dist=True)
    return _summary("a folder of torch.distributed.checkpoint", metadata, weights, state, [])


def _imported(
    folder: TorchCheckpoint, target: Path, optimizer: str | None, num_steps: int | None
) -> Conversion:
    contents = _Contents.of(folder)
    metadata = contents.metadata(optimizer, num_steps)
    ties = metadata.ties or {}
    weights = {name: entry for name, entry in contents.weights.items() if name not in ties}
    state = {
        f"{name}/{key}": entry
        for name, entries in contents.state.items()
        for key, entry in entries.items()
        if entry in folder.specs
    }
    if metadata.optimizer is not None and {*tensor_names(metadata.optimizer)} != state.keys():
        raise CheckpointError(
            f"{folder.directory} has other tensors of the optimizer's state than its metadata lists"
        )
    families: dict[str, dict[str, str]] = {"model": weights, "optimizer": state}
    files = {family: assign_files(family, _stored(folder, names)) for family, names in families.items()}

    def tensors() -> Iterator[TensorWrite]:
        for family, names in families.items():
            for file, every in files[family].items():
                for each in every:
                    yield file, each, folder.tensor(names[each.name])

    texts = {METADATA_FILE: metadata.file(), INDEX: weight_index(files["model"])}
    with _staged(target) as partial:
        writers = open_writers(partial, files["model"] | files["optimizer"])
        try:
            write_small_files(partial, write_tensors(writers, tensors()), texts)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
    made = {family: TensorFiles([target / file for file in own]) for family, own in files.items()}
    return _summary(
        "a checkpoint of pipec", metadata, made["model"], made["optimizer"], contents.skipped_entries
    )


def _stored(folder: TorchCheckpoint, names: Mapping[str, str]) -> list[SavedTensor]:
    """The tensors, ordered such that each is aligned to the size of its elements."""
    kinds = {name: folder.specs[entry] for name, entry in names.items()}
    aligned = sorted(kinds.items(), key=lambda item: -item[1].torch_dtype.itemsize)
    return [SavedTensor(name, kind, ((0, 0, kind.num_elements),), 0) for name, kind in aligned]


@dataclass(frozen=True)
class _Contents:
    """The entries of a folder: weights by name, the optimizer's state by parameter and key, its groups."""

    folder: TorchCheckpoint
    weights: dict[str, str]
    state: dict[str, dict[str, str]]
    groups: dict[int, dict[str, str]]
    file: bytes | None
    skipped_entries: list[str]

    @classmethod
    def of(cls, folder: TorchCheckpoint) -> "_Contents":
        """Raises CheckpointError without weights, or if the optimizer's state has another form."""
        made = cls(folder, {}, defaultdict(dict), defaultdict(dict), None, [])
        for entry, path in model_and_optimizer_entries(folder):
            match path:
                case "model", *names if names and entry in folder.specs:
                    made.weights[".".join(map(str, names))] = entry
                case "optimizer", "state", str(name), str(key):
                    made.state[name][key] = entry
                case "optimizer", "param_groups", int(number), str(key):
                    made.groups[number][key] = entry
                case "optimizer", *_:
                    raise CheckpointError(
                        f"{folder.directory} has {entry}, which get_state_dict(model, optimizer) does not "
                        "return; save the optimizer's state with it, and do not flatten it"
                    )
                case "pipec", "metadata":
                    made = replace(made, file=folder.value(entry))
                case _:
                    made.skipped_entries.append(entry)
        if not made.weights:
            raise CheckpointError(
                f"{folder.directory} has no tensors under model: it has "
                f"{', '.join(made.skipped_entries[:3])}. Save "
                'them as dcp.save({"model": model.state_dict()}, checkpoint_id=...)'
            )
        return made

    def metadata(self, optimizer: str | None, num_steps: int | None) -> CheckpointMetadata:
        if self.file is not None:
            if optimizer is not None or num_steps is not None:
                raise InputError(
                    "the folder was converted from a checkpoint, and has its optimizer and steps"
                )
            return parse_metadata(self.file, self.folder.directory)
        if self.groups and optimizer is None:
            raise InputError(
                f"{self.folder.directory} has the state of an optimizer, but not the optimizer's class; pass "
                "it, such as --optimizer AdamW"
            )
        if optimizer is not None and not self.groups:
            raise InputError(f"{self.folder.directory} has no state of an optimizer; leave out --optimizer")
        state = None if optimizer is None else self._optimizer(optimizer)
        return CheckpointMetadata(num_steps or 0, None, None, [], state, [], [], None)

    def _optimizer(self, kind: str) -> OptimizerState:
        groups = []
        for _, entries in sorted(self.groups.items()):
            values = {key: self._value(entry) for key, entry in entries.items()}
            names = tuple(values.pop("params", ()))
            values.pop("param_names", None)
            groups.append(ParamGroup(kind, names, plain(values, "a group of the optimizer")))
        state: dict[str, dict[str, list[Any] | str]] = {
            name: {
                key: f"{name}/{key}" if entry in self.folder.specs else [plain(self._value(entry), key)]
                for key, entry in entries.items()
            }
            for name, entries in self.state.items()
        }
        return OptimizerState(groups, state)

    def _value(self, entry: str) -> Any:
        return self.folder.tensor(entry) if entry in self.folder.specs else self.folder.value(entry)


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A folder to write to, which is renamed to ``target`` at the end of the ``with`` block."""
    place = StagingDirectory(target)
    try:
        yield Path(place.make())
        require_replaceable(target, None)
        place.publish()
    except BaseException:
        place.discard()
        raise


def _summary(
    kind: str,
    metadata: CheckpointMetadata,
    weights: TensorFiles,
    state: TensorFiles,
    skipped_entries: list[str],
) -> Conversion:
    specs = [*weights.specs.values(), *state.specs.values()]
    return Conversion(kind, metadata, len(specs), sum(spec.num_bytes for spec in specs), skipped_entries)
