"""The sizes of buckets: chosen by what a simulated step takes, and so the parts of backwards."""

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import NO_SYNC, ShardingLevel, SyncSpec, Value
from pipec.plan.buckets import GradientTimes, choose_buckets
from pipec.plan.sync_spec import with_collective_seconds

KB, PART_SECONDS = 1000, 5e-5


def gradients(sizes: Sequence[int], backward_seconds: float = 1.0) -> GradientTimes:
    """Of so many kilobytes each, made in equal times."""
    values = [Value(f"w{k}", "uint8", (size * KB,)) for k, size in enumerate(sizes)]
    return GradientTimes(values, [(k + 1) / len(values) for k in range(len(values))], 0.5, backward_seconds)


def groups(found: GradientTimes, link: LinkModel, sync_spec: SyncSpec = NO_SYNC) -> list[list[str]]:
    price = functools.partial(
        with_collective_seconds, ranks=(0, 1), topology=equal_devices(2, link), requested=sync_spec
    )
    return [
        [value.name for value in group] for group in choose_buckets(found, sync_spec, price, PART_SECONDS)
    ]


def test_a_sum_that_takes_long_starts_early() -> None:
    """It takes as long as the backward: all but the last eighth of it is over when the backward is."""
    link = LinkModel(800 * KB, 1e-6)
    assert groups(gradients([100] * 8), link) == [[f"w{k}"] for k in range(8)]


@pytest.mark.parametrize(
    ("sizes", "link", "backward_seconds"),
    [
        ([100] * 8, LinkModel(1e12, 0.0), 1.0),  # nothing to hide
        ([1] * 8, LinkModel(1e12, 0.5), 1.0),  # a latency for each
        ([100] * 8, LinkModel(800 * KB, 1e-6), 1e-5),  # nothing to hide it behind
        ([100], LinkModel(800 * KB, 1e-6), 1.0),
    ],
)
def test_what_does_not_pay_stays_whole(sizes: list[int], link: LinkModel, backward_seconds: float) -> None:
    assert len(groups(gradients(sizes, backward_seconds), link)) == 1


def test_small_gradients_travel_with_large_ones() -> None:
    found = groups(gradients([400, 1, 1, 400, 1, 1, 400, 1, 1, 400, 1, 1]), LinkModel(1600 * KB, 1e-3))
    assert found == [[f"w{k + j}" for j in range(3)] for k in (0, 3, 6, 9)]


@pytest.mark.parametrize("shard", [None, *ShardingLevel])
def test_sharded_sums_overlap_too(shard: ShardingLevel | None) -> None:
    sync_spec = SyncSpec(updates=True, shard=shard)
    assert len(groups(gradients([100] * 8), LinkModel(800 * KB, 1e-6), sync_spec)) > 1


@pytest.mark.slow
@pytest.mark.slow
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_every_gradient_is_in_one_group_and_in_order(sizes: list[int], latency: float) -> None:
    found = groups(gradients(sizes), LinkModel(100 * KB, latency))
    assert list(itertools.chain(*found)) == [f"w{k}" for k in range(len(sizes))]


@pytest.mark.slow
@pytest.mark.slow
@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_no_choice_is_slower_than_all_together(sizes: list[int], latency: float) -> None:
    """By a model of its own: sums follow each other, each once its gradients are there."""
    link = LinkModel(100 * KB, latency)
    found = groups(gradients(sizes), link)

    def seconds(chosen: Sequence[Sequence[str]]) -> float:
        clock, made = 0.0, 0
        for group in chosen:
            made += len(group)
            num_bytes = KB * sum(sizes[int(name[1:])] for name in group)
            clock = max(clock, made / len(sizes)) + 2 * link.seconds(num_bytes / 2)
        return clock + PART_SECONDS * len(chosen)

    together = [list(itertools.chain(*found))]
    assert seconds(found) <= seconds(together) + 1e-9
