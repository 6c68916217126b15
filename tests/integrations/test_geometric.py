"""Graphs of PyTorch Geometric, merged into one: their batches have no dimension that all tensors share."""

import copy
import logging
from pathlib import Path
from typing import Any

import geometric
import pytest
import torch
from geometric import batches, compare, differences, make_model
from torch import nn
from worker_processes import run_ranks

import pipec

loss_fn = nn.functional.cross_entropy


@pytest.mark.parametrize("kind", geometric.MODELS)
def test_each_batch_and_lists_of_them_train_as_plain_pytorch(kind: str) -> None:
    compare(kind, devices=2)


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    printed = run_ranks(Path(geometric.__file__), 2, tmp_path, [])
    assert [each.splitlines()[-1] for each in printed] == ["equal"] * 2


def test_every_size_is_a_symbol_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipec.compile(make_model(), devices=2, microbatches=1, loss_fn=loss_fn)
    first, second, *others = batches(8)
    for arguments, target in (first, second):
        pipe.step(**arguments, target=target)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pipec"):
        for arguments, target in others:
            pipe.step(**arguments, target=target)
    assert not [each.message for each in caplog.records if "compiling" in each.message]
    assert len({variable.name for variable in pipe.plan.variables}) == 3  # nodes, edges, graphs
    assert not pipe.plan.fixed_sizes


@pytest.mark.parametrize("step", ["outputs", "eval_step", "module", "outside", "stream"])
def test_other_ways_to_run_a_batch(step: str) -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {} if step == "outside" else {"loss_fn": loss_fn}
    pipe = pipec.compile(model, devices=2, microbatches=1, **options)
    module = pipe.as_module()
    for arguments, target in batches(3):
        output = plain(**arguments)
        expected = loss_fn(output, target)
        plain.zero_grad()
        expected.backward()
        pipe.zero_grad()
        match step:
            case "outputs":
                loss, found = pipe.step(**arguments, target=target, outputs=True)
                torch.testing.assert_close(found, output.detach())
            case "eval_step":
                loss = pipe.eval_step(**arguments, target=target)
            case "module":
                loss = module(**arguments, target=target)
                loss.backward()
            case "outside":
                loss = loss_fn(module(**arguments), target)
                loss.backward()
            case "stream":
                [loss] = pipe.stream([{**arguments, "target": target}])
        torch.testing.assert_close(loss.detach(), expected.detach())
        if step != "eval_step":
            assert differences(pipe, plain) < 1e-12


def test_a_saved_artifact_takes_batches(tmp_path: Path) -> None:
    pipe = pipec.compile(make_model(), devices=2, microbatches=1, loss_fn=loss_fn)
    first, second, last = batches(3)
    for arguments, target in (first, second):
        pipe.step(**arguments, target=target)
    pipe.save(tmp_path / "artifact", tensors=True)
    loaded = pipec.load(tmp_path / "artifact")
    arguments, target = last
    torch.testing.assert_close(
        loaded.step(**arguments, target=target), pipe.eval_step(**arguments, target=target)
    )
