"""Loops with Accelerate, whose model is a pipeline::

    accelerator = PipecAccelerator(devices=4, gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

To Accelerate every process trains alone, on the batches that one process would train on; pipec divides these
among stages and replicas.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator, DistributedType, PartialState
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.integrations import clip_grad_norm, module_of, refuse_optimizer, replicas_of, wait_for_members
from pipec.options import OPTIONS
from pipec.pipeline.pipeline_module import PipelineModule
from pipec.runtime.processes.launch import world

__all__ = ["PipecAccelerator"]

_PRECISIONS = {"no": None, "bf16": "bf16-mixed"}


class PipecAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose ``prepare`` makes a pipeline of the model, and returns ``pipe.as_module()`` of it.

    A pipeline, or a module of one, is taken as it is. ``is_main_process`` is true on rank 0 alone. Every rank
    makes the calls that a loop makes: steps, ``clip_grad_norm_``, ``save_state``, ``get_state_dict``.

    Args:
        given: the options of ``pipec.compile``, and the arguments of ``Accelerator``. ``mixed_precision`` is
            pipec's ``precision``, and the ``dp_replicate_size`` of a ``parallelism_config`` the ``replicas``.
            The script's own optimizer makes the updates.

    Raises:
        InputError: an option does not fit, or leaves no update to the script.
    """

    def __init__(self, **given: Any) -> None:
        self._options = {name: given.pop(name) for name in [*given] if name in OPTIONS}
        refuse_optimizer(self._options)
        if given.get("split_batches") or given.get("dispatch_batches"):
            raise InputError(
                "split_batches and dispatch_batches divide batches among processes, but pipec divides them "
                "among replicas; leave them out"
            )
        precision = given.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in _PRECISIONS:
            raise InputError(
                f"mixed_precision is {precision!r}; expected 'no' or 'bf16', for the script's own optimizer "
                "makes the updates, and pipec scales losses where the programs make them"
            )
        if _PRECISIONS[precision] is not None:
            self._options.setdefault("precision", _PRECISIONS[precision])
        if (parallelism := given.pop("parallelism_config", None)) is not None:
            self._options.setdefault("replicas", replicas_of(parallelism))
        self._group = self._options.get("group")
        state = PartialState(cpu=bool(given.get("cpu")))
        state.num_processes, state.distributed_type = 1, DistributedType.NO
        state.process_index = world(self._group).rank
        super().__init__(mixed_precision="no", **given)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The module of the pipeline of a model; a module without parameters as it is."""
        module = module_of(model, self._options) if any(True for _ in model.parameters()) else model
        if module not in self._models:
            self._models.append(module)
        return module

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As of Accelerate, by the norm over all stages of a model. Every rank calls it."""
        return clip_grad_norm(self._models, parameters, max_norm, norm_type)

    def wait_for_everyone(self) -> None:
        """Wait for the other ranks."""
        wait_for_members(self._group)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs what is inside a ``with`` before the others do."""
        yield from self._first(self.is_main_process)

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first rank of each host runs what is inside a ``with`` before its others do."""
        yield from self._first(self.is_local_main_process)

    def _first(self, is_main: bool) -> Iterator[None]:
        if not is_main:
            self.wait_for_everyone()
        yield
        if is_main:
            self.wait_for_everyone()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The state of the whole model on rank 0, and an empty dict on the others. Every rank calls this."""
        if isinstance(model, PipelineModule):
            return model.__dict__["_pipe"].state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As of Accelerate. Every rank calls this, sees the same folder, and waits until all is written."""
        saved = super().save_state(output_dir, *args, **kwargs)
        self.wait_for_everyone()
        return saved
