"""What ranks compare of a call, and what the call returns."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipec.capture.call import Call
from pipec.compiler.compiler import Compiled
from pipec.runtime.facts import Facts, leaf_fact
from pipec.torch_compat import pytree


def call_facts(call: Call, kind: str) -> Facts:
    """What the ranks must have in common; where nothing is run, that does not include values."""
    facts = [leaf_fact(leaf, values=kind != "prepare") for leaf in call.leaves]
    return {"rows": str(call.batch_size), **dict(zip(call.paths, facts, strict=True))}


def output_of(compiled: Compiled, results: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """The model's output, in the structure that it has."""
    assert compiled.output_spec is not None
    return pytree.tree_unflatten([results.get(name) for name in names], compiled.output_spec)
