"""Several processes: no rank fails alone, none runs beside another that holds something else, one speaks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from compile_variants import Variant, captured, compiled, save_with_tensors
from huggingface_models import perceptron
from page_views import embedded
from worker_processes import pipec_cli, train


def test_a_stage_that_fails_fails_every_rank_with_its_error(tmp_path: Path) -> None:
    model = captured(perceptron)
    artifact = compiled(model, Variant(2, "1f1b", "none"))
    first, last = artifact.sources
    broken = replace(
        artifact, sources=(first, last.replace('frame.pop("saved")', 'frame.pop("saved").sort(0)', 1))
    )
    directory = save_with_tensors(broken, model.model, tmp_path / "artifact")
    errors = train([directory] * 2, model.inputs, tmp_path)
    original = "rank 1, stage 1, microbatch 0, backward: TypeError: sort() takes no positional arguments ("
    assert errors[1].startswith(f"ExecutionError: {original}")
    assert errors[0].startswith("TransportError: rank 0, stage 0, microbatch")
    assert original in errors[0]


def test_ranks_that_load_different_artifacts_refuse_to_run(tmp_path: Path) -> None:
    model = captured(perceptron)
    directories = [
        save_with_tensors(compiled(model, Variant(2, schedule, "none")), model.model, tmp_path / schedule)
        for schedule in ("gpipe", "1f1b")
    ]
    errors = train(directories, model.inputs, tmp_path)
    for error in errors:
        assert error.startswith(
            "TransportError: the ranks do not hold the same plan, programs and stage sources: "
        )


@pytest.mark.slow
def test_every_rank_is_traced_and_rank_zero_tells(tmp_path: Path) -> None:
    """The times of all ranks come together on one axis; the others print nothing and write nothing."""
    model = captured(perceptron)
    artifact = compiled(model, Variant(2, "1f1b", "none"))
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    pages = [tmp_path / f"{rank}.html" for rank in (0, 1)]
    options = ("--trace", "--steps", "2", "--json", "--output")
    traced = [("run", str(directory), *options, str(page)) for page in pages]
    told, silence = pipec_cli(traced, tmp_path)
    assert silence == ""
    facts = json.loads(told)
    assert [len(facts[name]["waits"]) for name in ("planned", "measured")] == [2, 2]
    assert facts["measured"]["num_events"] == facts["planned"]["num_events"]
    assert all(0 < rank["busy"] < facts["measured"]["makespan"] for rank in facts["measured"]["waits"])
    assert [page.exists() for page in pages] == [True, False]
    assert "measured" in str(embedded(pages[0].read_text(encoding="utf-8")))
