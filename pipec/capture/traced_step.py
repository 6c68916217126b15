"""A call of a model to capture, the module that is traced for it, and the names of its tensors."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipec.capture.batch_inputs import positional_names
from pipec.capture.block_masks import is_mask, with_block_masks
from pipec.capture.markers import LOSS_OUTSIDE
from pipec.capture.model_call import ModelCall
from pipec.capture.model_loss import UNKNOWN_LOSS, LossPath, find_loss, result_at
from pipec.capture.variable_history import equal_dimensions, own_numbers
from pipec.errors import InputError, NoLossError
from pipec.ir import Mode, Variable
from pipec.torch_compat import pytree

CPU = torch.device("cpu")

Timed = Callable[[str], AbstractContextManager[None]]
"""Measures a block, which is a step of this name."""


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """A call of a model to capture.

    Attributes:
        call: One microbatch. A symbolic batch is traced with at least two rows, because torch traces a
            dimension of size one as a constant.
        canonical: Maps every name of a tied tensor to the one that the graph uses.
        device: The model is traced as if it were there, wherever its tensors are.
        rewrite_loss: Let the losses of microbatches, averaged by their rows, be that of the batch. Else the
            graph is of the loss as the model has it.
        may_have_tail: Let what mixes rows run once, of the rows of all microbatches.
        loss_path: Where the loss is in what the model returns, as the user says; None: it is found.
        outputs: Return the model's output besides the loss.
        variables: Other sizes, and numbers, that are to be symbolic as well. Dynamo alone can do that.
        num_replicas: How many replicas take part in the model's own collectives. None if that differs by
            stage, or is not known; a model with collectives is then refused.
        batch: The mini-batch of the call, if there is more of it. Its values decide the branches that ask for
            those of arguments.
        timed: Measures each step of the capture, by its name.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    mode: Mode
    call: ModelCall
    canonical: Mapping[str, str] = field(default_factory=dict)
    device: torch.device = CPU
    rewrite_loss: bool = True
    may_have_tail: bool = False
    loss_path: LossPath | None = None
    outputs: bool = False
    variables: Sequence[Variable] = ()
    num_replicas: int | None = 1
    batch: ModelCall | None = None
    timed: Timed = lambda step: nullcontext()

    @property
    def has_loss(self) -> bool:
        return self.mode is not Mode.FORWARD

    @property
    def adds_up(self) -> bool:
        """Whether the graph is rewritten so that the results of microbatches add up."""
        return self.rewrite_loss or not self.has_loss

    @property
    def whole_batch(self) -> ModelCall:
        return self.batch or self.call


_NO_CALL = ModelCall((), {}, split=())


class TracedStep(nn.Module):
    """The module that is traced: the model, and the loss on top of it.

    Its arguments are those of ``call``, with their rows in front. Model and loss get them as the user passes
    them: with the rows where they were, and a tensor that was passed twice again. ``batched`` tells which
    leaves are known to be split. Of the ``variables`` that are symbols, dimensions of one name are equal, and
    numbers come in 0-dim tensors, which lets a front end make symbols of them. ``loss_path`` says where the
    loss is in the results; None: it is there as ``.loss`` or under ``"loss"``, or a dry run finds it.
    """

    is_dry_run = False

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        mode: Mode,
        call: ModelCall = _NO_CALL,
        variables: Sequence[Variable] = (),
        outputs: bool = False,
        loss_path: LossPath | None = None,
    ) -> None:
        super().__init__()
        self.model, self.loss_fn, self.mode = model, loss_fn, mode
        self.loss_path, self.outputs = loss_path, outputs
        self.batched = tuple(call.batched)
        self.moved_axes = [(k, axis) for k, axis in enumerate(call.axes) if axis and not axis.is_leading]
        self.strided, self.keyword_order, self.repeated = call.strided, call.keyword_order, call.repeated
        self.equal_dimensions = tuple(map(tuple, equal_dimensions(variables)))
        self.numbers = tuple(variable.position for variable in own_numbers(variables))
        self.has_masks = any(map(is_mask, pytree.tree_leaves(call.tree, is_leaf=is_mask)))
        self.training = model.training
        transformers_caches = sys.modules.get("transformers.cache_utils")
        self.cache_types = () if transformers_caches is None else (transformers_caches.Cache,)
        self.replaceable_buffers = tuple(_replaceable_buffers(model))

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The results, and by name the new tensors of buffers that the model replaced."""
        given, structure = pytree.tree_flatten((args, kwargs, target), is_leaf=is_mask)
        leaves = [leaf for each in given for leaf in (each.leaves if is_mask(each) else (each,))]
        if self.numbers:
            leaves = [leaf.item() if i in self.numbers else leaf for i, leaf in enumerate(leaves)]
        sizes = [leaf.shape[0] for leaf, batched in zip(leaves, self.batched, strict=True) if batched]
        for size in sizes[1:]:
            torch._check(size == sizes[0])  # else each tensor has a batch symbol of its own
        for (first, axis), *others in self.equal_dimensions:
            for position, dim in others:
                if dim is None:
                    leaves[position] = leaves[first].shape[axis]
                else:
                    torch._check(leaves[position].shape[dim] == leaves[first].shape[axis])
        for position, place in self.moved_axes:  # laid out as what the user passes, which may be viewed
            restored = place.restore(leaves[position])
            leaves[position] = restored if position in self.strided else restored.contiguous()
        for position, first in self.repeated:
            leaves[position] = leaves[first]
        if self.has_masks:
            leaves = with_block_masks(given, leaves)
        if self.has_masks or self.numbers or self.equal_dimensions or self.moved_axes or self.repeated:
            args, kwargs, target = pytree.tree_unflatten(leaves, structure)
        before = [self.get_buffer(name) for name in self.replaceable_buffers]
        output = self.result(args, kwargs, target)
        after = [self.get_buffer(name) for name in self.replaceable_buffers]
        named = zip(self.replaceable_buffers, before, after, strict=True)
        return output, {name: _detached(new) for name, old, new in named if new is not old}

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        """The output; or the loss, and if there is more, a tuple of loss, logs and output.

        Where the script computes the loss, something stands for it.
        """
        if self.keyword_order:
            ordered = {name: kwargs[name] for name in self.keyword_order}
            kwargs = {**{name: x for name, x in kwargs.items() if name not in ordered}, **ordered}
        output = self._without_caches(self.model(*args, **kwargs))
        if self.mode is Mode.FORWARD:
            return output
        if self.mode is Mode.OUTPUTS:
            return _loss_outside(output), {}, _detached(output)
        if self.is_dry_run and self.loss_fn is None:
            self._find_loss(output, args, kwargs)
        loss, logs = self.loss_and_logs(output, target)
        if not logs and not self.outputs:
            return loss
        return loss, *_detached((logs, output if self.outputs else ()))

    def _without_caches(self, output: Any) -> Any:
        """The output with None for transformers' caches of keys and values, which no stage returns."""
        return pytree.tree_map(lambda leaf: None if isinstance(leaf, self.cache_types) else leaf, output)

    def loss_and_logs(self, output: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        if self.loss_fn is not None:
            found = self.loss_fn(output, target)
            has_logs = isinstance(found, tuple) and len(found) == 2 and not isinstance(found[1], Tensor)
            return found if has_logs else (found, {})
        if self.loss_path is not None:
            return _one_number(result_at(output, self.loss_path)), {}
        if isinstance(output, Tensor):
            return _one_number(output), {}
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise TypeError(UNKNOWN_LOSS)
        return _one_number(loss), {}

    def _find_loss(self, output: Any, args: Any, kwargs: Any) -> None:
        """Find the loss in the ``output`` of a dry run. Without gradients, the model is called again."""
        if self.mode is Mode.LOSS and not isinstance(output, Tensor):
            with torch.enable_grad():
                output = self._without_caches(self.model(*args, **kwargs))
        self.loss_path = find_loss(output, self.loss_path)


def refuse_returned_cache(request: CaptureRequest) -> None:
    """Raise InputError if a call whose output is returned asks for a cache of keys and values in it.

    A script that passes on the None in its place would generate another text.
    """
    call = request.call
    given = {**dict(zip(positional_names(request.model), call.args, strict=False)), **call.kwargs}
    returns_output = request.outputs or request.mode in (Mode.FORWARD, Mode.OUTPUTS)
    if returns_output and given.get("use_cache"):
        raise InputError(
            "use_cache=True asks for a cache of keys and values, which only generating text needs and no "
            "stage returns; leave it out"
        )


def _loss_outside(output: Any) -> Tensor:
    """What stands for a loss that the script computes of outputs. Raises NoLossError if there is none."""
    leaves = enumerate(pytree.tree_leaves(output), 1)  # the loss is the first of the results
    terms: list[Tensor] = [
        LOSS_OUTSIDE(x, k) for k, x in leaves if isinstance(x, Tensor) and x.is_floating_point()
    ]
    if not terms:
        raise NoLossError("no loss can be computed of what the model returns: no tensor in it has numbers")
    return functools.reduce(torch.add, terms)


def _one_number(loss: Any) -> Any:
    """A loss of shape [1] as a number. Others stay as they are."""
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.ndim and loss.numel() == 1 else loss


def _detached(tree: Any) -> Any:
    """The outputs detached: only the loss has a gradient, even if the model returns it again."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _replaceable_buffers(model: nn.Module) -> Iterator[str]:
    """The names in ``TracedStep`` of buffers that ``self.name = tensor`` may replace.

    Buffers of torch's own modules are left out: those modules change them in place.
    """
    for path, module in model.named_modules(prefix="model"):
        if not type(module).__module__.startswith("torch.nn.modules."):
            yield from (f"{path}.{name}" for name, buffer in module._buffers.items() if buffer is not None)


def named_tensors(step: TracedStep) -> dict[str, Tensor]:
    """The parameters and buffers of a traced step, a tied one by each of its names."""
    return {
        **dict(step.named_parameters(remove_duplicate=False)),
        **dict(step.named_buffers(remove_duplicate=False)),
    }


def model_names(step: TracedStep, canonical: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The name in the model of each tensor of ``step``, and the tensors that only the loss function holds.

    Raises:
        InputError: the loss function has parameters of its own to train.
    """
    tensors = named_tensors(step)
    fqns = {name: canonical.get(fqn, fqn) for name in tensors if (fqn := name.removeprefix("model.")) != name}
    of_model = {id(tensors[name]): fqn for name, fqn in fqns.items()}
    for name, tensor in tensors.items():
        fqns.setdefault(name, of_model.get(id(tensor), f"constant.{name}"))
    constants = {fqns[name]: tensor for name, tensor in tensors.items() if id(tensor) not in of_model}
    for fqn, tensor in constants.items():
        if tensor.requires_grad and step.mode.trains:
            raise InputError(
                f"{fqn.removeprefix('constant.')} would be trained, but belongs to no stage: pipec trains "
                "the parameters of the model. Make the loss a part of the model, which then returns it, or "
                "freeze it."
            )
    return fqns, constants
