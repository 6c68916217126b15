"""Train a small language model with a Trainer whose model is a pipeline.

python examples/trainer.py
torchrun --nproc-per-node 4 examples/trainer.py
"""

import argparse

from stdlib_llm import load_texts, make_model, make_tokenizer, tokenize

from pipec.integrations.transformers import PipecArguments, PipecTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="trainer_output")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    tokenizer = make_tokenizer()
    rows = tokenize(load_texts(), tokenizer, length=64).train_test_split(test_size=64, shuffle=False)
    arguments = PipecArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_strategy="steps",
        save_steps=options.steps // 2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PipecTrainer(
        make_model(),
        arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=options.resume)
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
