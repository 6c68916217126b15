"""The model collectives of a captured model: calls of ``pipec.ops``, and ``nn.SyncBatchNorm``.

torch's ``nn.SyncBatchNorm`` asks for a process group of its own. A captured one is a batch norm like others,
until ``resolve_model_collectives`` lets it take the statistics of a round of microbatches.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pipec import ops
from pipec.capture.graph_calls import describe_call, named_arguments
from pipec.capture.operators import module_of
from pipec.errors import CaptureError, InputError

ALL_REDUCES = {torch.ops.pipec.all_reduce, ops.ALL_REDUCE}
ALL_GATHERS = {torch.ops.pipec.all_gather, ops.ALL_GATHER}
BROADCASTS = {torch.ops.pipec.broadcast, ops.BROADCAST}

MODEL_COLLECTIVES = ALL_REDUCES | ALL_GATHERS | BROADCASTS
"""Calls of ``pipec.ops``, as either front end writes them."""

_BATCH_NORMS = {F.batch_norm, torch.ops.aten.batch_norm.default}


def use_local_statistics(model: nn.Module) -> None:
    """Let each ``nn.SyncBatchNorm`` compute as without a process group, until its module is restored.

    Raises:
        CaptureError: there is a process group, and a norm has a forward of its own that may use it.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        if type(module).forward is nn.SyncBatchNorm.forward and "forward" not in vars(module):
            module.forward = types.MethodType(nn.BatchNorm1d.forward, module)  # type: ignore[method-assign]
        elif module.training and dist.is_available() and dist.is_initialized():
            raise CaptureError(
                f"{path.removeprefix('model.')} is an nn.SyncBatchNorm with a forward of its own, which may "
                "communicate while it is captured; call an nn.SyncBatchNorm in a module around it instead"
            )


def resolve_model_collectives(captured: fx.GraphModule, step: nn.Module, num_replicas: int | None) -> str:
    """Let each ``nn.SyncBatchNorm`` in a captured graph use the statistics of a round.

    Returns the first call of ``pipec.ops``, if there is one. ``num_replicas`` is None if stages may have
    different numbers of replicas.

    Raises:
        InputError: the number of replicas is not known.
        CaptureError: a call of ``pipec.ops`` is in a graph that a node calls.
    """
    calls = [node for node in captured.graph.nodes if node.target in MODEL_COLLECTIVES]
    modules = dict(step.named_modules())
    norms = [node for node in _all_nodes(captured) if node.target in _BATCH_NORMS and _is_sync(node, modules)]
    if hidden := [
        node for node in _all_nodes(captured) if node.target in MODEL_COLLECTIVES and node not in calls
    ]:
        raise CaptureError(
            f"{describe_call(hidden[0])} is called where the graph is replayed or has a backward of its own; "
            "call it outside of torch.utils.checkpoint and of autograd functions"
        )
    if num_replicas is None and (calls or norms):
        who = describe_call(calls[0]) if calls else f"the nn.SyncBatchNorm {module_of(norms[0])[0]!r}"
        raise InputError(
            f"{who} joins the replicas of a stage, of which all stages must have the same number, known "
            "beforehand: pass replicas=2, say, or stages=1"
        )
    for node in norms if num_replicas != 1 else ():
        _synchronize(node)
    for module in {node.graph.owning_module for node in norms}:
        assert module is not None
        module.recompile()
    return describe_call(calls[0]) if calls else ""


def _all_nodes(captured: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of the graph and of every graph that it calls."""
    for module in captured.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _is_sync(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    path, _ = module_of(node)
    module = modules.get(f"model.{path}".rstrip("."), modules.get(path))
    return isinstance(module, nn.SyncBatchNorm) and module.training


def _synchronize(batch_norm: fx.Node) -> None:
    arguments: Mapping[str, Any] = named_arguments(batch_norm)
    batch_norm.target = sync_batch_norm
    batch_norm.args = tuple(arguments[name] for name in _ARGUMENTS)
    batch_norm.kwargs = {}


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "momentum", "eps")


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """``F.batch_norm`` in training, over the rows of all replicas, which have equally many.

    Each replica takes mean and variance of its own rows. The variance of all is the mean of theirs and the
    variance of their means (Chan et al. 1983, "Algorithms for computing the sample variance").
    """
    exact = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    own = torch.var_mean(exact, [0, *range(2, x.ndim)], correction=0)
    variances, means = ops.all_gather(torch.stack(own).unsqueeze(0)).unbind(1)
    mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    if running_mean is not None and running_var is not None:
        count = means.shape[0] * x.numel() / x.shape[1]
        _follow(running_mean, mean, momentum)
        _follow(running_var, variance * (count / (count - 1)), momentum)
    scale = torch.rsqrt(variance + eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale = scale if weight is None else scale * weight
    result = (exact - mean.view(shape)) * scale.view(shape)
    result = result if bias is None else result + bias.view(shape)
    return result.to(x.dtype)


def _follow(running: Tensor, value: Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(value.detach(), alpha=momentum)
