"""Generated stages: plain Python, the same bytes in every process, foreign names and paths kept out."""

import ast
import os
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_models import encoder
from torch import nn

import pipec
from pipec.codegen.stage_source import StageSource
from pipec.pipeline import Pipeline

HOSTILE = (
    '"""\nimport os #',
    "'); raise SystemExit #",
    "%s{0}\\",
    "class",
    "torch",
    "x\ty",
    "été",
    "a" * 300,
)
"""Names that are code, formats, keywords, and names that the generated code uses itself."""


@pytest.fixture(scope="module")
def hostile() -> Pipeline:
    model, x = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in HOSTILE)), torch.zeros(4, 4)
    pipe = pipec.compile(model, devices=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    return pipe.prepare(x, target=x)


def test_foreign_names_are_data_and_identifiers_are_short_words(hostile: Pipeline) -> None:
    """Each is found as a string in the table of parameters, and nowhere in the code."""
    nodes = [node for stage in range(2) for node in ast.walk(ast.parse(hostile.source(stage)))]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {f"{name}.weight" for name in HOSTILE} <= strings
    assert not any(isinstance(node, ast.Raise | ast.ClassDef) for node in nodes)
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"torch"}
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    assert [name for name in names if not name.isascii() or len(name) >= 60] == []


def test_a_stage_of_hostile_names_trains(hostile: Pipeline) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = hostile.step(x, target=x)
    assert torch.allclose(found, nn.functional.mse_loss(hostile.unsplit_model(x), x))


SAVE = """
import sys
from huggingface_models import encoder
import pipec
model, batch = encoder()
pipec.compile(model, devices=2, microbatches=2).prepare(**batch).save(sys.argv[1])
"""


@pytest.mark.slow
def test_every_process_writes_the_same_bytes_and_no_path_of_the_machine(tmp_path: Path) -> None:
    """The other process hashes strings in another way."""
    model, batch = encoder()
    pipec.compile(model, devices=2, microbatches=2).prepare(**batch).save(tmp_path / "here")
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": helpers}
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "there")], env=environment, check=True)
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("here", "there")
    )
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    places = {str(Path.home()), sys.prefix, str(Path(torch.__file__).parent), str(Path(__file__).parents[2])}
    for name, content in one.items():
        assert [place for place in places if len(place) > 1 and place.encode() in content] == [], name


def test_hundreds_of_names_are_unpacked_of_more() -> None:
    """Python takes up to 255 of them before a star."""
    held = [f"scale_{index}" for index in range(300)]
    source = SimpleNamespace(names={name: name for name in held})
    for last in (254, 255, 298, 299):
        lines = StageSource.unpack(source, "w", held, held[: last + 1])  # type: ignore[arg-type]
        found = {"w": tuple(range(300))}
        exec(textwrap.dedent("\n".join(lines)), found)
        assert [found[name] for name in held[: last + 1]] == list(range(last + 1))
