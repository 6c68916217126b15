"""``pipec.from_pretrained`` against transformers from the same folder: what is read, by whom, and refused."""

import json
from pathlib import Path
from typing import Any

import pretrained_memory_script
import pretrained_script
import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(pretrained_script.__file__)
MEMORY_SCRIPT = Path(pretrained_memory_script.__file__)
RANKS = {4: ("gpt2", "mixtral", "headless"), 0: ("t5", "bert", "tied", "bfloat16", "sharded", "remote")}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_models_start_train_and_are_saved_as_by_transformers(num_ranks: int, tmp_path: Path) -> None:
    names = RANKS[num_ranks]
    for name in names:
        pretrained_script.write(tmp_path, name)

    def found(kind: str, ranks: int) -> list[Any]:
        printed = run_ranks(SCRIPT, ranks, tmp_path, [str(tmp_path), kind, *names])
        return [json.loads(each.splitlines()[-1]) for each in printed]

    (expected,) = found("plain", 0)
    for each in found("pipec", num_ranks):
        for name in names:
            own, reference = each[name], expected[name]
            assert own["differing"] == []
            assert own["dtypes"] == reference["dtypes"]
            assert own["drawn"] == reference["drawn"]
            assert own["logits"] == pytest.approx(reference["logits"], abs=1e-6), name
            assert own["losses"] == pytest.approx(reference["losses"], abs=2e-6), name
            assert own["state"] == pytest.approx(reference["state"], rel=1e-4 if name == "bfloat16" else 1e-7)


def test_no_rank_holds_more_than_its_stages(tmp_path: Path) -> None:
    pretrained_memory_script.write(tmp_path / "model")
    printed = run_ranks(MEMORY_SCRIPT, 4, tmp_path, [str(tmp_path / "model")])
    found = [[int(number) for number in each.splitlines()[-1].split()] for each in printed]
    assert sum(held for *_, held in found) > 1e9
    for of_headers, peak, held in found:
        assert of_headers < 40e6
        assert peak < 0.45e9
        assert peak < held + 190e6  # the largest tensor, and what was imported and captured
