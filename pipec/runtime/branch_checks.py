"""Checks in generated code that the model's branches go as they did at capture."""

from torch import Tensor

from pipec.errors import BranchError


def check_branch(condition: Tensor, outcome: bool, branch: str) -> None:
    """Raise BranchError unless ``condition`` equals ``outcome``, with which ``branch`` was captured."""
    if bool(condition) is not outcome:
        raise BranchError(
            f"{branch}: the condition is {not outcome} for this microbatch, but was {outcome} when the model "
            "was captured, and a stage goes one way only. Compute both sides and choose with torch.where, or "
            "decide outside of the model"
        )
