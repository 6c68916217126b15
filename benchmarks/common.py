"""Models that several benchmarks measure, and how they measure them."""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from pipec.capture.tracer import CaptureRequest, capture
from pipec.graph import TrainingGraph, copy_graph

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))  # for memory_meter


class Embedding(nn.Module):
    """``int64[batch, context]`` tokens to ``f32[batch, context, width]``."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Causal attention and an MLP, each normalised first and added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(heads.transpose(1, 2).flatten(2))


def gpt(width: int, vocabulary: int, context: int, num_layers: int = 8) -> nn.Sequential:
    """Embedding, ``num_layers`` blocks of heads 32 wide, final norm, output layer."""
    return nn.Sequential(
        Embedding(vocabulary, context, width),
        *(Block(width, width // 32) for _ in range(num_layers)),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)),
    )


def text(rows: int, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """``int64[rows, context]`` random tokens, and the tokens that follow them."""
    tokens = torch.randint(vocabulary, (rows, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``f32[batch, context, vocabulary]`` logits against ``int64[batch, context]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def resnet50(scale: float) -> nn.Sequential:
    """A ResNet-50 with all widths ``scale`` times those of the paper (He et al., CVPR 2016)."""
    sizes = [int(scale * width) for width in (256, 512, 1024, 2048)]
    return resnet(num_labels=1000, embedding_size=int(scale * 64), hidden_sizes=sizes)


def resnet(**config: Any) -> nn.Sequential:
    """``f32[batch, 3, height, width]`` images to logits, with a module for each block."""
    whole = ResNetForImageClassification(ResNetConfig(**config))
    blocks = [block for stage in whole.resnet.encoder.stages for block in stage.layers]
    return nn.Sequential(
        whole.resnet.embedder, *blocks, nn.Sequential(whole.resnet.pooler, *whole.classifier)
    )


def gpt2(width: int, num_layers: int, vocabulary: int, context: int) -> GPT2LMHeadModel:
    """GPT-2 of transformers, with heads 32 wide."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=num_layers,
        n_head=width // 32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5(width: int, num_layers: int, vocabulary: int) -> T5ForConditionalGeneration:
    """T5 of transformers, with so many layers in its encoder and in its decoder, and heads 32 wide."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=num_layers,
        num_heads=width // 32,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def table(*headings: str, numbers_from: int = 1) -> Iterator[str]:
    """The two lines that begin a Markdown table; columns from ``numbers_from`` on align right."""
    yield row(*headings)
    yield "|" + "---|" * numbers_from + "--:|" * (len(headings) - numbers_from)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def processor_seconds() -> float:
    """Seconds of the processor that all threads of this process took."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def medians(
    calls: Mapping[str, Callable[[], object]],
    turns: int,
    *,
    in_turn: int = 1,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median seconds of each call. They take turns, of which the first ``warmup`` do not count.

    Of several calls in a turn the first does not count either, for the others before it have emptied the
    caches. What runs ``before`` a call is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + turns):
        for name, call in calls.items():
            for number in range(in_turn):
                before()
                started = clock()
                call()
                if turn >= warmup and (number or in_turn == 1):
                    seconds[name].append(clock() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def in_processes(script: str, num_processes: int, arguments: Sequence[str]) -> str:
    """What ``script`` prints on so many ranks, started by torchrun if there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [sys.executable, *(launcher if num_processes > 1 else []), script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


_GRAPHS: dict[object, TrainingGraph] = {}


def capture_once(request: CaptureRequest) -> TrainingGraph:
    """Capture models of equal class and size once for each precision, for any number of ranks."""
    num_parameters = sum(parameter.numel() for parameter in request.model.parameters())
    key = type(request.model), num_parameters, torch.is_autocast_enabled("cpu")
    if key not in _GRAPHS:
        _GRAPHS[key] = capture(request)
    return copy_graph(_GRAPHS[key])
