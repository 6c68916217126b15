"""Which schedules without a flush are chosen, and by what: the time from one mini-batch to the next."""

from dataclasses import replace
from typing import Any

import pytest
from delayed_gradients import LOSS, SGD, assert_same, batches, delayed, model

import pipec
from pipec.errors import InputError
from pipec.hardware.devices import DEVICES, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import HostCost, Plan
from pipec.schedules import ASYNCHRONOUS_SCHEDULES
from tests.compiler.test_replica_choice import Wide, replica_counts
from tests.compiler.test_replica_choice import prepared as shared


def compiled(stages: int = 3, **options: Any) -> pipec.Pipeline:
    given = {"model": model(), "schedule": "auto-async", "optimizer": SGD, **options}
    return pipec.compile(given.pop("model"), stages, loss_fn=LOSS, **given)


def prepared(stages: int = 3, **options: Any) -> pipec.Pipeline:
    x, y = next(batches(1))
    return compiled(stages, **options).prepare(x, target=y)


def tried(pipe: pipec.Pipeline) -> set[str]:
    return {pipe.plan.schedule, *(each.schedule for each in pipe.plan.alternatives)}


@pytest.mark.slow
def test_the_search_takes_a_schedule_without_a_flush_and_stays_with_it() -> None:
    pipe = prepared()
    assert (pipe.plan.schedule, pipe.plan.num_microbatches) == ("pipedream", 1)
    assert tried(pipe) > {*ASYNCHRONOUS_SCHEDULES, "1f1b", "zb-h1"}
    reference = delayed(pipe, SGD)
    assert list(pipe.stream(batches(10))) == [reference.step(batch) for batch in batches(10)]
    assert_same(pipe, reference)
    x, y = next(batches(1, rows=32))
    pipe.prepare(x, target=y)
    assert tried(pipe) == {"pipedream"}


@pytest.mark.slow
def test_a_schedule_that_flushes_is_taken_where_it_is_faster() -> None:
    """Six microbatches wait for messages under 2BW; orders that a search finds wait less."""
    how = {"microbatches": 6, "costs": replace(DEVICES["cpu"], host=HostCost())}
    pipe, plain = compiled(**how), compiled(**how, schedule="auto")
    losses = list(pipe.stream(batches(4)))
    assert pipe.plan.sync_spec.stream is None
    assert "pipedream-2bw" in tried(pipe)
    assert losses == list(plain.stream(batches(4)))
    assert tried(plain).isdisjoint(ASYNCHRONOUS_SCHEDULES)


@pytest.mark.slow
def test_double_buffering_has_as_many_microbatches_as_are_fastest() -> None:
    plan = prepared(schedule="pipedream-2bw").plan
    assert plan.num_microbatches == 3
    assert {each.num_microbatches for each in plan.alternatives if len(each.replicas) == 3} == {4, 6, 8}


def planned(bytes_per_second: float, schedule: str) -> Plan:
    links = equal_devices(4, LinkModel(bytes_per_second, 0.0))
    return shared(Wide(), links, microbatches=None, optimizer=SGD, schedule=schedule).plan


@pytest.mark.slow
def test_stages_get_replicas() -> None:
    """Convolutions with few weights are shared; a layer of many, whose gradients are slow to sum, is not."""
    plan = planned(4e7, "pipedream")
    assert (plan.schedule, replica_counts(plan)) == ("pipedream", [3, 1])


@pytest.mark.slow
def test_delays_are_not_taken_for_nothing() -> None:
    """With fast links data parallelism has no bubble either."""
    plan = planned(1e12, "auto-async")
    assert plan.sync_spec.stream is None
    told = [each.rejection_reason for each in plan.alternatives if each.schedule in ASYNCHRONOUS_SCHEDULES]
    assert any("about as fast" in each or "0.0% slower" in each for each in told), told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "schedule 'auto-async' updates each stage .* pass optimizer="),
        ({"shard": "optimizer", "replicas": 3}, "auto-async' updates a stage while its replicas"),
        ({"batch": "rank0"}, "batch is 'rank0'"),
    ],
    ids=["no optimizer", "shard", "batches"],
)
def test_what_contradicts_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(**options)
