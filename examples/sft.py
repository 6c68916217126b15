"""Fine-tune a small language model with LoRA by an SFTTrainer whose model is a pipeline.

python examples/sft.py
torchrun --nproc-per-node 4 examples/sft.py
"""

import argparse

from peft import LoraConfig
from stdlib_llm import load_texts, make_model, make_tokenizer

from pipec.integrations.transformers import PipecSFTConfig, PipecSFTTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="sft_output")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    texts = load_texts().train_test_split(test_size=40, shuffle=False)
    arguments = PipecSFTConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_length=96,
        packing=True,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        logging_steps=1,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PipecSFTTrainer(
        make_model(),
        arguments,
        train_dataset=texts["train"],
        eval_dataset=texts["test"],
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0),
    )
    trainer.train()
    trainer.save_model(f"{options.output}/final")
    if trainer.is_world_process_zero():
        for log in trainer.state.log_history:
            print(
                *(
                    f"step {log['step']}: {name} {log[name]:.4f}"
                    for name in ("loss", "eval_loss")
                    if name in log
                )
            )


if __name__ == "__main__":
    main()
