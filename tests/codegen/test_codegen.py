"""Generated stages: plain Python, the same bytes in every process, foreign names and paths kept out."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_models import encoder
from torch import Tensor, nn

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


class Hostile(nn.Module):
    """Layers whose names are code, formats, keywords, and names that the generated code uses itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in HOSTILE:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(scope="module")
def hostile() -> Pipeline:
    x = torch.zeros(4, 4)
    pipe = pipec.compile(Hostile(), devices=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    return pipe.prepare(x, target=x)


def test_foreign_names_are_data(hostile: Pipeline) -> None:
    """Each is found as a string in the table of parameters, and nowhere in the code."""
    trees = [ast.parse(hostile.source(stage)) for stage in range(2)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert {f"{name}.weight" for name in HOSTILE} <= strings
    assert not any(isinstance(node, ast.Raise | ast.ClassDef) for node in nodes)
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"torch"}


def test_identifiers_are_short_words(hostile: Pipeline) -> None:
    for stage in range(2):
        for node in ast.walk(ast.parse(hostile.source(stage))):
            if isinstance(node, ast.Name | ast.arg):
                name = node.id if isinstance(node, ast.Name) else node.arg
                assert name.isascii(), name
                assert len(name) < 60, name


def test_a_stage_of_hostile_names_trains(hostile: Pipeline) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.mse_loss(hostile_output(hostile, x), x)
    assert torch.allclose(hostile.step(x, target=x), expected)


def hostile_output(pipe: Pipeline, x: Tensor) -> Tensor:
    weights = dict(pipe.named_parameters())
    for name in HOSTILE:
        x = torch.tanh(nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return x


SAVE = """
import sys
from huggingface_models import encoder
import pipec
model, batch = encoder()
pipec.compile(model, devices=2, microbatches=2).prepare(**batch).save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of one artifact, made here and by a process that hashes strings in another way."""
    here, there = (tmp_path_factory.mktemp("artifacts") / name for name in ("here", "there"))
    model, batch = encoder()
    pipec.compile(model, devices=2, microbatches=2).prepare(**batch).save(here)
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": str(Path(__file__).parents[1] / "helpers"),
    }
    subprocess.run([sys.executable, "-c", SAVE, str(there)], env=environment, check=True)
    return [{path.name: path.read_bytes() for path in made.iterdir()} for made in (here, there)]


@pytest.mark.slow
def test_every_process_writes_the_same_bytes(artifacts: list[dict[str, bytes]]) -> None:
    one, other = artifacts
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.mark.slow
def test_no_path_of_the_machine_is_written(artifacts: list[dict[str, bytes]]) -> None:
    places = {str(Path.home()), sys.prefix, str(Path(torch.__file__).parent), str(Path(__file__).parents[2])}
    for name, content in artifacts[0].items():
        found = [place for place in places if len(place) > 1 and place.encode() in content]
        assert found == [], name


def test_hundreds_of_names_are_unpacked_of_more() -> None:
    """Python takes up to 255 of them before a star."""
    held = [f"scale_{index}" for index in range(300)]
    source = SimpleNamespace(names={name: name for name in held})
    for last in (254, 255, 298, 299):
        lines = StageSource.unpack(source, "w", held, held[: last + 1])  # type: ignore[arg-type]
        found = {"w": tuple(range(300))}
        exec(textwrap.dedent("\n".join(lines)), found)
        assert [found[name] for name in held[: last + 1]] == list(range(last + 1))
