"""Fine-tune a language model on text, all of it or by LoRA, on as many ranks as there are processes.

    torchrun --nproc-per-node 4 examples/finetune_llm.py --model Qwen/Qwen3-0.6B --data wikitext --lora
    torchrun --nproc-per-node 4 examples/finetune_llm.py

Without --model and --data a small model learns the source of Python's standard library, and nothing is
downloaded. A run that was stopped goes on with --resume, on any number of ranks. At the end rank 0 loads what
was saved, as any script would, and lets it write.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from stdlib_llm import load_texts, make_model, make_tokenizer, tokenize
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipec.integrations.transformers import PipecArguments, PipecTrainer


def load_model(name: str | None, output: Path) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The model, and its tokenizer. The small one is a folder then, as others are in a cache."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    model, tokenizer = make_model(), make_tokenizer()
    model.name_or_path = str(output / "base")
    return model, tokenizer


def load_rows(name: str | None, tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Rows of ``length`` tokens, in which the texts follow one another: ``train`` and ``test``."""
    texts = load_texts() if name is None else load_dataset(name, split="train")
    return tokenize(texts, tokenizer, length).train_test_split(test_size=0.1, shuffle=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of the Hub, or a folder")
    parser.add_argument("--data", help="a data set of the Hub with a column text")
    parser.add_argument("--lora", action="store_true", help="train an adapter alone")
    parser.add_argument("--output", type=Path, default=Path("finetuned"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=16, help="of a batch of each replica")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model, options.output)
    rows = load_rows(options.data, tokenizer, options.length)
    arguments = PipecArguments(
        str(options.output),
        replicas=options.replicas,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        per_device_eval_batch_size=options.rows,
        learning_rate=3e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        bf16=options.bf16,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_strategy="steps",
        save_steps=options.steps // 2,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    if options.model is None and arguments.should_save:
        model.save_pretrained(model.name_or_path)
    if options.lora:
        torch.manual_seed(0)  # the adapter's first weights
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = PipecTrainer(
        model,
        arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            for name in {"loss", "eval_loss"} & log.keys():
                print(f"step {log['step']}: {name} {log[name]:.4f}")
        print(repr(complete(options.output / "final", tokenizer, "def main(")))


def complete(folder: Path, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """What the model in a folder writes after ``prompt``."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    written = model.generate(tokens, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(written[0])


if __name__ == "__main__":
    main()
