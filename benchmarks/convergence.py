"""How many mini-batches training takes with a flush and without one: curves, and a table in Markdown.

    python benchmarks/convergence.py --plot docs/images/convergence.svg
    python benchmarks/convergence.py --models gpt --seeds 1 --minibatches 20

Two models of the examples train on four stages under four schedules, for each seed from the same weights and
on the same mini-batches. Where a schedule has microbatches, there are four in a mini-batch.

* ``gpt``: the byte-level GPT on the source of Python's standard library. Every mini-batch is drawn anew from
  10 MB, so that its loss is one on text not seen before. A point of a curve is the mean loss of ten.
* ``digits``: the ResNet on scikit-learn's digits. A point is the accuracy on the digits held out, every half
  epoch; to evaluate drains the pipeline.

All schedules have the learning rate of the example, which was chosen under 1F1B: what is compared is what a
script sees that changes its schedule and nothing else.
"""

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from common import row, table
from torch import Tensor, nn

import pipec

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import resnet_digits
from digits import load_images
from stdlib_text import load_bytes, sample
from train_gpt import GPT, next_byte_loss

STAGES, BATCH, CONTEXT = 4, 32, 64
SCHEDULES = ("gpipe", "1f1b", "pipedream", "pipedream-2bw")


@dataclass(frozen=True)
class Task:
    """A model to train on ``minibatches``. Its curve has a point after ``every`` so many of them.

    That is what ``evaluate`` returns, else the mean of their losses. Training has come far enough where a
    point is as good as the ``target``: below it if it ``falls``.
    """

    name: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor] | None
    learning_rate: float
    batches: Callable[[torch.Generator], Iterator[dict[str, Tensor]]]
    minibatches: int
    every: int
    label: str
    target: float
    falls: bool
    evaluate: Callable[[pipec.Pipeline], float] | None = None

    def needed(self, points: Sequence[float]) -> float:
        """The mini-batches until the target is reached; infinite if it never is."""
        for number, value in enumerate(points, 1):
            if value <= self.target if self.falls else value >= self.target:
                return number * self.every
        return math.inf


Curves = dict[str, list[list[float]]]
"""For each schedule the points of the training from each seed."""


def gpt_batches(generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    text, _ = load_bytes()
    while True:
        rows = sample(text, BATCH, CONTEXT + 1, generator)
        yield {"tokens": rows[:, :-1], "target": rows[:, 1:]}


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_images()
    return nn.functional.interpolate(images, size=(32, 32)), labels


def digits_batches(generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    images, labels = digits()
    while True:
        for rows in torch.randperm(resnet_digits.NUM_TRAIN, generator=generator).split(BATCH):
            yield {"pixel_values": images[rows], "labels": labels[rows]}


def held_out_accuracy(pipe: pipec.Pipeline) -> float:
    images, labels = (each[resnet_digits.NUM_TRAIN :] for each in digits())
    pipe.eval()
    predicted = pipe(pixel_values=images).logits.argmax(dim=-1)
    pipe.train()
    return float((predicted == labels).float().mean())


TASKS = (
    Task(
        name="gpt",
        make=functools.partial(GPT, num_layers=4, width=64, num_heads=2),
        loss_fn=next_byte_loss,
        learning_rate=2e-3,
        batches=gpt_batches,
        minibatches=700,
        every=10,
        label="loss (nats per byte)",
        target=2.3,
        falls=True,
    ),
    Task(
        name="digits",
        make=resnet_digits.make_model,
        loss_fn=None,
        learning_rate=3e-3,
        batches=digits_batches,
        minibatches=288,
        every=24,
        label="accuracy on digits held out",
        target=0.97,
        falls=False,
        evaluate=held_out_accuracy,
    ),
)


def train(task: Task, schedule: str, seed: int) -> list[float]:
    """The points of the curve."""
    torch.manual_seed(seed)
    pipe = pipec.compile(
        task.make(),
        STAGES,
        loss_fn=task.loss_fn,
        schedule=schedule,
        microbatches=1 if schedule == "pipedream" else STAGES,
        optimizer=functools.partial(torch.optim.AdamW, lr=task.learning_rate),
    )
    batches = islice(task.batches(torch.Generator().manual_seed(seed)), task.minibatches)
    if task.evaluate is None:
        losses = [loss.item() for loss in pipe.stream(batches)]
        return [statistics.mean(losses[k : k + task.every]) for k in range(0, len(losses), task.every)]
    points = list[float]()
    while [loss.item() for loss in pipe.stream(islice(batches, task.every))]:
        points.append(task.evaluate(pipe))
    return points


def lines(task: Task, curves: Curves) -> Iterator[str]:
    needs = {name: sorted(map(task.needed, found)) for name, found in curves.items()}
    medians = {name: statistics.median(found) for name, found in needs.items()}
    for name, found in needs.items():
        ratio = f"{medians[name] / medians['1f1b']:.2f}" if "1f1b" in medians else ""
        target = f"{task.label} {'at most' if task.falls else 'at least'} {task.target:g}"
        yield row(task.name, target, name, f"{medians[name]:g}", ", ".join(f"{x:g}" for x in found), ratio)


STYLES = {
    "gpipe": {"color": "#9ecae1", "linewidth": 5},
    "1f1b": {"color": "#08519c"},
    "pipedream": {"color": "#d94801"},
    "pipedream-2bw": {"color": "#238b45"},
}
"""Of the lines. Those of GPipe and 1F1B lie on each other."""


def plot(tasks: Sequence[Task], curves: Mapping[str, Curves], path: Path) -> None:
    """Each schedule's median over the seeds, in the band of all of them."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(tasks), figsize=(5.5 * len(tasks), 4), layout="constrained", squeeze=False
    )
    for task, axes in zip(tasks, panels[0], strict=True):
        for name, found in curves[task.name].items():
            columns = list(zip(*found, strict=True))
            at = range(task.every, task.every * len(columns) + 1, task.every)
            axes.plot(at, list(map(statistics.median, columns)), label=name, **STYLES[name])
            axes.fill_between(
                at, list(map(min, columns)), list(map(max, columns)), color=STYLES[name]["color"], alpha=0.2
            )
        axes.axhline(task.target, color="black", linewidth=0.8, linestyle=":", label="target")
        axes.set(title=task.name, xlabel="mini-batches", ylabel=task.label)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--seeds", type=int, default=5, help="how many trainings of each")
    parser.add_argument(
        "--minibatches", type=int, help="how many a training has; default: enough for the target"
    )
    parser.add_argument("--plot", type=Path, help="where to draw the curves, such as curves.svg")
    args = parser.parse_args()

    tasks = [
        replace(task, minibatches=args.minibatches or task.minibatches)
        for task in TASKS
        if task.name in (args.models or task.name)
    ]
    headings = ("mini-batches, median", "of all seeds", "median / 1F1B")
    pipec.log("\n".join(table("model", "target", "schedule", *headings, numbers_from=3)))
    curves: dict[str, Curves] = {}
    for task in tasks:
        curves[task.name] = {
            name: [train(task, name, seed) for seed in range(args.seeds)] for name in args.schedules
        }
        pipec.log("\n".join(lines(task, curves[task.name])))
    if args.plot:
        plot(tasks, curves, args.plot)


if __name__ == "__main__":
    main()
