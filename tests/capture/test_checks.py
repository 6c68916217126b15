"""What is checked of every microbatch, and what cannot be told of a graph for one size of it."""

from typing import Any

import pytest
import torch
from awkward_modules import module, train_as_eager
from slow_params import slow
from torch import Tensor, fx, nn

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import CaptureError, ExecutionError, InputError
from pipec.graph import is_constant, is_forward
from pipec.ir import Mode

ROWS, WIDTH = 4, 4


class Illustrated(nn.Module):
    """Texts, in which two words of each row are to be replaced by what is made of two pictures."""

    def __init__(self, unrolled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.unrolled = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), unrolled

    def forward(self, x: Tensor, replaced: Tensor, pictures: Tensor) -> Tensor:
        if self.unrolled:  # the batch becomes a number
            pictures = pictures * torch.tensor([2.0 for _ in pictures])[:, None, None]
            torch._check_tensor_all(replaced.sum() * WIDTH == pictures.numel())
        mask = replaced[..., None].expand(x.shape)
        return self.head(self.words(x).masked_scatter(mask, pictures)).square().mean()


def inputs(replaced: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, pictures = (torch.randn(ROWS, n, WIDTH, generator=generator) for n in (3, 2))
    return {"x": x, "replaced": torch.tensor(replaced).bool(), "pictures": pictures}


TWO_EACH = [[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]
UNEQUAL = [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 1]]
FEWER = [[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("unrolled", [slow(False), True])
def test_rows_take_their_own_elements_or_the_step_fails(unrolled: bool) -> None:
    """Of rows that choose more or fewer elements than they bring along, the unsplit model gives to others."""
    pipe = train_as_eager(
        Illustrated(unrolled), **inputs(TWO_EACH), options={"batched": {"pictures": 0, "replaced": 0}}
    )
    said = "each is checked as if it were" if unrolled else "the rows of each microbatch must bring along"
    pattern = rf"test_checks\.py:(.|\n)*{said}"
    if torch.__version__.startswith("2.11"):  # which has no such check where the batch is a number
        pattern += "|the rows of each microbatch must bring along|off by inf"
    for replaced in (FEWER,) if not unrolled else (FEWER, UNEQUAL):
        errors = ExecutionError, InputError  # of the step, or of the check before it
        with pytest.raises(errors, match=pattern):
            pipe.step(**inputs(replaced))


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = [row * 2 for row in x]  # the batch becomes a number
        return torch.stack(rows) if (x > 0).sum() > len(rows) else torch.stack(rows) + 1


def test_a_count_of_the_batch_is_not_compared_with_the_rows_of_a_microbatch() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH))
    pipe = pipec.compile(
        nn.Sequential(Counting(), *model), 2, loss_fn=lambda y, target: y.mean(), microbatches=2
    )
    with pytest.raises(CaptureError, match=r"test_checks\.py:(.|\n)*the number 2, which may come from the 2"):
        pipe.step(torch.randn(ROWS, WIDTH), target=torch.zeros(ROWS))


@module(lambda: {"layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))})
def Overwriting(self: Any, x: Tensor) -> Tensor:
    """Shows a tensor, changes it, and reads what the first view shows, as Longformer does."""
    scores = x.new_zeros(x.shape[0], WIDTH, 6)
    scores[:, :, 1:5] = self.layers[0](x)
    shown = scores.transpose(2, 1)
    other = self.layers[1](x).tanh()
    scores[:, :, :2] = other[:, :, :2]
    scores[:, :, 3:] += other[:, :, 1:]
    return self.layers[2]((shown + 1).transpose(2, 1)[:, :, 1:5]).square().mean()


@pytest.mark.slow
def test_operators_follow_the_data_where_a_tensor_is_changed() -> None:
    """torch makes views anew behind a change, and says they were of the operator that made the first one."""
    call = ModelCall((torch.randn(ROWS, WIDTH, WIDTH),), {})
    graph = capture(CaptureRequest(Overwriting(), None, Mode.TRAIN, call))
    edges = [(source, node) for node in graph.nodes for source in node.all_input_nodes if _is_placed(source)]
    for source, node in edges:
        one, other = source.meta["operator"], node.meta["operator"]
        if is_forward(source) and is_forward(node):
            assert one <= other, (source, node)
        if not is_forward(source):
            assert one >= other, (source, node)


def _is_placed(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_constant(node)
