"""Trains with Lightning's Trainer and prints what came of it as JSON.

The arguments are a FOLDER, "plain" or "pipec", and options of pipec as Python.
"""

import functools
import json
import logging
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import classified_rows
import lightning.pytorch as lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from pipec.integrations.lightning import PipecStrategy

FOLDER, KIND, OPTIONS = classified_rows.arguments()
PLACE = Path(FOLDER) / KIND


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, name: str, is_manual: bool, accumulation: int) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.kind, self.accumulation = classified_rows.MODELS[name], accumulation
        self.rows = torchmetrics.SumMetric()
        self.losses: list[float] = []
        self.rates: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.kind()

    def training_step(self, batch: Any, index: int) -> Any:
        loss: Tensor = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, batch_size=len(batch["labels"]))
        if self.automatic_optimization:
            return loss
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss / self.accumulation)
        if (index + 1) % self.accumulation == 0 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, gradient_clip_val=0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return None

    def configure_gradient_clipping(self, optimizer: Any, **given: Any) -> None:
        self.clip_gradients(optimizer, **given)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, index: int) -> None:
        output = self.model(**batch)
        right = (output["logits"].argmax(-1) == batch["labels"]).double().mean()
        rows = len(batch["labels"])
        self.log("validated", output["loss"], sync_dist=True, batch_size=rows)
        self.rows.update(rows)
        self.log("rows", self.rows)
        self.log("right", right, sync_dist=True, batch_size=rows)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": step, "interval": "step"}]


def loaders(name: str) -> list[Any]:
    torch.manual_seed(5)
    data = classified_rows.rows()
    collate: Any = functools.partial(classified_rows.collated, length=10, of_tokens=name == "llama")
    return [DataLoader(data, classified_rows.BATCH, shuffle=x, collate_fn=collate) for x in (True, False)]


def trainer(name: str, *callbacks: Any, **given: Any) -> Any:
    options = {} if KIND == "plain" else {"strategy": PipecStrategy(**OPTIONS)}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        default_root_dir=PLACE,
        logger=CSVLogger(PLACE, name=name, version=0),
        callbacks=[ModelCheckpoint(PLACE / name, save_top_k=-1, filename="{epoch}"), *callbacks],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
        **given,
    )


def result(module: Classifier, trained: Any, name: str, epoch: int) -> dict[str, Any]:
    trained.strategy.barrier()
    saved = torch.load(PLACE / name / f"epoch={epoch}.ckpt", weights_only=False)
    lines = (PLACE / name / "version_0" / "metrics.csv").read_text().splitlines()
    return {
        "losses": module.losses,
        "rates": module.rates,
        "metrics": {key: float(value) for key, value in sorted(trained.callback_metrics.items())},
        "lines": len(lines),
        "weights": classified_rows.sums(saved["state_dict"]),
        "optimizer": len(saved["optimizer_states"][0]["state"]),
        "steps": trained.global_step,
    }


def fitted(name: str, is_manual: bool, accumulation: int) -> dict[str, Any]:
    def module() -> Classifier:
        return Classifier(name, is_manual, accumulation)

    clip = {} if is_manual else {"gradient_clip_val": 0.3, "accumulate_grad_batches": accumulation}
    run = f"{name} {is_manual} {accumulation}"
    first, made = module(), trainer(run, max_epochs=2, **clip)
    made.fit(first, *loaders(name))
    found = {"fitted": result(first, made, run, 1)}
    if accumulation == 3 and not is_manual:
        stopping = EarlyStopping("validated", min_delta=10, patience=1)  # after two epochs
        again, other = module(), trainer(f"{run} again", stopping, max_epochs=9, **clip)
        other.fit(again, *loaders(name), ckpt_path=PLACE / run / "epoch=0.ckpt", **LOADED)
        found["resumed"] = result(again, other, f"{run} again", 2)
        found["validated"] = trainer(f"{run} alone").validate(
            module(), loaders(name)[1], ckpt_path=PLACE / run / "epoch=1.ckpt", **LOADED
        )
    return found


LOADED = {"weights_only": False} if "weights_only" in signature(lightning.Trainer.fit).parameters else {}
"""Lightning asks for it from version 2.6 on."""

RUNS = [("bert", False, 3), ("llama", False, 1), ("llama", True, 3), ("bert", True, 1)]
"""Models, whether the module makes the updates itself, and how many batches accumulate."""

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(json.dumps({f"{run}": fitted(*run) for run in RUNS}))
