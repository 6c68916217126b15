"""What was measured of the processor: kept for later processes, and what schedule="auto" goes by."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pipec
from pipec.compiler import calibration_cache
from pipec.compiler.calibration_cache import cached_calibration, store_calibration
from pipec.hardware.devices import DEVICES, DeviceModel

MADE_UP = replace(
    DEVICES["cpu"],
    flops_per_second={"float32": 3e9, "bfloat16": 2e9},
    memory_bytes_per_second=1e9,
    launch_seconds=1e-5,
    attention_efficiency=0.5,
    other_flops_per_second=1e9,
)


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A folder of its own, and one entry for each time that the processor is measured."""
    monkeypatch.setenv(calibration_cache.CACHE_DIR, str(tmp_path))
    made: list[str] = []

    def calibrate(device: str) -> DeviceModel:
        made.append(device)
        return MADE_UP

    monkeypatch.setattr(calibration_cache, "calibrate", calibrate)
    calibration_cache._measured.cache_clear()
    yield made
    calibration_cache._measured.cache_clear()


def file_in(path: Path) -> Path:
    (found,) = path.iterdir()
    return found


def test_processor_is_measured_once_and_kept(
    measurements: list[str], tmp_path: Path, said: list[str]
) -> None:
    first = cached_calibration()
    assert "calibrated this CPU, for schedule='auto': 3 GFLOP/s" in "".join(said)
    said.clear()
    calibration_cache._measured.cache_clear()  # as in another process
    assert cached_calibration() == first
    assert measurements == ["cpu"]
    assert not said
    assert first.link == DEVICES["cpu"].link
    assert first.seconds(3e9, 0.0) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda figures: figures | {"launch_seconds": -1.0},
        lambda figures: figures | {"launch_seconds": "fast"},
        lambda figures: figures | {"launch_seconds": float("inf")},
        lambda figures: {name: x for name, x in figures.items() if name != "attention_efficiency"},
        lambda figures: figures | {"flops_per_second": {"bfloat16": 1.0}},
    ],
)
def test_figures_that_cannot_be_are_measured_anew(change, measurements: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    store_calibration(MADE_UP)
    path = file_in(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert cached_calibration().flops_per_second == MADE_UP.flops_per_second
    assert measurements == ["cpu"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 50_000, b"1" * 100_000, b"null"])
def test_a_file_that_holds_no_figures_is_measured_anew(
    content: bytes, measurements: list[str], tmp_path: Path
) -> None:
    store_calibration(MADE_UP)
    file_in(tmp_path).write_bytes(content)
    assert cached_calibration().flops_per_second == MADE_UP.flops_per_second
    assert measurements == ["cpu"]


def test_another_torch_or_number_of_threads_is_measured_anew(
    measurements: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_calibration(MADE_UP)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    cached_calibration()
    monkeypatch.setattr(torch, "__version__", "9.0")
    cached_calibration()
    assert len(measurements) == 2
    assert len([*tmp_path.iterdir()]) == 3


def test_nothing_is_kept_where_nothing_may_be(
    measurements: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(calibration_cache.CACHE_DIR, "")
    assert cached_calibration() is cached_calibration()
    assert measurements == ["cpu"]
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_auto_goes_by_the_processor_and_a_named_schedule_by_the_table(measurements: list[str]) -> None:
    x, model = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def planned(**options: object) -> pipec.Pipeline:
        pipe = pipec.compile(model, 2, loss_fn=nn.functional.mse_loss, microbatches=2, **options)  # type: ignore[arg-type]
        return pipe.prepare(x, target=x)

    named = planned(schedule="1f1b")
    given = planned(schedule="auto", costs=DEVICES["a100"])
    assert not measurements
    auto = planned(schedule="auto")
    assert measurements == ["cpu"]
    told = [pipe.plan.cost_source for pipe in (named, given, auto)]
    assert told == [f"the device model {name}" for name in ("cpu", "a100", "cpu-calibrated")]
    assert "seconds come from the device model cpu-calibrated" in str(auto.plan)
