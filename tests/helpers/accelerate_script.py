"""Trains in a loop with Accelerate and prints what came of it as JSON.

The arguments are a FOLDER, "plain" or "pipec", and options of pipec as Python.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import classified_rows
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from pipec.integrations.accelerate import PipecAccelerator

FOLDER, KIND, OPTIONS = classified_rows.arguments()


class Loop:
    def __init__(self, name: str) -> None:
        if KIND == "plain":
            self.accelerator = Accelerator(cpu=True)
        else:
            self.accelerator = PipecAccelerator(cpu=True, **OPTIONS)
        self.kind = classified_rows.MODELS[name]
        model = self.kind()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.collate = functools.partial(classified_rows.collated, of_tokens=name == "llama")
        loaders = self.rows(shuffle=True), self.rows(shuffle=False)
        prepared = self.accelerator.prepare(loaders[0], model, optimizer, loaders[1], scheduler)
        self.loader, self.model, self.optimizer, self.evaluated, self.scheduler = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []

    def rows(self, count: int = classified_rows.NUM_ROWS, shuffle: bool = False) -> Any:
        torch.manual_seed(5)
        data, size = classified_rows.rows(count), classified_rows.BATCH
        return DataLoader(data, size, shuffle=shuffle, collate_fn=self.collate)

    def epoch(self, accumulation: int, loader: Any = None, save_after: int = -1) -> None:
        self.accelerator.gradient_accumulation_steps = accumulation
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
            rows = self.accelerator.reduce(torch.tensor(len(batch["labels"])))
            logits, labels = self.accelerator.gather_for_metrics((logits, batch["labels"]))
            sum_of_logits = logits[labels != -100].sum().item()
            found.append(
                [rows.item(), len(labels), sum_of_logits, (logits.argmax(-1) == labels).sum().item()]
            )
        self.model.train()
        return found

    def result(self) -> dict[str, Any]:
        accelerator, evaluated = self.accelerator, self.evaluate()
        state = accelerator.get_state_dict(self.model)
        assert bool(state) == accelerator.is_main_process
        model = accelerator.unwrap_model(self.model)
        model.save_pretrained(f"{FOLDER}/{KIND}/model", state_dict=state, save_function=accelerator.save)
        accelerator.wait_for_everyone()
        weights = type(self.kind()).from_pretrained(f"{FOLDER}/{KIND}/model").state_dict()
        return {
            "losses": [*self.losses],
            "norms": [*self.norms],
            "rates": self.scheduler.get_last_lr(),
            "evaluated": evaluated,
            "weights": classified_rows.sums(weights),
        }


def check_processes(loop: Loop) -> None:
    """Rank 0 goes first."""
    accelerator, file = loop.accelerator, Path(FOLDER) / f"{KIND}.written"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.5)
            file.touch()
        assert file.exists()
    assert accelerator.pad_across_processes(torch.ones(2, 3), 1, -1).shape == (2, 3)


def trained(name: str) -> dict[str, Any]:
    """An epoch without accumulation and one over 3 batches; of BERT what is resumed, and a batch of a row."""
    loop = Loop(name)
    check_processes(loop)
    loop.epoch(1)
    loop.epoch(3, save_after=2)
    found = {"trained": loop.result()}
    if name == "bert":
        other = Loop(name)
        other.accelerator.load_state(f"{FOLDER}/{KIND}")
        torch.manual_seed(9)
        other.epoch(3, other.accelerator.skip_first_batches(other.loader, 3))
        found["resumed"] = other.result()
        other.epoch(1, other.accelerator.prepare(other.rows(1)))
        found["one row"] = other.result()
    return found


if __name__ == "__main__":
    Path(FOLDER).mkdir(exist_ok=True)
    print(json.dumps({name: trained(name) for name in classified_rows.MODELS}))
