"""Collectives of ranks on several hosts: what they take, what they bring, and what travels between hosts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from two_level_topology_script import LEVELS, ODD, RANKS, ROWS, SGD, STEPS, batch, model
from unsplit_reference import unsplit_step
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

    class WithLoss(nn.Module):
        def forward(self, x: Any, target: Any) -> Any:
            return nn.functional.mse_loss(net(x), target)

    net, losses = model(widths), []
    optimizer = SGD(net.parameters())
    for number in range(STEPS):
        x, target = batch(number, widths)
        losses.append(float(unsplit_step(WithLoss(), {"x": x, "target": target}, [ROWS // RANKS] * RANKS)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sent(rank: Facts, name: str) -> Counter[str]:
    """What a rank sends to each of the others in a step: what they agree on before it goes another way."""
    return Counter(rank[name]["sent"])


@pytest.mark.parametrize("where", ["on hosts", "flat"])
@pytest.mark.parametrize("shard", LEVELS)
def test_losses_are_those_of_the_plain_script(found: list[Facts], shard: str | None, where: str) -> None:
    for rank in found:
        assert rank[f"{shard} {where}"]["losses"] == pytest.approx(plain(), rel=1e-12)


def test_parts_may_be_unequal(found: list[Facts]) -> None:
    for rank in found:
        assert rank["odd on hosts"]["losses"] == pytest.approx(plain(ODD), rel=1e-12)


@pytest.mark.parametrize("where", ["on hosts", "flat"])
@pytest.mark.parametrize("shard", LEVELS[1:])
def test_what_is_sent_is_what_programs_send(found: list[Facts], shard: str, where: str) -> None:
    """A rank sends each of the others a quarter of the gradients, and of the parameters."""
    for number, rank in enumerate(found):
        facts = rank[name := f"{shard} {where}"]
        expected = Counter({str(peer): facts["bytes"] // 2 for peer in range(RANKS) if peer != number})
        assert sent(rank, name) == Counter(facts["sends"]) + expected


def test_stages_on_several_ranks_train_as_the_plain_script(found: list[Facts]) -> None:
    for facts in found:
        assert facts["two stages"]["losses"] == pytest.approx(plain(), rel=1e-12)


def test_a_ring_takes_as_long_as_its_slowest_link() -> None:
    hosts = Topology((Device(),) * 16, (Level(8, 1e10, 1e-6), Level(2, 1e9, 1e-5)))
    size = 1e8
    assert unshard_seconds(hosts, range(8), size) == pytest.approx(7 * (1e-6 + size / 8 / 1e10))
    assert all_reduce_seconds(hosts, range(16), size) == pytest.approx(30 * (1e-5 + size / 16 / 1e9))
    assert unshard_seconds(hosts, (3,), size) == 0
