"""Every example runs unchanged; alone and under torchrun they print the same losses."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import worker_processes
from doc_blocks import Block, blocks, pages, without_pipec
from page_views import embedded
from worker_processes import run_script

import pipec

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def results(printed: str) -> list[str]:
    """The lines that tell results: losses and accuracies."""
    return [line for line in printed.splitlines() if "loss" in line or "accuracy" in line]


@pytest.mark.parametrize(
    ("script", "arguments", "num_ranks"),
    [
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


LEARNED = {
    "semi_supervised.py": (("--epochs", "10"), r"([\d.]+)% with unlabelled images", 85.0),
    "collaborative.py": (("--rounds", "2"), r"([\d.]+)% of the shared model", 80.0),
    "evolutionary.py": (("--generations", "2"), r"test accuracy ([\d.]+)%", 90.0),
    "finetune_digits.py": (("--epochs", "1"), r"([\d.]+)% on 5 to 9", 70.0),
    "navigation.py": (("--updates", "1"), r"([\d.]+)% after", 60.0),
    "on_device.py": ((), r"([\d.]+)% on the last", 70.0),
    "policy_gradient.py": (("--updates", "4"), r"update +11 .* ([\d.]+) moves", 100.0),
}
"""Fewer rounds for two processes; where a result is, and what it is at least.

Chance is 10% of the digits, 5% of the walkers, and 20 moves until a pole falls that nobody balances.
"""


ON_GROUPS = {"collaborative.py", "evolutionary.py"}
"""On four processes, two pipelines run at once."""


@pytest.mark.parametrize("script", LEARNED)
def test_a_workflow_learns_and_processes_begin_alike(script: str, tmp_path: Path) -> None:
    fewer, pattern, least = LEARNED[script]
    printed = run_script(EXAMPLES / script, (), 0, tmp_path)
    found = re.search(pattern, printed)
    assert found, printed
    assert float(found[1]) >= least
    for num_ranks in (2, *[4] * (script in ON_GROUPS)):
        distributed = run_script(EXAMPLES / script, fewer, num_ranks, tmp_path)
        assert results(distributed)[0] == results(printed)[0]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("contrastive_digits.py", ("--epochs", "1")), ("gan_digits.py", ("--epochs", "2"))],
)
def test_two_processes_print_losses(script: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    printed = results(run_script(EXAMPLES / script, arguments, 2, tmp_path))
    assert len(printed) == 2, printed
    assert "nan" not in "".join(printed)


CHANGES = {
    block.mark.rpartition("/")[2]: block
    for page in pages()
    for block in blocks(page)
    if block.language == "diff"
}
"""What the documentation says of the lines that differ from a script without pipec."""


def plain_script(block: Block, folder: Path) -> Path:
    """The script without pipec, in a folder with the modules that examples import."""
    for helper in ("digits.py", "stdlib_llm.py", "stdlib_text.py"):
        shutil.copy(EXAMPLES / helper, folder)
    script = folder / "plain.py"
    script.write_text(without_pipec(block), encoding="utf-8")
    assert "pipec" not in without_pipec(block).split('"""', 2)[2].lower()
    return script


@pytest.mark.parametrize("name", ["data_parallel_digits.py", "accelerate_loop.py", "lightning_module.py"])
def test_the_lines_that_change_change_no_losses(name: str, tmp_path: Path) -> None:
    plain = plain_script(CHANGES[name], tmp_path)
    expected = numbers(results(run_script(plain, ("--epochs", "2"), 0, tmp_path)))
    for num_ranks in (0, 2):
        found = results(run_script(EXAMPLES / name, ("--epochs", "2"), num_ranks, tmp_path))
        assert numbers(list(dict.fromkeys(found))) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("name", ["trainer.py", "sft.py"])
def test_the_lines_that_change_a_trainer_change_no_losses(name: str, tmp_path: Path) -> None:
    def losses(script: Path, num_ranks: int) -> list[float]:
        folder = str(tmp_path / f"{script.stem}_{num_ranks}")
        printed = run_script(script, ("--steps", "4", "--output", folder), num_ranks, tmp_path)
        return numbers(re.findall(r"^step \d+: .*", printed, re.MULTILINE))

    plain, pipeline = losses(plain_script(CHANGES[name], tmp_path), 0), losses(EXAMPLES / name, 2)
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


def test_train_gpt_leaves_the_same_losses_an_artifact_and_a_page(tmp_path: Path) -> None:
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
        assert "measured" in str(embedded((output / "page.html").read_text(encoding="utf-8")))


def test_a_script_of_the_cluster_recipes_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, printed = EXAMPLES / "restartable_digits.py", list[str]()
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def train(directory: str) -> None:
        given = ["--steps", "6", "--every", "2", "--directory", str(tmp_path / directory)]
        monkeypatch.setattr(sys, "argv", [str(script), *given])
        runpy.run_path(str(script), run_name="__main__")

    def log_until_step_4(line: str) -> None:
        printed.append(line)
        if line.startswith("step    4"):
            raise KeyboardInterrupt

    monkeypatch.setattr(pipec, "log", printed.append)
    train("whole")
    *whole, accuracy = printed
    assert [line[:9] for line in whole] == ["step    2", "step    4", "step    6"]
    printed.clear()
    monkeypatch.setattr(pipec, "log", log_until_step_4)
    with pytest.raises(KeyboardInterrupt):
        train("stopped")
    monkeypatch.setattr(pipec, "log", printed.append)
    train("stopped")
    assert printed == [*whole, accuracy]


def test_ray_train_runs_the_training_on_workers_without_gpus(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason='needs `pip install "ray[train]"`')
    given = ["--workers", "2", "--steps", "6", "--every", "2", "--directory", str(tmp_path)]
    script = EXAMPLES / "cluster" / "ray_train.py"
    done = subprocess.run([sys.executable, script, *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step +6  loss \d", done.stdout + done.stderr)
    assert (tmp_path / "step-00000006").is_dir()
