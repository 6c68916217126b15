"""Trains models from folders, and prints what came of it as JSON: FOLDER KIND NAME ...

KIND is "plain" for transformers to load and train the models on one device, else "pipec". Of the name "large"
it prints by how many bytes loading the model raises the memory of a rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_models
import peft
import pretrained_remote
import torch
import transformers
from torch import nn

import pipec


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    """Its experts, which files hold one by one, are merged."""
    model: Any = huggingface_models.mixtral()[0]
    model.config.output_router_logits = False
    return model, huggingface_models.llama()[1]


def tied() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = huggingface_models.llama()
    config: Any = model.config
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config), batch


def bfloat16() -> tuple[nn.Module, dict[str, Any]]:
    model, batch = huggingface_models.llama()
    return model.bfloat16(), batch


def remote() -> tuple[nn.Module, dict[str, Any]]:
    """The code of the model is in the folder."""
    pretrained_remote.RemoteConfig.register_for_auto_class()
    pretrained_remote.RemoteModel.register_for_auto_class("AutoModelForCausalLM")
    return pretrained_remote.RemoteModel(pretrained_remote.RemoteConfig()), huggingface_models.llama()[1]


def headless() -> tuple[nn.Module, dict[str, Any]]:
    """A model for masked tokens, which is loaded as a classifier."""
    model, batch = huggingface_models.bert()
    return model, {**batch, "labels": torch.arange(huggingface_models.ROWS) % 3}


def large() -> tuple[nn.Module, dict[str, Any]]:
    """About 1 GB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 19, "vocab_size": 8000}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=16)), {}


MODELS = {
    **{name: vars(huggingface_models)[name] for name in ("gpt2", "llama", "bert", "t5")},
    **{each.__name__: each for each in (mixtral, tied, bfloat16, remote, headless, large)},
    "sharded": huggingface_models.llama,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "mixtral": {"dtype": torch.float32},  # torch multiplies groups in no wider type
    "headless": {
        "dtype": torch.float64,
        "num_labels": 3,
        "model_class": transformers.AutoModelForSequenceClassification,
    },
    "remote": {
        "dtype": torch.float64,
        "trust_remote_code": True,
        "model_class": transformers.AutoModelForCausalLM,
    },
}


def write(folder: Path, name: str) -> None:
    model: Any = MODELS[name]()[0]
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / name, max_shard_size="20KB" if name == "sharded" else "1GB")


def trained(folder: Path, name: str, is_plain: bool) -> dict[str, Any]:
    """What is seen of a model before and after two updates."""
    arguments, batch = dict(ARGUMENTS.get(name, {"dtype": torch.float64})), MODELS[name]()[1]
    model_class = arguments.get("model_class", type(MODELS[name]()[0]))
    plain_arguments = {key: arguments[key] for key in arguments if key != "model_class"}
    torch.manual_seed(3)
    if is_plain:
        model: Any = model_class.from_pretrained(folder / name, **plain_arguments)
    else:
        model = pipec.from_pretrained(folder / name, 4, microbatches=2, timeout=240.0, **arguments)
    drawn = torch.rand(1).item()
    with torch.no_grad():
        output = model(**batch)
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), list[float]()
    for _ in range(2):
        loss = model(**batch).loss if is_plain else model.step(**batch)
        if is_plain:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict() if is_plain else model.full_state_dict(all_ranks=True)
    saved = folder / f"{name}_{'plain' if is_plain else 'pipec'}"
    model.save_pretrained(saved)
    again = model_class.from_pretrained(saved, **plain_arguments).state_dict()
    return {
        "logits": output["logits"].flatten()[:20].tolist(),
        "drawn": drawn,
        "losses": losses,
        "state": {key: x.double().abs().sum().item() for key, x in sorted(state.items())},
        "differing": [key for key, x in again.items() if not torch.equal(x, state[key])],
        "dtypes": {key: str(x.dtype) for key, x in sorted(state.items())},
    }


def adapted(folder: Path, name: str, is_plain: bool) -> list[float]:
    """Losses of three updates of an adapter, which is saved then."""
    config, arguments = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]), {"dtype": torch.float64}
    torch.manual_seed(3)
    if is_plain:
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "tied", **arguments)
        module: Any = peft.get_peft_model(model, config)
    else:
        options: dict[str, Any] = {"microbatches": 2, "timeout": 240.0, "peft_config": config}
        module = pipec.from_pretrained(folder / "tied", 4, **options, **arguments).as_module()
    module.train()
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], 0.5)
    ids, losses = torch.arange(32).view(4, 8), list[float]()
    for _ in range(3):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    module.save_pretrained(str(folder / f"{name}_{'plain' if is_plain else 'pipec'}"))
    return losses


def memory(kind: str) -> int:
    """The bytes that the kernel counts of this process, of a kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(each for each in lines if each.startswith(kind))
    return int(line.split()[1]) * 1024


def loaded(folder: Path, name: str, _: bool) -> list[int]:
    """How many bytes were taken at most to read the headers, and then to have the stages, and their bytes."""
    ids = torch.zeros(4, 16, dtype=torch.int64)
    before, _ = memory("VmRSS"), Path("/proc/self/clear_refs").write_text("5")
    pipe = pipec.from_pretrained(folder / name, 4, microbatches=4, timeout=240.0, check="off")
    of_headers = memory("VmHWM") - before
    pipe.prepare(input_ids=ids, labels=ids)
    return [of_headers, memory("VmHWM") - before, sum(x.nbytes for x in pipe.local_state_dict().values())]


if __name__ == "__main__":
    place, kind, *names = sys.argv[1:]
    runs = {"large": loaded, "adapter": adapted}
    print(json.dumps({each: runs.get(each, trained)(Path(place), each, kind == "plain") for each in names}))
