"""``python -m zoo [FAMILY[/MODEL] ...]`` tries the models of the zoo. All of them make docs/models.md anew.

The exit status is 1 if a model is wrong or crashes, is refused without being listed as refused, or is listed
and right.
"""

import sys
from pathlib import Path

from zoo.families import cases, find
from zoo.process_pool import run_all
from zoo.report import PAGE, replace_section, surprise, zoo_section

RESULTS = Path("build") / "zoo.jsonl"
LIMIT = 1800.0
"""Seconds after which a model is taken to hang; one takes 10 to 300, by the load of the machine."""


def main(wanted: tuple[str, ...]) -> int:
    families = cases()
    names = [f"{family}/{case.name}" for family, members in families.items() for case in members]
    chosen = [name for name in names if name.startswith(wanted or ("",))]
    RESULTS.unlink(missing_ok=True)
    results = run_all(chosen, find, RESULTS, LIMIT)
    if not wanted:
        replace_section(PAGE, "The zoo", zoo_section(families, results))
    surprises = {name: text for name, each in results.items() if (text := surprise(find(name), each))}
    print(*(f"\n{name}: {text}" for name, text in surprises.items()), sep="\n")
    return bool(surprises)


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
