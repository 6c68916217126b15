"""Hugging Face's caches of keys and values, which only generating text reads: training makes none."""

import contextlib
from collections.abc import Iterator

from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.errors import InputError


def refuse_kv_cache(call: ModelCall) -> None:
    """Raise InputError if the call asks for a cache."""
    if call.kwargs.get("use_cache"):
        raise InputError(
            "use_cache=True asks for a cache of keys and values, which only generating text needs and no "
            "stage returns; leave it out"
        )


@contextlib.contextmanager
def without_kv_cache(model: nn.Module) -> Iterator[None]:
    """Turn off caches in the configurations of a model."""
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config"))}
    asking = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True
