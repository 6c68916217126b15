"""Gradients that are made within their sums: of whole numbers, no sum rounds, and so it has eager's bits."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_meter import measure_memory
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.errors import InputError

ROWS, WIDTH, MICROBATCHES = 8, 4, 4
SGD = functools.partial(torch.optim.SGD, lr=0.5)


class Net(nn.Module):
    """Whole numbers alone. With ``tied``, the last layer has the first one's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()
        self.experts = nn.Parameter(torch.eye(WIDTH).repeat(3, 1, 1))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return torch.bmm(torch.stack([x, x - 1, x + 1]), self.experts).square().sum((0, 2)).mean()


def batch(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (ROWS, WIDTH), generator=generator).float()


def pipeline(
    model: nn.Module, devices: int = 2, fused_gradients: bool = True, **options: Any
) -> pipec.Pipeline:
    options = {"microbatches": MICROBATCHES, "dynamic": False, **options}
    return pipec.compile(model, devices, fused_gradients=fused_gradients, **options)


def tied_apart(pipe: pipec.Pipeline) -> bool:
    """Whether both uses of a weight are on stages of their own, which add up its gradients apart."""
    return any(stage.borrowed_parameters for stage in pipe.plan.stages)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "zb-h1", "recompute": "full"},
        slow({"devices": 4, "stages": 2}),
        {"devices": 4, "replicas": (3, 1)},
        slow({"stages": 1}),
        {"on_nan": "skip"},
    ],
    ids=str,
)
def test_two_steps_add_up_what_eager_does(options: dict[str, Any], tied: bool) -> None:
    model = Net(tied)
    eager, pipe = copy.deepcopy(model), pipeline(model, **options)
    for seed in range(2):
        loss = eager(batch(seed))
        loss.backward()
        assert torch.equal(pipe.step(batch(seed)), loss.detach())
    torch.testing.assert_close(gradients(model), gradients(eager), rtol=0, atol=0)
    code = "".join(map(pipe.source, range(len(pipe.plan.stages))))
    assert code.count(".addmm_(") == (4 if not tied or tied_apart(pipe) else 2)
    assert code.count(".baddbmm_(") == 1


@pytest.mark.parametrize("shard", [None, slow("optimizer"), slow("gradients"), "parameters"])
def test_programs_that_update_do_so_with_the_same_sums(shard: str | None) -> None:
    model = Net(tied=False)
    eager, pipe = copy.deepcopy(model), pipeline(model, 4, stages=2, optimizer=SGD, shard=shard)
    optimizer = SGD(eager.parameters())
    eager(batch()).backward()
    optimizer.step()
    pipe.step(batch())
    for (name, found), expected in zip(pipe.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_streams_without_a_flush_use_them_for_the_right_update() -> None:
    plain, fast = Net(tied=False), Net(tied=False)
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    pipes = [
        pipeline(
            model, fused_gradients=is_fast, schedule="pipedream-2bw", optimizer=optimizer, clip_grad_norm=9.0
        )
        for model, is_fast in ((plain, False), (fast, True))
    ]
    for pipe in pipes:
        list(pipe.stream((batch(seed),) for seed in range(4)))
    for one, other in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_is_kept_of_a_step_that_is_skipped() -> None:
    model = Net(tied=False)
    pipe = pipeline(model, on_nan="skip")
    pipe.step(batch() * torch.inf)
    assert pipe.num_skipped == 1
    assert {*gradients(model).values()} == {None}


def test_a_rank_holds_what_it_is_said_to_hold() -> None:
    """The gradient of a microbatch is as large as the weight here, and everything else is small."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False)]
    peaks = []
    for fast in (False, True):
        pipe = pipec.compile(
            nn.Sequential(*copy.deepcopy(layers)),
            loss_fn=lambda output, target: (output - target).square().mean(),
            microbatches=4,
            fused_gradients=fast,
            dynamic=False,
        )
        x = torch.randn(4, 256)
        (measured,) = measure_memory(pipe, x, target=x)
        (predicted,) = pipe.memory()
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
        peaks.append(measured.peak_bytes)
    assert peaks[0] - peaks[1] > 256 * 256 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-mixed"}, "precision='bf16-mixed'"),
        ({"kernels": "inductor"}, "kernels='inductor'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipeline(Net(tied=False), **options)


def test_an_artifact_runs_as_its_source_alone(tmp_path: Path) -> None:
    pipe = pipeline(Net(tied=False)).prepare(batch())
    pipe.save(tmp_path / "artifact", tensors=True)
    with pytest.raises(InputError, match="kernels='inductor'"):
        pipec.load(tmp_path / "artifact", kernels="inductor")
    assert torch.equal(pipec.load(tmp_path / "artifact").step(batch()), pipe.step(batch()))
