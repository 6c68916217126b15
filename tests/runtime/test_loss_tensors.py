"""The loss that a step returns explains its ``backward``, and is otherwise a plain tensor to a script."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.runtime.loss_tensors import STEP_LOSS, StepLoss


@pytest.fixture
def loss() -> StepLoss:
    return StepLoss.of(torch.tensor(2.5), STEP_LOSS)


def test_backward_names_the_module(loss: StepLoss) -> None:
    with pytest.raises(pipec.InputError, match=r"already computed the gradients.*pipe\.as_module\(\)"):
        loss.backward()


def test_a_grad_scaler_is_refused_by_name(loss: StepLoss) -> None:
    with pytest.raises(pipec.InputError, match='precision="fp16-mixed"'):
        torch.amp.GradScaler("cpu").scale(loss)
    assert torch.amp.GradScaler("cpu", enabled=False).scale(loss) is loss


def test_it_prints_formats_and_converts_as_a_tensor(loss: StepLoss) -> None:
    assert (repr(loss), str(loss), f"{loss:.2f}") == ("tensor(2.5000)", "tensor(2.5000)", "2.50")
    assert float(loss) == loss.item() == loss.numpy() == 2.5


def test_what_is_computed_of_it_is_plain(loss: StepLoss) -> None:
    total: Tensor = torch.zeros(())
    total += loss
    for result in (
        loss + 1,
        2 * loss,
        loss / 2,
        torch.stack([loss, loss]),
        loss.detach(),
        total,
        sum([loss]),
    ):
        assert type(result) is Tensor
        assert not result.requires_grad


def test_copies_and_files_have_plain_tensors(loss: StepLoss) -> None:
    buffer = io.BytesIO()
    torch.save({"loss": loss}, buffer)
    buffer.seek(0)
    copies = [
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        torch.load(buffer, weights_only=True)["loss"],
    ]
    for found in copies:
        assert type(found) is Tensor
        assert found == 2.5


def test_every_call_that_returns_a_loss_returns_one_that_explains() -> None:
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), devices=2, loss_fn=loss_fn)
    x, y = torch.ones(4, 2), torch.ones(4, 1)
    losses = [pipe.step(x, target=y), pipe.step(x, target=y, outputs=True)[0], *pipe.stream([(x, y)])]
    for loss in losses:
        with pytest.raises(pipec.InputError, match="already computed the gradients"):
            loss.backward()
    with pytest.raises(pipec.InputError, match="computes no gradients"):
        pipe.eval_step(x, target=y).backward()
