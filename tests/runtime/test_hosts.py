"""Collectives of ranks on several hosts: what they take, what they bring, and what travels between hosts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from two_level_topology_script import LEVELS, ODD, RANKS, SGD, STEPS, batch, model
from unsplit_reference import Plain
from worker_processes import run_ranks

from pipec.hardware.collective_costs import all_reduce_seconds, unshard_seconds
from pipec.hardware.topology import Device, Level, Topology

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """What each of four ranks has found."""
    script = Path(__file__).parents[1] / "helpers" / "two_level_topology_script.py"
    printed = run_ranks(script, RANKS, tmp_path_factory.mktemp("ranks"))
    return [json.loads(text.splitlines()[-1]) for text in printed]


def plain(widths: tuple[int, int] = (32, 8)) -> list[float]:
    """The losses of the script without pipec."""
    script = Plain(model(widths), SGD, loss_fn=nn.functional.mse_loss)
    batches = (batch(number, widths) for number in range(STEPS))
    return [script.step(x, target=target).item() for x, target in batches]


NAMES = [f"{shard} {where}" for shard in LEVELS for where in ("on hosts", "flat")]


@pytest.mark.parametrize("name", [*NAMES, "odd on hosts", "two stages"])
def test_losses_are_those_of_the_plain_script(found: list[Facts], name: str) -> None:
    """Parts may be unequal, and stages on several ranks."""
    expected = plain(ODD) if name == "odd on hosts" else plain()
    for rank in found:
        assert rank[name]["losses"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", NAMES[2:])
def test_what_is_sent_is_what_programs_send(found: list[Facts], name: str) -> None:
    """A rank sends each of the others a quarter of the gradients, and of the parameters."""
    for number, rank in enumerate(found):
        facts = rank[name]
        expected = Counter({str(peer): facts["bytes"] // 2 for peer in range(RANKS) if peer != number})
        assert Counter(facts["sent"]) == Counter(facts["sends"]) + expected


def test_a_ring_takes_as_long_as_its_slowest_link() -> None:
    hosts = Topology((Device(),) * 16, (Level(8, 1e10, 1e-6), Level(2, 1e9, 1e-5)))
    size = 1e8
    assert unshard_seconds(hosts, range(8), size) == pytest.approx(7 * (1e-6 + size / 8 / 1e10))
    assert all_reduce_seconds(hosts, range(16), size) == pytest.approx(30 * (1e-5 + size / 16 / 1e9))
    assert unshard_seconds(hosts, (3,), size) == 0
