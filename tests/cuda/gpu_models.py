"""Models for tests of GPUs, and eager torch to compare with."""

import copy
import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unsplit_reference import relative_error

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
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    return nn.Sequential(*[copy.deepcopy(layers[0]) for _ in range(num_layers)])


def vectors(rows: int, width: int = 2048) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return x, y


def eager_step(model: nn.Module, loss_fn: Loss, batch: Batch, microbatches: int) -> Tensor:
    """The loss of a batch; gradients are added to ``.grad``, those of one microbatch after the other."""
    total = torch.zeros((), device=next(model.parameters()).device)
    for x, y in zip(*(tensor.to(total.device).chunk(microbatches) for tensor in batch), strict=True):
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


def free_unused_memory() -> None:
    """Free the memory of a GPU that former tests of this process have left, and that of cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def on(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]
