"""CUDA graphs compute what the source of the functions does, wait for nothing, and take no more with time."""

import copy
from pathlib import Path

import pytest
import torch
from gpu_models import decoder, on, token_loss, tokens
from replayed_cuda_graphs import ReplayedGraphs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from worker_processes import run_script

import pipec
from pipec.runtime.step import execution, ranks
from tests.runtime.test_graphs import Selecting


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, where CUDA graphs are at hand. On a CPU functions are computed again in their place."""
    if device.type == "cpu":
        monkeypatch.setattr(execution, "CudaGraphRecorder", ReplayedGraphs)
        monkeypatch.setattr(ranks, "require_gpus", lambda devices: None)
    return device


def train(
    model: nn.Module, devices: list[torch.device], kernels: str, **options: object
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The losses of three steps, which draw, and the gradients of all of them together."""
    model, batch = copy.deepcopy(model), on(devices[0], tokens(16))
    pipe = pipec.compile(
        model, devices, microbatches=8, loss_fn=token_loss, kernels=kernels, **{"recompute": "none"} | options
    )
    torch.manual_seed(3)
    losses = [pipe.step(batch[0], target=batch[1]) for _ in range(3)]
    return losses, {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_graphs_have_the_bits_of_the_source(graphs: torch.device, schedule: str, recompute: str) -> None:
    """The same kernels run, in the same order, and draw the same numbers."""
    model = decoder(dropout=0.1).to(graphs)
    options = {"schedule": schedule, "recompute": recompute}
    with sdpa_kernel(SDPBackend.MATH):
        found = train(model, [graphs] * 4, "cudagraphs", **options)
        torch.testing.assert_close(found, train(model, [graphs] * 4, "source", **options), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
def test_attention_draws_the_same_in_graphs(graphs: torch.device, kernel: SDPBackend) -> None:
    """Its kernels draw from the default generator of the device, and tell their backward where they did."""
    model, batch = decoder(dropout=0.2).to(graphs, torch.bfloat16), on(graphs, tokens(8))
    with sdpa_kernel(kernel):
        try:
            model(batch[0]).sum().backward()
        except RuntimeError as error:
            pytest.skip(f"the kernel does not run here: {error}")
        model.zero_grad()
        found, expected = (train(model, [graphs] * 2, kernels) for kernels in ("cudagraphs", "source"))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=1e-3)
    assert len({float(loss) for loss in found[0]}) == 3, "steps draw other numbers"


@pytest.mark.slow
def test_the_host_waits_nowhere_where_graphs_are_replayed(gpu: torch.device) -> None:
    model, (x, y) = decoder(dropout=0.1).to(gpu), on(gpu, tokens(16))
    pipe = pipec.compile(model, [gpu] * 4, microbatches=4, loss_fn=token_loss, kernels="cudagraphs")
    for _ in range(2):
        pipe.step(x, target=y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = pipe.step(x, target=y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(loss) > 0


@pytest.mark.slow
def test_replays_take_no_more_memory_with_time(gpu: torch.device) -> None:
    model, (x, y) = decoder().to(gpu), on(gpu, tokens(16))
    pipe = pipec.compile(model, [gpu] * 2, microbatches=4, loss_fn=token_loss, kernels="cudagraphs")
    held = []
    for _ in range(10):
        pipe.zero_grad()
        pipe.step(x, target=y)
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[2]


def test_a_function_that_waits_for_the_gpu_is_refused(graphs: torch.device) -> None:
    """How many rows are selected, only values tell. The same process goes on with the source."""
    x, losses = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), []
    for kernels in ("cudagraphs", "source"):
        options = {"loss_fn": lambda y, _: y.square().sum(), "microbatches": 2, "kernels": kernels}
        pipe = pipec.compile(Selecting().to(graphs), [graphs] * 2, **options)
        if kernels == "cudagraphs":
            with pytest.raises(pipec.PipecError, match="kernels='cudagraphs' cannot"):
                pipe.step(x, target=torch.zeros(16))
            torch.randn(4, device=graphs)  # the default generator is not left in the middle of a graph
        else:
            losses.append(float(pipe.step(x, target=torch.zeros(16))))
    assert losses[0] > 0


OVER_NCCL = """
import torch, pipec
from torch import nn
losses = []
for kernels in ("cudagraphs", "source"):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Dropout(0.1))
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": 8, "kernels": kernels}
    pipe = pipec.compile(model, devices=2, schedule="zb-h1", **options)
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    torch.manual_seed(3)
    losses.append([float(pipe.step(x, target=x)) for _ in range(20)])
    pipe.zero_grad()
pipec.log("equal" if losses[0] == losses[1] else f"not equal: {losses}")
"""


@pytest.mark.slow
def test_graphs_run_between_messages_of_nccl(two_devices: list[torch.device], tmp_path: Path) -> None:
    if two_devices[0].type == "cpu":
        pytest.skip("says nothing on a CPU")
    script = tmp_path / "over_nccl.py"
    script.write_text(OVER_NCCL)
    assert run_script(script, [], 2, tmp_path).strip().endswith("equal")


def test_the_last_batch_may_be_smaller(graphs: torch.device) -> None:
    """Its graphs are recorded before its first step, and those of the other batches stay."""
    model, expected = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(graphs) for _ in range(2)
    )
    expected.load_state_dict(model.state_dict())
    pipe = pipec.compile(model, [graphs] * 2, microbatches=4, loss_fn=F.mse_loss, kernels="cudagraphs")
    for rows in (16, 10, 16, 10):
        x, y = torch.randn(rows, 8, device=graphs), torch.randn(rows, 4, device=graphs)
        torch.testing.assert_close(pipe.step(x, target=y), F.mse_loss(expected(x), y), rtol=1e-5, atol=0)
