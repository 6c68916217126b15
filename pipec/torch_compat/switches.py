"""What of torch's state, besides modes around a call, decides what a model is traced to."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch.fx.experimental import _config as symbolic_config
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

CONFIGS: tuple[Any, ...] = (torch._dynamo.config, torch._functorch.config, symbolic_config)

_ASKED: Mapping[str, Callable[[], Any]] = {
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "anomaly": torch.is_anomaly_enabled,
    "dtype": torch.get_default_dtype,
    "device": torch.get_default_device,
    "deterministic": torch.get_deterministic_debug_mode,
    "autocast cache": torch.is_autocast_cache_enabled,
    "threads": torch.get_num_threads,
    "cpu": torch.backends.cpu.get_cpu_capability,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled,
    "fast path": torch.backends.mha.get_fastpath_enabled,
    "distributed": lambda: torch.distributed.is_available() and torch.distributed.is_initialized(),
}

_BACKENDS: Any = torch.backends

_FLOAT32: Mapping[str, Any] = {
    "everywhere": _BACKENDS,
    "cublas": _BACKENDS.cuda.matmul,
    "cudnn": _BACKENDS.cudnn,
    "cudnn conv": _BACKENDS.cudnn.conv,
    "cudnn rnn": _BACKENDS.cudnn.rnn,
    "mkldnn matmul": _BACKENDS.mkldnn.matmul,
    "mkldnn conv": _BACKENDS.mkldnn.conv,
    "mkldnn rnn": _BACKENDS.mkldnn.rnn,
}
"""What has a precision of float32. torch's older settings change these, and raise once these were set."""

_FLAGS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "cudnn": (torch.backends.cudnn, ("enabled", "benchmark", "deterministic")),
    "mkldnn": (torch.backends.mkldnn, ("enabled", "deterministic")),
    **{f"float32 {name}": (holder, ("fp32_precision",)) for name, holder in _FLOAT32.items()},
    "opt_einsum": (torch.backends.opt_einsum, ("enabled", "strategy")),
    "cublas": (torch.backends.cuda.matmul, ("allow_fp16_reduced_precision_reduction",)),
    "memory": (torch.utils.deterministic, ("fill_uninitialized_memory",)),
}


def modes_around() -> list[object]:
    """The modes that would see every operator of a model, and the functions that autograd packs with."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return [
        *_get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
        *([hooks] if hooks else []),
    ]


def patched_functions() -> dict[str, FunctionType]:
    """Functions among torch's own that someone else put there, by name."""
    folder = str(Path(torch.__file__).parent)
    return {
        f"{holder.__name__}.{name}": value
        for holder in (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.Tensor)
        for name, value in vars(holder).items()
        if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith((folder, "<"))
    }


def switches(device: torch.device) -> dict[str, Any]:
    """The state of torch that a trace for a device depends on, by name."""
    found: dict[str, Any] = {name: asked() for name, asked in _ASKED.items()}
    for name, (holder, flags) in _FLAGS.items():
        found |= {f"{name} {flag}": getattr(holder, flag, None) for flag in flags}
    for kind in ("cpu", "cuda"):
        found[f"autocast {kind}"] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    for config in CONFIGS:
        found[config.__name__] = config.get_config_copy()
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return found
