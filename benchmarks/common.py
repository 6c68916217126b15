"""Models that several benchmarks measure, and how they measure them."""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

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


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``f32[batch, context, vocabulary]`` logits against ``int64[batch, context]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def resnet50(scale: float) -> nn.Sequential:
    """The first convolution, 16 blocks of three with batch norm, and the output layer for 1,000 classes.

    ``f32[batch, 3, height, width]`` images to ``f32[batch, 1000]`` (He et al., CVPR 2016). All widths are
    ``scale`` times those of the paper.
    """
    sizes = [int(scale * width) for width in (256, 512, 1024, 2048)]
    config = ResNetConfig(num_labels=1000, embedding_size=int(scale * 64), hidden_sizes=sizes)
    whole = ResNetForImageClassification(config)
    blocks = [block for stage in whole.resnet.encoder.stages for block in stage.layers]
    return nn.Sequential(
        whole.resnet.embedder, *blocks, nn.Sequential(whole.resnet.pooler, *whole.classifier)
    )


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
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each call. They take turns, and a first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = clock()
            call()
            seconds[name].append(clock() - started)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def medians_of_turns(
    calls: Mapping[str, Callable[[], object]], turns: int, in_turn: int = 4
) -> dict[str, float]:
    """Median seconds of each call, of ``in_turn`` calls in a turn.

    The first call of a turn does not count, for the others before it have emptied the caches, nor does the
    first turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            for number in range(in_turn):
                started = time.perf_counter()
                call()
                if turn and number:
                    seconds[name].append(time.perf_counter() - started)
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
