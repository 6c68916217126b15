"""Every example runs unchanged; alone and under torchrun they print the same losses."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import worker_processes
from doc_blocks import blocks, pages, without_pipec
from page_views import embedded
from worker_processes import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "TIMEOUT", 600.0)


def printed(script: Path | str, num_ranks: int, folder: Path, *words: str) -> str:
    """What rank 0 of a script prints; with no ranks, the script alone. FOLDER is a folder of its own."""
    own = folder / f"{Path(script).stem}_{num_ranks}"
    own.mkdir(exist_ok=True)
    return run_script(EXAMPLES / script, [word.replace("FOLDER", str(own)) for word in words], num_ranks, own)


def results(text: str) -> list[str]:
    """The lines that tell results: losses and accuracies."""
    return [line for line in text.splitlines() if "loss" in line or "accuracy" in line]


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+(?:\.\d+)?", line)]


ALIKE = {
    "resnet_digits.py": (4, "--epochs 1"),
    "data_parallel_digits.py": (2, "--epochs 1"),
    "train_gpt.py": (4, "--steps 3 --output FOLDER"),
}


@pytest.mark.parametrize("script", ALIKE)
def test_one_process_and_many_print_the_same_losses(script: str, tmp_path: Path) -> None:
    num_ranks, words = ALIKE[script]
    alone = results(printed(script, 0, tmp_path, *words.split()))
    assert len(alone) == 2, alone
    assert results(printed(script, num_ranks, tmp_path, *words.split())) == alone
    for page in tmp_path.glob("*/page.html"):
        assert (page.parent / "artifact" / "plan.json").is_file()
        assert "measured" in str(embedded(page.read_text(encoding="utf-8")))


def test_a_llama_from_a_folder_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The lines of docs/gpus.md, with a small model: the first loss is eager's, and a run goes on."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama")
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16) % 61)
    tokens = torch.arange(128).view(8, 16) % 61
    expected = float(model(input_ids=tokens, labels=tokens).loss.detach())
    words = f"{tmp_path / 'llama'} --rows 8 --length 16 --microbatches 4 --steps 3 --checkpoints FOLDER"
    words += f" --data {tmp_path / 'tokens.npy'}"
    alone, distributed = (printed("finetune_llama.py", count, tmp_path, *words.split()) for count in (0, 2))
    losses = re.findall(r"^step \d+: loss .*", alone, re.MULTILINE)
    assert re.findall(r"^step \d+: loss .*", distributed, re.MULTILINE) == losses
    assert len(losses) == 3
    assert float(losses[0].split()[-1]) == pytest.approx(expected, rel=1e-2)


LEARNED = {
    "semi_supervised.py": ("--epochs 10", r"([\d.]+)% with unlabelled images", 85.0),
    "collaborative.py": ("--rounds 2", r"([\d.]+)% of the shared model", 80.0),
    "evolutionary.py": ("--generations 2", r"test accuracy ([\d.]+)%", 90.0),
    "finetune_digits.py": ("--epochs 1", r"([\d.]+)% on 5 to 9", 70.0),
    "navigation.py": ("--updates 1", r"([\d.]+)% after", 60.0),
    "on_device.py": ("", r"([\d.]+)% on the last", 70.0),
    "policy_gradient.py": ("--updates 4", r"update +11 .* ([\d.]+) moves", 100.0),
}
"""Fewer rounds for two processes; where a result is, and what it is at least.

Chance is 10% of the digits, 5% of the walkers, and 20 moves until a pole falls that nobody balances.
"""

ON_GROUPS = {"collaborative.py", "evolutionary.py"}
"""On four processes, two pipelines run at once."""


@pytest.mark.parametrize("script", LEARNED)
def test_a_workflow_learns_and_processes_begin_alike(script: str, tmp_path: Path) -> None:
    fewer, pattern, least = LEARNED[script]
    alone = printed(script, 0, tmp_path)
    found = re.search(pattern, alone)
    assert found, alone
    assert float(found[1]) >= least
    for num_ranks in (2, *[4] * (script in ON_GROUPS)):
        assert results(printed(script, num_ranks, tmp_path, *fewer.split()))[0] == results(alone)[0]


@pytest.mark.parametrize("words", ["contrastive_digits.py --epochs 1", "gan_digits.py --epochs 2"])
def test_two_processes_print_losses(words: str, tmp_path: Path) -> None:
    script, *others = words.split()
    losses = results(printed(script, 2, tmp_path, *others))
    assert len(losses) == 2, losses
    assert "nan" not in "".join(losses)


CHANGES = {
    block.mark.rpartition("/")[2]: block
    for page in pages()
    for block in blocks(page)
    if block.language == "diff"
}
"""What the documentation says of the lines that differ from a script without pipec."""

STEPS = "--steps 4 --output FOLDER"
CHANGED = {
    **dict.fromkeys(("data_parallel_digits.py", "accelerate_loop.py", "lightning_module.py"), "--epochs 2"),
    **dict.fromkeys(("trainer.py", "sft.py"), STEPS),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_lines_that_change_change_no_losses(name: str, tmp_path: Path) -> None:
    for helper in ("digits.py", "stdlib_llm.py", "stdlib_text.py"):
        shutil.copy(EXAMPLES / helper, tmp_path)
    plain, source = tmp_path / "plain.py", without_pipec(CHANGES[name])
    assert "pipec" not in source.split('"""', 2)[2].lower()
    plain.write_text(source, encoding="utf-8")

    def losses(script: Path | str, num_ranks: int) -> list[float]:
        text = printed(script, num_ranks, tmp_path, *CHANGED[name].split())
        told = re.findall(r"^step \d+: .*", text, re.MULTILINE) if CHANGED[name] is STEPS else results(text)
        return numbers(list(dict.fromkeys(told)))

    expected = losses(plain, 0)
    for num_ranks in (2,) if CHANGED[name] is STEPS else (0, 2):
        assert losses(name, num_ranks) == pytest.approx(expected, rel=2e-4, abs=2e-4)


@pytest.mark.parametrize("adapter", [(), ("--lora",)], ids=["full", "lora"])
def test_a_language_model_is_fine_tuned_on_any_number_of_ranks(
    adapter: tuple[str, ...], tmp_path: Path
) -> None:
    """It goes on on two ranks from a checkpoint of one, and what was saved writes the same text."""

    def told(num_ranks: int, *more: str) -> list[str]:
        options = ["--steps", "4", "--output", str(tmp_path / "run"), *adapter, *more]
        lines = printed("finetune_llm.py", num_ranks, tmp_path, *options).splitlines()
        return [line for line in lines if line.startswith(("step", "'def main(", '"def main('))]

    alone = told(0)
    assert len(alone) == 7, alone
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    assert told(2, "--resume") == alone


def test_a_script_of_the_cluster_recipes_goes_on_by_itself(tmp_path: Path) -> None:
    words = ["--steps", "6", "--every", "2", "--directory", str(tmp_path / "run")]
    whole = results(printed("restartable_digits.py", 0, tmp_path, *words))
    assert [line[:9] for line in whole[:-1]] == ["step    2", "step    4", "step    6"]
    shutil.rmtree(tmp_path / "run" / "step-00000006")
    assert results(printed("restartable_digits.py", 0, tmp_path, *words)) == whole[2:]
