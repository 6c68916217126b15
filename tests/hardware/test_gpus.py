"""What is assumed of GPUs: their memory less a reserve, and links within hosts and between them."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipec
from pipec.hardware.collective_costs import all_reduce_seconds
from pipec.hardware.devices import DEVICES
from pipec.hardware.gpus import GpuMemory, gpu_topology
from pipec.hardware.topology import Device, Level, Topology
from pipec.pipeline import Pipeline

H100, A100_PCIE = DEVICES["h100"], DEVICES["a100-pcie"]
TOTAL = 85 * 10**9


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Topology]:
    """The topology of a model that is compiled where torch says that there are two H100s."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def compile_on(devices: list[str], **options: object) -> Topology:
        pipe = pipec.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices, **options)  # type: ignore[arg-type]
        assert isinstance(pipe, Pipeline)
        found: Topology = pipe._executions.compiler.decided.options.topology
        return found

    return compile_on


def test_a_plan_has_the_memory_of_a_gpu_less_a_reserve(compiled: Callable[..., Topology]) -> None:
    memory = GpuMemory(TOTAL, 1)
    assert 5e9 < memory.reserve < 8e9
    topology = compiled(["cuda:0", "cuda:1"])
    assert {device.memory_bytes for device in topology.devices} == {memory.plannable}
    assert memory.plannable + memory.reserve == TOTAL
    assert str(memory) in topology.assumptions


def test_ranks_share_the_memory_of_their_gpu(compiled: Callable[..., Topology]) -> None:
    """Each has a thread, for which cuBLAS keeps workspaces."""
    one, two, four = (GpuMemory(TOTAL, num_ranks) for num_ranks in (1, 2, 4))
    assert four.reserve - two.reserve == 2 * (two.reserve - one.reserve) == 66 * 2**20
    assert compiled(["cuda:0"] * 4).devices == (Device(four.plannable),) * 4
    assert four.plannable == (TOTAL - four.reserve) // 4
    assert compiled(["cuda:0", "cuda:0", "cuda:1"]).devices == (Device(two.plannable),) * 3


def test_a_limit_counts_as_it_is_unless_the_gpu_has_less(compiled: Callable[..., Topology]) -> None:
    devices = ["cuda:0", "cuda:1"]
    assert compiled(devices, memory_limit="40GB").devices == (Device(40e9),) * 2
    with pytest.raises(pipec.InputError, match=r"memory_limit is 80000000000, but a plan has 7\d.\d GB of"):
        compiled(devices, memory_limit="80GB")


def test_a_topology_counts_as_it_is_where_it_names_memory(compiled: Callable[..., Topology]) -> None:
    levels = (Level(2, 1e9),)
    devices, given = ["cuda:0", "cuda:1"], Topology((Device(84e9),) * 2, levels)
    assert compiled(devices, topology=given) == given
    assert compiled(devices, topology=given, memory_limit="90GB") == given
    silent = Topology((Device(math.inf, 2.0),) * 2, levels)
    plannable = GpuMemory(TOTAL, 1).plannable
    assert compiled(devices, topology=silent).devices == (Device(plannable, 2.0),) * 2


def test_one_host_has_one_level() -> None:
    topology = gpu_topology([0] * 8, H100, None)
    assert topology.levels == (Level(8, 450e9, 1e-5),)
    assert topology.assumptions == ("any two devices are joined by 450 GB/s, as h100 is built",)
    assert gpu_topology([0] * 8, A100_PCIE, None).levels == (Level(8, 32e9, 1e-5),)


def test_hosts_are_a_level_of_their_own() -> None:
    topology = gpu_topology([0] * 8 + [8] * 8, H100, 4)
    assert [(level.size, level.bytes_per_second) for level in topology.levels] == [(8, 450e9), (2, 50e9)]
    (assumption,) = topology.assumptions
    assert "2 hosts of 8 devices, joined by 450 GB/s (90 GB/s for a message) within a host" in assumption
    assert "and by 50 GB/s between hosts" in assumption


@pytest.mark.parametrize("hosts", [[0, 0, 0, 3], [0, 1, 0, 1]])
def test_hosts_that_are_no_equal_groups_are_joined_by_the_network(hosts: list[int]) -> None:
    topology = gpu_topology(hosts, H100, 4)
    assert [(level.size, level.bytes_per_second) for level in topology.levels] == [(4, 50e9)]
    assert "not equally many" in topology.assumptions[0]


def test_messages_have_fewer_channels_than_collectives() -> None:
    """A direction of NCCL has 4 thread blocks of 22.5 GB/s each, where a collective fills the link."""
    topology = gpu_topology([0] * 8, H100, 4)
    assert topology.link_between(0, 7).bytes_per_second == topology.slowest_link.bytes_per_second == 90e9
    free = gpu_topology([0] * 8, H100, None)
    assert all_reduce_seconds(topology, range(8), 1e9) == all_reduce_seconds(free, range(8), 1e9)
    groups = topology.grouped([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert groups.link_between(0, 1).bytes_per_second == 90e9
    assert topology.first_devices(4).link_between(0, 3).bytes_per_second == 90e9
