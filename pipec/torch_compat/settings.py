"""torch's global settings that affect what operators compute, and functions that read them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.backends import cuda

uninitialized: Any = torch.utils.deterministic
cudnn: Any = torch.backends.cudnn
mkldnn: Any = torch.backends.mkldnn


def _precision(operators: Any) -> Callable[[], str]:
    """Reads the precision of float32 products, which torch's older settings change too; "ieee" if unset."""
    return lambda: "ieee" if (precision := operators.fp32_precision) == "none" else precision


SETTINGS: Mapping[str, Callable[[], Any]] = {
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "warnings only for nondeterministic algorithms": torch.is_deterministic_algorithms_warn_only_enabled,
    "filling of uninitialized memory": lambda: uninitialized.fill_uninitialized_memory,
    "float32 precision": _precision(torch.backends),
    "float32 matmul precision on GPUs": _precision(cuda.matmul),
    "float32 convolution precision on GPUs": _precision(cudnn.conv),
    "float32 RNN precision on GPUs": _precision(cudnn.rnn),
    "float32 matmul precision on CPUs": _precision(mkldnn.matmul),
    "float32 convolution precision on CPUs": _precision(mkldnn.conv),
    "float32 RNN precision on CPUs": _precision(mkldnn.rnn),
    "reduced precision of float16 sums": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced precision of bfloat16 sums": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cudnn": lambda: cudnn.enabled,
    "cudnn deterministic": lambda: cudnn.deterministic,
    "cudnn benchmark": lambda: cudnn.benchmark,
    "oneDNN": lambda: mkldnn.enabled,
    "oneDNN deterministic": lambda: mkldnn.deterministic,
    "flash attention": cuda.flash_sdp_enabled,
    "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
    "math attention": cuda.math_sdp_enabled,
    "cudnn attention": cuda.cudnn_sdp_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "default device": lambda: torch.get_default_device().type,
}
"""Functions that read the settings, by name."""


def read_settings() -> tuple[Any, ...]:
    """The current values, in the order of ``SETTINGS``."""
    return tuple([read() for read in SETTINGS.values()])
