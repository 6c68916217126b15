"""The empty state of other ranks than 0 is not written over the whole one of rank 0."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch

from pipec import InputError
from pipec.runtime.whole_model import StateOfRank0


@pytest.mark.parametrize("save", [torch.save, safetensors.torch.save_file])
def test_it_refuses_to_be_written(save: object, tmp_path: Path) -> None:
    assert callable(save)
    state = StateOfRank0()
    with pytest.raises(InputError, match="rank 0 saves"):
        save(state, tmp_path / "file")
    with pytest.raises(InputError, match="rank 0 saves"):
        torch.save({"model": state, "step": 1}, tmp_path / "file")


def test_what_a_script_makes_of_it_is_empty_too() -> None:
    assert copy.deepcopy(StateOfRank0()) == {} == {name: x.clone() for name, x in StateOfRank0().items()}
