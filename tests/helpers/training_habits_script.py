"""What training scripts do between two steps, each written once for the plain model and for a pipeline of it.

``training_habits_script.py DEVICES`` prints the losses of a pipeline as JSON, by what the script does and by
where the parameters of its optimizer come from.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import huggingface_models
import torch
from torch import Tensor, nn, optim
from unsplit_reference import unsplit_output, unsplit_step

import pipec
from pipec.ir.batch_split import split_sizes

STEPS, MICROBATCHES, ROWS = 6, 4, 8
SOURCES = ("model", "pipe")


class Plain(nn.Module):
    """The unsplit model behind the methods of a pipeline that scripts call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, **batch: Any) -> Tensor:
        return unsplit_step(self.model, batch, split_sizes(ROWS, MICROBATCHES))

    def eval_step(self, **batch: Any) -> Tensor:
        self.model.eval()
        loss = unsplit_output(self.model, batch, split_sizes(ROWS, MICROBATCHES)).loss
        self.model.train()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def full_state_dict(self, all_ranks: bool) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        return self.model.load_state_dict(state)


Trained = Plain | pipec.Pipeline
Losses = list[float]


@dataclass
class Script:
    """A loop that trains ``pipe`` by an optimizer of the parameters of ``source``."""

    model: nn.Module
    pipe: Trained
    source: nn.Module

    @functools.cached_property
    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.source.parameters(), lr=0.01)

    def step(self, number: int, clip: float | None = None) -> float:
        loss = self.pipe.step(**batch(number))
        if clip is not None:
            self.pipe.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def batch(number: int) -> dict[str, Tensor]:
    words = torch.randint(
        huggingface_models.VOCABULARY, (ROWS, 6), generator=torch.Generator().manual_seed(number)
    )
    return {"input_ids": words, "labels": words}


def clipping(script: Script) -> Losses:
    return [script.step(number, clip=0.1 * (1 + number)) for number in range(STEPS)]


def learning_rates(script: Script) -> Losses:
    schedule = optim.lr_scheduler.OneCycleLR(script.optimizer, max_lr=0.1, total_steps=STEPS + 1)
    losses = []
    for number in range(STEPS):
        losses.append(script.step(number))
        schedule.step()
    return losses


def freezing(script: Script) -> Losses:
    losses = []
    for number in range(STEPS):
        frozen = 2 <= number < 4
        for name, parameter in script.model.named_parameters():
            parameter.requires_grad_(not (frozen and ".h.0." in name))
        losses.append(script.step(number))
    return losses


def averaging(script: Script) -> Losses:
    """An exponential moving average of the weights, evaluated after each step."""
    decay = optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = optim.swa_utils.AveragedModel(script.pipe, multi_avg_fn=decay)
    losses = []
    for number in range(STEPS):
        script.step(number)
        average.update_parameters(script.pipe)
        losses.append(float(average.module.eval_step(**batch(number))))
    return losses


def saving(script: Script) -> Losses:
    """Two steps are made again from what was saved before them."""
    losses = [script.step(number) for number in range(2)]
    state = copy.deepcopy(script.pipe.full_state_dict(all_ranks=True))
    optimizer = copy.deepcopy(script.optimizer.state_dict())
    losses += [script.step(number) for number in range(2, 4)]
    script.pipe.load_state_dict(state)
    script.optimizer.load_state_dict(optimizer)
    return losses + [script.step(number) for number in range(2, 4)]


HABITS: Mapping[str, Callable[[Script], Losses]] = {
    "clipping": clipping,
    "learning rates": learning_rates,
    "freezing": freezing,
    "averaging": averaging,
    "saving": saving,
}


def plain(habit: str) -> Losses:
    """The losses of the script without pipec."""
    model = huggingface_models.gpt2()[0].double()
    return HABITS[habit](Script(model, Plain(model), model))


def pipelined() -> Iterator[tuple[str, Losses]]:
    """Every habit in turn of one script, each from the same weights."""
    model = huggingface_models.gpt2()[0].double()
    pipe = pipec.compile(model, devices=int(sys.argv[1]), microbatches=MICROBATCHES)
    start = copy.deepcopy(model.state_dict())
    for source in SOURCES:
        for habit, run in HABITS.items():
            pipe.load_state_dict(start)
            yield f"{habit}, {source}", run(Script(model, pipe, model if source == "model" else pipe))


if __name__ == "__main__":
    print(json.dumps(dict(pipelined())))
