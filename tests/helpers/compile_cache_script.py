"""Trains a model for some calls; prints digests of what it computed and compiled, and how much was read."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pipec
from pipec import console

Batch = Mapping[str, Any]


def gpt2() -> tuple[nn.Module, list[Batch]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=5, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = [torch.randint(64, (8, length)) for length in (16, 12, 20)]
    return GPT2LMHeadModel(config), [{"input_ids": each, "labels": each} for each in tokens]


def bert() -> tuple[nn.Module, list[Batch]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )

    def batch(length: int) -> Batch:
        lengths = torch.randint(length // 2, length + 1, (8, 1))
        mask = (torch.arange(length) < lengths).long()
        return {
            "input_ids": torch.randint(64, (8, length)),
            "attention_mask": mask,
            "labels": torch.randint(2, (8,)),
        }

    return BertForSequenceClassification(config), [batch(16), batch(12)]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), labels)


def resnet() -> tuple[nn.Module, list[Batch]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Residual(8) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    batches = [{"x": torch.randn(8, 3, 8, 8), "labels": torch.randint(4, (8,))} for _ in range(2)]
    return WithLoss(model), batches


class Counting(nn.Module):
    """Has dropout, a buffer that the forward changes, and a tensor that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))
        self.shift = torch.arange(8.0)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return nn.functional.mse_loss(x + self.shift, labels)


def counting() -> tuple[nn.Module, list[Batch]]:
    return Counting(), [{"x": torch.randn(n, 8), "labels": torch.randn(n, 8)} for n in (8, 12)]


MODELS: Mapping[str, Callable[[], tuple[nn.Module, list[Batch]]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet": resnet,
    "counting": counting,
}


def digest(*tensors: Tensor) -> str:
    held = hashlib.sha256()
    for tensor in tensors:
        held.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def main() -> None:
    name, *words = sys.argv[1:]
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    console.logger.addHandler(handler)
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    options: dict[str, Any] = {"microbatches": 4, "devices": None if "ranks" in words else 2}
    if "train" in words:
        options["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    if "stream" in words:
        options |= {"schedule": "pipedream", "microbatches": None}
    pipe = pipec.compile(model, **options)
    found = []
    if "stream" in words:
        found += [digest(loss) for loss in pipe.stream([batches[0]] * 6)]
    else:
        for batch in (*batches, batches[0]):
            found.append(digest(pipe.step(**batch)))
            found.append(digest(pipe.eval_step(**batch)))
    pipe.eval()
    found.append(digest(pipe.eval_step(**batches[0])))
    state = pipe.state_dict()
    gradients = [p.grad for p in model.parameters() if isinstance(p.grad, Tensor)]
    found.append(digest(*(x for x in state.values() if isinstance(x, Tensor)), *gradients))
    texts = [each.artifact.canonical_text() for each in pipe._compiler.cache.compiled]
    found += [hashlib.sha256(text.encode()).hexdigest() for text in (*texts, str(pipe.plan))]
    num_read = sum(message.startswith("traced in") for message in said)
    others = [x for x in said if "compilation cache" not in x and not x.startswith("compiling")]
    if console.is_rank_zero():
        print(json.dumps({"found": found, "said": others, "num_read": num_read, "num_compiled": len(texts)}))


if __name__ == "__main__":
    main()
