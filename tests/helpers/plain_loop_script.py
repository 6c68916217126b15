"""Trains in a script of its own, by ``loss.backward()``, and prints what came of it as JSON.

The arguments are a FOLDER, "plain" or "pipec", and options of pipec as Python.
"""

import functools
import json
from pathlib import Path
from typing import Any

import classified_rows
import torch
from torch import nn
from torch.utils.data import DataLoader

import pipec

FOLDER, KIND, OPTIONS = classified_rows.arguments()
SAVED = Path(FOLDER) / KIND


class Loop:
    """A model, which is a pipeline unless ``KIND`` is "plain", and how it is trained."""

    def __init__(self, name: str) -> None:
        self.model: Any = classified_rows.MODELS[name]()
        if KIND == "pipec":
            self.pipe = pipec.compile(self.model, **OPTIONS)
            self.model = self.pipe.as_module()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.collate = functools.partial(classified_rows.collated, of_tokens=name == "llama")
        self.losses: list[float] = []
        self.norms: list[float] = []

    def batches(self, count: int = classified_rows.NUM_ROWS) -> list[Any]:
        return [*DataLoader(classified_rows.rows(count), classified_rows.BATCH, collate_fn=self.collate)]

    def train(self, batches: list[Any], accumulation: int) -> None:
        for number, batch in enumerate(batches, 1):
            loss = self.model(**batch).loss
            (loss / accumulation).backward()
            self.losses.append(loss.item())
            if number % accumulation == 0 or number == len(batches):
                norm = self.clip(0.3)
                self.norms.append(norm.item())
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()

    def clip(self, max_norm: float) -> torch.Tensor:
        if KIND == "pipec" and any(not each.requires_grad for each in self.model.parameters()):
            return self.pipe.clip_grad_norm_(max_norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def evaluate(self) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            losses = [self.model(**batch).loss.item() for batch in self.batches()]
        self.model.train()
        return losses

    def save(self) -> None:
        if KIND == "pipec":
            self.pipe.save_checkpoint(SAVED, optimizer=self.optimizer, scheduler=self.scheduler)
        else:
            parts = self.model, self.optimizer, self.scheduler
            torch.save([part.state_dict() for part in parts], SAVED)

    def resume(self) -> None:
        if KIND == "pipec":
            self.pipe.load_checkpoint(SAVED, optimizer=self.optimizer, scheduler=self.scheduler)
        else:
            for part, state in zip(
                (self.model, self.optimizer, self.scheduler), torch.load(SAVED), strict=True
            ):
                part.load_state_dict(state)

    def result(self) -> dict[str, Any]:
        return {
            "losses": [*self.losses],
            "norms": [*self.norms],
            "rates": self.scheduler.get_last_lr(),
            "evaluated": self.evaluate(),
            "weights": classified_rows.sums(self.model.state_dict()),
        }


def trained(name: str) -> dict[str, Any]:
    """An epoch without accumulation and one over 3 batches; of BERT what is resumed, and a batch of a row."""
    loop = Loop(name)
    loop.train(loop.batches(), 1)
    loop.train(loop.batches()[:3], 3)
    if name == "bert":
        loop.save()
    loop.train(loop.batches()[3:], 3)
    found = {"trained": loop.result()}
    if name == "bert":
        other = Loop(name)
        other.resume()
        other.train(other.batches()[3:], 3)
        found["resumed"] = other.result()
        other.train(other.batches(1), 1)
        found["one row"] = other.result()
    return found


if __name__ == "__main__":
    print(json.dumps({name: trained(name) for name in classified_rows.MODELS}))
