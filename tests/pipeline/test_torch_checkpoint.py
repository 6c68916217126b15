"""``torch.distributed.checkpoint`` of a pipeline: each rank writes and reads its own part."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from worker_processes import run_ranks

import pipec
from pipec.errors import InputError

SCRIPT = Path(__file__).parents[1] / "helpers" / "dcp_script.py"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.slow
def test_each_rank_saves_its_part_and_any_layout_loads_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")

    def found(num_ranks: int, *arguments: str) -> list[Any]:
        printed = run_ranks(SCRIPT, num_ranks, tmp_path, [folder, *arguments])
        return [json.loads(each.splitlines()[-1]) for each in printed]

    saved = found(4, "save", "own")
    loss, files = saved[0]
    names = [name for own in files.values() for name in own]
    assert len(files) == 4
    assert len(names) == len({*names})
    assert all(len(own) <= 12 for own in files.values())
    for num_ranks, *when in ((2, "own"), (4, "after"), (0,)):
        for each, _ in found(num_ranks, "load", *when):
            assert each == pytest.approx(loss, abs=1e-12)


def test_a_plain_model_loads_it(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    pipe = pipec.compile(model, 1, loss_fn=nn.functional.mse_loss)
    dcp.save({"app": pipe}, checkpoint_id=tmp_path)
    dcp.load({"app": other.state_dict()}, checkpoint_id=tmp_path)
    assert torch.equal(other.weight, model.weight)


def test_the_state_of_an_optimizer_is_not_left_out_unsaid(tmp_path: Path) -> None:
    pipe = pipec.compile(nn.Linear(3, 3), 1, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(Exception, match="without the state of its optimizer") as raised:
        dcp.save({"app": pipe}, checkpoint_id=tmp_path)
    assert isinstance(raised.value, InputError)
