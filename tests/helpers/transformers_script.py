"""Trains in a Trainer of transformers or TRL, and prints what it logged as JSON.

``transformers_script.py CASE FOLDER plain|REPLICAS|groups``: with ``plain`` on one device without pipec; with
so many replicas on all ranks, or alone on two devices for each; or with two pipelines on two ranks each, of
which one has a folder of its own. Every batch has four rows.
"""

import json
import os
import sys
from typing import Any

import datasets
import huggingface_models
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

CASE, FOLDER, LAYOUT = sys.argv[1:4]
IS_PLAIN, GROUP = LAYOUT == "plain", None
if LAYOUT == "groups":
    dist.init_process_group("gloo")
    GROUP = [dist.new_group(members) for members in ([0, 1], [2, 3])][dist.get_rank() // 2]
    FOLDER += "/other" * (dist.get_rank() // 2)
LOGGED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "eval_loss",
    "eval_accuracy",
    "entropy",
    "mean_token_accuracy",
    *("rewards/margins", "logps/chosen", "reward", "kl", "completions/mean_length"),
)
datasets.disable_progress_bars()


def arguments(kind: Any, pipec_kind: Any, **options: Any) -> Any:
    """Those of the library, or with the options of pipec."""
    options = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    if IS_PLAIN:
        return kind(FOLDER, **options)
    replicas = 1 if GROUP else int(LAYOUT)
    options["per_device_train_batch_size"] //= replicas
    options["per_device_eval_batch_size"] //= replicas
    if pipec_kind is TrainingArguments:
        return pipec_kind(FOLDER, **options)
    size = int(os.environ.get("WORLD_SIZE", 2 * replicas))
    options |= {"devices": size} if GROUP is None else {"group": GROUP}
    return pipec_kind(FOLDER, replicas=replicas, microbatches=2 * replicas, timeout=240.0, **options)


def trainer_arguments(**options: Any) -> Any:
    if IS_PLAIN:
        return arguments(TrainingArguments, None, **options)
    from pipec.integrations.transformers import PipecArguments

    return arguments(None, PipecArguments, **options)


def trainer(**given: Any) -> Any:
    if IS_PLAIN:
        return Trainer(**given)
    from pipec.integrations.transformers import PipecTrainer

    return PipecTrainer(**given)


def history(trained: Any) -> list[dict[str, float]]:
    logs = [{name: log[name] for name in LOGGED if name in log} for log in trained.state.log_history]
    return [log for log in logs if log]


def llama() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    ids = torch.randint(huggingface_models.VOCABULARY, (25, 6), generator=torch.Generator().manual_seed(0))
    return huggingface_models.llama()[0].double(), [{"input_ids": row, "labels": row} for row in ids], None


def bert() -> tuple[nn.Module, list[dict[str, Any]], Any]:
    """A classifier; rows of a batch are padded to the longest one."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=huggingface_models.VOCABULARY,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    sizes = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (25,), generator=sizes).tolist()
    rows = [
        {
            "input_ids": torch.randint(2, huggingface_models.VOCABULARY, (length,), generator=sizes),
            "labels": length % 3,
        }
        for length in lengths
    ]
    return BertForSequenceClassification(config).double(), rows, DataCollatorWithPadding(tokenizer())


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, huggingface_models.VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def with_trainer(made: Any) -> dict[str, Any]:
    """Accumulation, clipping, a schedule, evaluation, checkpoints, the best model.

    Then another trainer goes on from the fourth update, and a third one neither accumulates nor clips.
    """

    def run(accumulation: int, **more: Any) -> Any:
        model, rows, collator = made()
        options = {
            "gradient_accumulation_steps": accumulation,
            "learning_rate": 0.01,
            "warmup_steps": 2,
            "lr_scheduler_type": "cosine",
            "weight_decay": 0.1,
            **more,
        }
        given = {"model": model, "train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
        return trainer(args=trainer_arguments(**options), compute_metrics=accuracy, **given), rows

    saved = {
        "num_train_epochs": 2,
        "max_grad_norm": 0.3,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "save_total_limit": 3,
        "load_best_model_at_end": True,
    }
    first, rows = run(3, **saved)
    first.train()
    first.save_model(f"{FOLDER}/best")
    predicted = first.predict(rows).predictions
    resumed, _ = run(3, **saved | {"eval_strategy": "no", "load_best_model_at_end": False})
    resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-4")
    resumed.save_model(f"{FOLDER}/resumed")
    plainest, _ = run(1, max_steps=3, max_grad_norm=0.0, save_strategy="no")
    plainest.train()
    plainest.save_model(f"{FOLDER}/without")
    return {
        "trained": history(first),
        "resumed": history(resumed),
        "without": history(plainest),
        "predicted": [*predicted.shape, float(abs(predicted).sum())],
    }


def with_sft(packs: bool = False, padding_free: bool = False, experts: bool = False) -> dict[str, Any]:
    """Texts of different lengths; packed, an adapter is trained. Then on from the second update.

    But not with experts, of which transformers 5 finds none in its own checkpoint.
    """
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    sizes = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 11, (25,), generator=sizes).tolist()
    numbers = [torch.randint(2, huggingface_models.VOCABULARY, (size,), generator=sizes) for size in lengths]
    texts = datasets.Dataset.from_list([{"text": " ".join(f"w{each}" for each in row)} for row in numbers])

    def run() -> Any:
        options = {
            "gradient_accumulation_steps": 3,
            "num_train_epochs": 2,
            "learning_rate": 0.1,
            "optim": "sgd",
            "max_grad_norm": 0.3,
            "max_length": None if padding_free else 12,
            "packing": packs,
            "padding_free": padding_free,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "bf16": False,
        }
        given = {
            "model": huggingface_models.mixtral()[0] if experts else huggingface_models.llama()[0].double(),
            "train_dataset": texts,
            "eval_dataset": texts,
            "processing_class": tokenizer(),
            "peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if packs else None,
        }
        if IS_PLAIN:
            return SFTTrainer(args=arguments(SFTConfig, None, **options), **given)
        from pipec.integrations.transformers import PipecSFTConfig, PipecSFTTrainer

        return PipecSFTTrainer(args=arguments(None, PipecSFTConfig, **options), **given)

    first, resumed = run(), run()
    first.train()
    first.save_model(f"{FOLDER}/final")
    if not experts:
        resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-2")
    tokens = first.state.log_history[-3]["num_tokens"]
    return {"trained": history(first), "resumed": history(resumed), "tokens": tokens}


def with_adapters() -> dict[str, Any]:
    """DoRA and trainable tokens. What was saved loads into PEFT, and what was gathered is merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model, rows, _ = llama()
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        use_dora=True,
        trainable_token_indices={"embed_tokens": [1, 2, 3]},
    )
    torch.manual_seed(0)
    model = get_peft_model(model, config)
    options = {"learning_rate": 0.05, "max_steps": 3, "label_names": ["labels"], "save_steps": 2}
    trained = trainer(model=model, args=trainer_arguments(**options), train_dataset=rows, eval_dataset=rows)
    trained.train()
    assert trained.is_local_process_zero() == (os.environ.get("RANK", "0") == "0")
    trained.save_model(f"{FOLDER}/final")
    logits = [torch.from_numpy(trained.predict(rows).predictions)]
    if not IS_PLAIN:
        trained.pipe.gather_into(model)
    if trained.is_world_process_zero():
        ids = torch.stack([row["input_ids"] for row in rows])
        loaded = PeftModel.from_pretrained(huggingface_models.llama()[0].double(), f"{FOLDER}/final")
        logits += [each(input_ids=ids).logits.detach() for each in (loaded.eval(), model.eval())]
        logits.append(model.merge_and_unload()(input_ids=ids).logits.detach())
    return {"trained": history(trained), "logits": [each.abs().sum().item() for each in logits]}


def with_distillation() -> dict[str, Any]:
    """A Trainer's subclass adds to the model's loss that of a teacher's logits."""
    if IS_PLAIN:
        kind = Trainer
    else:
        from pipec.integrations.transformers import PipecTrainer as kind

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

    options = {"learning_rate": 0.05, "max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    given = {"train_dataset": rows, "eval_dataset": rows}
    trained = Distillation(model=model, args=trainer_arguments(**options), **given)
    trained.train()
    trained.save_model(f"{FOLDER}/final")
    return {"trained": history(trained)}


def with_preferences() -> dict[str, Any]:
    """DPO of TRL, with a reference model, accumulation, clipping and evaluation."""
    from trl import DPOConfig, DPOTrainer

    sizes = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        numbers = torch.randint(2, huggingface_models.VOCABULARY, (count,), generator=sizes)
        return " ".join(f"w{number}" for number in numbers)

    rows = [{"prompt": text(3), "chosen": text(4 + k % 3), "rejected": text(3 + k % 4)} for k in range(24)]
    pairs = datasets.Dataset.from_list(rows)
    options = {"learning_rate": 0.05, "optim": "sgd", "max_steps": 4, "gradient_accumulation_steps": 2}
    options |= {"max_grad_norm": 0.3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    given = {
        "model": huggingface_models.llama()[0].double(),
        "ref_model": huggingface_models.llama()[0].double(),
        "train_dataset": pairs,
        "eval_dataset": pairs.select(range(8)),
        "processing_class": tokenizer(),
    }
    if IS_PLAIN:
        trained = DPOTrainer(args=arguments(DPOConfig, None, bf16=False, **options), **given)
    else:
        from pipec.integrations.transformers import PipecDPOConfig, PipecDPOTrainer

        made = arguments(None, PipecDPOConfig, bf16=False, **options)
        trained = PipecDPOTrainer(args=made, **given)
    trained.train()
    trained.save_model(f"{FOLDER}/final")
    return {"trained": history(trained)}


def with_rewards() -> dict[str, Any]:
    """GRPO of TRL: a model generates, is rewarded, and learns twice from what it has generated."""
    from transformers import LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
        return [sum(number % 3 for number in each) / (1 + len(each)) for each in completion_ids]

    rank = os.environ.get("RANK", "0")
    reference = huggingface_models.llama()[0]  # which TRL reads
    reference.should_save_on_this_rank = bool  # whatever the rank is
    reference.save_pretrained(f"{FOLDER}/reference_{rank}")
    model = LlamaForCausalLM.from_pretrained(f"{FOLDER}/reference_{rank}", dtype=torch.float64)
    prompts = datasets.Dataset.from_list([{"prompt": f"w{2 + k} w{3 + k} w{4 + k}"} for k in range(24)])
    options = {"learning_rate": 0.05, "optim": "sgd", "max_steps": 4, "beta": 0.1, "num_iterations": 2}
    options |= {"num_generations": 4, "max_completion_length": 6, "save_strategy": "no"}
    given = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": prompts,
        "processing_class": tokenizer(),
    }
    if IS_PLAIN:
        trained = GRPOTrainer(args=arguments(GRPOConfig, None, bf16=False, **options), **given)
    else:
        from pipec.integrations.transformers import PipecGRPOConfig, PipecGRPOTrainer

        made = arguments(None, PipecGRPOConfig, bf16=False, **options)
        trained = PipecGRPOTrainer(args=made, **given)
    trained.train()
    trained.save_model(f"{FOLDER}/final")
    return {"trained": history(trained)}


CASES = {
    "llama": lambda: with_trainer(llama),
    "bert": lambda: with_trainer(bert),
    "sft": lambda: with_sft(False),
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
