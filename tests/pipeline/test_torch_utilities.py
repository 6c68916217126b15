"""Utilities of torch and of libraries over two processes: each is right or refused, as a table says."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from worker_processes import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "helpers" / "torch_utilities_script.py"
REMEDY = r"[Cc]all |[Ee]very rank calls|[Ll]eave .*out|Save |Use |clip_grad_norm_\("
BY_TORCH = "refused by torch"
HEAD = "| torch, given a pipeline or its model | over several processes |\n| --- | --- |\n"


def test_each_is_right_or_refuses_as_the_table_says(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    ranks = [json.loads(printed.splitlines()[-1]) for printed in run_ranks(SCRIPT, 2, tmp_path)]
    lines = [line(name, [rank[name] for rank in ranks]) for name in ranks[0]]
    golden(HEAD + "".join(lines), "torch_utilities.md")


def line(name: str, ranks: list[str]) -> str:
    """The row of a utility: what it does on both ranks."""
    assert "silent" not in ranks, name
    said = [short(each) for each in ranks]
    assert len({each == "right" for each in said}) == 1, (name, ranks)
    assert said[0] in ("right", BY_TORCH) or all(re.search(REMEDY, each) for each in ranks), (name, ranks)
    return f"| `{name}` | {said[0]} |\n"


def short(said: str) -> str:
    """The first words of an error, wherever torch has put it."""
    if said == "right":
        return said
    if re.match(r"\w+Error: FSDP (needs|does not support)", said):
        return BY_TORCH
    if wrapped := re.search(r"(\w+ cannot use [\w.]+): it is on rank", said):
        return f"InputError: {wrapped[1]}"
    kind = "CaptureError" if said.startswith("CaptureError: ") else "InputError"
    first = re.split(r"[:;,.] ", said.removeprefix(f"{kind}: "))[0]
    assert "Error" not in first, said
    return f"{kind}: {first}"
