"""Weights in host memory: the bits, the memory, the copies and the errors of ``offload="weights"``."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import memory_meter
import pytest
import torch
from huggingface_models import Factory, gpt2, llama, resnet, t5
from optimizer_reference import batches, pair
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.errors import ExecutionError, InfeasibleError, InputError
from pipec.hardware.devices import DEVICES
from pipec.ir.text_format import value_bytes
from pipec.runtime.memory import host_room
from pipec.runtime.stages.host_bucket import HostBucket

LAYOUTS = {
    "one device": {"devices": 1, "schedule": "looped-bfs-v3"},
    "a stage a device": {"devices": 2, "schedule": "zb-h1"},
}
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
sgd = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


# bits


def trained(make: Factory, steps: int, factory: Any = adamw, **options: Any) -> list[Tensor]:
    """The losses of some steps and of an evaluation, and then all tensors of the model."""
    own, inputs = make()
    torch.manual_seed(1)
    pipe = pipec.compile(own, optimizer=factory, microbatches=4, **options)
    found = [pipe.step(**inputs) for _ in range(steps)] + [pipe.eval_step(**inputs)]
    return [torch.as_tensor(each) for each in (*found, *pipe.state_dict().values())]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def lora(make: Factory) -> Factory:
    """All weights but those of one block are frozen."""

    def made() -> tuple[nn.Module, dict[str, Any]]:
        own, inputs = make()
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(".1." in name)
        return own, inputs

    return made


REPLICATED = {"shard": "parameters", "recompute": "full"}
IN_TURNS = {"devices": 2, "replicas": 2, "schedule": "looped-bfs-v3", **REPLICATED}
PIPELINES = {"devices": 4, "replicas": 2, "schedule": "zb-h1", "clip_grad_norm": 0.1, **REPLICATED}
ONE_HAS_NONE = {"devices": 3, "replicas": (2, 1), "schedule": "1f1b", **REPLICATED}


@pytest.mark.filterwarnings("ignore:batch norms")
@pytest.mark.parametrize(
    ("make", "steps", "options"),
    [
        (lora(gpt2), 2, IN_TURNS),
        (gpt2, 2, PIPELINES),
        (lora(gpt2), 2, ONE_HAS_NONE),
        slow(lora(gpt2), 10, {"devices": 1, "schedule": "looped-bfs-v4"}),
        slow(llama, 10, {"devices": 2, "schedule": "looped-bfs-v2", "factory": sgd}),
        slow(lora(t5), 10, {"devices": 2, "schedule": "looped-bfs-v2"}),
        slow(resnet, 10, {"devices": 1, "schedule": "looped-bfs-v4", "factory": sgd}),
    ],
)
def test_every_bit_is_that_without_offload(make: Factory, steps: int, options: dict[str, Any]) -> None:
    assert equal(trained(make, steps, offload="weights", **options), trained(make, steps, **options))


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    """It has the state of its step, from which training takes the same way without offload."""
    (own, inputs), (other, _) = gpt2(), gpt2()
    options = {"devices": 1, "microbatches": 2, "schedule": "looped-bfs-v2", "optimizer": adamw}
    first = pipec.compile(own, offload="weights", **options)
    first.step(**inputs)
    saving = first.save_checkpoint(tmp_path / "saved", asynchronous=True)
    losses = [first.step(**inputs) for _ in range(3)]
    saving.result()
    second = pipec.compile(other, **options)
    second.load_checkpoint(tmp_path / "saved")
    assert equal(losses, [second.step(**inputs) for _ in range(3)])


def test_a_folder_is_read_into_host_memory(tmp_path: Path) -> None:
    own, inputs = llama()
    own.save_pretrained(tmp_path)
    options = {"devices": 1, "optimizer": adamw, "microbatches": 2, "schedule": "looped-bfs-v2"}
    pipe = pipec.from_pretrained(tmp_path, offload="weights", memory_limit="10MB", **options).train()
    expected = pipec.compile(own, **options)
    assert [pipe.step(**inputs) for _ in range(3)] == [expected.step(**inputs) for _ in range(3)]


def test_a_failed_step_leaves_no_gradients_and_says_which_stages_were_updated() -> None:
    """As after a device was lost, in the middle of the backwards."""
    pipe, _ = pair(offload="weights", devices=1, schedule="looped-bfs-v3")
    (batch,) = batches(1)
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


@pytest.mark.parametrize("layout", ["one device", "a stage a device"])
def test_a_device_holds_two_stages_at_most(layout: str) -> None:
    pipe, _ = pair(offload="weights", **LAYOUTS[layout] | {"recompute": "full"})
    for batch in batches(2):
        pipe.step(**batch)
    measured, planned = memory_meter.measure_memory(pipe, **batch), pipe.memory()
    for found, expected in zip(measured, planned, strict=True):
        assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03, abs=512)
        assert found.host_bytes == expected.host_bytes
    stages: dict[int, float] = Counter()
    for bucket in pipe.plan.sync_spec.buckets:
        stages[bucket.stage] += sum(value_bytes(value, {}) for value in bucket.parameters)
    tied = sum(value_bytes(v, {}) for x in pipe.plan.sync_spec.buckets if x.is_tied for v in x.parameters)
    largest = sorted(stages.values())[-2:]
    for expected in planned:
        loaded = expected.bytes_by_category["parameters"]
        assert loaded <= sum(largest) + 2 * tied


def test_each_weight_is_loaded_twice_at_most_and_each_gradient_stored_once() -> None:
    """By bytes."""
    pipe, _ = pair(offload="weights", devices=1, schedule="looped-bfs-v3")
    (batch,) = batches(1)
    moved = Counter[str]()

    def counting(name: str, start: Any) -> Any:
        def count(bucket: HostBucket, *gradients: Any) -> None:
            start(bucket, *gradients)
            held = bucket._loaded if name == "load" else bucket._stored
            moved[name] += sum(each.nbytes for each in held.values())

        return count

    with (
        mock.patch.object(HostBucket, "start_load", counting("load", HostBucket.start_load)),
        mock.patch.object(HostBucket, "start_store", counting("store", HostBucket.start_store)),
    ):
        pipe.step(**batch)
        trained = moved.copy()
        pipe.eval_step(**batch)
    weights = sum(each.nbytes for each in pipe.parameters())
    assert moved["store"] == trained["store"] == weights
    assert weights < trained["load"] <= 2 * weights
    assert moved["load"] > trained["load"]


# plans and errors


def wide(width: int = 256, depth: int = 16) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), torch.empty(8, width)


def planned(**options: Any) -> pipec.Pipeline:
    own, x = wide()
    given = {"devices": 1, "optimizer": adamw, "costs": DEVICES["h100"], "loss_fn": nn.functional.mse_loss}
    pipe = pipec.compile(own, **given | options)
    pipe.prepare(x, target=x)
    return pipe


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
    pipe, _ = pair(offload="weights", devices=1, schedule="looped-bfs-v3")
    (batch,) = batches(1)
    with (
        mock.patch.object(host_room, "available_bytes", return_value=100.0),
        pytest.raises(InfeasibleError, match="of optimizer state in host memory"),
    ):
        pipe.step(**batch)
    assert pipe.step(**batch) > 0
    with mock.patch.object(host_room, "available_bytes", return_value=100.0):
        (shorter,) = batches(1, rows=4)
        assert pipe.step(**shorter) > 0, "what training needs is there by now, also for another batch"
