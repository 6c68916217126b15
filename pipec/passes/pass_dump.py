"""Write the graph after every pass to ``PIPEC_DUMP``, to see what each pass changed."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from pipec.graph import TrainingGraph, is_tensor
from pipec.graph.size_text import format_size
from pipec.passes import Pass


@dataclass
class PassDump:
    """An observer that records what each pass changed, for files like ``03_insert_communication.txt``.

    A search tries many graphs; ``write`` is called only for the chosen one.
    """

    directory: Path
    _previous: frozenset[str] = field(default_factory=frozenset)
    _texts: dict[str, str] = field(default_factory=dict)

    def __call__(self, position: int, transform: Pass, graph: TrainingGraph, seconds: float) -> None:
        nodes = frozenset(node.name for node in graph.nodes)
        added, removed = sorted(nodes - self._previous), sorted(self._previous - nodes)
        self._previous = nodes
        lines = [
            f"# {transform!r}, {seconds * 1e3:.1f} ms",
            f"# {len(nodes)} nodes: {len(added)} added, {len(removed)} removed",
            "",
            *(node_line(graph, node) for node in graph.module.graph.nodes if node.op != "output"),
            *(f"result {role}: {node.name}" for role, node in graph.outputs),
        ]
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(transform).__name__).lower()
        self._texts[f"{position:02}_{name}.txt"] = "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write a file for each pass."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, text in self._texts.items():
            (self.directory / name).write_text(text, encoding="utf-8")


def requested_pass_dumps() -> list[PassDump]:
    """One observer if the environment variable ``PIPEC_DUMP`` names a directory, else none."""
    directory = os.environ.get("PIPEC_DUMP")
    return [PassDump(Path(directory))] if directory else []


def node_line(graph: TrainingGraph, node: fx.Node) -> str:
    """``mm_3: f32[4*b, 8] = aten.mm.default(x, w)    stage 1, backward, operator 12``"""
    if node.op == "placeholder":
        return f"{node.name}{_type(graph, node)} = {node.meta['role']}"
    arguments = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
    target = getattr(node.target, "__name__", node.target)
    labels = [f"{key} {node.meta[key]}" for key in ("stage", "operator") if key in node.meta]
    labels += [str(node.meta["phase"]), *(["recomputed"] if node.meta.get("recompute") else [])]
    return f"{node.name}{_type(graph, node)} = {target}({arguments})    {', '.join(labels)}"


def _type(graph: TrainingGraph, node: fx.Node) -> str:
    if not is_tensor(node):
        return ""
    value = node.meta["val"]
    sizes = ", ".join(format_size(size, graph.symbols) for size in value.shape)
    return f": {str(value.dtype).removeprefix('torch.')}[{sizes}]"
