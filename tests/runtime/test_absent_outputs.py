"""Tensors without values have the shapes and dtypes that values would have, and refuse to be read."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipec import InputError
from pipec.runtime.absent_outputs import AbsentOutput, absent_output

Y = torch.tensor([0, 2, 1, 4])


def absent(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> AbsentOutput:
    memory = torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)
    return absent_output(memory, [2, 3], torch.device("cpu"))


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "cross entropy": lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
    "weights": lambda x: F.cross_entropy(x, Y, weight=torch.ones(5)),
    "module": lambda x: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(-1), torch.ones(4, 5) / 5),
    "reflected": lambda x: 2 - torch.ones(4, 1) / x,
    "mask": lambda x: x[Y > 0],
    "mask and column": lambda x: x[Y > 0, 1:3],
    "mask of rows and columns": lambda x: x[torch.eye(4, 5) > 0],
    "where": lambda x: torch.where(Y[:, None] > 1, x, torch.tensor(0.0)),
    "gather": lambda x: x.log_softmax(-1).gather(1, Y[:, None]),
    "topk": lambda x: x.topk(2).values,
    "max": lambda x: x.max(1).indices,
    "rows": lambda x: torch.stack([*x]),
    "matmul": lambda x: torch.ones(3, 4) @ x,
    "equal elements": lambda x: (x.argmax(-1) == Y).float().mean(),
    "double": lambda x: x.to(torch.float64, copy=True),
    "move": lambda x: x.to("cpu", torch.float64).cpu().to(torch.device("cpu")).to(Y.device),
    "like": lambda x: torch.zeros_like(x, device="cpu") + x.new_ones(5, device="cpu"),
    "beside the device": lambda x: x + torch.zeros(5, device=x.device),
    "in place": lambda x: x.clone().add_(torch.ones(5)).relu_(),
    "write at a mask": lambda x: x.clone().masked_fill_(Y[:, None] > 0, 0.0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_shape_and_dtype(name: str) -> None:
    found, expected = COMPUTED[name](absent(4, 5)), COMPUTED[name](torch.randn(4, 5, requires_grad=True))
    assert isinstance(found, AbsentOutput)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert found.requires_grad == expected.requires_grad


def add_up(x: Tensor) -> None:
    total = torch.zeros(4, 5)
    total += x.detach()


def write_into(x: Tensor) -> None:
    torch.zeros(5)[1] = x.detach().mean()


READ: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.mean().item(),
    "float": lambda x: float(x.mean()),
    "branch": lambda x: 1 if x.mean() > 0 else 0,
    "int": lambda x: int(x.argmax()),
    "range": lambda x: range(x.argmax()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "torch.equal": lambda x: torch.equal(x, torch.zeros(4, 5)),
    "torch.allclose": lambda x: torch.allclose(x, torch.zeros(4, 5)),
    "contains": lambda x: 3.0 in x,
    "format": lambda x: f"{x.mean():.3f}",
    "save": lambda x: torch.save(x, io.BytesIO()),
    "pickle": lambda x: pickle.dumps(x),
    "deepcopy": lambda x: copy.deepcopy(x),
    "own mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.argmax(-1).unique(),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "list": lambda x: torch.tensor([x.mean(), x.mean()]),
    "add up": add_up,
    "write into": write_into,
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.zeros(4, 5)),
    "another parameter": lambda x: x * nn.Parameter(torch.ones(5)),
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_a_value_that_is_read_is_refused(name: str) -> None:
    READ[name](torch.randn(4, 5))
    with pytest.raises(InputError, match=r"on ranks 2, 3 alone.*outputs=\"differentiable\""):
        READ[name](absent(4, 5))


@pytest.mark.parametrize(
    "call",
    [
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.reduce(x, 0),
        lambda x: dist.all_gather([torch.zeros(())], x),
    ],
)
def test_a_collective_is_refused(call: Callable[[Tensor], object]) -> None:
    """The ranks with values would wait for the others."""
    if torch.__version__.startswith("2.11") and not dist.is_initialized():
        pytest.skip("torch 2.11 asks for a group first")
    with pytest.raises(InputError, match="on ranks 2, 3 alone"):
        call(absent(4, 5).detach().mean())


def test_an_error_of_the_script_is_its_own() -> None:
    with pytest.raises(ValueError, match="to match target batch_size"):
        F.cross_entropy(absent(4, 5), Y[:3])


def test_what_is_printed_says_where_the_values_are() -> None:
    assert str(absent(4, 5)) == f"{absent(4, 5)}" == "<float32[4, 5], on ranks 2, 3>"


@pytest.mark.parametrize("value", [0.1, 0.125, float("nan")])
@pytest.mark.parametrize("function", [Tensor.mean, lambda x: x.mean().sqrt()])
def test_a_loss_has_a_value_after_its_backward(function: Callable[[Tensor], Tensor], value: float) -> None:
    """It is exact, whatever dtype the loss has here. Nothing else has one."""
    loss, other = function(absent(4, 5)), absent(4, 5).mean()
    loss.value = value
    loss.backward(torch.tensor(0.5))
    assert type(loss) is Tensor
    assert str(loss.item()) == str(value)
    assert f"{loss:.2f}" == f"{value:.2f}"
    with pytest.raises(InputError, match="float"):
        float(loss + other)


def test_a_loss_that_another_graph_has_saved_stays_without_a_value() -> None:
    loss, other = absent(4, 5).mean(), absent(4, 5).mean()
    product = loss * other
    loss.value = 0.1
    loss.backward()
    product.backward()
    with pytest.raises(InputError, match="item"):
        loss.item()
