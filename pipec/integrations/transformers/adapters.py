"""Adapters of PEFT on a model whose tensors are on several ranks."""

from pathlib import Path
from typing import Any

from pipec.errors import InputError


def is_peft_model(model: object) -> bool:
    """Whether it is a model with adapters; a module of a pipeline is what its model is."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def load_adapter(module: Any, folder: str | Path, adapter: str = "default") -> None:
    """Load the weights that ``save_pretrained`` of PEFT wrote into an adapter that the model has.

    It does what ``PeftModel.load_adapter`` does with such an adapter. Every rank calls it.

    Args:
        module: that of a pipeline (``pipe.as_module()``, ``trainer.model``).
        folder: with the file ``adapter_model.safetensors``.
        adapter: the name of the adapter.

    Raises:
        InputError: the folder is that of an adapter of another configuration; what fits was loaded.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    weights = load_peft_weights(str(folder), device="cpu")
    found = set_peft_model_state_dict(module, weights, adapter)
    if found.unexpected_keys:
        raise InputError(
            f"{folder} has weights that adapter {adapter!r} has not: {found.unexpected_keys}; pass the name "
            "of the adapter that was saved there, or make one of the same configuration"
        )
