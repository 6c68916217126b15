"""Calls of a pipeline: ranks compare digests of them, one is made at a time, and loggers get numbers."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_reference import batches, model
from torch import Tensor, nn

import pipec
from pipec.errors import InputError
from pipec.runtime.messages.call_description import describe_leaf, values_digest

# digests of tensors

TENSORS = {
    "text": torch.arange(24).view(2, 3, 4),
    "half": torch.arange(8).to(torch.bfloat16),
    "one": torch.tensor(3.0),
    "large": torch.arange(20_000.0),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "every second": torch.arange(9)[::2],
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_digest_is_of_values_however_they_are_read(tensor: Tensor) -> None:
    other = nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
    assert values_digest(other) == values_digest(tensor)
    other.detach().view(-1)[-1] += 1
    assert describe_leaf(other) != describe_leaf(tensor)
    if tensor.is_complex():
        assert values_digest(tensor.conj()) != values_digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_a_digest_sees_every_element_and_no_layout_of_the_storage(dtype: torch.dtype) -> None:
    count = 80_003
    values = (torch.arange(count) % 2).to(dtype)
    expected = values_digest(values)
    shifted = torch.zeros(count + 3, dtype=dtype)[3:]
    assert values_digest(shifted.copy_(values)) == expected
    for position in (1, 40_001, count - 2):  # and in the bytes behind the last row
        changed = values.clone()
        changed[position] = 0
        assert values_digest(changed) != expected


def test_a_digest_of_a_large_batch_sees_rows_that_change_places_and_signs() -> None:
    tokens = torch.randint(50_000, (64, 1024), generator=torch.Generator().manual_seed(1))
    one_hot = nn.functional.one_hot(tokens[:, 0] % 1000, 2048)
    numbers = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [
        (tokens, tokens[torch.arange(64).roll(8)]),
        (one_hot, one_hot[[1, 0, *range(2, 64)]]),
        (tokens, tokens[:, [1, 0, *range(2, 1024)]]),
        (numbers, -numbers),  # changes the highest bit of each word of 8 bytes
    ]
    for first, second in pairs:
        assert values_digest(first) != values_digest(second.contiguous())


# one call at a time


@pytest.mark.slow
def test_a_pipeline_that_is_dropped_leaves_nothing_of_its_model() -> None:
    """Neither parameters nor their gradients: the next model may need all the memory of a GPU."""
    dropped = model()
    pipe = pipec.compile(dropped, 2, microbatches=2)
    pipe.step(**next(batches(1)))
    weight = next(dropped.parameters())
    assert weight.grad is not None
    alive = [weakref.ref(each) for each in (dropped, weight, weight.grad.untyped_storage())]
    del dropped, pipe, weight
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_calls_of_other_threads_are_refused(tmp_path: Path) -> None:
    """While a step runs, which waits here for a batch of the stream that it is in."""
    pipe = pipec.compile(model(), 2, microbatches=2, optimizer=partial(torch.optim.AdamW, lr=0.01))
    (batch,) = batches(1)
    others: dict[str, Callable[[], Any]] = {
        "step": lambda: pipe.step(**batch),
        "forward": lambda: pipe(**batch),
        "eval_step": lambda: pipe.eval_step(**batch),
        "prepare": lambda: pipe.prepare(**batch),
        "stream": lambda: next(pipe.stream(batches(1))),
        "join": pipe.join,
        "drain": pipe.drain,
        "train": pipe.train,
        "save": lambda: pipe.save(tmp_path / "artifact"),
        "save_checkpoint": lambda: pipe.save_checkpoint(tmp_path / "checkpoint"),
        "load_checkpoint": lambda: pipe.load_checkpoint(tmp_path / "checkpoint"),
        "state_dict": pipe.state_dict,
        "full_state_dict": pipe.full_state_dict,
        "load_state_dict": lambda: pipe.load_state_dict({}),
        "gather_into": lambda: pipe.gather_into(model()),
        "_convert": pipe.double,
        "optimizer": pipe.optimizer.state_dict,
    }
    refused = dict[str, str]()

    def reading() -> Iterator[Any]:
        for name, call in others.items():
            try:
                call()
            except InputError as error:
                refused[name] = str(error)
        yield from batches(2)

    assert len(list(pipe.stream(reading()))) == 2
    assert refused.keys() == others.keys()
    assert refused["step"].startswith("step was called on thread 'pipec batches' while stream ran on another")
    assert list(pipe.stream(batches(2)))
    assert not list(tmp_path.iterdir())


# metrics


def test_metrics_are_those_of_the_plan_and_of_the_steps() -> None:
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    options: dict[str, Any] = {"microbatches": 4, "on_nan": "skip"}
    pipe = pipec.compile(nn.Sequential(*layers), 2, loss_fn=nn.functional.mse_loss, **options)
    x, target = torch.randn(8, 4), torch.ones(8, 3)
    assert pipec.metrics(pipe) == {"steps": 0, "skipped_steps": 0}
    with pipe.trace() as trace:
        pipe.step(x, target=target)
        pipe.step(x * torch.inf, target=target)
    found = pipec.metrics(pipe)
    sent, losses = 2 * 8 * 6 * 4, 4 * 4  # activations and their gradients; of each microbatch, to rank 0
    assert (found["steps"], found["skipped_steps"]) == (2, 1)
    assert sent <= found["bytes_sent"] <= sent + 2 * losses
    assert found["predicted_seconds"] == pipe.simulate().makespan
    assert found["predicted_idle_share"] == pipe.simulate().bubble_rate
    assert [found[f"peak_bytes/rank_{rank}"] for rank in (0, 1)] == [x.peak_bytes for x in pipe.memory()]
    assert 0 < found["step_seconds"] < 60
    traced = pipec.metrics(pipe, trace)
    assert traced["idle_share"] == trace.median_step().bubble_rate
    assert traced["step_seconds"] == trace.median_step().makespan
