"""Trains in a loop with Accelerate and prints what came of it as JSON.

The arguments are a FOLDER, "plain" or "pipec", and options of pipec as Python.
"""

import ast
import functools
import json
import sys
from pathlib import Path
from typing import Any

import classified_rows
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from pipec.integrations.accelerate import PipecAccelerator

FOLDER, KIND, *OPTIONS = sys.argv[1:]
IS_LOCAL = "local" in "".join(OPTIONS)


class Loop:
    def __init__(self, accumulation: int, num_rows: int = classified_rows.NUM_ROWS) -> None:
        common = {"gradient_accumulation_steps": accumulation, "cpu": True}
        if KIND == "plain":
            self.accelerator = Accelerator(**common)
        else:
            self.accelerator = PipecAccelerator(**common, **ast.literal_eval(OPTIONS[0]))
        model = classified_rows.model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        torch.manual_seed(5)
        data, size, collate = classified_rows.rows(num_rows), classified_rows.BATCH, classified_rows.collated
        if IS_LOCAL:
            collate = functools.partial(collate, length=10)  # replicas pad to the same length
        loaders = [DataLoader(data, size, shuffle=shuffle, collate_fn=collate) for shuffle in (True, False)]
        prepared = self.accelerator.prepare(loaders[0], model, optimizer, loaders[1], scheduler)
        self.loader, self.model, self.optimizer, self.evaluated, self.scheduler = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []

    def epoch(self, loader: Any = None, save_after: int = -1) -> None:
        for number, batch in enumerate(loader or self.loader):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch)["loss"]
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if number == save_after:
                self.accelerator.save_state(f"{FOLDER}/{KIND}")

    def evaluate(self) -> list[float]:
        self.model.eval()
        found = []
        for batch in self.evaluated:
            with torch.no_grad():
                logits = self.model(**batch).logits
            logits, labels = self.accelerator.gather_for_metrics((logits, batch["labels"]))
            found.append([len(labels), logits.sum().item(), (logits.argmax(-1) == labels).sum().item()])
        self.model.train()
        return found

    def result(self) -> dict[str, Any]:
        accelerator, evaluated = self.accelerator, self.evaluate()
        state = accelerator.get_state_dict(self.model)
        assert bool(state) == accelerator.is_main_process
        model = accelerator.unwrap_model(self.model)
        model.save_pretrained(f"{FOLDER}/{KIND}/model", state_dict=state, save_function=accelerator.save)
        accelerator.wait_for_everyone()
        weights = type(classified_rows.model()).from_pretrained(f"{FOLDER}/{KIND}/model").state_dict()
        return {
            "losses": self.losses,
            "norms": self.norms,
            "rates": self.scheduler.get_last_lr(),
            "evaluated": evaluated,
            "weights": classified_rows.sums(weights),
        }


def trained() -> dict[str, Any]:
    found = {}
    for accumulation in (1, 3):
        loop = Loop(accumulation)
        loop.epoch()
        loop.epoch(save_after=2)
        found[f"accumulated {accumulation}"] = loop.result()
        if accumulation == 3:
            other = Loop(accumulation)
            other.accelerator.load_state(f"{FOLDER}/{KIND}")
            torch.manual_seed(9)
            skipped = other.accelerator.skip_first_batches(other.loader, 3)
            other.epoch(skipped)
            found["resumed"] = other.result()
    small = Loop(1, num_rows=1)
    if not IS_LOCAL:
        small.epoch()
        found["one row"] = small.result()
    return found


if __name__ == "__main__":
    Path(FOLDER).mkdir(exist_ok=True)
    print(json.dumps(trained()))
