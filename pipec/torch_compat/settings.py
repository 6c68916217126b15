"""torch's global settings that affect what operators compute, and functions that read them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.backends import mha
from torch.utils import _device


def _precision(backend: str, operators: str) -> Callable[[], Any]:
    """Reads the precision of float32 products, which torch's older settings change too; "ieee" if unset."""
    read = functools.partial(torch._C._get_fp32_precision_getter, backend, operators)
    return lambda: "ieee" if (precision := read()) == "none" else precision


SETTINGS: Mapping[str, Callable[[], Any]] = {
    "deterministic algorithms": torch._C._get_deterministic_algorithms,
    "warnings only for nondeterministic algorithms": torch._C._get_deterministic_algorithms_warn_only,
    "filling of uninitialized memory": torch._C._get_deterministic_fill_uninitialized_memory,
    "float32 precision": _precision("generic", "all"),
    "float32 matmul precision on GPUs": _precision("cuda", "matmul"),
    "float32 convolution precision on GPUs": _precision("cuda", "conv"),
    "float32 RNN precision on GPUs": _precision("cuda", "rnn"),
    "float32 matmul precision on CPUs": _precision("mkldnn", "matmul"),
    "float32 convolution precision on CPUs": _precision("mkldnn", "conv"),
    "float32 RNN precision on CPUs": _precision("mkldnn", "rnn"),
    "reduced precision of float16 sums": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "reduced precision of bfloat16 sums": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "cudnn": torch._C._get_cudnn_enabled,
    "cudnn deterministic": torch._C._get_cudnn_deterministic,
    "cudnn benchmark": torch._C._get_cudnn_benchmark,
    "oneDNN": torch._C._get_mkldnn_enabled,
    "oneDNN deterministic": torch._C._get_mkldnn_deterministic,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "memory-efficient attention": torch._C._get_mem_efficient_sdp_enabled,
    "math attention": torch._C._get_math_sdp_enabled,
    "cudnn attention": torch._C._get_cudnn_sdp_enabled,
    "fast path of attention modules": mha.get_fastpath_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "default device": lambda: getattr(_device.CURRENT_DEVICE, "type", None),
}
"""Functions that read the settings, by name."""

_READERS = [*SETTINGS.values()]


def read_settings() -> tuple[Any, ...]:
    """The current values, in the order of ``SETTINGS``."""
    return tuple([read() for read in _READERS])
