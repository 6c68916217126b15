"""Trainers of Lightning whose model is a pipeline::

    trainer = lightning.Trainer(strategy=PipecStrategy(devices=4), devices=1, ...)

In each process that ``torchrun`` starts, or in one alone. To Lightning every process trains alone, on the
batches that one process would train on; pipec divides these among stages and replicas.
"""

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torchmetrics import Metric

from pipec.errors import InputError
from pipec.integrations import (
    clip_grad_norm,
    module_of,
    process_groups,
    refuse_optimizer,
    wait_for_members,
)
from pipec.options import Options
from pipec.pipeline import Pipeline
from pipec.pipeline.pipeline_module import PipelineModule
from pipec.runtime.processes.launch import world

__all__ = ["PipecStrategy"]


class PipecStrategy(SingleDeviceStrategy):
    """Trains the one submodule of a LightningModule that has parameters, as a pipeline.

    That submodule, whatever its name, becomes ``pipe.as_module()`` when the Trainer sets it up. It may be a
    pipeline already, or a module of one, as ``configure_model`` makes it. ``training_step`` takes the loss
    from it: what it returns, or with ``loss_fn``, what ``self.model(x, target=y)`` returns. Every rank makes
    the calls that the Trainer makes; rank 0 alone logs, and writes checkpoints, which plain Lightning loads.

    Args:
        given: the options of ``pipec.compile``, but ``optimizer``: ``configure_optimizers`` has that.

    Raises:
        InputError: an option does not fit.
    """

    strategy_name = "pipec"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        refuse_optimizer(given)
        Options.of(given)
        self._options = given
        self._group = given.get("group")
        self.global_rank = world(self._group).rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))

    @property
    def root_device(self) -> torch.device:
        """Where batches are put: the GPU of this process, or the CPU."""
        on_gpu = getattr(self.accelerator, "name", lambda: "")() == "cuda"
        return torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the process group, which is made if there is none."""
        super().setup_environment()
        if world().is_distributed and not dist.is_initialized():
            dist.init_process_group("nccl" if self.root_device.type == "cuda" else "gloo")
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010, which it declares nowhere

    def setup(self, trainer: lightning.Trainer) -> None:
        self._take_precision(trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        trainer._accelerator_connector.use_distributed_sampler = False  # pipec divides rows
        super().setup(trainer)

    def _take_precision(self, trainer: lightning.Trainer) -> None:
        """Let pipec's ``precision`` do what Lightning's autocast would."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            if plugin.precision != "bf16-mixed":
                raise InputError(
                    f"precision={plugin.precision!r} scales losses, and skips updates on each rank for "
                    'itself; pass precision="bf16-mixed" to the Trainer'
                )
            self._options = {"precision": "bf16-mixed", **self._options}
            self.precision_plugin = Precision()

    def _clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.lightning_module is not None
        parameters = self.precision_plugin.main_params(optimizer)
        clip_grad_norm(self.lightning_module.children(), parameters, clip_val)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The LightningModule, in which a pipeline has taken the place of the model."""
        with_parameters = {
            name: child for name, child in model.named_children() if any(True for _ in child.parameters())
        }
        if len(with_parameters) != 1 or any(True for _ in model.parameters(recurse=False)):
            found = ", ".join(with_parameters) or "none"
            raise InputError(
                f"{type(model).__name__} has its parameters in {found}, or itself, but a pipeline is made of "
                "one module that computes the loss; put them into one, whose forward returns the loss or "
                "takes what loss_fn needs, and assign it in __init__ or configure_model"
            )
        ((name, child),) = with_parameters.items()
        setattr(model, name, module_of(child, self._options))
        for metric in model.modules():
            if isinstance(metric, Metric):  # which would add up what all ranks have of the same rows
                metric.distributed_available_fn = bool
        return model

    @property
    def _pipes(self) -> dict[str, Pipeline]:
        """The pipeline of the LightningModule, once there is one, by its name there."""
        children = () if self.lightning_module is None else self.lightning_module.named_children()
        return {name: x.__dict__["_pipe"] for name, x in children if isinstance(x, PipelineModule)}

    def model_to_device(self) -> None:
        """Move what is not of the pipeline, which has places for its own."""
        assert self.lightning_module is not None
        for child in self.lightning_module.children():
            if not any(True for _ in child.parameters()):
                child.to(self.root_device)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        wait_for_members(self._group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``; over a mesh of two axes, the first one's."""
        found, groups = [obj], process_groups(self._group)
        assert src == 0 or len(groups) < 2
        for group in groups:
            dist.broadcast_object_list(found, group=group, group_src=src)
        return found[0]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what plain Lightning loads, each rank its own part."""
        if not self._pipes:
            return super().load_model_state_dict(checkpoint, strict)
        assert self.lightning_module is not None
        rest = dict(checkpoint["state_dict"])
        for name, pipe in self._pipes.items():
            prefix = f"{name}."
            own = {key: rest.pop(key) for key in [*rest] if key.startswith(prefix)}
            pipe.load_state_dict({key.removeprefix(prefix): value for key, value in own.items()}, strict)
        missing, unexpected = self.lightning_module.load_state_dict(rest, strict=False)
        others = [key for key in missing if not key.startswith(tuple(f"{name}." for name in self._pipes))]
        if strict and (others or unexpected):
            raise InputError(f"the checkpoint lacks {others} and has {unexpected} besides, of this module")
        return None

    def teardown(self) -> None:
        """End the training. The pipeline keeps its stages."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


StrategyRegistry.register("pipec", PipecStrategy, description="stages of one model on several devices")
