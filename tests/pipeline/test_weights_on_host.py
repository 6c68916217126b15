"""Weights in host memory: the bits, the memory, the copies and the errors of ``offload="weights"``."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import memory_meter
import pytest
import torch
from equality_rows import Row, piped, sizes_of, trained
from huggingface_models import llama
from optimizer_reference import batches, model
from slow_params import slow_but
from torch import nn

import pipec
from pipec.errors import ExecutionError, InfeasibleError, InputError
from pipec.hardware.devices import DEVICES
from pipec.ir import Op
from pipec.ir.text_format import value_bytes
from pipec.runtime.memory import host_room
from pipec.runtime.stages.host_bucket import HostBucket

ONE_DEVICE = {"devices": 1, "schedule": "looped-bfs-v3"}
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def offloaded(**options: Any) -> pipec.Pipeline:
    """The pipeline of a model of three layers and a tied weight."""
    options = {"optimizer": adamw, "microbatches": 4, "offload": "weights", **ONE_DEVICE, **options}
    return pipec.compile(model(), **options)


# bits

SHARED = Row(update="sgd", shard="parameters", recompute="recomputed", evaluates="loss")
ROWS = (
    replace(SHARED, model="unusual", layout="2x2", schedule="looped-bfs-v3"),
    replace(SHARED, model="tied", layout="2x2", schedule="zb-h1", update="clipped"),
    replace(SHARED, model="unusual", layout="2-1", schedule="1f1b"),
    Row(model="norms", layout="1", schedule="looped-bfs-v4", update="clipped"),
    Row(model="tied", layout="2", schedule="looped-bfs-v2", update="clipped"),
)


@pytest.mark.filterwarnings("ignore:batch norms")
@pytest.mark.parametrize("row", slow_but(ROWS, ROWS[1], ROWS[2]), ids=str)
def test_every_bit_is_that_without_offload(row: Row) -> None:
    found, expected = (
        [*trained(piped(row, offload=offload), sizes_of(row))] for offload in ("weights", None)
    )
    assert len(found) == len(expected)
    for (name, value), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(value, other), name


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    """It has the state of its step, from which training takes the same way without offload."""
    first, second, (batch,) = offloaded(), offloaded(offload=None), batches(1)
    first.step(**batch)
    saving = first.save_checkpoint(tmp_path / "saved", asynchronous=True)
    losses = [first.step(**batch) for _ in range(3)]
    saving.result()
    second.load_checkpoint(tmp_path / "saved")
    assert losses == [second.step(**batch) for _ in range(3)]


def test_a_folder_is_read_into_host_memory(tmp_path: Path) -> None:
    own, inputs = llama()
    own.save_pretrained(tmp_path)
    options = {"devices": 1, "optimizer": adamw, "microbatches": 2, "schedule": "looped-bfs-v2"}
    pipe = pipec.from_pretrained(tmp_path, offload="weights", memory_limit="10MB", **options).train()
    expected = pipec.compile(own, **options)
    assert [pipe.step(**inputs) for _ in range(3)] == [expected.step(**inputs) for _ in range(3)]


def test_a_failed_step_leaves_no_gradients_and_says_which_stages_were_updated() -> None:
    """As after a device was lost, in the middle of the backwards."""
    pipe, (batch,) = offloaded(), batches(1)
    start, stores = HostBucket.start_store, [0]

    def store(bucket: HostBucket, gradients: Any) -> None:
        stores[0] += 1
        if stores[0] == 7:  # the third one of the second step, when the last stage is updated
            raise RuntimeError("the device is lost")
        start(bucket, gradients)

    with mock.patch.object(HostBucket, "start_store", store):
        pipe.step(**batch)
        with pytest.raises(ExecutionError, match="lost") as raised:
            pipe.step(**batch)
    assert all(each.grad is None for each in pipe.parameters())
    assert "updates had begun, of stage 2" in raised.value.__notes__[-1]


# memory and copies


@pytest.mark.parametrize("layout", [ONE_DEVICE, {"devices": 2, "schedule": "zb-h1"}])
def test_a_device_holds_two_stages_at_most(layout: dict[str, Any]) -> None:
    pipe = offloaded(recompute="full", **layout)
    for batch in batches(2):
        pipe.step(**batch)
    measured, planned = memory_meter.measure_memory(pipe, **batch), pipe.memory()
    for found, expected in zip(measured, planned, strict=True):
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03, abs=512)
        assert found.host_bytes == expected.host_bytes
    stages, tied = Counter[int](), 0
    for bucket in pipe.plan.sync_spec.buckets:
        num_bytes = int(sum(value_bytes(value, {}) for value in bucket.parameters))
        stages[bucket.stage] += num_bytes
        tied += num_bytes * bucket.is_tied
    most = sum(sorted(stages.values())[-2:]) + 2 * tied
    assert all(expected.bytes_by_category["parameters"] <= most for expected in planned)


def test_each_weight_is_loaded_twice_at_most_and_each_gradient_stored_once() -> None:
    """The last stage is there already when its backwards begin."""
    (program,) = offloaded().prepare(**next(batches(1))).programs
    loads, stores = (
        Counter((each.stage, each.bucket) for each in program.instructions if each.op is op)
        for op in (Op.LOAD, Op.STORE)
    )
    assert loads.keys() == stores.keys()
    assert ({*loads.values()}, {*stores.values()}) == ({1, 2}, {1})


# plans and errors


def planned(**options: Any) -> pipec.Pipeline:
    with torch.device("meta"):
        own, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))), torch.empty(8, 256)
    given = {"devices": 1, "optimizer": adamw, "costs": DEVICES["h100"], "loss_fn": nn.functional.mse_loss}
    return pipec.compile(own, **given | options).prepare(x, target=x)


def test_weights_go_to_the_host_if_nothing_else_fits(caplog: pytest.LogCaptureFixture) -> None:
    """Of 16 layers of 263 kB, with gradients and AdamW's state 16.8 MB, stages become small enough."""
    assert not planned(memory_limit="40MB").plan.sync_spec.weights_on_host
    with caplog.at_level("INFO", "pipec"):
        pipe = planned(memory_limit="1.5MB")
    assert pipe.plan.sync_spec.weights_on_host
    assert pipe.plan.schedule.startswith("looped-bfs")
    assert pipe.memory().peak_bytes <= 1.5e6
    assert "host memory by rank" in str(pipe.plan)
    assert "kept in host memory" in caplog.text
    with pytest.raises(InfeasibleError):
        planned(memory_limit="100kB")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"replicas": 2, "devices": 2}, "shard='parameters'"),
        ({"stages": 1, "devices": 2, "shard": "gradients"}, "shard='parameters'"),
        ({"shard": "parameters", "devices": 2}, "replicas"),
        ({"schedule": "pipedream", "devices": 2}, "asynchronous"),
    ],
)
def test_what_it_excludes_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        pipec.compile(nn.Linear(2, 2), optimizer=adamw, offload="weights", **options)


def test_sparse_gradients_are_refused() -> None:
    own = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    pipe = pipec.compile(own, devices=1, loss_fn=lambda output, _: output.mean(), offload="weights")
    with pytest.raises(InputError, match="sparse"):
        pipe.step(torch.zeros(4, dtype=torch.long), target=torch.zeros(4))


def test_a_host_with_too_little_memory_is_refused_before_anything_is_allocated() -> None:
    pipe, (batch,) = offloaded(), batches(1)
    with (
        mock.patch.object(host_room, "available_bytes", return_value=100.0),
        pytest.raises(InfeasibleError, match="of optimizer state in host memory"),
    ):
        pipe.step(**batch)
    assert pipe.step(**batch) > 0
    with mock.patch.object(host_room, "available_bytes", return_value=100.0):
        (shorter,) = batches(1, rows=4)
        assert pipe.step(**shorter) > 0, "what training needs is there by now, also for another batch"
