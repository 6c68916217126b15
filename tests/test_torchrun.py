"""Several processes: no rank fails alone, and none runs beside another that holds something else."""

from dataclasses import replace
from pathlib import Path

from combinations import Combination, captured, compiled, save_with_tensors
from models import perceptron
from workers import train


def test_a_stage_that_fails_fails_every_rank_with_its_error(tmp_path: Path) -> None:
    model = captured(perceptron)
    artifact = compiled(model, Combination(2, "1f1b", "none"))
    first, last = artifact.sources
    broken = replace(artifact, sources=(first, last.replace("    saved.clear()\n", "    saved.sort(0)\n", 1)))
    directory = save_with_tensors(broken, model.model, tmp_path / "artifact")
    errors = train([directory] * 2, model.inputs, tmp_path)
    original = "rank 1, stage 1, microbatch 0, backward: TypeError: sort() takes no positional arguments ("
    assert errors[1].startswith(f"ExecutionError: {original}")
    assert errors[0].startswith(
        "TransportError: rank 0, stage 0, microbatch 0, backward: another rank failed while"
    )
    assert original in errors[0]


def test_ranks_that_load_different_artifacts_refuse_to_run(tmp_path: Path) -> None:
    model = captured(perceptron)
    directories = [
        save_with_tensors(compiled(model, Combination(2, schedule, "none")), model.model, tmp_path / schedule)
        for schedule in ("gpipe", "1f1b")
    ]
    errors = train(directories, model.inputs, tmp_path)
    for error in errors:
        assert error.startswith(
            "TransportError: the ranks do not hold the same plan, programs and stage sources: "
        )
