"""Loggers of Trainers get the metrics of a pipeline, and its page once."""

from pathlib import Path
from typing import Any

import classified_rows
import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import pipec
from pipec.integrations.lightning import PipecMetrics, PipecStrategy
from pipec.integrations.trainer_metrics import log_pipeline

pytestmark = pytest.mark.slow

NAMES = ("pipec/bytes_sent", "pipec/peak_bytes/rank_1", "pipec/predicted_seconds", "pipec/step_seconds")


class Reporter(TrainerCallback):
    """What a callback of a logger is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    pipe = pipec.compile(classified_rows.model(), 2, microbatches=2)
    reporter, rows = Reporter(), classified_rows.rows()
    options: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    trainer = Trainer(
        model=pipe.as_module(),
        args=TrainingArguments(str(tmp_path), max_steps=2, logging_steps=1, **options),
        train_dataset=rows,
        data_collator=classified_rows.collated,
        callbacks=[reporter],
    )
    log_pipeline(trainer, pipe)
    trainer.train()
    logged = [each for each in reporter.logs if "loss" in each]
    assert len(logged) == 2
    assert all(each[name] > 0 for each in logged for name in NAMES)
    assert [each["pipec/steps"] for each in logged] == [1, 2]


def test_a_trainer_of_lightning(tmp_path: Path) -> None:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = classified_rows.model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    rows = classified_rows.rows()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipecStrategy(devices=2, microbatches=2),
        max_steps=2,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path, version=0),
        callbacks=[PipecMetrics()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(rows, 4, collate_fn=classified_rows.collated))
    lines = (Path(trainer.log_dir) / "metrics.csv").read_text().splitlines()
    assert {*NAMES} <= {*lines[0].split(",")}
    assert len(lines) == 3
