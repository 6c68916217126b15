"""Weights for ``from_pretrained`` of transformers, of which each rank reads its own stages' alone.

transformers renames and merges weights while it loads them, initialises what a folder lacks, and ties. All of
this it does here, too, but first with weights on meta, which take no memory: the names and shapes come from
the headers of the files. Once the stages are cut, ``read`` converts the weights of some names for real.
"""

import contextlib
import copy
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipec.checkpoint.all_ranks import call_on_all_ranks
from pipec.checkpoint.hugging_face import weight_files
from pipec.errors import CheckpointError, InputError
from pipec.runtime.absent_tensors import hold, is_unread
from pipec.runtime.messages.call_description import format_names, values_digest
from pipec.runtime.model_tensors import ModelTensors
from pipec.runtime.step.ranks import Ranks


def read_pretrained(
    name: str | Path, model_class: Any, arguments: Mapping[str, Any]
) -> tuple[nn.Module, "PretrainedWeights"]:
    """What ``model_class.from_pretrained(name, **arguments)`` returns, but with its weights on meta.

    Tensors that the folder lacks have the values that transformers gives them.

    Args:
        model_class: None for the class that the configuration names.

    Raises:
        CheckpointError: the folder does not fit the model, or a file is damaged.
        InputError: such weights cannot be read for each stage by itself.
    """
    transformers = _transformers()
    if model_class is None:
        model_class = _configured_class(name, arguments)
    if forbidden := arguments.keys() & {
        "device_map",
        "tp_plan",
        "tp_size",
        "distributed_config",
        "max_memory",
    }:
        raise InputError(
            f"{min(forbidden)} says where transformers puts weights, but with pipec a rank holds those of "
            "its own stages; leave it out, and pass devices=..."
        )
    found: list[PretrainedWeights] = []

    def load_later(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **_: Any
    ) -> tuple[Any, None]:
        if found:
            raise InputError(
                f"{name} has more than one set of weights, such as those of a PEFT adapter. Pass the folder "
                "of the model alone, and for an adapter load both with transformers and call pipec.compile"
            )
        _require_plain_files(name, checkpoint_files, load_config)
        found.append(PretrainedWeights(str(name), model, checkpoint_files, load_config))
        return found[0].load_on_meta(model), None

    base, later = transformers.PreTrainedModel, staticmethod(load_later)
    with mock.patch.object(base, "_load_pretrained_model", later), _raising_checkpoint_errors(name):
        model = model_class.from_pretrained(name, **arguments)
    if not found:
        raise InputError(f"{model_class.__name__}.from_pretrained does not load a model of transformers")
    return model, found[0]


def weights_for(model: Any, folder: str | Path) -> "PretrainedWeights":
    """The weights in a folder, for a model on meta, which gets values where the folder has none.

    Raises:
        CheckpointError: the folder does not fit the model, or a file is damaged.
        InputError: the model is not on meta, or not one of transformers.
    """
    transformers = _transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise InputError(
            f"weights takes a model of transformers, and {type(model).__name__} is none. Compile it on meta, "
            "call pipe.to_empty(device=...) and then pipe.load_checkpoint(folder, model_only=True)"
        )
    if real := [name for name, parameter in model.named_parameters() if not parameter.is_meta]:
        raise InputError(
            f"weights takes a model on meta, but {format_names(real)} has values; make the model inside of "
            'torch.device("meta"), or leave out weights'
        )
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    with _raising_checkpoint_errors(folder):
        files = [str(Path(folder) / file) for file in sorted(weight_files(Path(folder)))]
        config = LoadStateDictConfig(
            pretrained_model_name_or_path=str(folder),
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=get_model_conversion_mapping(model),
        )
        weights = PretrainedWeights(str(folder), model, files, config)
        model._finalize_model_loading(model, config, weights.load_on_meta(model))
    return weights


class PretrainedWeights:
    """The files of a model's weights, and how they become tensors of the model.

    It has a copy of the model on meta, into which transformers loads.
    """

    def __init__(self, name: str, model: Any, files: Sequence[str], load_config: Any) -> None:
        self.name = name
        self._model, self._load_config = copy.deepcopy(model), load_config
        self._files: dict[str, str] = {}
        self._on_meta: dict[str, Tensor] = {}
        for file in files:
            for key, tensor in load_file(file).items():  # which maps it, and reads its header
                self._files[key], self._on_meta[key] = file, torch.empty_like(tensor, device="meta")
        self._sources: dict[str, list[str]] = {}
        self._names: dict[str, str] = {}  # of tensors whose names in the model have changed

    @property
    def digest(self) -> str:
        """A digest of the files' sizes, their headers, and some of their contents."""
        return " ".join(f"{Path(file).name} {_sampled(file)}" for file in sorted({*self._files.values()}))

    def load_on_meta(self, model: Any) -> Any:
        """Let ``model``, on meta, be what it would be with its weights; returns what transformers notes.

        Raises InputError for a module with state that is no tensor.
        """
        if extra := [name for name in model.state_dict() if name.endswith("_extra_state")]:
            raise InputError(
                f"{format_names(extra)} is no tensor, and a module is given it as a whole; load the model by "
                "from_pretrained(...) of transformers, and call pipec.compile"
            )
        info = self._converted(model, self._on_meta, "meta")
        self._find_sources({*model.state_dict()} - info.missing_keys)
        for target, source in list(model.all_tied_weights_keys.items()):
            if target in self._sources and source in self._sources:
                if self._are_equal(target, source):
                    info.missing_keys.add(target)  # so that it is tied
                else:
                    model.all_tied_weights_keys.pop(target)
        return info

    def with_adapter(self, model: nn.Module, peft_config: Any) -> nn.Module:
        """``get_peft_model(model, peft_config)`` for a model on meta. The adapter has its values.

        Raises:
            InputError: it begins with values of the model.
        """
        import peft

        to = nn.Module.to

        def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            """``module.to``, but an adapter does not follow its layer to meta."""
            kept = {name: _without_meta(value) for name, value in kwargs.items()}
            return to(module, *map(_without_meta, args), **kept)

        refusal = (
            f"{type(peft_config).__name__}: an adapter of this kind begins with values of the weights of "
            f"{self.name}, which are read once the stages are cut; load the model by from_pretrained(...) of "
            "transformers, and pass get_peft_model(model, peft_config) to pipec.compile"
        )
        named = sorted(_named_tensors(model), key=lambda each: each[0] in self._sources)  # for tied ones
        before = {id(tensor): name for name, tensor in named}
        try:
            with mock.patch.object(nn.Module, "to", stay):
                adapted: nn.Module = peft.get_peft_model(model, peft_config)
        except (NotImplementedError, RuntimeError) as error:
            raise InputError(f"{refusal} ({error})") from error
        self._names = {name: before[id(x)] for name, x in _named_tensors(adapted) if id(x) in before}
        if any(tensor.is_meta and name not in self._names for name, tensor in _named_tensors(adapted)):
            raise InputError(refusal)
        return adapted.train(model.training)

    def fill(self, ranks: Ranks, tensors: ModelTensors, devices: Mapping[str, torch.device | None]) -> None:
        """Read the tensors of this process that are in files still. All processes do so together.

        Raises:
            CheckpointError: a file has changed or is damaged, or ranks see different files.
        """
        unread = {fqn: x for fqn, x in tensors.unique().items() if is_unread(x)}
        names = {
            name: self._names.get(name, name) for name, fqn in tensors.canonical.items() if fqn in unread
        }
        stored = {tensors.canonical[name]: x for name, x in names.items() if x in self._sources}
        made_together = defaultdict[tuple[str, ...], dict[str, str]](dict)
        for fqn, target in stored.items():
            made_together[tuple(self._sources[target])][fqn] = target

        def read() -> dict[str, str]:
            digests = {}
            for sources, targets in made_together.items():
                homes = {fqn: devices.get(fqn) or torch.device("cpu") for fqn in targets}
                for fqn, values in self._read(sources, targets, homes):
                    hold(unread[fqn], values.to(unread[fqn].dtype))  # after pipe.to(dtype), it is another
                    digests[fqn] = values_digest(values)
            return digests

        found: dict[str, str] = {}
        for rank, digests in enumerate(call_on_all_ranks(ranks, f"reading {self.name}", read)):
            for fqn, digest in digests.items():
                if found.setdefault(fqn, digest) != digest:
                    raise CheckpointError(
                        f"{self.name}: rank {rank} has read other values of {fqn} than a rank before it; "
                        "let every rank see the same files"
                    )

    def _read(
        self, sources: Sequence[str], targets: Mapping[str, str], homes: Mapping[str, torch.device]
    ) -> Iterator[tuple[str, Tensor]]:
        """Make these tensors of the model of their weights, and yield each on its device."""
        with contextlib.ExitStack() as stack:  # files are closed at the end, as they hold memory
            files = {
                file: stack.enter_context(safetensors.safe_open(file, "pt"))
                for file in {self._files[source] for source in sources}
            }
            weights = {source: files[self._files[source]].get_slice(source) for source in sources}
            info = self._converted(self._model, weights, str(next(iter(homes.values()))))
            for fqn, target in targets.items():
                found = self._model.get_parameter_or_buffer(target).detach()
                if info.mismatched_keys or info.conversion_errors or found.is_meta:
                    raise CheckpointError(
                        f"{self.name} has changed since its headers were read; start again when nobody "
                        "writes to it"
                    )
                yield fqn, found.to(homes[fqn], copy=found.device == homes[fqn])
                path, _, leaf = target.rpartition(".")
                owner = self._model.get_submodule(path)
                setattr(owner, leaf, _on_meta(getattr(owner, leaf)))  # gives its memory back

    def _find_sources(self, targets: set[str]) -> None:
        """Find the weights of which each of these tensors is made."""
        from transformers import core_model_loading as loading

        state = self._model.state_dict()
        mapping = self._load_config.weight_mapping or []
        renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
        prefix, made = self._model.base_model_prefix, defaultdict[str, list[str]](list)
        converted = set[str]()
        for source in self._on_meta:
            renamed, pattern = loading.rename_source_key(source, renamings, converters, prefix, state)
            if renamed not in state and source in state:
                renamed, pattern = loading.rename_source_key(source, [], [], prefix, state)
            if renamed in state:
                made[renamed].append(source)
                converted |= {renamed} if pattern else set()
        for first, sources in made.items():
            found = {first}
            if first in converted:
                info = self._converted(self._model, {key: self._on_meta[key] for key in sources}, "meta")
                found = state.keys() - info.missing_keys
            self._sources |= dict.fromkeys(found & targets, sources)
        if lost := targets - self._sources.keys():
            raise InputError(
                f"it cannot be found of which weights of {self.name} transformers makes "
                f"{format_names(sorted(lost))}; load the model by from_pretrained(...) of transformers, and "
                "call pipec.compile"
            )

    def _converted(self, model: Any, weights: dict[str, Any], device: str) -> Any:
        """Load weights into ``model`` by transformers; returns what it notes."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        config = replace(self._load_config, device_map={"": device})
        with _without_progress_bars():
            info, _ = convert_and_load_state_dict_in_model(model, weights, config)
        return info

    def _are_equal(self, *targets: str) -> bool:
        """Whether two tensors are made of weights with the same values."""
        values = [[load_file(self._files[x])[x] for x in self._sources[target]] for target in targets]
        pairs = zip(*values, strict=False)
        same = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
        return same and len(values[0]) == len(values[1])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _transformers() -> Any:
    try:
        import transformers
        import transformers.core_model_loading
    except ImportError as error:
        raise InputError(
            "from_pretrained and weights=... read models of transformers, version 5: pip install "
            f"'transformers>=5' ({error})"
        ) from error
    return transformers


def _configured_class(name: str | Path, arguments: Mapping[str, Any]) -> Any:
    """The class of the model that was saved."""
    transformers = _transformers()
    config = arguments.get("config")
    if not isinstance(config, transformers.PreTrainedConfig):
        where = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code")
        given = {key: arguments[key] for key in where if key in arguments}
        with _raising_checkpoint_errors(name):
            config = transformers.AutoConfig.from_pretrained(name if config is None else config, **given)
    names = config.architectures or ["None"]
    found = getattr(transformers, names[0], None)
    if found is None:
        raise InputError(
            f"the configuration of {name} names the class {names[0]}, which transformers lacks; pass the "
            "class, such as model_class=transformers.AutoModelForCausalLM"
        )
    return found


def _require_plain_files(name: str | Path, files: Any, load_config: Any) -> None:
    """Raise InputError for weights of which a part cannot be read by itself."""
    if load_config.is_quantized:
        raise InputError(
            f"the weights of {name} are quantized, which pipec does not train; pass the folder of the model "
            "that is not"
        )
    if other := [file for file in files or ["none"] if not str(file).endswith(".safetensors")]:
        raise InputError(
            f"the weights of {name} are in {Path(other[0]).name}, but only safetensors can be read in parts; "
            "load and save the model by transformers once: AutoModel.from_pretrained(...)"
            ".save_pretrained(folder)"
        )


def _sampled(file: str) -> str:
    """A digest of the size of a file and of blocks of it at even distances, the first of its header."""
    path, digest = Path(file), 0
    size = path.stat().st_size
    with path.open("rb") as opened:
        for number in range(_NUM_BLOCKS):
            opened.seek(size * number // _NUM_BLOCKS)
            digest = zlib.crc32(opened.read(_BLOCK_BYTES), digest)
    return f"{size} {digest:08x}"


_NUM_BLOCKS, _BLOCK_BYTES = 64, 4096


@contextlib.contextmanager
def _raising_checkpoint_errors(name: str | Path) -> Iterator[None]:
    """Turn the errors of transformers for such folders into CheckpointError."""
    try:
        yield
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{name} cannot be loaded: {error}") from error


def _without_meta(value: Any) -> Any:
    """An argument of ``nn.Module.to`` that asks for no device if it asked for meta."""
    if isinstance(value, Tensor):
        return value.dtype if value.is_meta else value
    is_device = isinstance(value, str | torch.device)
    return None if is_device and torch.device(value).type == "meta" else value


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers would draw one for each group of tensors."""
    from transformers.utils import logging

    are_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if are_shown:
            logging.enable_progress_bar()
