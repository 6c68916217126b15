"""A profile: how long each node of a training graph took on one device, kept as JSON.

Nodes, also those of the backward, are listed under the forward operator that caused them, as in PipeDream's
profiler (Harlap et al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018, section 3.2).
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from pipec.errors import DAMAGED_DATA_ERRORS, InputError
from pipec.ir.json_form import read_plain

VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfiledNode:
    """One node of the graph: the operator it calls, its phase, and its median time in seconds."""

    name: str
    calls: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfiledOperator:
    """A forward operator with all the nodes it caused."""

    name: str
    module: str
    nodes: tuple[ProfiledNode, ...]

    def seconds(self, phase: str) -> float:
        return sum(node.seconds for node in self.nodes if node.phase == phase)


@dataclass(frozen=True, slots=True)
class Profile:
    """Times measured with microbatches of ``microbatch_size`` rows. Other sizes follow the cost formulas.

    ``fingerprint`` identifies the graph that was run; see ``cost.graph_fingerprint``. ``device`` and
    ``torch`` say what it ran on.
    """

    fingerprint: str
    device: str
    torch: str
    microbatch_size: int
    operators: tuple[ProfiledOperator, ...]

    def seconds(self) -> dict[str, float]:
        """Time of each node by its name."""
        return {node.name: node.seconds for operator in self.operators for node in operator.nodes}

    def save(self, path: str | Path) -> None:
        """Write the profile. Raises InputError if the file cannot be written."""
        data = {"format": "pipec profile", "version": VERSION, **asdict(self)}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError for a name that no file can have
            raise InputError(f"{path} cannot be written: {error}") from error


def load_profile(path: str | Path) -> Profile:
    """Read what ``Profile.save`` wrote. Raises InputError, which says what is wrong with the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except DAMAGED_DATA_ERRORS as error:
        raise InputError(f"{path} is no profile: {error}; make one with `pipec profile`") from error
    if not isinstance(data, dict) or data.get("format") != "pipec profile":
        raise InputError(f"{path} is no profile of pipec; make one with `pipec profile`")
    if data.get("version") != VERSION:
        raise InputError(
            f"{path} is a profile of version {data.get('version')}, and this pipec reads version {VERSION}; "
            "make it again with `pipec profile`"
        )
    try:
        data = {key: value for key, value in data.items() if key not in ("format", "version")}
        profile = read_plain(Profile, data)
    except DAMAGED_DATA_ERRORS as error:
        raise InputError(
            f"{path} is a damaged profile: {type(error).__name__} {error}; make it again with `pipec profile`"
        ) from error
    for name, seconds in profile.seconds().items():
        if not 0 <= seconds < math.inf:
            raise InputError(f"{path}: node {name} took {seconds} seconds; expected 0 or more, and finite")
    return profile
