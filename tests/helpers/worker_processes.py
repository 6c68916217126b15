"""Processes that run as ranks over gloo: forks of one that has imported torch, pipec and a model."""

import contextlib
import logging
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed import TCPStore
from unsplit_reference import Inputs, StepResult

import pipec

PIPEC_TIMEOUT, TIMEOUT = 240.0, 200.0
"""Seconds: pipec gives up on a rank well before the processes are given up."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pipec.cli", "pipec.api", "transformers.models.gpt2.modeling_gpt2"])


def free_port() -> int:
    """A port where nobody listens. It is none of those that systems give to whoever asks for any port.

    One of those could be another process's before it is used here.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("100 ports from 15000 to 32000 are all in use")


def train(artifacts: Sequence[Path], inputs: Inputs, scratch: Path) -> list[str]:
    """Rank r loads ``artifacts[r]`` and makes one step; what each rank raised, or an empty text.

    ``read_outcome(scratch, num_ranks)`` gives what the step left.
    """
    given = scratch / "inputs"
    torch.save(dict(inputs), given)  # a tensor that is two arguments stays one
    arguments = [(artifact, given, scratch / f"outcome_{rank}") for rank, artifact in enumerate(artifacts)]
    return _run_ranks(_save_step, arguments, scratch)


def run_script(script: Path, arguments: Sequence[str], num_ranks: int, scratch: Path) -> str:
    """What rank 0 prints if ``torchrun`` starts the script; with no ranks, what the script alone prints."""
    return run_ranks(script, num_ranks, scratch, arguments)[0]


def run_ranks(script: Path, num_ranks: int, scratch: Path, arguments: Sequence[str] = ()) -> list[str]:
    """What each rank prints if ``torchrun`` starts the script, or with no ranks, the script alone.

    A failure fails the test.
    """
    printed = [scratch / f"printed_{rank}" for rank in range(max(num_ranks, 1))]
    given = [(path, run_main, script, arguments) for path in printed]
    errors = _run_ranks(printing, given, scratch, distributed=num_ranks > 0)
    assert errors == [""] * len(printed), "\n".join(errors)
    return [path.read_text() for path in printed]


def run_lines(text: str, num_ranks: int, scratch: Path) -> list[list[str]]:
    """The lines that each rank prints that runs a script of this text, without what pipec logs.

    With ``num_ranks`` 0, those of one process for all.
    """
    script = scratch / "script.py"
    script.write_text(text)
    printed = run_ranks(script, num_ranks, scratch)
    return [[line for line in each.splitlines() if not line.startswith("pipec: ")] for each in printed]


def _run_ranks(
    task: Callable[..., None], arguments: Sequence[tuple[Any, ...]], scratch: Path, distributed: bool = True
) -> list[str]:
    """Rank r calls ``task`` with ``arguments[r]``; what each rank raised, or an empty text."""
    store = new_store()
    processes = start_ranks(task, arguments, scratch, store.port if distributed else None)
    try:
        deadline = time.monotonic() + TIMEOUT
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        assert codes == [0] * len(processes), f"exit codes of the ranks, None for one that hung: {codes}"
    finally:
        for process in processes:
            process.kill()
    return [_error_of(scratch, rank).read_text() for rank in range(len(processes))]


def new_store() -> TCPStore:
    """What ranks meet at. They may for as long as the caller holds it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start_ranks(
    task: Callable[..., None], arguments: Sequence[tuple[Any, ...]], scratch: Path, port: int | None
) -> list[ForkServerProcess]:
    """Rank r calls ``task`` with ``arguments[r]``. With a store, it is told what ``torchrun`` tells."""
    processes = [
        forks.Process(
            target=_run, args=(_environment(rank, len(arguments), port), _error_of(scratch, rank), task, *own)
        )
        for rank, own in enumerate(arguments)
    ]
    for process in processes:
        process.start()
    return processes


def _error_of(scratch: Path, rank: int) -> Path:
    return scratch / f"error_{rank}"


def read_outcome(scratch: Path, num_ranks: int, replicated: bool = False) -> StepResult:
    """What all ranks together hold after the step. Each has the loss.

    No two have the same parameter; if it is ``replicated``, those that have it have the same bits.
    """
    ranks = [safetensors.torch.load_file(scratch / f"outcome_{rank}") for rank in range(num_ranks)]
    losses = [tensors.pop("loss") for tensors in ranks]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    merged: dict[str, dict[str, Tensor]] = {"gradients": {}, "parameters": {}, "buffers": {}}
    for name, tensor in (item for tensors in ranks for item in tensors.items()):
        kind, fqn = name.split("/")
        assert replicated or fqn not in merged[kind], f"two ranks hold {fqn}"
        assert torch.equal(merged[kind].get(fqn, tensor), tensor), f"replicas differ in {kind} of {fqn}"
        merged[kind][fqn] = tensor
    return StepResult(losses[0], **merged)


def _environment(rank: int, num_ranks: int, port: int | None) -> dict[str, str]:
    """What ``torchrun`` tells a process, if there is a store; it is held by whoever started the process."""
    own = {name: os.environ[name] for name in _OF_TEST if name in os.environ}
    if port is None:
        return own
    return own | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


_OF_TEST = ("PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START")
"""What a fork must be told of the test that started it, so that ``mutants.py`` knows which lines it runs."""


def _run(environment: Mapping[str, str], error: Path, task: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment)
    if _OF_TEST[1] in os.environ:
        import coverage

        coverage.process_startup(force=True)
    torch.set_num_threads(1)
    raised = ""
    try:
        task(*arguments)
    except Exception as caught:
        raised = f"{type(caught).__name__}: {caught}"
    error.write_text(raised)


def _save_step(artifact: Path, inputs: Path, file: Path) -> None:
    pipe = pipec.load(artifact, timeout=PIPEC_TIMEOUT)
    outcome = StepResult.of(pipe.step(**torch.load(inputs)), pipe)
    held = {
        f"{kind}/{fqn}": tensor
        for kind in ("gradients", "parameters", "buffers")
        for fqn, tensor in getattr(outcome, kind).items()
    }
    safetensors.torch.save_file({"loss": outcome.loss, **held}, file)


def printing(printed: Path, task: Callable[..., None], *arguments: Any) -> None:
    """``task`` prints into a file, with what pipec logs."""
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("pipec: %(message)s"))
        handler.addFilter(lambda record: record.levelno == logging.INFO)
        handler.addFilter(lambda record: not record.getMessage().startswith("compiling"))  # depends on time
        logging.getLogger("pipec").addHandler(handler)
        task(*arguments)


def run_main(script: Path, arguments: Sequence[str]) -> None:
    """As ``python script arguments``."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
