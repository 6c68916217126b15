"""What a script does to parameters and gradients of which replicas keep shares, besides what random loops do.

In one process replicas share parameters and gradients, whatever ``shard`` says; in two each has its shares.
"""

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from worker_processes import run_ranks

import pipec


class Pair:
    """A pipeline whose replicas keep shares, and the plain script with an equal model."""

    def __init__(self, shard: str) -> None:
        torch.manual_seed(0)
        self.own = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.plain = copy.deepcopy(self.own)
        self.x, self.y = torch.randn(8, 6).double(), torch.randn(8, 8).double()
        adamw, mse = functools.partial(torch.optim.AdamW, lr=1e-2), nn.functional.mse_loss
        options = {"stages": 1, "shard": shard, "loss_fn": mse, "microbatches": 2, "timeout": 240.0}
        self.pipe = pipec.compile(self.own, 2, optimizer=adamw, **options)
        self.optimizer = adamw(list(self.plain.named_parameters()))

    def accumulate(self) -> None:
        with self.pipe.accumulate():
            self.pipe.step(self.x, target=self.y)
        self._backward()

    def step(self) -> None:
        loss = self.pipe.step(self.x, target=self.y)
        torch.testing.assert_close(loss, self._backward(), rtol=1e-9, atol=0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in self.own.parameters())
        for own, plain in zip(self.own.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-12)

    def _backward(self) -> Tensor:
        loss = nn.functional.mse_loss(self.plain(self.x), self.y)
        loss.backward()
        return loss.detach()


def test_weights_are_swapped_and_swapped_back() -> None:
    swap_weights(Pair("gradients"))


def swap_weights(pair: Pair) -> None:
    """What the script holds of the memory from before keeps its values, whatever is trained meanwhile."""
    pair.step()
    held = []
    for model in (pair.own, pair.plain):
        held.append({name: parameter.data for name, parameter in model.named_parameters()})
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
    before = copy.deepcopy(held[0])
    pair.pipe.eval_step(pair.x, target=pair.y)
    pair.step()
    for model, tensors in zip((pair.own, pair.plain), held, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors[name], before[name]) or model is pair.plain
            parameter.data = tensors[name]
    pair.step()


def accumulate_in_shares(pair: Pair) -> None:
    """A gradient in shares shows that it is no number."""
    pair.accumulate()
    shown = pair.own[0].weight.grad
    assert shown is not None
    assert shown.isnan().all()
    assert shown.untyped_storage().nbytes() == shown.element_size()
    with pytest.raises(RuntimeError, match="clone"):
        nn.utils.clip_grad_norm_(pair.own.parameters(), 1.0)
    with pytest.raises(pipec.InputError, match="gradients have been accumulated"):
        pair.pipe.save_checkpoint("nowhere")
    pair.step()


def transpose(pair: Pair) -> None:
    before = pair.own[2].weight.data
    pair.own[2].weight.data = before.t()
    with pytest.raises(pipec.InputError, match=r"2\.weight has strides"):
        pair.pipe.step(pair.x, target=pair.y)
    pair.own[2].weight.data = before
    pair.step()


def main(shard: str) -> None:
    """All of this file on a rank."""
    pair = Pair(shard)
    swap_weights(pair)
    accumulate_in_shares(pair)
    transpose(pair)
    print("same", shard)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_processes_follow_the_script(shard: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    paths = [str(Path(__file__).parents[2]), *sys.path]
    script.write_text(
        f"import sys\nsys.path[:] = {paths!r}\n"
        f"from tests.pipeline.test_sharded_by_hand import main\nmain({shard!r})\n"
    )
    assert run_ranks(script, 2, tmp_path) == [f"same {shard}\n"] * 2
