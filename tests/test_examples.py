"""Every example runs unchanged; alone and under torchrun they print the same losses."""

import difflib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import worker_processes
from worker_processes import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def results(printed: str) -> list[str]:
    """The lines that tell results: losses and accuracies."""
    return [line for line in printed.splitlines() if "loss" in line or "accuracy" in line]


@pytest.mark.parametrize(
    ("script", "arguments", "num_ranks"),
    [
        ("huggingface_gpt2.py", ("--steps", "3"), 4),
        ("resnet_digits.py", ("--epochs", "1"), 4),
        ("data_parallel_digits.py", ("--epochs", "1"), 2),
    ],
)
def test_one_process_and_many_print_the_same_losses(
    script: str, arguments: tuple[str, ...], num_ranks: int, tmp_path: Path
) -> None:
    alone, distributed = (
        results(run_script(EXAMPLES / script, arguments, count, tmp_path)) for count in (0, num_ranks)
    )
    assert len(alone) == 2, alone
    assert distributed == alone


def test_a_llama_from_a_folder_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The lines of docs/gpus.md, with a small model: the first loss is eager's, and a run goes on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama")
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16) % 61)
    tokens = torch.arange(128).view(8, 16) % 61
    expected = float(model(input_ids=tokens, labels=tokens).loss.detach())

    def losses(num_ranks: int, steps: int) -> list[str]:
        sizes = ["--rows", "8", "--length", "16", "--microbatches", "4", "--steps", str(steps)]
        places = ["--data", str(tmp_path / "tokens.npy"), "--checkpoints", str(tmp_path / f"run_{num_ranks}")]
        script = EXAMPLES / "finetune_llama.py"
        printed = run_script(script, [str(tmp_path / "llama"), *sizes, *places], num_ranks, tmp_path)
        return re.findall(r"^step \d+: loss .*", printed, re.MULTILINE)

    alone, distributed = losses(0, 3), losses(2, 3)
    assert distributed == alone
    assert len(alone) == 3
    assert float(alone[0].split()[-1]) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("contrastive_digits.py", ("--epochs", "1")),
        ("finetune_digits.py", ("--epochs", "1")),
        ("gan_digits.py", ("--epochs", "2")),
        ("policy_gradient.py", ("--updates", "2")),
    ],
)
def test_two_processes_print_losses(script: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    printed = results(run_script(EXAMPLES / script, arguments, 2, tmp_path))
    assert len(printed) == 2, printed
    assert "nan" not in "".join(printed)


def test_data_parallelism_is_three_lines_and_prints_the_losses_of_plain_pytorch(tmp_path: Path) -> None:
    scripts = [EXAMPLES / "digits_plain.py", EXAMPLES / "data_parallel_digits.py"]
    codes = [script.read_text(encoding="utf-8").split('"""', 2)[2].splitlines() for script in scripts]
    new = [line for line in difflib.ndiff(*codes) if line.startswith("+ ") and line.strip("+ ")]
    assert len(new) == 3, new
    plain, parallel = (results(run_script(script, ("--epochs", "2"), 0, tmp_path)) for script in scripts)
    assert len(plain) == 3, plain
    assert numbers(parallel) == pytest.approx(numbers(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("plain", "script"),
    [("accelerate_plain.py", "accelerate_loop.py"), ("lightning_plain.py", "lightning_module.py")],
)
def test_a_loop_of_a_library_differs_in_three_lines_and_not_in_losses(
    plain: str, script: str, tmp_path: Path
) -> None:
    codes = [(EXAMPLES / name).read_text(encoding="utf-8").split('"""', 2)[2] for name in (plain, script)]
    new = [line for line in difflib.ndiff(*(code.splitlines() for code in codes)) if line[0] in "+-"]
    changed = [line for line in new if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 3, changed
    expected = numbers(results(run_script(EXAMPLES / plain, ("--epochs", "2"), 0, tmp_path)))
    for num_ranks in (0, 2):
        found = results(run_script(EXAMPLES / script, ("--epochs", "2"), num_ranks, tmp_path))
        assert numbers(found) == pytest.approx(expected, rel=2e-4)


def test_clip_prints_the_losses_of_the_plain_loop(tmp_path: Path) -> None:
    plain, alone, distributed = (
        numbers(results(run_script(EXAMPLES / "clip_digits.py", ("--epochs", "1", *more), count, tmp_path)))
        for more, count in ((("--plain",), 0), ((), 0), ((), 4))
    )
    assert len(plain) == 3, plain
    assert alone == pytest.approx(plain, rel=1e-3)
    assert distributed == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_a_trainer_of_a_library_becomes_a_pipeline_by_three_lines(name: str, tmp_path: Path) -> None:
    scripts = [EXAMPLES / f"{name}_plain.py", EXAMPLES / f"{name}.py"]
    lines = [script.read_text(encoding="utf-8").split('"""', 2)[2].splitlines() for script in scripts]
    new = [line for line in difflib.ndiff(*lines) if line.startswith("+ ") and line.strip("+ ")]
    assert len(new) == 3, new

    def losses(script: Path, num_ranks: int) -> list[float]:
        folder = str(tmp_path / f"{script.stem}_{num_ranks}")
        printed = run_script(script, ("--steps", "4", "--output", folder), num_ranks, tmp_path)
        return numbers(re.findall(r"^step \d+: .*", printed, re.MULTILINE))

    plain, pipeline = losses(scripts[0], 0), losses(scripts[1], 2)
    assert len(plain) == 12
    assert pipeline == pytest.approx(plain, abs=2e-4)


@pytest.mark.parametrize("adapter", [(), ("--lora",)], ids=["full", "lora"])
def test_a_language_model_is_fine_tuned_on_any_number_of_ranks(
    adapter: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on on two ranks from a checkpoint of one, and what was saved writes the same text."""
    monkeypatch.setattr(worker_processes, "TIMEOUT", 600.0)

    def printed(num_ranks: int, *more: str) -> list[str]:
        options = ["--steps", "4", "--output", str(tmp_path / "run"), *adapter, *more]
        lines = run_script(EXAMPLES / "finetune_llm.py", options, num_ranks, tmp_path).splitlines()
        return [line for line in lines if line.startswith(("step", "'def main(", '"def main('))]

    alone = printed(0)
    assert len(alone) == 7, alone
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    assert printed(2, "--resume") == alone


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+(?:\.\d+)?", line)]


def test_train_gpt_leaves_the_same_losses_and_an_artifact_a_timeline_and_a_loss_curve(tmp_path: Path) -> None:
    outputs = {0: tmp_path / "alone", 4: tmp_path / "distributed"}
    alone, distributed = (
        results(
            run_script(EXAMPLES / "train_gpt.py", ("--steps", "3", "--output", str(output)), count, tmp_path)
        )
        for count, output in outputs.items()
    )
    assert len(alone) == 2, alone
    assert distributed == alone
    for output in outputs.values():
        assert (output / "artifact" / "plan.json").is_file()
        for picture in ("timeline.svg", "loss.svg"):
            assert "<svg" in (output / picture).read_text(encoding="utf-8")
