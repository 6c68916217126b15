"""Checkpoints to and from folders of ``torch.distributed.checkpoint``, by one process, tensor by tensor.

Such a folder has a model's tensors under ``model``, and an optimizer's, as that library's ``get_state_dict``
returns them, under ``optim``. The rest of a checkpoint of pipec is stored as one file, ``pipec.metadata``, so
that it can be converted back.

The library reads the folder, but nothing in it is run: its ``.metadata`` is a pickle, which may name only the
classes that such a file contains, and entries are read with ``weights_only=True``.
"""

import math
import pickle
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from pipec.checkpoint.all_ranks import as_pipec_error
from pipec.checkpoint.hugging_face import INDEX
from pipec.checkpoint.metadata import METADATA_FILE, CheckpointMetadata, parse_metadata
from pipec.checkpoint.optimizer_state import OptimizerState, ParamGroup, state_entries, tensor_names
from pipec.checkpoint.plain_values import plain, refusal
from pipec.checkpoint.read import OpenedCheckpoint, saved_folder
from pipec.checkpoint.shards import (
    SavedTensor,
    TensorSpec,
    assign_files,
    tensor_spec,
    weight_index,
    write_tensors,
)
from pipec.checkpoint.write import require_replaceable
from pipec.errors import DAMAGED_DATA_ERRORS, CheckpointError, InputError, PipecError
from pipec.saved_folders import CHECKSUMS, StagingFolder, find_folder, write_checksums, write_file

METADATA = ".metadata"


@dataclass(frozen=True)
class Conversion:
    """A folder that was written. ``skipped_entries`` of the source have no place in a checkpoint."""

    kind: str
    metadata: CheckpointMetadata
    num_tensors: int
    num_bytes: int
    skipped_entries: list[str] = field(default_factory=list)


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
    staging = StagingFolder(target)
    try:
        with staging.discarded_on_failure(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # not needed here
            if is_torch_folder:
                made = _imported(_Contents.of(_TorchFolder(source)), staging, optimizer, num_steps)
            else:
                made = _exported(open_checkpoint(find_folder(source)), staging)
            require_replaceable(target, None)
            staging.publish()
            return made
    except PipecError:
        raise
    except Exception as error:
        raise as_pipec_error(error, f"converting {source}") from error


def open_checkpoint(place: Path) -> OpenedCheckpoint:
    """A checkpoint, after all of its files were checked.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    if not (place / CHECKSUMS).is_file() and not (place / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{place} is neither a checkpoint of pipec nor a folder of torch.distributed.checkpoint: it has "
            f"no {METADATA_FILE} and no {METADATA}. Pass the folder that save_checkpoint or dcp.save wrote"
        )
    folder = saved_folder(place)
    for name in sorted(folder.sums):
        folder.check(name)
    return OpenedCheckpoint.of(folder)


def _exported(source: OpenedCheckpoint, staging: StagingFolder) -> Conversion:
    metadata, weights, state = source.metadata, source.weights, source.state
    tied = {other: weights[first] for other, first in (metadata.ties or {}).items()}
    nested: dict[str, Any] = {"model": dict(weights) | tied, "pipec": {"metadata": metadata.file()}}
    if (optimizer := metadata.optimizer) is not None:
        nested["optim"] = {
            "state": {name: state_entries(optimizer, name, state) for name in optimizer.state},
            "param_groups": [
                {**group.hyperparameters, "params": list(group.names)} for group in optimizer.groups
            ],
        }
    dcp.save(nested, checkpoint_id=staging.make(), no_dist=True)
    num_bytes = sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))
    kind = "a folder of torch.distributed.checkpoint"
    return Conversion(kind, metadata, len(weights) + len(state), num_bytes)


class _TorchFolder:
    """A folder of ``torch.distributed.checkpoint``.

    ``paths`` has the path of each entry in the nested state, by its name in the folder, and ``specs`` the
    entries that are tensors.

    Raises:
        CheckpointError: the metadata are damaged, or name other classes than such a file contains.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, path = directory, directory / METADATA
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
            entries = found.state_dict_metadata
            planned = found.planner_data or {}
            self.paths = {name: tuple(planned.get(name, (name,))) for name in entries}
            tensors = {name: entry for name, entry in entries.items() if hasattr(entry, "chunks")}
            self.specs: dict[str, TensorSpec] = {
                name: tensor_spec(name, entry.properties.dtype, entry.size) for name, entry in tensors.items()
            }
            covered = {n: sum(math.prod(c.sizes) for c in entry.chunks) for n, entry in tensors.items()}
            files = [place.relative_path for place in found.storage_data.values()]
        except (*DAMAGED_DATA_ERRORS, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if strange := [file for file in files if Path(file).name != file]:
            raise CheckpointError(f"{path} names a file outside its folder: {strange[0]}")
        for name, spec in self.specs.items():
            if covered[name] != spec.num_elements:
                raise CheckpointError(
                    f"{directory}: the parts of {name} have {covered[name]} of {spec.num_elements} elements"
                )
        self._reader = _Reader(directory, found)

    def value(self, entry: str) -> Any:
        """A tensor, assembled from the parts that processes have written, or another value."""
        spec = self.specs.get(entry)
        found: dict[str, Any] = {entry: spec and torch.empty(spec.shape, dtype=spec.dtype)}
        try:
            dcp.load(
                found, storage_reader=self._reader, planner=_Planner(flatten_state_dict=False), no_dist=True
            )
        except (Exception, CheckpointException) as error:
            cause = error.failures[0][0] if isinstance(error, CheckpointException) else error
            raise CheckpointError(f"{self.directory}: {entry} cannot be read: {refusal(cause)}") from error
        return found[entry]


class _Reader(dcp.FileSystemReader):
    """Reads a folder whose metadata were read already."""

    def __init__(self, directory: Path, metadata: Any) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Reads entries that are not tensors as plain values."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_type:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which such a file does not contain")


def _imported(
    contents: "_Contents", staging: StagingFolder, optimizer: str | None, num_steps: int | None
) -> Conversion:
    folder, metadata = contents.folder, contents.metadata(optimizer, num_steps)
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
    families = {"model": weights, "optimizer": state}
    stored = {
        family: {SavedTensor(name, folder.specs[entry], (), 0): entry for name, entry in names.items()}
        for family, names in families.items()
    }
    index, others = (assign_files(family, [*each]) for family, each in stored.items())
    place, every = staging.make(), [pair for each in stored.values() for pair in each.items()]
    tensors = ((each, folder.value(entry)) for each, entry in every)
    sums = write_tensors(place, index | others, 0, tensors)
    for name, data in ((METADATA_FILE, metadata.file()), (INDEX, weight_index(index))):
        sums[name] = write_file(place / name, data)
    write_checksums(place, sums)
    num_bytes = sum(each.spec.num_bytes for each, _ in every)
    return Conversion("a checkpoint of pipec", metadata, len(every), num_bytes, contents.skipped_entries)


@dataclass
class _Contents:
    """The entries of a folder: weights by name, the optimizer's state by parameter and key, its groups.

    ``names`` has the parameters of groups, unless they are an entry.
    """

    folder: _TorchFolder
    weights: dict[str, str] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    groups: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    file: bytes | None = None
    skipped_entries: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: _TorchFolder) -> "_Contents":
        """Raises CheckpointError without weights, or if the optimizer's state has another form."""
        made, flat = cls(folder), list[tuple[str, str]]()
        for entry, path in folder.paths.items():
            start = next((k for k, key in enumerate(path[:2]) if key in _TOP), 0)  # may be nested one level
            match path[start:]:
                case "model", *names if names and entry in folder.specs:
                    made.weights[".".join(map(str, names))] = entry
                case "optim" | "optimizer", "state", str(name), str(key):
                    made.state[name][key] = entry
                case "optim" | "optimizer", "param_groups", int(number), str(key):
                    made.groups[number][key] = entry
                case "optim" | "optimizer", str(name) if name.startswith(("state.", "param_groups.")):
                    flat.append((name, entry))
                case "optim" | "optimizer", *_:
                    raise CheckpointError(
                        f"{folder.directory} has {entry}, which get_state_dict(model, optimizer) does not "
                        "return; save the optimizer's state with it"
                    )
                case "pipec", "metadata":
                    made.file = folder.value(entry)
                case _:
                    made.skipped_entries.append(entry)
        if not made.weights:
            raise CheckpointError(
                f"{folder.directory} has no tensors under model: it has "
                f"{', '.join(made.skipped_entries[:3])}. Save "
                'them as dcp.save({"model": model.state_dict()}, checkpoint_id=...)'
            )
        made._add_flattened(flat)
        return made

    def _add_flattened(self, entries: list[tuple[str, str]]) -> None:
        """Add the optimizer's state in the form of ``flatten_optimizer_state_dict``, ``state.NAME.KEY``.

        It has the hyperparameters of each parameter. Parameters that have the same ones become a group.

        Raises:
            CheckpointError: a name begins with that of no weight.
        """
        hyperparameters: dict[str, dict[str, str]] = defaultdict(dict)
        for name, entry in entries:
            kind, _, rest = name.partition(".")
            weight, _, key = rest.rpartition(".")
            if weight not in self.weights:
                raise CheckpointError(
                    f"{self.folder.directory} has {name}, but {weight or rest!r} is no weight under model"
                )
            (self.state if kind == "state" else hyperparameters)[weight][key] = entry
        grouped: dict[str, list[str]] = defaultdict(list)
        for weight in filter(hyperparameters.__contains__, self.weights):
            values = {key: self.folder.value(entry) for key, entry in hyperparameters[weight].items()}
            grouped[repr(sorted(values.items()))].append(weight)
        for number, names in enumerate(grouped.values()):
            self.groups[number] = hyperparameters[names[0]]
            self.names[number] = tuple(names)

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
        for number, entries in sorted(self.groups.items()):
            values = {key: self.folder.value(entry) for key, entry in entries.items()}
            names = tuple(values.pop("params", self.names.get(number, ())))
            values.pop("param_names", None)
            groups.append(ParamGroup(kind, names, plain(values, "a group of the optimizer")))
        state: dict[str, dict[str, list[Any] | str]] = {
            name: {
                key: f"{name}/{key}" if entry in self.folder.specs else [plain(self.folder.value(entry), key)]
                for key, entry in entries.items()
            }
            for name, entries in self.state.items()
        }
        return OptimizerState(groups, state)


_TOP = ("model", "optim", "optimizer")
