"""Arguments of a Trainer, options of ``pipec.compile`` among them.

For the Trainer each process is alone: it reads whole batches, which pipec divides among replicas, and the
results of a step are those of all ranks. Only what is printed, logged and written depends on the rank.
"""

import os
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import DistributedType
from torch.distributed import DeviceMesh, ProcessGroup
from transformers import TrainingArguments

from pipec.compiler.schedule_policy import make_schedule_policy
from pipec.errors import InputError
from pipec.integrations import replicas_of
from pipec.options import OPTIONS, Options
from pipec.runtime.processes.launch import default_num_ranks, world

_OF_TRAINER = {"loss_fn", "optimizer", "clip_grad_norm", "precision", "batch"}
"""Options that follow from what the Trainer is given."""

_TYPES = {
    "devices": int | None,
    "replicas": int,
    "microbatch_weight": str | None,
    "timeout": float,
}
"""Types of fields, where the flag of an option does not tell it."""

_REFUSED = {
    "fsdp": "leave it out: stages divide the model, and shard='parameters' with replicas what is left",
    "deepspeed": "leave it out: shard='optimizer', 'gradients' or 'parameters' is ZeRO 1, 2 or 3",
    "use_liger_kernel": "leave it out: its kernels would replace operators that pipec cuts and proves",
    **dict.fromkeys(
        ("torch_compile_backend", "torch_compile_mode"), "torch_compile=True compiles by inductor's defaults"
    ),
    "auto_find_batch_size": "leave it out: microbatches and memory_limit make a step fit",
    "save_on_each_node": "leave it out: output_dir is one folder, which all nodes see",
    "activation_offloading": 'pass offload="activations"',
    "neftune_noise_alpha": "add the noise in the model, by a forward hook of its embedding",
}


def _option_fields() -> list[tuple[str, Any, Any]]:
    """The options that a user may set, as fields that ``HfArgumentParser`` can read."""
    found: list[tuple[str, Any, Any]] = []
    for option in OPTIONS:
        if option in _OF_TRAINER:
            continue
        declared, default = OPTIONS[option], getattr(_DEFAULTS, option)
        default = None if option == "recompute" else default
        kind: Any = _TYPES.get(option, Any)
        if option not in _TYPES and declared.flag is not None:
            kind = bool if isinstance(default, bool) else (declared.flag.reads or str) | None
        metadata = {"help": " ".join(declared.meaning.split()).replace("%", "%%")}
        found.append((option, kind, field(default=default, kw_only=True, metadata=metadata)))
    return found


_DEFAULTS = Options()

_Options: Any = make_dataclass("_Options", _option_fields())


class PipelineArguments(_Options):  # type: ignore[misc]
    """Mixed into the arguments of a Trainer: the options, and that each process is alone."""

    torch_compile: Any
    parallelism_config: Any
    group: Any
    activation_checkpointing: Any
    recompute: Any
    _n_gpu: Any

    def __post_init__(self) -> None:
        self._refuse()
        if self.torch_compile:
            self.torch_compile, self.kernels = False, "inductor"
        if self.parallelism_config is not None:
            self.replicas, self.parallelism_config = replicas_of(self.parallelism_config), None
        if isinstance(self.group, ProcessGroup):  # which cannot be copied and saved with the arguments
            self.group = DeviceMesh.from_group(self.group, "cpu")
        super().__post_init__()
        self._take_recompute()
        self.num_replicas = self._num_replicas()
        self.options()

    def _refuse(self) -> None:
        for name, remedy in _REFUSED.items():
            if getattr(self, name, None):
                raise InputError(f"{name} is set, which a pipeline does otherwise; {remedy}")

    def _take_recompute(self) -> None:
        """``activation_checkpointing``, once ``gradient_checkpointing``, is ``recompute="full"``."""
        if self.recompute is None:
            self.recompute = "full" if self.activation_checkpointing else _DEFAULTS.recompute
        self.activation_checkpointing = self.gradient_checkpointing = False

    def options(self) -> dict[str, Any]:
        """The options for ``pipec.compile``, each checked. Raises InputError."""
        chosen = {name: getattr(self, name) for name in OPTIONS if name not in _OF_TRAINER}
        chosen["precision"] = f"{self._given_precision}-mixed" if self._given_precision != "no" else None
        Options.of(chosen)
        return chosen

    @property
    def updates_in_programs(self) -> bool:
        """Whether pipec makes the updates: it does where it scales the loss, shards or offloads state."""
        return (
            self._given_precision == "fp16"
            or bool(self.shard)
            or self.offload in ("optimizer", "weights", "all")
        )

    @property
    def mixed_precision(self) -> str:
        """What Accelerate casts to: nothing. Stages are compiled with ``bf16`` or ``fp16``."""
        return "no"

    @mixed_precision.setter
    def mixed_precision(self, precision: str) -> None:
        self._given_precision = precision

    def _num_replicas(self) -> int:
        """How many pipelines share a batch. ``per_device_train_batch_size`` is the rows of each."""
        here = world(self.group)
        devices = default_num_ranks(here) if self.devices is None else self.devices
        count = devices if isinstance(devices, int) else len(devices)
        wanted: Any = self.replicas if here.replicas is None else here.replicas
        replicas = make_schedule_policy(self.schedule, count, self.stages, wanted).replicas
        if not isinstance(replicas, int) or wanted == "auto":
            raise InputError(
                f"replicas is {self.replicas!r}, but a batch has per_device_train_batch_size rows for each "
                "replica, so that their number must be known; pass it, or stages"
            )
        return replicas

    @property
    def train_batch_size(self) -> int:
        """The rows of a batch, of all replicas."""
        return int(self.per_device_train_batch_size) * self.num_replicas

    @property
    def eval_batch_size(self) -> int:
        """The rows of a batch of an evaluation, of all replicas."""
        return int(self.per_device_eval_batch_size) * self.num_replicas

    @cached_property
    def _setup_devices(self) -> torch.device:
        device: torch.device = TrainingArguments._setup_devices.func(self)
        state = self.distributed_state
        state.num_processes, state.process_index = 1, 0
        state.local_process_index = int(os.environ.get("LOCAL_RANK", self.process_index))
        state.distributed_type = DistributedType.NO
        self._n_gpu = min(self._n_gpu, 1)
        return device

    @property
    def process_index(self) -> int:
        """The rank: rank 0 prints, logs and writes."""
        return world(self.group).rank

    def to_dict(self) -> dict[str, Any]:
        """As in ``TrainingArguments``, as JSON can have it."""
        return {**super().to_dict(), "group": None if self.group is None else str(self.group)}

    @property
    def place_model_on_device(self) -> bool:
        """Stages are placed by the pipeline."""
        return False


@dataclass(repr=False)
class PipecArguments(PipelineArguments, TrainingArguments):  # type: ignore[misc]
    """``transformers.TrainingArguments`` with the options of ``pipec.compile``.

    ``per_device_train_batch_size`` is the rows of a replica: with one pipeline, those of the batch. ``bf16``
    and ``fp16`` set ``precision``, ``activation_checkpointing`` (``gradient_checkpointing``) sets
    ``recompute="full"``, ``torch_compile`` sets ``kernels="inductor"``, the ``dp_replicate_size`` of a
    ``parallelism_config`` sets ``replicas``; ``max_grad_norm`` clips. Every process of ``group`` reads all
    rows of a batch. ``output_dir`` is one folder for them, which rank 0 writes.

    Raises InputError for what a pipeline takes the place of, such as ``fsdp`` and ``deepspeed``.
    """
