"""The tables of docs/models.md: what came of every model, and what is refused and why."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from zoo.comparison import REFUSED, RIGHT, ROUNDED, UNUSABLE, Result
from zoo.model_case import Case

UNEVEN = 1.3
"""From where on stages count as uneven: the time of the slowest over the mean."""

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def surprise(case: Case, result: Result) -> str:
    """What is not as the case says, or nothing."""
    if result.outcome == REFUSED:
        expected = f"expected {case.refused}" if case.refused else "expected to be right"
        return "" if result.cause == case.refused else f"refused, {result.cause}; {expected}"
    if not result.trained:
        return f"{result.outcome}: {result.message}"
    return f"right, but listed as refused: {case.refused}" if case.refused else ""


def replace_section(page: Path, heading: str, lines: Iterable[str]) -> None:
    """Write ``lines`` below the heading ``## heading``, in place of everything up to the next one."""
    before, _, rest = page.read_text().partition(f"## {heading}\n")
    _, mark, after = rest.partition("\n## ")
    body = "\n".join(lines)
    page.write_text(f"{before}## {heading}\n\n{body}\n{mark}{after}")


def zoo_section(families: Mapping[str, Sequence[Case]], results: Mapping[str, Result]) -> Iterator[str]:
    """A summary, and a table for each family."""
    every = list(results.values())
    trained = [result for result in every if result.trained]
    yield (
        f"{len(every)} models: {len(trained)} are right, {sum(r.outcome == RIGHT for r in trained)} of them "
        f"bit for bit; {counted(r.outcome for r in every if not r.trained) or 'none is refused'}."
    )
    yield from warnings_in(every)
    seconds, balance = [r.compile_seconds for r in trained], [r.balance for r in trained]
    yield (
        f"Compilation takes {statistics.median(seconds):.1f} s in the median, {max(seconds):.0f} s at most. "
        f"The slowest stage takes {statistics.median(balance):.2f} times the mean in the median, and "
        f"{max(balance):.2f} times at most."
    )
    uneven = [r for r in trained if r.balance >= UNEVEN]
    divisible = [r for r in uneven if r.possible < UNEVEN]
    yield (
        f"Of {len(uneven)} models the slowest stage takes {UNEVEN} times the mean or more: {_named(uneven)}. "
        f"More even stages of whole operators exist for "
        f"{f'{len(divisible)} of them: {_named(divisible)}' if divisible else 'none of them'}."
    )
    yield "\n| family | right | right to rounding | other |\n|---|---|---|---|"
    yield from (_row(family, cases, results) for family, cases in families.items())


def warnings_in(results: Sequence[Result]) -> Iterator[str]:
    """How many models that are right are warned of, and their names."""
    warned = [result for result in results if result.warned and result.trained]
    number, names = len(warned), _named(warned)
    yield f"\nOf {number} models that are right pipec says that something is not proved: {names}.\n"


def _row(family: str, cases: Sequence[Case], results: Mapping[str, Result]) -> str:
    """The models of a family by outcome."""
    found = {case.name: results[f"{family}/{case.name}"] for case in cases}
    cells = [family.replace("_", " ").capitalize()]
    for outcome in (RIGHT, ROUNDED):
        cells.append(", ".join(name for name, result in found.items() if result.outcome == outcome))
    others = [(name, result) for name, result in found.items() if not result.trained]
    cells.append(", ".join(f"{name} ({result.outcome}: {_reason(result)})" for name, result in others))
    return f"| {' | '.join(cells)} |"


def huggingface_section(results: Mapping[str, Result]) -> Iterator[str]:
    """For each kind of model the share that is right, and the rest by cause."""
    kinds = defaultdict[str, list[Result]](list)
    for name, result in results.items():
        kinds[name.partition("/")[0]].append(result)
    yield "| kind | tried | right | bit for bit | refused | other |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kind, found in {**kinds, "all": list(results.values())}.items():
        tried = [result for result in found if result.outcome != UNUSABLE]
        trained = sum(result.trained for result in tried)
        bits = sum(result.outcome == RIGHT for result in tried)
        refused = sum(result.outcome == REFUSED for result in tried)
        share = f"{trained} ({trained / max(len(tried), 1):.0%})"
        yield f"| {kind} | {len(tried)} | {share} | {bits} | {refused} | {len(tried) - trained - refused} |"
    yield from warnings_in(list(results.values()))
    yield "What is not right, by cause:\n"
    causes = defaultdict[str, list[str]](list)
    for name, result in results.items():
        if not result.trained and result.outcome != UNUSABLE:
            causes[result.cause or f"{result.outcome}: {_reason(result)}"].append(name.partition("/")[2])
    for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        yield f"* {cause}: {', '.join(names)}"


def counted(words: Iterable[str]) -> str:
    """``3 refused, 1 crash``"""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())


def _named(results: Iterable[Result]) -> str:
    return ", ".join(result.name.partition("/")[2] for result in results) or "none"


def _reason(result: Result) -> str:
    return result.cause or result.message.split("\n")[0][:240].replace("|", "/")
