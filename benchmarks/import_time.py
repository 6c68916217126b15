"""Import time: what each name of pipec adds to ``import torch``, in seconds of the processor.

``import pipec`` loads nothing; a name loads its part when it is first used. Statements take turns, each in a
process of its own, and the median counts.
"""

import argparse
import statistics
import subprocess
import sys

STATEMENTS = {
    "import torch": "import torch",
    "import pipec": "import pipec",
    "import torch, pipec": "import torch, pipec",
    "pipec.load": "import pipec; pipec.load",
    "pipec.compile": "import pipec; pipec.compile",
    "pipec --version": "from pipec.cli import app; app(['--version'], standalone_mode=False)",
}

_MEASURE = "import resource, sys; exec(sys.argv[1]); print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"


def processor_seconds(statement: str) -> float:
    """The processor time of a process that runs ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, statement], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(runs):
        for name, statement in STATEMENTS.items():
            seconds[name].append(processor_seconds(statement))
    torch = statistics.median(seconds["import torch"])
    print("| statement | seconds | of `import torch` |\n|---|---|---|")
    for name, each in seconds.items():
        print(f"| `{name}` | {statistics.median(each):.2f} | {statistics.median(each) / torch:.2f} |")


if __name__ == "__main__":
    main()
