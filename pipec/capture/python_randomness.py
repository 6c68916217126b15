"""Refuses models that draw random numbers of Python or numpy, which a capture would freeze."""

import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from pipec.capture.attributes import non_torch_generators
from pipec.errors import CaptureError

_MOMENT = 0.02
"""Seconds in which other threads that draw all the time will have drawn."""


class NonTorchGenerators:
    """The generators of Python and numpy that ``traced`` may use: global ones, and its own."""

    def __init__(self, traced: nn.Module) -> None:
        self._held = non_torch_generators(traced)
        self._all = {"Python's random module": random, "numpy's random module": np.random, **self._held}
        self._before = {name: pickle.dumps(_state(generator)) for name, generator in self._all.items()}

    def refuse_non_torch_draws(self, run: Callable[[], object], suspected: bool) -> None:
        """Raise CaptureError if ``run``, which calls the model, draws from a generator.

        It is called only if a generator moved during capture, if the model holds one, of which capture may
        use a copy, or if it is ``suspected``. A generator that another thread moves meanwhile is passed over.
        """
        if not (suspected or self._held or self._drawn()):
            return
        self._restore()
        time.sleep(_MOMENT)
        of_others = self._drawn()
        run()
        drawn = [name for name in self._drawn() if name not in of_others]
        self._restore()
        if drawn:
            raise CaptureError(
                f"the model draws from {drawn[0]}. A pipeline would repeat in every step what was drawn when "
                "it was captured. Draw with torch, and choose with torch.where: "
                "x = torch.where(torch.rand(()) < p, x, layer(x)). Or draw before the step, and pass a tensor"
            )

    def _drawn(self) -> list[str]:
        """The names of the generators that have moved."""
        return [name for name, x in self._all.items() if pickle.dumps(_state(x)) != self._before[name]]

    def _restore(self) -> None:
        for name, state in self._before.items():
            _set_state(self._all[name], pickle.loads(state))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)
