"""The models, a file for each family. Each file has its ``CASES``, and its first line names the family."""

import importlib
from collections.abc import Mapping

from zoo.model_case import Case

FAMILIES = (
    *("decoders", "encoders", "sequences", "mixtures_of_experts", "state_space", "vision", "speech"),
    *("multimodal", "diffusion", "convolutional", "graphs", "recurrent", "generative", "physics"),
    *("recommendation", "reinforcement", "others"),
)


def cases() -> Mapping[str, list[Case]]:
    """All models of the zoo, by family."""
    return {name: list(importlib.import_module(f"zoo.families.{name}").CASES) for name in FAMILIES}


def find(name: str) -> Case:
    """The case of ``family/name``."""
    family, _, own = name.partition("/")
    return next(case for case in cases()[family] if case.name == own)
