"""What libraries do with a pipeline, and with its model, over two processes: ``libraries_script.py LIBRARY``.

It prints as JSON, by what is done, "right" where the result is the unsplit model's, else what the error says.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_models
import torch
import torch.distributed as dist
from torch import nn, optim
from unsplit_reference import unsplit_step

import pipec

IDS = torch.randint(huggingface_models.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


class Trained:
    """A model with its pipeline, and the unsplit model, after one step of each."""

    def __init__(self) -> None:
        self.model, self.plain = (huggingface_models.gpt2()[0].double() for _ in range(2))
        self.pipe = pipec.compile(self.model, devices=2, microbatches=2, timeout=240.0)
        self.pipe.step(**BATCH)
        unsplit_step(self.plain, BATCH, [2, 2])


def with_transformers(folder: Path) -> dict[str, Callable[[], Any]]:
    from transformers import GPT2LMHeadModel

    t = Trained()

    def saved_whole() -> bool:
        state = t.pipe.state_dict()
        if dist.get_rank() == 0:
            t.model.save_pretrained(folder / "whole", state_dict=state)
        dist.barrier()
        found = GPT2LMHeadModel.from_pretrained(folder / "whole", dtype=torch.float64).state_dict()
        return all(torch.equal(found[name], value) for name, value in t.plain.state_dict().items())

    def generated() -> bool:
        t.pipe.gather_into(t.model)
        if dist.get_rank() == 0:
            options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
            found, expected = (each.generate(IDS[:1], **options) for each in (t.model, t.plain))
            return torch.equal(found, expected)
        return True

    return {
        "model.save_pretrained(folder)": lambda: t.model.save_pretrained(folder / str(dist.get_rank())),
        "model.save_pretrained(folder, state_dict=pipe.state_dict())": saved_whole,
        "model.generate(ids)": lambda: t.model.generate(IDS[:1], max_new_tokens=2, pad_token_id=0),
        "model(ids)": lambda: t.model(IDS),
        "model.generate(ids) after pipe.gather_into(model)": generated,
    }


def with_accelerate(folder: Path) -> dict[str, Callable[[], Any]]:
    from accelerate import Accelerator

    accelerator, t = Accelerator(cpu=True), Trained()
    made = optim.AdamW(t.model.parameters())
    optimizer = accelerator.prepare(made)

    def clipped() -> bool:
        found = accelerator.clip_grad_norm_(t.model.parameters(), 0.5)
        gradients = [each.grad for each in t.plain.parameters() if each.grad is not None]
        return torch.allclose(found, nn.utils.get_total_norm(gradients), rtol=1e-12)

    def updated() -> bool:
        optimizer.step()
        expected = optim.AdamW(t.plain.parameters())
        nn.utils.clip_grad_norm_(t.plain.parameters(), 0.5)
        expected.step()
        state, whole = optimizer.state_dict()["state"], expected.state_dict()["state"]
        return state.keys() == whole.keys() and all(
            torch.allclose(state[k]["exp_avg"], whole[k]["exp_avg"], rtol=1e-9) for k in whole
        )

    def gathered() -> bool:
        """On rank 0 it is the unsplit model's state, on others nothing."""
        found = copy.deepcopy(accelerator.get_state_dict(t.pipe))
        expected = t.plain.state_dict() if dist.get_rank() == 0 else {}
        return found.keys() == expected.keys() and all(map(torch.equal, found.values(), expected.values()))

    def scheduled() -> None:
        other = optim.AdamW(t.model.parameters())
        schedule = optim.lr_scheduler.StepLR(other, 1)
        prepared, _ = accelerator.prepare(other, schedule)
        prepared.step()

    return {
        "accelerator.prepare(pipe)": lambda: accelerator.prepare(t.pipe),
        "accelerator.prepare(model)": lambda: accelerator.prepare(t.model),
        "accelerator.prepare(pipe.as_module())": lambda: accelerator.prepare(t.pipe.as_module()),
        "accelerator.get_state_dict(pipe)": gathered,
        "accelerator.clip_grad_norm_": clipped,
        "optimizer.state_dict() of accelerator.prepare(optimizer)": updated,
        "accelerator.prepare(scheduler)": scheduled,
        "accelerator.save_model(model)": lambda: accelerator.save_model(t.model, folder),
    }


LIBRARIES = {"transformers": with_transformers, "accelerate": with_accelerate}


def outcome(call: Callable[[], Any]) -> str:
    try:
        return "right" if call() is True else "silent"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared)
        found = {}
        for name, call in LIBRARIES[sys.argv[1]](Path(shared[0])).items():
            found[name] = outcome(call)
            dist.barrier()
        dist.barrier()
    print(json.dumps(found))
