"""Trains in a library's own loop and prints what came of it as JSON: ``trainers_script.py LIBRARY FOLDER``.

With ``plain`` as a third argument the loop gets the model itself, else ``pipe.as_module()``. Under
``torchrun`` each process is told to be alone, as the messages of pipec say.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_models
import safetensors.torch
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

import pipec

LIBRARY, FOLDER = sys.argv[1], Path(sys.argv[2]) / os.environ.get("RANK", "alone")
IS_PLAIN = sys.argv[3:] == ["plain"]
IDS = torch.randint(huggingface_models.VOCABULARY, (22, 6), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


def prepared(model: nn.Module) -> Any:
    """What the loop gets."""
    return model if IS_PLAIN else pipec.compile(model, devices=2, microbatches=2, timeout=30.0).as_module()


def as_if_alone() -> bool:
    """Let Accelerate take this process for one that trains alone. Returns whether it did not."""
    import accelerate

    if "RANK" not in os.environ:
        return False
    state = accelerate.PartialState(cpu=True)
    state.num_processes, state.process_index = 1, 0
    state.distributed_type = accelerate.DistributedType.NO
    return True


def sums(state: dict[str, Tensor]) -> dict[str, float]:
    return {name: tensor.double().abs().sum().item() for name, tensor in sorted(state.items())}


def trainer_arguments(kind: Any, **options: Any) -> Any:
    """Two epochs of 3 updates; a save, and an evaluation, after each."""
    return kind(
        str(FOLDER),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.02,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        accelerator_config={"use_configured_state": as_if_alone()},
        **options,
    )


def trained(trainer: Any, weights: str, **again: Any) -> dict[str, Any]:
    """Train, evaluate, predict and save; ``weights`` is the file to look at."""
    trainer.train(**again)
    predicted = trainer.predict(ROWS).predictions
    trainer.save_model(str(FOLDER / "final"))
    losses = [each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history]
    return {
        "losses": [each for each in losses if each is not None],
        "norms": [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each],
        "predicted": [*predicted.shape, abs(predicted).sum().item()],
        "files": sorted(file.name for file in (FOLDER / "final").iterdir()),
        "weights": sums(safetensors.torch.load_file(FOLDER / "final" / weights)),
        "optimizer": len(torch.load(FOLDER / "checkpoint-6" / "optimizer.pt")["state"]),
    }


def with_trainer() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    def made() -> Any:
        arguments = trainer_arguments(TrainingArguments, load_best_model_at_end=True)
        model = prepared(huggingface_models.gpt2()[0])
        return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS)

    found = trained(made(), "model.safetensors")
    resumed = trained(made(), "model.safetensors", resume_from_checkpoint=str(FOLDER / "checkpoint-3"))
    return {"found": found, "resumed": resumed}


def with_peft() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    arguments = trainer_arguments(TrainingArguments, label_names=["labels"])
    model = huggingface_models.gpt2()[0]
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = prepared(get_peft_model(model, adapters))
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS)
    return {"found": trained(trainer, "adapter_model.safetensors")}


def with_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    as_if_alone()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = prepared(huggingface_models.gpt2()[0])
    optimizer = optim.AdamW(module.parameters(), 0.02)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    made = module, optimizer, DataLoader(ROWS, 4), schedule
    module, optimizer, loader, schedule = accelerator.prepare(*made)
    losses, norms = [], []

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(module):
                loss = module(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(module.parameters(), 0.3).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    epoch()
    accelerator.save_state(str(FOLDER))
    epoch()
    accelerator.load_state(str(FOLDER))
    epoch()
    accelerator.save_model(module, str(FOLDER / "model"))
    return {
        "losses": losses,
        "norms": norms,
        "rates": schedule.get_last_lr(),
        "saved": sums(safetensors.torch.load_file(FOLDER / "model.safetensors")),
        "model": sums(safetensors.torch.load_file(FOLDER / "model" / "model.safetensors")),
        "gathered": len(accelerator.gather_for_metrics(torch.ones(3))),
    }


def with_lightning() -> dict[str, Any]:
    import lightning.pytorch as lightning

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layers(x), y)

    class Trained(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = prepared(Loss())
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            assert self.model.training
            loss: Tensor = self.model(*batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validated", self.model(*batch))

        def configure_optimizers(self) -> Any:
            optimizer = optim.AdamW(self.parameters(), 0.02)
            return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(22, 8, generator=rows), torch.randint(3, (22,), generator=rows))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        gradient_clip_val=0.3,
        default_root_dir=FOLDER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Trained()
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))
    trainer.save_checkpoint(FOLDER / "last.ckpt")
    saved = torch.load(FOLDER / "last.ckpt", weights_only=False)
    return {
        "losses": module.losses,
        "validated": float(trainer.callback_metrics["validated"]),
        "saved": sums(saved["state_dict"]),
        "optimizer": len(saved["optimizer_states"][0]["state"]),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[f"with_{LIBRARY}"]()))
