"""Tries the cases whose names contain a word, or all: a line for each, and a table.

``python tests/helpers/batch_case_table.py [WORDS...]``
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable

import torch
from batch_cases import CASES
from batch_comparison import BatchCase, BrokenCase, ComparisonResult, ComparisonStatus, compare_with_eager


def tried(cases: Iterable[BatchCase]) -> dict[str, ComparisonResult]:
    """What each case comes to; a line for each is printed."""
    results = {}
    for case in cases:
        begun = time.process_time()
        try:
            result = results[case.name] = compare_with_eager(case)
        except BrokenCase as error:
            print(f"BROKEN {error}", flush=True)
            continue
        mark, seconds = " " if result.allowed(case) else "!", time.process_time() - begun
        line = f"{mark} {case.name:60} {result.verdict:13} {seconds:5.2f} s  {result.message[:150]}"
        print(line, flush=True)
    return results


def table(results: dict[str, ComparisonResult]) -> str:
    """Verdicts by group, as Markdown."""
    groups = {name: name.split(":")[0] for name in results}
    counts = Counter((groups[name], result.verdict) for name, result in results.items())
    lines = [
        f"| group | cases | {' | '.join(ComparisonStatus)} |",
        "|---|" + "--:|" * (len(ComparisonStatus) + 1),
    ]
    for group in [*dict.fromkeys(groups.values())]:
        row = [counts[group, verdict] for verdict in ComparisonStatus]
        lines.append(f"| {group} | {sum(row)} | {' | '.join(map(str, row))} |")
    total = [sum(result.verdict == verdict for result in results.values()) for verdict in ComparisonStatus]
    return "\n".join([*lines, f"| all | {sum(total)} | {' | '.join(map(str, total))} |"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    chosen = [
        case for case in CASES.values() if not sys.argv[1:] or any(word in case.name for word in sys.argv[1:])
    ]
    results = tried(chosen)
    bad = [name for name, result in results.items() if not result.allowed(CASES[name])]
    print(table(results), f"\n{len(bad)} of {len(results)} are not what they may be")
