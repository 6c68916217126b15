"""Models for tests of GPUs, and eager torch to compare with."""

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unsplit_reference import relative_error

import pipec

VOCABULARY, WIDTH, TOKENS = 64, 64, 16

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a perceptron, both with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), p)


def decoder(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(dropout) for _ in range(4)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def tokens(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def wide(num_layers: int = 8, width: int = 2048) -> nn.Sequential:
    """Layers large enough that what libraries hold beside tensors counts little."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return nn.Sequential(*[copy.deepcopy(layer) for _ in range(num_layers)])


def vectors(rows: int, *shape: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, *(shape or (2048,)), generator=generator) for _ in range(2))
    return x, y


def eager_step(model: nn.Module, loss_fn: Loss, batch: Batch, microbatches: int) -> Tensor:
    """The loss of a batch; gradients are added to ``.grad``, one microbatch after the other.

    Batch norms count the step as one batch.
    """
    total = torch.zeros((), device=next(model.parameters()).device)
    counters = [x for name, x in model.named_buffers() if name.endswith("num_batches_tracked")]
    counts = [counter.clone() for counter in counters]
    for x, y in zip(*(tensor.to(total.device).chunk(microbatches) for tensor in batch), strict=True):
        for counter, count in zip(counters, counts, strict=True):
            counter.copy_(count)
        loss = loss_fn(model(x), y) * (len(x) / len(batch[0]))
        loss.backward()
        total += loss.detach()
    return total


def errors(found: nn.Module, expected: nn.Module) -> dict[str, float]:
    """How far off the gradients and buffers of a model are, relative to their size."""
    mine, theirs = _state(found), _state(expected)
    assert mine.keys() == theirs.keys()
    return {name: relative_error(mine[name].cpu(), x.cpu()) for name, x in theirs.items()}


def _state(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return gradients | {name: x.float() for name, x in model.named_buffers()}


def assert_steps_agree(
    expected: nn.Module,
    devices: Sequence[torch.device],
    loss_fn: Loss,
    batches: Iterable[Batch],
    rtol: float = 1e-5,
    error: float = 1e-4,
    num_eager: int | None = None,
    **options: Any,
) -> pipec.Pipeline:
    """Steps of a pipeline on these batches leave the losses, gradients and buffers of eager torch.

    Eager torch takes a batch in ``num_eager`` parts, or else in the microbatches.
    """
    model = copy.deepcopy(expected)
    options = {"microbatches": 4, **options}
    pipe: pipec.Pipeline = pipec.compile(model, devices, loss_fn=loss_fn, **options)
    for batch in batches:
        pipe.zero_grad()
        expected.zero_grad()
        loss = pipe.step(batch[0], target=batch[1])
        reference = eager_step(expected, loss_fn, batch, num_eager or options["microbatches"])
        torch.testing.assert_close(loss, reference, rtol=rtol, atol=0)
        assert max(errors(model, expected).values()) < error
    return pipe


class LastLayer(nn.Module):
    """The output of a recurrent network, which returns its states as well."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)[0]
        return output


def free_unused_memory() -> None:
    """Free the memory of a GPU that former tests of this process have left, and that of cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def on(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]
