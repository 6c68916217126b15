"""Devices and links as data: the figures that turn FLOPs and bytes into seconds. No torch.

Peak rates are the vendors' figures for dense arithmetic, without structured sparsity. ``float32`` is the rate
of full precision, torch's default; ``with_tf32`` gives the rate of TF32. Bandwidths of links are per
direction.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import starmap

from pipec.ir import HostCost


class Arithmetic(StrEnum):
    """Kinds of operators that a device runs at different rates."""

    PRODUCT = "product"  # matrix products, convolutions, recurrent layers
    ATTENTION = "attention"
    OTHER = "other"  # elementary functions, reductions, normalisations


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A message of n bytes arrives after ``latency_seconds + n / bytes_per_second``."""

    bytes_per_second: float
    latency_seconds: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


_GPU_LATENCY_SECONDS = 1e-5

PCIE_3, PCIE_4, PCIE_5 = (LinkModel(rate, _GPU_LATENCY_SECONDS) for rate in (16e9, 32e9, 64e9))
"""Sixteen lanes, per direction (PCI Express Base Specifications: 8, 16 and 32 GT/s a lane)."""

_NETWORK_LATENCY_SECONDS = 2e-5
NETWORK_100, NETWORK_200, NETWORK_400 = (
    LinkModel(rate, _NETWORK_LATENCY_SECONDS) for rate in (12.5e9, 25e9, 50e9)
)
"""One port of a GPU of its own, in gigabits: as NVIDIA builds DGX-2, DGX A100 and DGX H100 (datasheets)."""

NCCL_CHANNEL_BYTES_PER_SECOND = 22.5e9
"""What one thread block of NCCL moves over NVLink: between the 20 and 25 GB/s that are reported of it."""

HOST_MEMORY = 100e9
"""Half of the peak of eight channels of DDR4-3200, of 25.6 GB/s each (JEDEC JESD79-4)."""

_NO_HOST_COST = HostCost()


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One device under the roofline model (Williams, Waterman, Patterson: Roofline, CACM 2009).

    ``flops_per_second`` maps names of dtypes to peak rates; dtypes that it lacks have the rate of
    ``float32``. Attention reaches the fraction ``attention_efficiency`` of these rates. Operators that are
    neither products nor attention reach at most ``other_flops_per_second``. Every operator takes at least
    ``launch_seconds``, and ``host`` is the host's time besides operators. ``link`` joins the device to its
    peers in one host, ``network_link`` to those of other hosts, and ``host_link`` to the memory of the host,
    which the host reads and writes at ``host_memory_bytes_per_second``.
    ``source`` says where the figures come from.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    launch_seconds: float
    memory_bytes: int
    link: LinkModel
    source: str
    host_link: LinkModel = PCIE_4
    network_link: LinkModel = NETWORK_100
    host_memory_bytes_per_second: float = HOST_MEMORY
    host: HostCost = _NO_HOST_COST
    attention_efficiency: float = 1.0
    other_flops_per_second: float = math.inf

    def seconds(
        self,
        flops: float,
        bytes_moved: float,
        dtype: str = "float32",
        arithmetic: Arithmetic = Arithmetic.PRODUCT,
    ) -> float:
        """Time of one operator: launch, then arithmetic or memory traffic, whichever takes longer."""
        rate = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        if arithmetic is Arithmetic.ATTENTION:
            rate *= self.attention_efficiency
        elif arithmetic is Arithmetic.OTHER:
            rate = min(rate, self.other_flops_per_second)
        return self.launch_seconds + max(flops / rate, bytes_moved / self.memory_bytes_per_second)

    def with_tf32(self) -> "DeviceModel":
        """The device with products of float32 computed in TF32: at half the rate of bfloat16.

        NVIDIA's datasheets give this ratio for all GPUs that have both.
        """
        rates = self.flops_per_second
        if "bfloat16" not in rates:
            return self
        return replace(self, flops_per_second={**rates, "float32": rates["bfloat16"] / 2})


_KERNEL_LAUNCH_SECONDS = 5e-6
"""Host time of one eager operator on a GPU: the least time of an operator, however small."""

_CPU = DeviceModel(
    name="cpu",
    flops_per_second={"float64": 24e9, "float32": 48e9, "bfloat16": 24e9, "float16": 24e9},
    memory_bytes_per_second=8e9,
    launch_seconds=3e-5,
    memory_bytes=16 * 10**9,
    link=LinkModel(1e9, 1e-4),
    source="conservative, for one core of a server CPU with AVX2; a launch as measured on one, with "
    "the Python and the views around an operator; the link is gloo over loopback, and a copy to the "
    "host reads and writes this memory; the host's time as of two processes on two cores",
    host_link=LinkModel(4e9, 3e-5),
    host_memory_bytes_per_second=8e9,
    host=HostCost(call_seconds=1.2e-4, step_seconds=2e-3),
)

_NETWORKS = {100: NETWORK_100, 200: NETWORK_200, 400: NETWORK_400}
_ADA = "float64 at the Ada rate of 1/64 of float32"

# TFLOP/s by dtype; GB/s and GB of memory; GB/s of the link and the host's link; Gbit/s of the network.
_GPUS: Sequence[tuple[str, float, float, float, float, float, int, float, float, int, str]] = (
    ("v100", 7.8, 15.7, 0, 125, 900, 32, 150, 16, 100, "V100 datasheet (2020), V100 SXM2 32 GB"),
    ("v100-16gb", 7.8, 15.7, 0, 125, 900, 16, 150, 16, 100, "V100 datasheet (2020), V100 SXM2 16 GB"),
    ("v100-pcie", 7, 14, 0, 112, 900, 32, 16, 16, 100, "V100 datasheet (2020), V100 PCIe 32 GB"),
    ("v100-pcie-16gb", 7, 14, 0, 112, 900, 16, 16, 16, 100, "V100 datasheet (2020), V100 PCIe 16 GB"),
    ("a100", 9.7, 19.5, 312, 312, 2039, 80, 300, 32, 200, "A100 datasheet (2021), A100 80GB SXM"),
    ("a100-40gb", 9.7, 19.5, 312, 312, 1555, 40, 300, 32, 200, "A100 datasheet (2020), A100 40GB SXM"),
    ("a100-pcie", 9.7, 19.5, 312, 312, 1935, 80, 32, 32, 100, "A100 datasheet (2021), A100 80GB PCIe"),
    ("a100-pcie-40gb", 9.7, 19.5, 312, 312, 1555, 40, 32, 32, 100, "A100 datasheet (2020), A100 40GB PCIe"),
    ("h100", 34, 67, 989, 989, 3350, 80, 450, 64, 400, "H100 datasheet (2023), H100 SXM"),
    ("h100-pcie", 26, 51, 756, 756, 2000, 80, 64, 64, 100, "H100 datasheet (2023), H100 PCIe"),
    ("h100-nvl", 30, 60, 835, 835, 3900, 94, 64, 64, 100, "H100 datasheet (2024), H100 NVL"),
    ("gh200", 34, 67, 990, 990, 4000, 96, 450, 450, 400, "GH200 datasheet (2024), 96 GB of HBM3"),
    ("h200", 34, 67, 989, 989, 4800, 141, 450, 64, 400, "H200 datasheet (2024), H200 SXM"),
    ("b200", 37, 75, 2250, 2250, 7700, 180, 900, 64, 400, "Blackwell datasheet (2025), one of an HGX B200"),
    ("l4", 0.47, 30.3, 121, 121, 300, 24, 32, 32, 100, f"L4 datasheet (2023); {_ADA}"),
    ("l40s", 1.43, 91.6, 362, 362, 864, 48, 32, 32, 100, f"L40S datasheet (2023); {_ADA}"),
    ("rtx-4090", 1.29, 82.6, 165, 165, 1008, 24, 32, 32, 100, "Ada whitepaper (2023)"),
)


def _gpu(
    name: str,
    float64: float,
    float32: float,
    bfloat16: float,
    float16: float,
    memory_rate: float,
    memory: int,
    link: float,
    host_link: float,
    network: int,
    source: str,
) -> DeviceModel:
    rates = {"float64": float64, "float32": float32, "bfloat16": bfloat16, "float16": float16}
    return DeviceModel(
        name,
        {dtype: rate * 1e12 for dtype, rate in rates.items() if rate},
        memory_rate * 1e9,
        _KERNEL_LAUNCH_SECONDS,
        memory * 10**9,
        LinkModel(link * 1e9, _GPU_LATENCY_SECONDS),
        f"NVIDIA {source}{'; a link over PCIe x16' if link <= 64 else ''}",
        LinkModel(host_link * 1e9, _GPU_LATENCY_SECONDS),
        _NETWORKS[network],
    )


DEVICES: Mapping[str, DeviceModel] = {each.name: each for each in (_CPU, *starmap(_gpu, _GPUS))}
"""Known devices by short name."""


def find_device(product: str) -> DeviceModel | None:
    """The entry for a product's name, or None.

    All words of the entry's name occur in the product's name. Of several such entries it is the one with the
    most words: ``NVIDIA A100-SXM4-40GB`` is ``a100-40gb``, and ``NVIDIA A100-SXM4-80GB`` is ``a100``. A
    laptop GPU has no entry: it is another chip than the card of the same name.
    """
    words = set(re.split(r"[^a-z0-9]+", product.lower()))
    if "laptop" in words:
        return None
    fitting = [device for name, device in DEVICES.items() if words.issuperset(name.split("-"))]
    return max(fitting, key=lambda device: device.name.count("-"), default=None)
