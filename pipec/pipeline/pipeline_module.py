"""A pipeline as a module whose loss has a ``backward``, for loops that call one.

Where the pipeline has the loss, the step computes the gradients, and ``backward`` commits them::

    loss = module(x, target=y) step; its gradients are kept apart from .grad
    (loss / 3).backward()      .grad += gradients / 3, on each rank for itself

Where the script computes it, the outputs have a graph::

    out = module(x)            the forwards of the step
    loss_of(out).backward()    its backwards: .grad += gradients
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from pipec.errors import InputError, NoLossError
from pipec.runtime.loss_tensors import ModuleLoss
from pipec.runtime.step.optimizer_updates import HeldGradients
from pipec.runtime.waiting_forward import refuse_partial_backward
from pipec.runtime.wrappers import AcceleratedModule
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import ConvertedModule, share_registries

if TYPE_CHECKING:
    from pipec.capture.model_loss import LossPath
    from pipec.pipeline.pipeline import Pipeline


OutputsOption = Literal[False, True, "differentiable", "last"]
"""What a module returns in training: its loss, the outputs beside it, or outputs with gradients, on every
rank or on those of the last stage."""


class PipelineModule(AcceleratedModule, ConvertedModule):
    """What ``Pipeline.as_module`` returns.

    It has the submodules and other attributes of the model, and the parameters, buffers and state of the
    pipeline. In training mode, and with gradients enabled, a call runs one step. ``isinstance`` takes it for
    the model, so that a Trainer, which asks, saves it as one.
    """

    _pipe: "Pipeline"
    _model: nn.Module

    def __init__(
        self, pipe: "Pipeline", model: nn.Module, outputs: OutputsOption, loss_path: "LossPath | None"
    ) -> None:
        super().__init__()
        self._outputs, self._loss_path = outputs, loss_path
        self._without_loss = set[object]()
        self._anchor = torch.zeros((), requires_grad=True)
        share_registries(self, model)  # which modules around it list
        self.__dict__["_pipe"], self.__dict__["_model"] = pipe, model  # neither is a submodule

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["_model"]) if "_model" in self.__dict__ else type(self)

    @property
    def training(self) -> bool:
        """The model's own mode, wherever it is set."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self._model.training = mode

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """In training mode the loss, of one step, or differentiable outputs; else the output.

        A target is for ``loss_fn``.
        """
        if not self.training or not torch.is_grad_enabled():
            return self._evaluated(args, kwargs, target)
        if self._outputs in ("differentiable", "last"):
            return self._differentiable(args, kwargs, target)
        kind = len(args), *sorted(kwargs)
        if kind in self._without_loss:
            return self._differentiable(args, kwargs, target)
        try:
            return self._trained(args, kwargs, target)
        except NoLossError:
            if self._pipe.has_loss_fn or target is not None or self._loss_path is not None:
                raise
        self._without_loss.add(kind)
        return self._differentiable(args, kwargs, target)

    def _differentiable(self, args: Any, kwargs: Any, target: Any) -> Any:
        """The outputs of the model, whose backward runs that of the pipeline."""
        if target is not None:
            raise InputError(
                "target= is for loss_fn, but the script computes the loss of the outputs that the module "
                "returns; leave one of both out"
            )
        return self._pipe._differentiable_outputs(args, kwargs, self._outputs != "last")

    def _trained(self, args: Any, kwargs: Any, target: Any) -> Any:
        """The loss of a step, with the outputs where they are asked for."""
        (loss, output), gradients = self._step(args, kwargs, target)
        committing = _Commit.apply(  # type: ignore[no-untyped-call]
            self._anchor, loss, gradients, *self._pipe._tensors.trained_here()
        ).as_subclass(ModuleLoss)
        if not self._outputs:
            return committing
        output = self._explaining(output, _LOSS_OUTSIDE)
        if self._pipe.has_loss_fn:
            return committing, output
        from pipec.capture.model_loss import with_loss  # which a saved artifact does without

        return with_loss(output, self._loss_path, loss, committing)

    def _step(self, args: Any, kwargs: Any, target: Any) -> tuple[tuple[Tensor, Any], "StepGradients"]:
        """Loss and output of a step, and its gradients, which are not in ``.grad``."""
        parameters = list(self._pipe._tensors.names.unique_parameters().values())
        take = functools.partial(HeldGradients, parameters, self._pipe._steps.updates)
        before = take()
        try:
            with self._pipe.accumulate():
                outputs = bool(self._outputs)
                result: Any = self._pipe.step(*args, target=target, outputs=outputs, **kwargs)
            found = take()
        finally:
            take()
            before.add()
        report = functools.partial(self._pipe._agreement.report_backward, self._pipe.num_steps)
        loss, output = result if self._outputs else (result, None)
        return (loss.plain(), output), StepGradients(found, report)

    def _evaluated(self, args: Any, kwargs: Any, target: Any) -> Any:
        """The model's output, with its loss; with a target, what the loss function makes of it."""
        if target is None:
            result = self._pipe(*args, **kwargs)
        else:
            result = self._pipe.eval_step(*args, target=target, outputs=bool(self._outputs), **kwargs)
        return self._explaining(result, _EVALUATED) if torch.is_grad_enabled() else result

    def _explaining(self, results: Any, explanation: str) -> Any:
        """Results with a graph, as a model's would be, whose backward raises the explanation."""

        def explain(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            return _Refuse.apply(self._anchor, leaf.as_subclass(Tensor), explanation)  # type: ignore[no-untyped-call]

        return pytree.tree_map(explain, results)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if "_model" not in self.__dict__:
            raise AttributeError(name)
        found = getattr(self._model, name)
        if name in _WHOLE_MODEL_METHODS and self._pipe.ranks.world.is_distributed:
            return functools.partial(_refuse_whole_model_method, name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, if it has one. Some loops replace ``forward``, which is refused."""
        if name == "forward":
            refuse_other_forward()
        model = vars(self).get("_model")
        if model is None or name in vars(self) or hasattr(type(self), name) or name not in vars(model):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the whole model, on every rank: loops may save and load in each process."""
        return self._pipe.state_dict(*args, all_ranks=True, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As the pipeline's."""
        return self._pipe.load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As the model's. Under ``torchrun`` every rank calls it with one folder, and rank 0 writes."""

        def write(state: dict[str, Tensor]) -> None:
            given = {**kwargs, "state_dict": kwargs.get("state_dict") or state}
            cast(Any, self._model).save_pretrained(save_directory, *args, **given)

        self._pipe.write_whole(str(save_directory), write)

    def train(self, mode: bool = True) -> Self:
        """Set the model to training or evaluation mode."""
        self._pipe.train(mode)
        return self

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As the pipeline's: by the norm of the whole model."""
        return self._pipe.clip_grad_norm_(max_norm, norm_type)

    def _convert(self, function: Any, recurse: bool = True) -> Self:
        self._pipe._convert(function, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelineModule":
        return self._pipe.__deepcopy__(memo).as_module(self._outputs)

    def __reduce__(self) -> Any:
        return self._pipe.__reduce__()


def make_module(
    pipe: "Pipeline", model: nn.Module, outputs: OutputsOption, loss_path: "LossPath | None"
) -> PipelineModule:
    """The module of a pipeline. Its class has the signature of the model's, which loops look up."""
    if pipe.has_loss_fn:
        return PipelineModule(pipe, model, outputs, loss_path)

    def forward(self: PipelineModule, /, *args: Any, **kwargs: Any) -> Any:
        return PipelineModule.forward(self, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(model.forward)
    forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    like_model = type(f"PipelineOf{type(model).__name__}", (PipelineModule,), {"forward": forward})
    return cast(PipelineModule, like_model(pipe, model, outputs, loss_path))


def refuse_other_forward() -> NoReturn:
    raise InputError(
        "forward was assigned, but a step runs the forward that the pipeline has compiled. Assign it to the "
        "model, before pipec.compile. For trainers of trl that assign one there are PipecSFTTrainer and "
        "others in pipec.integrations.transformers"
    )


class StepGradients:
    """The gradients of a step, until ``backward`` adds them to ``.grad``.

    Args:
        report: called with the factor by which they were multiplied.
    """

    def __init__(self, gradients: HeldGradients, report: Callable[[Tensor], None]) -> None:
        self._gradients: HeldGradients | None = gradients
        self._report = report

    @torch.no_grad()
    def commit(self, factor: Tensor) -> None:
        """Add the gradients, multiplied by ``factor``, to ``.grad``. Raises InputError the second time."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise InputError(
                "backward() was called again on the loss of one step, whose gradients were handed over the "
                "first time; call it once, on the sum of what is made of the loss"
            )
        gradients.add(factor)
        self._report(factor)


class _Commit(torch.autograd.Function):
    """The loss, whose backward commits the gradients of its step; see ``OutputsOf``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: StepGradients, *trained: Tensor) -> Tensor:
        ctx.anchor, ctx.gradients, ctx.num_inputs = anchor, gradients, 3 + len(trained)
        ctx.save_for_backward(loss)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, ...]:
        _ = ctx.saved_tensors  # raises torch's own error if the graph was freed
        refuse_partial_backward(ctx.anchor)
        ctx.gradients.commit(*factors)
        return tuple([None] * ctx.num_inputs)


class _Refuse(torch.autograd.Function):
    """A result through which no gradient can flow; the attempt raises the explanation."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: Tensor, explanation: str) -> Tensor:
        ctx.explanation = explanation
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise InputError(ctx.explanation)


_LOSS_OUTSIDE = (
    "a loss was computed outside of the pipeline from an output of it, which has no gradients: the step has "
    'run its backward already, of the loss that the model returns. pipe.as_module(outputs="differentiable") '
    "returns outputs with gradients, the loss among them"
)

_EVALUATED = (
    "the module is in evaluation mode, in which it computes no gradients; call module.train() before the "
    "call whose loss is to have a backward"
)

_WHOLE_MODEL_METHODS = {"generate", "push_to_hub", "merge_and_unload"}
"""Methods of models that need all parameters at once."""


def _refuse_whole_model_method(name: str, *args: Any, **kwargs: Any) -> Any:
    raise InputError(
        f"{name} needs the whole model, and this process has the parameters of its stages alone; call "
        f"pipe.gather_into(model) on every rank, and then model.{name}(...) on rank 0"
    )
