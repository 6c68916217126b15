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
    return model if IS_PLAIN else pipec.compile(model, devices=2, microbatches=2, timeout=240.0).as_module()


def as_if_alone() -> None:
    """Let Accelerate take this process for one that trains alone."""
    import accelerate

    state = accelerate.PartialState(cpu=True)
    state.num_processes, state.process_index = 1, 0
    state.distributed_type = accelerate.DistributedType.NO


def sums(state: dict[str, Tensor]) -> dict[str, float]:
    return {name: tensor.double().abs().sum().item() for name, tensor in sorted(state.items())}


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


def with_fabric() -> dict[str, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    module = prepared(huggingface_models.gpt2()[0])
    optimizer = optim.AdamW(module.parameters(), 0.02)
    module, optimizer = fabric.setup(module, optimizer)
    loader, losses, norms = fabric.setup_dataloaders(DataLoader(ROWS, 4)), [], []

    def epoch() -> None:
        for number, batch in enumerate(loader, 1):
            with fabric.no_backward_sync(module, enabled=number % 2 == 1):
                loss = module(**batch)["loss"]
                fabric.backward(loss / 2)
            losses.append(loss.item())
            if number % 2 == 0:
                norms.append(fabric.clip_gradients(module, optimizer, max_norm=0.3).item())
                optimizer.step()
                optimizer.zero_grad()

    epoch()
    state = {"model": module, "optimizer": optimizer}
    fabric.save(FOLDER / "saved.ckpt", state)
    epoch()
    fabric.load(FOLDER / "saved.ckpt", state)
    epoch()
    return {"losses": losses, "norms": norms, "saved": sums(torch.load(FOLDER / "saved.ckpt")["model"])}


if __name__ == "__main__":
    print(json.dumps(globals()[f"with_{LIBRARY}"]()))
