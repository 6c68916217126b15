"""Trains in a Trainer of transformers or TRL, and prints what it logged as JSON.

``transformers_script.py CASE FOLDER plain|REPLICAS|groups``: with ``plain`` on one device without pipec; with
so many replicas on all ranks, or alone on two devices for each; or with two pipelines on two ranks each, of
which one has a folder of its own. Every batch has four rows.
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import datasets
import huggingface_models
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import DataCollatorWithPadding

CASE, FOLDER, LAYOUT = sys.argv[1:4]
IS_PLAIN, GROUP = LAYOUT == "plain", None
if LAYOUT == "groups":
    dist.init_process_group("gloo")
    GROUP = [dist.new_group(members) for members in ([0, 1], [2, 3])][dist.get_rank() // 2]
    FOLDER += "/other" * (dist.get_rank() // 2)
LOGGED = (
    *("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "entropy", "mean_token_accuracy"),
    *("rewards/margins", "logps/chosen", "reward", "kl", "completions/mean_length"),
)
WORDS = huggingface_models.VOCABULARY
datasets.disable_progress_bars()


def classes(method: str = "") -> tuple[Any, Any]:
    """Arguments and a trainer, of transformers or of a method of TRL, without pipec or with it."""
    if not IS_PLAIN:
        library, prefix = import_module("pipec.integrations.transformers"), "Pipec"
    else:
        library, prefix = import_module("trl" if method else "transformers"), ""
    arguments = f"{method}Config" if method else "TrainingArguments" if IS_PLAIN else "Arguments"
    return getattr(library, prefix + arguments), getattr(library, f"{prefix}{method}Trainer")


def arguments(kind: Any, **options: Any) -> Any:
    """Those of the library, or with the options of pipec."""
    replicas = 1 if IS_PLAIN or GROUP else int(LAYOUT)
    options = {
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    options |= {"per_device_train_batch_size": 4 // replicas, "per_device_eval_batch_size": 8 // replicas}
    if not IS_PLAIN:
        size = int(os.environ.get("WORLD_SIZE", 2 * replicas))
        options |= {"devices": size} if GROUP is None else {"group": GROUP}
        options |= {"replicas": replicas, "microbatches": 2 * replicas, "timeout": 240.0}
    return kind(FOLDER, **options)


def trainer(method: str = "", options: Mapping[str, Any] = {}, **given: Any) -> Any:
    arguments_kind, kind = classes(method)
    more = {"bf16": False} if method else {}
    return kind(args=arguments(arguments_kind, **more, **options), **given)


def history(trained: Any) -> list[dict[str, float]]:
    logs = [{name: log[name] for name in LOGGED if name in log} for log in trained.state.log_history]
    return [log for log in logs if log]


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
FOUR_UPDATES = {"learning_rate": 0.05, "max_steps": 4, "save_strategy": "no"}


def finished(trained: Any) -> dict[str, Any]:
    """Train and save; returns what was logged."""
    trained.train()
    trained.save_model(f"{FOLDER}/final")
    return {"trained": history(trained)}


def llama() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    ids = torch.randint(WORDS, (25, 6), generator=torch.Generator().manual_seed(0))
    return huggingface_models.llama()[0].double(), [{"input_ids": row, "labels": row} for row in ids], None


def bert() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    """A classifier; rows of a batch are padded to the longest one."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (25,), generator=draws).tolist()
    ids = [torch.randint(2, WORDS, (length,), generator=draws) for length in lengths]
    rows = [{"input_ids": each, "labels": len(each) % 3} for each in ids]
    return huggingface_models.bert_classifier(), rows, DataCollatorWithPadding(tokenizer())


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, WORDS))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def text(count: int, draws: torch.Generator) -> str:
    return " ".join(f"w{number}" for number in torch.randint(2, WORDS, (count,), generator=draws))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def with_trainer(made: Any) -> dict[str, Any]:
    """Accumulation, clipping, a schedule, evaluation, checkpoints, the best model.

    Then another trainer goes on from the fourth update, and a third one neither accumulates nor clips.
    """

    def run(accumulation: int, **more: Any) -> Any:
        model, rows, collator = made()
        options = {"gradient_accumulation_steps": accumulation, "learning_rate": 0.01, "weight_decay": 0.1}
        options |= {"lr_scheduler_type": "cosine", "warmup_steps": 2, **more}
        given = {"model": model, "train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
        return trainer(options=options, compute_metrics=accuracy, **given), rows

    saved = {"num_train_epochs": 2, "max_grad_norm": 0.3, **EVALUATES, "save_strategy": "steps"}
    saved |= {"save_steps": 2, "save_total_limit": 3, "load_best_model_at_end": True}
    first, rows = run(3, **saved)
    first.train()
    first.save_model(f"{FOLDER}/best")
    predicted = first.predict(rows).predictions
    resumed, _ = run(3, **saved | {"eval_strategy": "no", "load_best_model_at_end": False})
    resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-4")
    resumed.save_model(f"{FOLDER}/resumed")
    plainest, _ = run(1, max_steps=3, max_grad_norm=0.0, save_strategy="no")
    found = {**finished(plainest), "predicted": [*predicted.shape, float(abs(predicted).sum())]}
    return {"first": history(first), "resumed": history(resumed), **found}


def with_sft(packs: bool = False, padding_free: bool = False, experts: bool = False) -> dict[str, Any]:
    """Texts of different lengths; packed, an adapter is trained. Then on from the second update.

    But not with experts, of which transformers 5 finds none in its own checkpoint.
    """
    from peft import LoraConfig

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 11, (25,), generator=draws).tolist()
    texts = datasets.Dataset.from_list([{"text": text(length, draws)} for length in lengths])
    options = {"num_train_epochs": 2, "learning_rate": 0.1, "optim": "sgd", **EVALUATES, "save_steps": 2}
    options |= {"gradient_accumulation_steps": 3, "max_grad_norm": 0.3, "packing": packs}
    options |= {"padding_free": padding_free, "max_length": None if padding_free else 12}

    def run() -> Any:
        model = huggingface_models.mixtral()[0] if experts else huggingface_models.llama()[0].double()
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if packs else None
        given = {"model": model, "peft_config": adapter, "processing_class": tokenizer()}
        return trainer("SFT", options, train_dataset=texts, eval_dataset=texts, **given)

    first, resumed = run(), run()
    found = finished(first)
    if not experts:
        resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-2")
    tokens = first.state.log_history[-3]["num_tokens"]
    return {**found, "resumed": history(resumed), "tokens": tokens}


def with_adapters() -> dict[str, Any]:
    """DoRA and trainable tokens. What was saved loads into PEFT, and what was gathered is merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, rows, _ = llama()
    tokens = {"embed_tokens": [1, 2, 3]}
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], use_dora=True, trainable_token_indices=tokens
    )
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    options = {"learning_rate": 0.05, "max_steps": 3, "label_names": ["labels"], "save_steps": 2}
    trained = trainer(options=options, model=model, train_dataset=rows, eval_dataset=rows)
    found = finished(trained)
    assert trained.is_local_process_zero() == (os.environ.get("RANK", "0") == "0")
    logits = [torch.from_numpy(trained.predict(rows).predictions)]
    if not IS_PLAIN:
        trained.pipe.gather_into(model)
    if trained.is_world_process_zero():
        ids = torch.stack([row["input_ids"] for row in rows])
        loaded = PeftModel.from_pretrained(huggingface_models.llama()[0].double(), f"{FOLDER}/final")
        logits += [each(input_ids=ids).logits.detach() for each in (loaded.eval(), model.eval())]
        logits.append(model.merge_and_unload()(input_ids=ids).logits.detach())
    return {**found, "logits": [each.abs().sum().item() for each in logits]}


def with_distillation() -> dict[str, Any]:
    """A Trainer's subclass adds to the model's loss that of a teacher's logits."""
    arguments_kind, kind = classes()
    model, rows, _ = llama()
    teacher = huggingface_models.llama()[0].double()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)

    class Distillation(kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
            loss = outputs.loss - (outputs.logits.log_softmax(-1) * wanted).sum(-1).mean()
            return (loss, outputs) if return_outputs else loss

    options = {**FOUR_UPDATES, **EVALUATES, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    given = {"model": model, "train_dataset": rows, "eval_dataset": rows}
    return finished(Distillation(args=arguments(arguments_kind, **options), **given))


def with_preferences() -> dict[str, Any]:
    """DPO of TRL, with a reference model, accumulation, clipping and evaluation."""
    draws = torch.Generator().manual_seed(0)
    counts = ({"prompt": 3, "chosen": 4 + k % 3, "rejected": 3 + k % 4} for k in range(24))
    rows = [{name: text(count, draws) for name, count in each.items()} for each in counts]
    pairs = datasets.Dataset.from_list(rows)
    options = {**FOUR_UPDATES, **EVALUATES, "optim": "sgd", "gradient_accumulation_steps": 2}
    model, reference = (huggingface_models.llama()[0].double() for _ in range(2))
    given = {"model": model, "ref_model": reference, "train_dataset": pairs, "processing_class": tokenizer()}
    options["max_grad_norm"] = 0.3
    return finished(trainer("DPO", options, eval_dataset=pairs.select(range(8)), **given))


def with_rewards() -> dict[str, Any]:
    """GRPO of TRL: a model generates, is rewarded, and learns twice from what it has generated."""
    from transformers import LlamaForCausalLM

    def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
        return [sum(number % 3 for number in each) / (1 + len(each)) for each in completion_ids]

    rank = os.environ.get("RANK", "0")
    reference = huggingface_models.llama()[0]  # which TRL reads
    reference.should_save_on_this_rank = bool  # whatever the rank is
    reference.save_pretrained(f"{FOLDER}/reference_{rank}")
    model = LlamaForCausalLM.from_pretrained(f"{FOLDER}/reference_{rank}", dtype=torch.float64)
    prompts = datasets.Dataset.from_list([{"prompt": f"w{2 + k} w{3 + k} w{4 + k}"} for k in range(24)])
    options = {**FOUR_UPDATES, "optim": "sgd", "beta": 0.1, "num_iterations": 2, "num_generations": 4}
    options["max_completion_length"] = 6
    given = {"model": model, "reward_funcs": reward, "processing_class": tokenizer()}
    return finished(trainer("GRPO", options, train_dataset=prompts, **given))


CASES = {
    "llama": lambda: with_trainer(llama),
    "bert": lambda: with_trainer(bert),
    "sft": with_sft,
    "packed": lambda: with_sft(packs=True),
    "padding_free": lambda: with_sft(padding_free=True),
    "experts": lambda: with_sft(experts=True),
    "adapters": with_adapters,
    "distilled": with_distillation,
    "dpo": with_preferences,
    "grpo": with_rewards,
}

if __name__ == "__main__":
    found = CASES[CASE]()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))
