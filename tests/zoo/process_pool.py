"""Many cases, each in a process of its own with a time limit, and their results in a file of JSON lines.

A run that was interrupted goes on where it stopped: what has a line in the file is not tried again.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

from zoo.comparison import CRASH, Result, compare_case
from zoo.model_case import Case

PRELOADED = ("pipec", "transformers", "zoo.comparison", "zoo.families")

Find = Callable[[str], Case]
"""Makes the case of a name; a process is told the name alone."""


def results_in(file: Path) -> dict[str, Result]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def run_all(
    names: Sequence[str], find: Find, file: Path, limit: float, num_processes: int = 2
) -> dict[str, Result]:
    """Try each case that ``file`` has no result of, ``limit`` seconds at most; returns all results."""
    done = results_in(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPoolExecutor(num_processes) as pool, file.open("a") as out:
        waiting = [pool.submit(_in_process, context, name, find, limit) for name in names if name not in done]
        for number, future in enumerate(as_completed(waiting), 1):
            result = future.result()
            print(json.dumps(asdict(result)), file=out, flush=True)
            said = result.cause or result.message.partition("\n")[0][:150]
            print(f"{number:3} of {len(waiting)}  {result.outcome:18} {result.name}  {said}", flush=True)
    return results_in(file)


def _in_process(
    context: multiprocessing.context.ForkServerContext, name: str, find: Find, limit: float
) -> Result:
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, name, find))
    process.start()
    theirs.close()
    try:
        if not mine.poll(limit):
            return Result(name, CRASH, f"took more than {limit:.0f} seconds")
        result: Result = mine.recv()
        return result
    except EOFError:
        process.join()
        return Result(name, CRASH, f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _child(results: Connection, name: str, find: Find) -> None:
    import torch

    torch.set_num_threads(1)
    result = compare_case(find(name))
    results.send(replace(result, name=name))
