"""Devices and links as data: the figures that turn FLOPs and bytes into seconds. No torch.

Peak rates are the vendors' figures for dense arithmetic, without structured sparsity. ``float32`` is the rate
of full precision, torch's default; ``with_tf32`` gives the rate of TF32. Bandwidths of links are per
direction.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

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

_NO_HOST_COST = HostCost()


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One device under the roofline model (Williams, Waterman, Patterson: Roofline, CACM 2009).

    ``flops_per_second`` maps names of dtypes to peak rates; dtypes that it lacks have the rate of
    ``float32``. Attention reaches the fraction ``attention_efficiency`` of these rates. Operators that are
    neither products nor attention reach at most ``other_flops_per_second``. Every operator takes at least
    ``launch_seconds``, and ``host`` is the host's time besides operators. ``link`` joins the device to its
    peers in one host, ``network_link`` to those of other hosts, and ``host_link`` to the memory of the host.
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

DEVICES: Mapping[str, DeviceModel] = {
    device.name: device
    for device in (
        DeviceModel(
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
            host=HostCost(call_seconds=1.2e-4, step_seconds=2e-3),
        ),
        DeviceModel(
            name="v100",
            flops_per_second={"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12},
            memory_bytes_per_second=0.9e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=32 * 10**9,
            link=LinkModel(150e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA V100 datasheet (2020), V100 SXM2 32 GB",
            host_link=PCIE_3,
        ),
        DeviceModel(
            name="v100-16gb",
            flops_per_second={"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12},
            memory_bytes_per_second=0.9e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=16 * 10**9,
            link=LinkModel(150e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA V100 datasheet (2020), V100 SXM2 16 GB",
            host_link=PCIE_3,
        ),
        DeviceModel(
            name="v100-pcie",
            flops_per_second={"float64": 7e12, "float32": 14e12, "float16": 112e12},
            memory_bytes_per_second=0.9e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=32 * 10**9,
            link=LinkModel(16e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA V100 datasheet (2020), V100 PCIe 32 GB; a link over PCIe 3.0 x16",
            host_link=PCIE_3,
        ),
        DeviceModel(
            name="v100-pcie-16gb",
            flops_per_second={"float64": 7e12, "float32": 14e12, "float16": 112e12},
            memory_bytes_per_second=0.9e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=16 * 10**9,
            link=LinkModel(16e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA V100 datasheet (2020), V100 PCIe 16 GB; a link over PCIe 3.0 x16",
            host_link=PCIE_3,
        ),
        DeviceModel(
            name="a100",
            flops_per_second={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            memory_bytes_per_second=2.039e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=80 * 10**9,
            link=LinkModel(300e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA A100 datasheet (2021), A100 80GB SXM",
            network_link=NETWORK_200,
        ),
        DeviceModel(
            name="a100-40gb",
            flops_per_second={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            memory_bytes_per_second=1.555e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=40 * 10**9,
            link=LinkModel(300e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA A100 datasheet (2020), A100 40GB SXM",
            network_link=NETWORK_200,
        ),
        DeviceModel(
            name="a100-pcie",
            flops_per_second={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            memory_bytes_per_second=1.935e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=80 * 10**9,
            link=LinkModel(32e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA A100 datasheet (2021), A100 80GB PCIe; a link over PCIe 4.0 x16",
        ),
        DeviceModel(
            name="a100-pcie-40gb",
            flops_per_second={"float64": 9.7e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
            memory_bytes_per_second=1.555e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=40 * 10**9,
            link=LinkModel(32e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA A100 datasheet (2020), A100 40GB PCIe; a link over PCIe 4.0 x16",
        ),
        DeviceModel(
            name="h100",
            flops_per_second={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
            memory_bytes_per_second=3.35e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=80 * 10**9,
            link=LinkModel(450e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA H100 datasheet (2023), H100 SXM",
            host_link=PCIE_5,
            network_link=NETWORK_400,
        ),
        DeviceModel(
            name="h100-pcie",
            flops_per_second={"float64": 26e12, "float32": 51e12, "bfloat16": 756e12, "float16": 756e12},
            memory_bytes_per_second=2.0e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=80 * 10**9,
            link=LinkModel(64e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA H100 datasheet (2023), H100 PCIe; a link over PCIe 5.0 x16",
            host_link=PCIE_5,
        ),
        DeviceModel(
            name="h100-nvl",
            flops_per_second={"float64": 30e12, "float32": 60e12, "bfloat16": 835e12, "float16": 835e12},
            memory_bytes_per_second=3.9e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=94 * 10**9,
            link=LinkModel(64e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA H100 datasheet (2024), H100 NVL; a link over PCIe 5.0 x16",
            host_link=PCIE_5,
        ),
        DeviceModel(
            name="gh200",
            flops_per_second={"float64": 34e12, "float32": 67e12, "bfloat16": 990e12, "float16": 990e12},
            memory_bytes_per_second=4.0e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=96 * 10**9,
            link=LinkModel(450e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA GH200 datasheet (2024), with 96 GB of HBM3; NVLink-C2C to its own CPU",
            host_link=LinkModel(450e9, _GPU_LATENCY_SECONDS),
            network_link=NETWORK_400,
        ),
        DeviceModel(
            name="h200",
            flops_per_second={"float64": 34e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
            memory_bytes_per_second=4.8e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=141 * 10**9,
            link=LinkModel(450e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA H200 datasheet (2024), H200 SXM",
            host_link=PCIE_5,
            network_link=NETWORK_400,
        ),
        DeviceModel(
            name="b200",
            flops_per_second={"float64": 37e12, "float32": 75e12, "bfloat16": 2250e12, "float16": 2250e12},
            memory_bytes_per_second=7.7e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=180 * 10**9,
            link=LinkModel(900e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA Blackwell datasheet (2025), one GPU of an HGX B200",
            host_link=PCIE_5,
            network_link=NETWORK_400,
        ),
        DeviceModel(
            name="l4",
            flops_per_second={"float64": 0.47e12, "float32": 30.3e12, "bfloat16": 121e12, "float16": 121e12},
            memory_bytes_per_second=0.3e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=24 * 10**9,
            link=LinkModel(32e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA L4 datasheet (2023), PCIe 4.0 x16; float64 at the Ada rate of 1/64 of float32",
        ),
        DeviceModel(
            name="l40s",
            flops_per_second={"float64": 1.43e12, "float32": 91.6e12, "bfloat16": 362e12, "float16": 362e12},
            memory_bytes_per_second=0.864e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=48 * 10**9,
            link=LinkModel(32e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA L40S datasheet (2023), PCIe 4.0 x16; float64 at the Ada rate of 1/64 of float32",
        ),
        DeviceModel(
            name="rtx-4090",
            flops_per_second={"float64": 1.29e12, "float32": 82.6e12, "bfloat16": 165e12, "float16": 165e12},
            memory_bytes_per_second=1.008e12,
            launch_seconds=_KERNEL_LAUNCH_SECONDS,
            memory_bytes=24 * 10**9,
            link=LinkModel(32e9, _GPU_LATENCY_SECONDS),
            source="NVIDIA Ada whitepaper (2023), half precision summed in float32; PCIe 4.0 x16",
        ),
    )
}
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
