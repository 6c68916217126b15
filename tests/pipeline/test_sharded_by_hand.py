"""What a script writes into parameters and gradients between steps, where replicas keep shares of them.

In one process replicas share parameters and gradients, whatever ``shard`` says; in two each has its shares.
"""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from worker_processes import run_ranks

import pipec

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


class Pair:
    """A pipeline whose replicas keep shares, and the plain script with an equal model."""

    def __init__(self, shard: str) -> None:
        torch.manual_seed(0)
        self.own = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.plain = copy.deepcopy(self.own)
        self.x, self.y = torch.randn(8, 6).double(), torch.randn(8, 8).double()
        self.pipe = pipec.compile(
            self.own,
            2,
            stages=1,
            shard=shard,
            loss_fn=nn.functional.mse_loss,
            microbatches=2,
            optimizer=ADAMW,
            timeout=30.0,
        )
        self.optimizer = ADAMW(list(self.plain.named_parameters()))

    def accumulate(self) -> None:
        with self.pipe.accumulate():
            self.pipe.step(self.x, target=self.y)
        self._backward()

    def step(self) -> None:
        loss = self.pipe.step(self.x, target=self.y)
        torch.testing.assert_close(loss, self._backward(), rtol=1e-9, atol=0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.compare()

    def _backward(self) -> Tensor:
        loss = nn.functional.mse_loss(self.plain(self.x), self.y)
        loss.backward()
        return loss.detach()

    def compare(self) -> None:
        assert all(parameter.grad is None for parameter in self.own.parameters())
        for own, plain in zip(self.own.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def pair() -> Pair:
    made = Pair("gradients")
    made.step()
    return made


def zeros(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def by_the_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def zeros_by_the_optimizer(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def of_one_layer(model: nn.Module, optimizer: Any) -> None:
    model[2].zero_grad()  # type: ignore[index,operator]


def of_all(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def to_ones(model: nn.Module, optimizer: Any) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[index,union-attr]


CHANGES_OF_GRADIENTS = [of_all, zeros, by_the_optimizer, zeros_by_the_optimizer, of_one_layer, to_ones]


@pytest.mark.parametrize("change", CHANGES_OF_GRADIENTS)
def test_gradients_are_what_the_script_makes_of_them(
    pair: Pair, change: Callable[[nn.Module, Any], None]
) -> None:
    """Within an accumulation, and before a step without one."""
    for model, optimizer in ((pair.own, pair.pipe.optimizer), (pair.plain, pair.optimizer)):
        change(model, optimizer)
    pair.accumulate()
    pair.accumulate()
    for model, optimizer in ((pair.own, pair.pipe.optimizer), (pair.plain, pair.optimizer)):
        change(model, optimizer)
    pair.step()
    pair.step()


def test_zero_grad_of_the_pipeline_drops_gradients(pair: Pair) -> None:
    pair.accumulate()
    pair.pipe.zero_grad()
    pair.optimizer.zero_grad()
    pair.step()


def cloned(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()  # type: ignore[index,operator,union-attr]


def from_a_vector(model: nn.Module) -> None:
    vector_to_parameters(2 * parameters_to_vector(model.parameters()).detach(), model.parameters())


def there_and_back(model: nn.Module) -> None:
    model.float()
    model.double()


CHANGES_OF_PARAMETERS = [cloned, from_a_vector, there_and_back]


@pytest.mark.parametrize("change", CHANGES_OF_PARAMETERS)
def test_parameters_may_lie_in_other_memory(pair: Pair, change: Callable[[nn.Module], None]) -> None:
    for accumulates in (False, True):
        for model in (pair.own, pair.plain):
            change(model)
        if accumulates:
            pair.accumulate()
            for model in (pair.own, pair.plain):
                change(model)
        pair.step()
        pair.step()


def test_weights_are_swapped_and_swapped_back(pair: Pair) -> None:
    """What the script holds of the memory from before keeps its values, whatever is trained meanwhile."""
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


# in two processes


def a_gradient_in_shares_shows_that_it_is_no_number(pair: Pair) -> None:
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


def parameters_that_do_not_lie_row_by_row_are_refused(pair: Pair) -> None:
    before = pair.own[2].weight.data
    pair.own[2].weight.data = before.t()
    with pytest.raises(pipec.InputError, match=r"2\.weight has strides"):
        pair.pipe.step(pair.x, target=pair.y)
    pair.own[2].weight.data = before
    pair.step()


def main(shard: str) -> None:
    """All of this file on a rank, step after step of one pipeline."""
    pair = Pair(shard)
    pair.step()
    for change in CHANGES_OF_GRADIENTS:
        test_gradients_are_what_the_script_makes_of_them(pair, change)
    test_zero_grad_of_the_pipeline_drops_gradients(pair)
    a_gradient_in_shares_shows_that_it_is_no_number(pair)
    for move in CHANGES_OF_PARAMETERS:
        test_parameters_may_lie_in_other_memory(pair, move)
    test_weights_are_swapped_and_swapped_back(pair)
    parameters_that_do_not_lie_row_by_row_are_refused(pair)
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
