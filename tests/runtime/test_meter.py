"""What ``pipe.memory()`` predicts is what ``measure_memory(pipe, ...)`` finds, and the meter counts right."""

import functools
import threading

import pytest
import torch
from memory_meter import TensorMemoryMeter, measure_memory
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.ir import Phase
from pipec.pipeline import Pipeline

ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)


def model() -> nn.Module:
    """Saved masks, changing buffers, values read twice, views that are saved and gradients that add up."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


def trained(devices: int, **options: object) -> Pipeline:
    """A pipeline after a step, so that the state of its optimizer is there."""
    x, y = batch()
    cross_entropy = nn.functional.cross_entropy
    pipe = pipec.compile(model(), devices, loss_fn=cross_entropy, microbatches=8, optimizer=ADAM, **options)  # type: ignore[arg-type]
    torch.manual_seed(2)
    pipe.step(x, target=y)
    return pipe


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        slow(1, {"schedule": "gpipe"}),
        (2, {"schedule": "1f1b", "recompute": "full"}),
        slow(2, {"schedule": "zb-v"}),
    ],
    ids=str,
)
def test_each_rank_holds_what_is_predicted(devices: int, options: dict[str, object]) -> None:
    pipe = trained(devices, **options)
    x, y = batch()
    measured, predicted = measure_memory(pipe, x, target=y), pipe.memory()
    for found, said in zip(measured, predicted, strict=True):
        assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01), f"rank {found.rank}"
        assert said.most[0] == pytest.approx(found.most[0], rel=0.01), "no memory waits for messages"
        assert said.after[-1] == pytest.approx(found.after[-1], rel=0.01), "gradients go with the update"
        assert len(found.most) == len(said.most) == len(pipe.programs[found.rank].instructions)


def held_by_a_second_step(devices: int, **options: object) -> list[tuple[float, float]]:
    """What is predicted and measured of each rank, if the gradients of a first step were set to None."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x, y, loss = torch.randn(512, 64), torch.randn(512, 64), nn.functional.mse_loss
    pipe = pipec.compile(net, devices, loss_fn=loss, microbatches=4, **options)  # type: ignore[arg-type]
    pipe.step(x, target=y)
    net.zero_grad()
    found = measure_memory(pipe, x, target=y)
    return [(said.peak_bytes, most.peak_bytes) for said, most in zip(pipe.memory(), found, strict=True)]


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"schedule": "1f1b"}),  # what is sent was saved, and outlives that; the loss has large memory
        slow(2, {"schedule": "gpipe"}),  # all of a stage is saved when its gradients begin
        slow(1, {"on_nan": "raise"}),  # the gradients that are held become those of the parameters
        (2, {"stages": 1, "replicas": 2}),  # and so do those that travel
    ],
    ids=str,
)
def test_a_step_without_an_update_holds_what_is_predicted(devices: int, options: dict[str, object]) -> None:
    held = held_by_a_second_step(devices, **options)
    assert all(said == pytest.approx(most, rel=0.01) for said, most in held)


def test_each_part_of_a_backward_holds_what_is_predicted() -> None:
    """Between the parts of the last backward gradients are summed, and what the first has read is gone."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x, y, loss = torch.randn(512, 256), torch.randn(512, 256), nn.functional.mse_loss
    pipe = pipec.compile(net, 2, loss_fn=loss, microbatches=4, stages=1, replicas=2, optimizer=ADAM)
    pipe.step(x, target=y)
    assert pipe.plan.segments == {(0, Phase.BACKWARD): 2}
    found, said = measure_memory(pipe, x, target=y)[0], pipe.memory()[0]
    assert said.most == pytest.approx(found.most, rel=0.001)
    assert said.after == pytest.approx(found.after, rel=0.001)


def test_a_measured_step_is_a_step() -> None:
    x, y = batch()
    plain, measured = trained(2), trained(2)
    torch.manual_seed(3)
    plain.step(x, target=y)
    torch.manual_seed(3)
    memory = measure_memory(measured, x, target=y)
    for (name, one), (_, other) in zip(plain.named_parameters(), measured.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert memory[0].bytes_by_category["optimizer"] > 2 * memory[0].bytes_by_category["parameters"]
    assert "of stage 0 of microbatch" in str(memory)
    assert "running" in str(measured.memory())


def readings(meter: TensorMemoryMeter) -> tuple[float, float]:
    meter.note()
    memory = meter.memory(0)
    return float(memory.most[-1]), float(memory.after[-1])


def test_the_meter_counts_memory_once_and_until_nobody_has_it() -> None:
    given = torch.zeros(100)
    with TensorMemoryMeter() as meter:
        meter.begin({"parameters": [given, given.view(10, 10)]})
        assert readings(meter) == (400, 400)
        made = given + 1
        half, turned = made[:50], given.t()
        del made
        assert readings(meter) == (800, 800)
        half = half * 1
        assert readings(meter) == (1000, 600)
        half.resize_(100)
        assert readings(meter)[1] == 800
        rows = torch.sparse_coo_tensor(torch.zeros(1, 2).long(), half[:2], (5,), check_invariants=False)
        assert readings(meter)[1] == 800 + 16
        del rows, half
        del given, turned
        assert readings(meter)[1] == 0


def test_the_meter_counts_what_its_own_thread_makes() -> None:
    made: list[Tensor] = []
    with TensorMemoryMeter() as meter:
        meter.begin({})
        other = threading.Thread(target=lambda: made.append(torch.zeros(100)))
        other.start()
        other.join()
        assert readings(meter) == (0, 0)
        view = made[0].view(10, 10)
        own = view + 1
        assert readings(meter) == (400, 400)
        release = threading.Thread(target=made.append, args=(own,))
        release.start()
        release.join()
        del own, made[:]
        assert readings(meter) == (400, 0)
