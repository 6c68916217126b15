"""Mixed precision: the bits of eager torch under autocast, casts once a step, and GradScaler's scale."""

import copy
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_modules import model as module
from memory_meter import measure_memory
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from unsplit_reference import Plain
from worker_processes import run_lines

import pipec
from pipec.errors import InputError, NonFiniteError
from pipec.pipeline import Pipeline
from pipec.runtime.step.loss_scale import GROWTH_INTERVAL, LossScale

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
CPU = torch.device("cpu")
TYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
WIDTH, ROWS, MICROBATCHES = 16, 8, 4


@module(
    layers=lambda: nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
        *(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    ),
    head=lambda: nn.Linear(WIDTH, WIDTH),
)
def Untied(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Its fourth layer has a weight that is made of two parameters."""
    return nn.functional.mse_loss(self.head(self.layers(x)), y)


def tied() -> nn.Module:
    """Its last layer is the first one."""
    net = Untied()
    net.head.weight = net.layers[0].weight
    return net


def model(kind: Callable[[], nn.Module] = tied) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batches(count: int, overflowing: tuple[int, ...] = ()) -> Iterator[dict[str, Tensor]]:
    """Of those that overflow, the loss is finite, and its gradient in float16 is not in row 5."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
        if number in overflowing:
            y[5] *= 1e4
        yield {"x": x, "y": y}


class Eager(Plain):
    """The script without pipec: autocast around each microbatch, and a scaler if that is float16."""

    def __init__(self, model: nn.Module, precision: str, clip: float | None, device: torch.device) -> None:
        super().__init__(model, lambda named: SGD([p for _, p in named]), clip)
        self.device, self.dtype = device, TYPES[precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16-mixed")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for own, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            with torch.autocast(self.device.type, self.dtype):
                loss = self.model(own.to(self.device), target.to(self.device))
            self.scaler.scale(loss / MICROBATCHES).backward()
            losses.append(loss.detach() / MICROBATCHES)
        return torch.stack(losses).sum()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self._clip is not None:
            self.clip_grad_norm_(self._clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def pair(
    precision: str,
    kind: Callable[[], nn.Module] = tied,
    clip: float | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> tuple[Pipeline, Eager]:
    own = model(kind).to(device)
    eager = Eager(copy.deepcopy(own), precision, clip, device)
    options = {"devices": [device] * 2, "optimizer": SGD, "microbatches": MICROBATCHES, **options}
    return pipec.compile(own, precision=precision, clip_grad_norm=clip, **options), eager


def difference(pipe: Pipeline, eager: Eager) -> float:
    """The largest difference of a parameter."""
    own = dict(pipe.named_parameters())
    return max((own[name] - p).abs().max().item() for name, p in eager.model.named_parameters())


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16-mixed", {"schedule": "interleaved-1f1b", "recompute": "full"}),
        ("fp16-mixed", {"schedule": "zb-h1"}),
    ],
)
def test_losses_and_weights_are_those_of_eager_autocast(precision: str, options: dict[str, Any]) -> None:
    """Over 50 steps, bit for bit: nothing is tied, and gradients are added up in float32 in one order."""
    pipe, eager = pair(precision, Untied, **options)
    for batch in batches(50):
        torch.testing.assert_close(pipe.step(**batch), eager.step(**batch), rtol=1e-6, atol=0)
    assert difference(pipe, eager) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 3, "replicas": (2, 1), "gradient_dtype": "bf16"},
        {"devices": 2, "stages": 1, "shard": "gradients", "clip": 0.5, "on_nan": "raise"},
    ],
)
def test_overflow_leaves_an_update_out_on_all_ranks(options: dict[str, Any]) -> None:
    overflow(**options)


def overflow(**options: Any) -> None:
    """With replicas, tied weights and shares: weights, scale and its counter are GradScaler's afterwards."""
    pipe, eager = pair("fp16-mixed", **options)
    for number, batch in enumerate(batches(8, overflowing=(1, 2, 5))):
        before = {name: p.clone() for name, p in pipe.local_state_dict().items()}
        is_local = options.get("batch") == "local"
        rows = {key: x.chunk(2)[pipe.replica] if is_local else x for key, x in batch.items()}
        torch.testing.assert_close(pipe.step(**rows), eager.step(**batch), rtol=1e-2, atol=0)
        unchanged = all(torch.equal(before[name], p) for name, p in pipe.local_state_dict().items())
        assert unchanged == (number in (1, 2, 5))
        assert pipe.loss_scale == eager.scaler.get_scale()
    assert (pipe.num_skipped, pipe.num_steps, pipe.loss_scale) == (3, 8, 2.0**13)
    updates, whole = pipe._steps.updates, pipe.full_state_dict(all_ranks=True)
    assert updates is not None
    assert updates.loss_scale.growth_tracker == eager.scaler._get_growth_tracker()
    assert all((whole[name] - p).abs().max() < 5e-3 for name, p in eager.model.state_dict().items())
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_accumulated_gradients_are_unscaled_and_keep_an_overflow() -> None:
    """One that overflows takes those before and after it with it, as where a script scales the loss."""
    pipe, eager = pair("fp16-mixed", Untied)
    every = list(batches(6, overflowing=(3,)))
    for first, second in zip(every[::2], every[1::2], strict=True):
        for each in (pipe, eager):
            with each.accumulate():
                each.step(**first)
        scale, own = eager.scaler.get_scale(), dict(pipe.named_parameters())
        assert all(torch.equal(own[name].grad, p.grad / scale) for name, p in eager.model.named_parameters())
        pipe.step(**second)
        eager.step(**second)
    assert pipe.loss_scale == eager.scaler.get_scale() == 32768
    assert difference(pipe, eager) == 0


def test_the_scale_grows_and_shrinks_as_that_of_grad_scaler_but_not_for_ever() -> None:
    scale, scaler = LossScale(), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for number in range(2 * GROWTH_INTERVAL + 50):
        overflows = number in (3, 4, 2000, 4040)
        weight.grad = torch.full((), torch.inf if overflows else 0.0)
        scaler.scale(weight)  # makes its state
        scaler.step(optimizer)
        scaler.update()
        scale.update(overflows)
        assert (scale.scale, scale.growth_tracker) == (scaler.get_scale(), scaler._get_growth_tracker())
    shrunk = LossScale()
    for _ in range(32):
        shrunk.update(overflowed=True)
    with pytest.raises(NonFiniteError, match="another reason than the range of float16"):
        shrunk.update(overflowed=True)


def test_a_loss_that_is_nan_is_not_the_scales_doing() -> None:
    pipe, _ = pair("fp16-mixed", on_nan="skip")
    (batch,) = batches(1)
    pipe.step(x=batch["x"] * torch.nan, y=batch["y"])
    assert (pipe.num_skipped, pipe.loss_scale) == (1, 65536)


def test_weights_are_cast_once_a_step() -> None:
    """Forward and backward of four microbatches read the same copies: no phase makes one of its own."""
    pipe, _ = pair("bf16-mixed")
    pipe.prepare(**next(batches(1)))
    for stage in (0, 1):
        _, phases = pipe.source(stage).split("def forward")
        assert not re.search(r"(weight|bias)\w*\.to\(dtype=torch\.bfloat16", phases)
        assert re.search(r' = frame\["precomputed"\]\n', phases)
        assert "weight_norm_interface.default" not in phases
    assert "weight_norm_interface.default" in pipe.source(0) + pipe.source(1)


@module(
    gain=lambda: nn.Parameter(torch.full((WIDTH,), 0.5)),
    halves=lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH),
    turned=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH),
    layers=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
)
def Early(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Makes of a parameter what the last layer reads, before any layer runs."""
    gain = self.gain.exp()
    first, second = (2 * self.halves).chunk(2, dim=1)
    turned = self.turned.tanh().t()
    x = (self.layers(x) @ first).relu() @ turned
    return nn.functional.mse_loss(x @ second * gain, y)


def test_what_another_stage_reads_is_prepared_there() -> None:
    """The gradient of its parameter is made where it is read. Views of it may be made in between."""
    pipe, eager = pair("bf16-mixed", Early)
    for batch in batches(3):
        evaluated = pipe.eval_step(**batch)
        assert evaluated == pipe.step(**batch) == eager.step(**batch)
    assert difference(pipe, eager) == 0
    assert "gain" not in pipe.source(0)
    assert "'gain'" in pipe.source(1)


def measured(rank: int = 0, **options: Any) -> Any:
    """What the plan says that a rank holds at most, and what it does."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
    x = torch.randn(ROWS, 128)
    options |= {"optimizer": functools.partial(torch.optim.AdamW, foreach=False), "precision": "bf16-mixed"}
    pipe = pipec.compile(nn.Sequential(*layers), 2, loss_fn=nn.functional.mse_loss, **options)
    pipe.step(x, target=x)
    return pipe.memory()[rank], measure_memory(pipe, x, target=x)[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_is_what_the_plan_says(rank: int) -> None:
    """The copies in 16 bits count once, and not with each microbatch."""
    said, found = measured(rank, microbatches=MICROBATCHES)
    assert said.bytes_by_category["precomputed"] == said.bytes_by_category["parameters"] / 2
    assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)


def test_checkpoints_keep_the_scale_and_its_counter(tmp_path: Path) -> None:
    """Whoever goes on makes the same steps, and grows the scale at the same one."""
    pipe, _ = pair("fp16-mixed")
    first, second, *rest = batches(5, overflowing=(0,))
    pipe.step(**first)
    pipe.step(**second)
    pipe.save_checkpoint(tmp_path / "saved")
    other, _ = pair("fp16-mixed", devices=3)
    other.load_checkpoint(tmp_path / "saved")
    assert other.loss_scale == 32768
    assert [pipe.step(**batch) for batch in rest] == [other.step(**batch) for batch in rest]
    counters = [each._steps.updates.loss_scale for each in (pipe, other) if each._steps.updates]
    assert counters == [LossScale(32768.0, 4)] * 2


def test_artifacts_scale_the_loss(tmp_path: Path) -> None:
    pipe, eager = pair("fp16-mixed")
    first, *rest = batches(3, overflowing=(1,))
    pipe.prepare(**first).save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact", optimizer=SGD)
    for batch in (first, *rest):
        loaded.step(**batch)
        eager.step(**batch)
    assert (loaded.num_skipped, loaded.loss_scale) == (1, eager.scaler.get_scale())


@module(
    first=lambda direct: nn.Linear(WIDTH, WIDTH),
    last=lambda direct: nn.Linear(WIDTH, WIDTH),
    weight=lambda direct: nn.Parameter(torch.randn(WIDTH, WIDTH) / 4),
    direct=lambda direct: direct,
)
def Wide(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Attends to one tensor, in float32 where torch does so, and multiplies matrices without autocast."""
    hidden = self.first(x)[:, None]
    hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)[:, 0]
    if self.direct:
        assert hidden.grad_fn.metadata is not None  # which no other front end takes
    with torch.autocast("cpu", enabled=False):
        hidden = hidden.float() @ self.weight
    return nn.functional.mse_loss(self.last(hidden), y)


@pytest.mark.parametrize("direct", [False, True])
def test_a_backward_runs_without_autocast_as_in_eager_mode(direct: bool) -> None:
    torch.manual_seed(0)
    net = Wide(direct)
    eager, (batch,) = copy.deepcopy(net), batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = eager(**batch)
    loss.backward()
    pipe = pipec.compile(net, devices=1, microbatches=1, precision="bf16-mixed")
    assert torch.equal(pipe.step(**batch), loss.detach())
    for fqn, parameter in net.named_parameters():
        assert torch.equal(parameter.grad, eager.get_parameter(fqn).grad), fqn


def test_an_autocast_that_is_not_the_option_is_refused() -> None:
    (batch,) = batches(1)
    plain = pipec.compile(model(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputError, match=r"pass precision='bf16-mixed' to pipec\.compile"):
            pipec.compile(model(), 2)
        pipe = pipec.compile(model(), 2, precision="bf16-mixed")
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(InputError, match=r"pipec\.compile has precision='bf16-mixed'"):
            pipe.step(**batch)
        with pytest.raises(InputError, match=r"pass precision='fp16-mixed' to pipec\.compile"):
            plain.step(**batch)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": None}, "pass optimizer=..., such as"),
        ({"schedule": "pipedream"}, "pass precision='bf16-mixed', or schedule='1f1b'"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
        ({}, r"is float16, but precision='fp16-mixed' keeps weights in float32"),
    ],
)
def test_what_scaling_cannot_do_is_refused(options: dict[str, Any], expected: str) -> None:
    given = {"precision": "fp16-mixed", "optimizer": SGD, **options}
    (batch,) = batches(1)
    with pytest.raises(InputError, match=expected):
        pipec.compile(model().half(), 2, **given).step(**batch)


# on processes


def main() -> None:
    """On each rank. A gradient overflows in rows of the second replica alone."""
    overflow(stages=1, batch="local", timeout=240.0)
    overflow(stages=1, batch="local", shard="parameters", timeout=240.0)
    overflow(timeout=240.0)
    said, found = measured(int(os.environ["RANK"]), stages=1, microbatches=8, shard="parameters")
    print(said.peak_bytes / found.peak_bytes)


@pytest.mark.slow
def test_ranks_overflow_together(tmp_path: Path) -> None:
    """All leave out the same updates, and training goes on as with GradScaler; memory is as the plan says."""
    root = str(Path(__file__).parents[2])
    script = (
        f"import sys\nsys.path.insert(0, {root!r})\nfrom tests.pipeline.test_precision import main\nmain()"
    )
    for (ratio,) in run_lines(script, 2, tmp_path):
        assert float(ratio) == pytest.approx(1, rel=0.03)
