"""Many cases, each in a process of its own with a time limit, and their results in a file of JSON lines.

A run that was interrupted goes on where it stopped: what has a line in the file is not tried again.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from zoo.comparison import CRASH, Result, compare_case
from zoo.model_case import Case

NUM_PROCESSES = 2
PRELOADED = ["pipec", "transformers", "zoo.comparison", "zoo.families"]

Find = Callable[[str], Case]
"""Makes the case of a name; a process is told the name alone."""


def results_in(file: Path) -> dict[str, Result]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def run_all(names: Sequence[str], find: Find, file: Path, limit: float) -> dict[str, Result]:
    """Try each case that ``file`` has no result of, ``limit`` seconds at most; returns all results."""
    context, done = multiprocessing.get_context("forkserver"), results_in(file)
    context.set_forkserver_preload(PRELOADED)
    os.environ["OMP_NUM_THREADS"] = "1"
    file.parent.mkdir(parents=True, exist_ok=True)

    def run(name: str) -> None:
        process = context.Process(target=_try, args=(name, find, file))
        process.start()
        process.join(limit)
        if process.exitcode != 0 and name not in results_in(file):
            ended = f"the process ended with {process.exitcode}"
            how = f"took more than {limit:.0f} seconds" if process.is_alive() else ended
            process.kill()
            _write(Result(name, CRASH, how), file)

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        list(pool.map(run, [name for name in names if name not in done]))
    return results_in(file)


def _try(name: str, find: Find, file: Path) -> None:
    torch.set_num_threads(1)
    _write(replace(compare_case(find(name)), name=name), file)


def _write(result: Result, file: Path) -> None:
    with file.open("a") as out:
        print(json.dumps(asdict(result)), file=out)
    said = result.cause or result.message.partition("\n")[0][:150]
    print(f"{result.outcome:18} {result.name}  {said}", flush=True)
