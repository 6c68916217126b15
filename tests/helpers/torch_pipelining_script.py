"""A rank of torch's pipelining runs orders that pipec wrote, on stages of the modules that pipec named.

Each argument is a CSV of orders; ``.modules.json`` beside it has the modules. Rank r leaves what it found in
``FILE.rankR.pt``: the losses of the microbatches, if it has the last stage, its gradients, and the orders as
torch writes them.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import pipec

MICROBATCHES, VOCABULARY, WIDTH = 4, 96, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Language(nn.Module):
    """``int64[batch, t]`` to ``f64[batch, t, vocabulary]``. As in torchtitan, children may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(k): Block() for k in range(5)})
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm else x
        return self.output(x) if self.output else x


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def example() -> pipec.Example:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, 6))
    return pipec.Example(Language().double(), (tokens,), target=tokens.roll(-1, 1), loss_fn=token_loss)


def part(model: nn.Module, names: list[str]) -> nn.Module:
    """A copy of the model with these modules alone, as torchtitan makes it."""
    model = copy.deepcopy(model)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            for key in [*child]:
                if f"{name}.{key}" not in names:
                    del child[key]
        elif name not in names:
            setattr(model, name, None)
    return model


def run(path: Path) -> None:
    given, modules = example(), json.loads(path.with_suffix(".modules.json").read_text())
    row = path.read_text().splitlines()[dist.get_rank()]
    parts = {number: part(given.model, modules[number]) for number in stages_of(row)}
    stages = [
        PipelineStage(each, number, len(modules), torch.device("cpu")) for number, each in parts.items()
    ]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=token_loss)
    schedule._load_csv(str(path))
    losses: list[Tensor] = []
    targets = {"target": given.target, "losses": losses} if len(modules) - 1 in parts else {}
    schedule.step(*(given.args if 0 in parts else ()), **targets, return_outputs=False)
    gradients = {name: x.grad for each in parts.values() for name, x in each.named_parameters()}
    orders = [",".join(map(str, order)) for order in schedule.pipeline_order.values()]
    found = {"losses": losses, "gradients": gradients, "orders": "".join(f"{each}\n" for each in orders)}
    torch.save(found, path.with_suffix(f".rank{dist.get_rank()}.pt"))


def stages_of(row: str) -> list[int]:
    """The stages of a rank, read off its row."""
    return sorted(
        {int(cell[: next(k for k, x in enumerate(cell) if x.isalpha())]) for cell in row.split(",")}
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for argument in sys.argv[1:]:
        run(Path(argument))
    dist.destroy_process_group()
