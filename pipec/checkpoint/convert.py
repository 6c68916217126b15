"""Checkpoints to and from folders of ``torch.distributed.checkpoint``, by one process, tensor by tensor.

There a model's tensors are under ``model``, and what ``get_state_dict`` of that library gives of an optimizer
is under ``optim``. The rest of a checkpoint of pipec is one text there, ``pipec.document``, so that it comes
back.
"""

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from pipec.checkpoint.directory import Workplace, found, require_own
from pipec.checkpoint.document import DOCUMENT, Document, RandomStates, parse_document, read_document
from pipec.checkpoint.folder import Destined, files_of, index_of, write_rest, write_tensors, writers_of
from pipec.checkpoint.hugging_face import INDEX, weight_files
from pipec.checkpoint.manifest import check_file, read_manifest
from pipec.checkpoint.optimizers import Group, OptimizerState, tensor_names
from pipec.checkpoint.parts import Stored
from pipec.checkpoint.tensors import TensorFiles
from pipec.checkpoint.together import as_own
from pipec.checkpoint.torch_folder import METADATA, TorchFolder, names_in
from pipec.checkpoint.values import decoded, encoded
from pipec.errors import CheckpointError, InputError, PipecError


@dataclass(frozen=True)
class Converted:
    """What was made. ``left_out`` are entries of a folder that a checkpoint has no place for."""

    made: str
    document: Document
    num_tensors: int
    num_bytes: int
    left_out: list[str]


def convert(source: Path, target: Path, optimizer: str | None, num_steps: int | None) -> Converted:
    """Make a checkpoint of a folder of ``torch.distributed.checkpoint``, or such a folder of a checkpoint.

    ``optimizer`` is the class of the optimizer, which such a folder does not tell; ``num_steps`` the number
    of steps that were made. A folder that was made of a checkpoint tells both.

    Raises:
        CheckpointError: the source is damaged or neither of the two, or the target is there.
        InputError: the optimizer's class is missing, or given where nothing needs it.
    """
    require_own(target, None)
    is_torch_folder = (source / METADATA).is_file()
    if not is_torch_folder and (optimizer is not None or num_steps is not None):
        raise InputError("a checkpoint of pipec has its optimizer and its steps; leave out both options")
    try:
        if is_torch_folder:
            return _imported(TorchFolder.open(source), target, optimizer, num_steps)
        return _exported(found(source), target)
    except PipecError:
        raise
    except Exception as error:
        raise as_own(error, f"converting {source}") from error


def opened(place: Path) -> tuple[Document, TensorFiles, TensorFiles]:
    """A checkpoint, its weights and its optimizer's state, once every file was checked.

    Raises:
        CheckpointError: it is damaged, or none.
    """
    if not (place / DOCUMENT).is_file():
        raise CheckpointError(
            f"{place} is neither a checkpoint of pipec nor a folder of torch.distributed.checkpoint: it has "
            f"no {DOCUMENT} and no {METADATA}"
        )
    manifest = read_manifest(place)
    for name, expected in sorted(manifest.files.items()):
        check_file(place, name, expected)
    state = [place / name for name in manifest.files if name.startswith("optimizer-")]
    weights = [place / name for name in sorted(weight_files(place))]
    return read_document(place / DOCUMENT), TensorFiles(weights), TensorFiles(state)


def _exported(source: Path, target: Path) -> Converted:
    document, weights, state = opened(source)
    tied = {other: weights[first] for other, first in (document.ties or {}).items()}
    nested: dict[str, Any] = {"model": dict(weights) | tied, "pipec": {"document": document.text().decode()}}
    if document.optimizer is not None:
        nested["optim"] = {
            "state": {
                name: {key: state[x] if isinstance(x, str) else decoded(x[0]) for key, x in entries.items()}
                for name, entries in document.optimizer.state.items()
            },
            "param_groups": [
                {**decoded(group.numbers), "params": list(group.names)} for group in document.optimizer.groups
            ],
        }
    with _coming_to(target) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of which this makes no use
        dcp.save(nested, checkpoint_id=partial, no_dist=True)
    return _told("a folder of torch.distributed.checkpoint", document, weights, state, [])


def _imported(folder: TorchFolder, target: Path, optimizer: str | None, num_steps: int | None) -> Converted:
    contents = _Contents.of(folder)
    document = contents.document(optimizer, num_steps)
    ties = document.ties or {}
    weights = {name: entry for name, entry in contents.weights.items() if name not in ties}
    state = {
        f"{name}/{key}": entry
        for name, entries in contents.state.items()
        for key, entry in entries.items()
        if entry in folder.kinds
    }
    if document.optimizer is not None and {*tensor_names(document.optimizer)} != state.keys():
        raise CheckpointError(f"{folder.directory} has another state of the optimizer than it says itself")
    families: dict[str, dict[str, str]] = {"model": weights, "optimizer": state}
    files = {family: files_of(family, _stored(folder, names)) for family, names in families.items()}

    def tensors() -> Iterator[Destined]:
        for family, names in families.items():
            for file, every in files[family].items():
                for each in every:
                    yield file, each, folder.tensor(names[each.name])

    texts = {DOCUMENT: document.text(), INDEX: index_of(files["model"])}
    with _coming_to(target) as partial:
        writers = writers_of(partial, files["model"] | files["optimizer"])
        try:
            write_rest(partial, write_tensors(writers, tensors()), texts)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
    made = {family: TensorFiles([target / file for file in own]) for family, own in files.items()}
    return _told("a checkpoint of pipec", document, made["model"], made["optimizer"], contents.left_out)


def _stored(folder: TorchFolder, names: Mapping[str, str]) -> list[Stored]:
    """The tensors, in an order in which each lies at a multiple of its elements."""
    kinds = {name: folder.kinds[entry] for name, entry in names.items()}
    aligned = sorted(kinds.items(), key=lambda item: -item[1].torch_dtype.itemsize)
    return [Stored(name, kind, ((0, 0, kind.num_elements),), 0) for name, kind in aligned]


@dataclass(frozen=True)
class _Contents:
    """The entries of a folder: weights by name, the optimizer's state by parameter and key, its groups."""

    folder: TorchFolder
    weights: dict[str, str]
    state: dict[str, dict[str, str]]
    groups: dict[int, dict[str, str]]
    text: str | None
    left_out: list[str]

    @classmethod
    def of(cls, folder: TorchFolder) -> "_Contents":
        """Raises CheckpointError if it holds no weights, or a state of an optimizer in another form."""
        made = cls(folder, {}, defaultdict(dict), defaultdict(dict), None, [])
        for entry, path in names_in(folder):
            match path:
                case "model", *names if names and entry in folder.kinds:
                    made.weights[".".join(map(str, names))] = entry
                case "optimizer", "state", str(name), str(key):
                    made.state[name][key] = entry
                case "optimizer", "param_groups", int(number), str(key):
                    made.groups[number][key] = entry
                case "optimizer", *_:
                    raise CheckpointError(
                        f"{folder.directory} has {entry}, which is not what get_state_dict(model, optimizer) "
                        "gives; save the state of the optimizer by that, and do not flatten it"
                    )
                case "pipec", "document":
                    made = replace(made, text=folder.value(entry))
                case _:
                    made.left_out.append(entry)
        if not made.weights:
            raise CheckpointError(
                f"{folder.directory} has no tensors under model: it has {', '.join(made.left_out[:3])}. Save "
                'them as dcp.save({"model": model.state_dict()}, checkpoint_id=...)'
            )
        return made

    def document(self, optimizer: str | None, num_steps: int | None) -> Document:
        if self.text is not None:
            if optimizer is not None or num_steps is not None:
                raise InputError("the folder was made of a checkpoint, and has its optimizer and its steps")
            return parse_document(self.text.encode(), self.folder.directory)
        if self.groups and optimizer is None:
            raise InputError(
                f"{self.folder.directory} has the state of an optimizer, and does not tell of which; pass "
                "its class, such as --optimizer AdamW"
            )
        if optimizer is not None and not self.groups:
            raise InputError(f"{self.folder.directory} has no state of an optimizer; leave out --optimizer")
        state = None if optimizer is None else self._optimizer(optimizer)
        return Document(num_steps or 0, None, None, RandomStates([], []), state, [], [], None)

    def _optimizer(self, kind: str) -> OptimizerState:
        groups = []
        for _, entries in sorted(self.groups.items()):
            values = {key: self._value(entry) for key, entry in entries.items()}
            names = tuple(values.pop("params", ()))
            values.pop("param_names", None)
            groups.append(Group(kind, names, encoded(values, "a group of the optimizer")))
        state: dict[str, dict[str, list[Any] | str]] = {
            name: {
                key: f"{name}/{key}" if entry in self.folder.kinds else [encoded(self._value(entry), key)]
                for key, entry in entries.items()
            }
            for name, entries in self.state.items()
        }
        return OptimizerState(groups, state)

    def _value(self, entry: str) -> Any:
        return self.folder.tensor(entry) if entry in self.folder.kinds else self.folder.value(entry)


@contextlib.contextmanager
def _coming_to(target: Path) -> Iterator[Path]:
    """The folder to write to, which comes to its place at the end of a ``with``."""
    place = Workplace(target)
    try:
        yield Path(place.make())
        require_own(target, None)
        place.publish()
    except BaseException:
        place.discard()
        raise


def _told(
    made: str, document: Document, weights: TensorFiles, state: TensorFiles, left_out: list[str]
) -> Converted:
    kinds = [*weights.kinds.values(), *state.kinds.values()]
    return Converted(made, document, len(kinds), sum(kind.num_bytes for kind in kinds), left_out)
