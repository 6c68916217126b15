"""Artifacts of steps with replicas and updates: saved, checked, loaded, and refused where damaged."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optimizer_reference import batches, pair

from pipec.artifact.artifact import read_artifact
from pipec.errors import ArtifactError, VerifyError

Json = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines of two stages that share a weight, with everything that an ending may have."""
    pipe, _ = pair(clip=0.5, shard="parameters", devices=4, replicas=2)
    pipe.prepare(**next(batches(1)))
    directory = tmp_path_factory.mktemp("saved") / "artifact"
    pipe.save(directory, tensors=True)
    assert read_artifact(directory)[0].plan.sync_spec == pipe.plan.sync_spec
    return directory


def rewritten(saved: Path, directory: Path, edit: Callable[[Path, Json], None]) -> Path:
    """A copy of an artifact that someone has changed, checksums included."""
    shutil.copytree(saved, directory)
    path = directory / "plan.json"
    header = json.loads(path.read_text())
    edit(directory, header)
    path.write_text(json.dumps(header))
    files = sorted(file for file in directory.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (directory / "SHA256SUMS").write_text("".join(lines))
    return directory


def unclip(directory: Path, header: Json) -> None:
    header["plan"]["sync_spec"]["clips"] = False


def without(op: str) -> Callable[[Path, Json], None]:
    def edit(directory: Path, header: Json) -> None:
        """Take the first such line out of every rank's program, and number the others anew."""
        for path in directory.glob("rank_*.txt"):
            heading, *lines = path.read_text().splitlines()
            found = next((k for k, line in enumerate(lines) if line.split()[1] == op), None)
            if found is not None:
                lines.pop(found)
            renumbered = [f"{k}  {line.split(maxsplit=1)[1]}" for k, line in enumerate(lines)]
            rank = heading.partition(":")[0]
            path.write_text("\n".join([f"{rank}: {len(lines)} instructions", *renumbered, ""]))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (unclip, r"plan\.json is not the plan that was compiled: it was edited"),
        (without("update"), "is there 0 times on rank 0; expected once"),
        (without("grad_norm"), "grad_norm is there 0 times on rank 0; expected once"),
        (without("reduce_grad"), "reduce_grad of stage .*, bucket .* is there . times on rank 0; expected"),
        (without("unshard"), "has no unshard before it"),
    ],
)
def test_a_changed_ending_is_refused_even_if_its_checksums_fit(
    saved: Path, tmp_path: Path, edit: Callable[[Path, Json], None], message: str
) -> None:
    directory = rewritten(saved, tmp_path / "changed", edit)
    with pytest.raises((ArtifactError, VerifyError), match=message):
        read_artifact(directory)


def test_a_line_with_a_foreign_bucket_is_refused(saved: Path, tmp_path: Path) -> None:
    def edit(directory: Path, header: Json) -> None:
        path = directory / "rank_0.txt"
        path.write_text(path.read_text().replace("bucket 0", "bucket 77", 1))

    with pytest.raises(VerifyError, match="reduce_grad names bucket 77; expected"):
        read_artifact(rewritten(saved, tmp_path / "changed", edit))
