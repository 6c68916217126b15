"""nn.Module to TrainingGraph: one graph of forward, loss and backward, every node knowing its operator.

Dynamo's full-graph capture comes first: it keeps torch-level operators, variable names, source lines and
custom backwards. Non-strict ``torch.export`` serves where Dynamo cannot. Both are asked for a symbolic
batch, and then, with a logged reason, for a fixed one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipec import torch_compat
from pipec.capture.call import Call
from pipec.capture.diagnosis import brief, capture_error
from pipec.capture.normalize import Traced, training_graph
from pipec.capture.operators import number_operators
from pipec.errors import CaptureError, InputError, PipecError
from pipec.graph import Gradient, TrainingGraph
from pipec.ir import Mode
from pipec.torch_compat import Captured, pytree

__all__ = ["Call", "capture"]

log = logging.getLogger("pipec")

CPU = torch.device("cpu")

FrontEnd = Callable[[nn.Module, tuple[Any, ...], Sequence[Tensor]], Captured]

FRONT_ENDS: tuple[tuple[str, FrontEnd], ...] = (
    ("Dynamo", torch_compat.capture_with_dynamo),
    ("torch.export", torch_compat.capture_with_export),
)


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    mode: Mode,
    call: Call,
    canonical: Mapping[str, str] | None = None,
    device: torch.device = CPU,
    symbolic: bool = True,
) -> TrainingGraph:
    """Trace ``call`` of ``model`` into one graph. The model is left as it was.

    A model on meta is traced as if it were on ``device``. Unless ``symbolic``, the graph is for as many rows
    as the call has and no others, and takes half the time to make.

    ``call`` holds one microbatch. A symbolic batch is traced with at least two rows, because a dimension of
    size one is always traced as a constant. ``canonical`` maps every name of a tied tensor to the one to use.

    Raises CaptureError, naming the model's source line, when no front end can capture the model, and
    InputError when the model fails on these arguments or its loss is not one number.
    """
    if mode is Mode.TRAIN:
        _check_gradients(model, call)
    step = _Step(model, loss_fn, mode, call.batched())
    tracer = _Tracer(step, mode, call, canonical or {}, device)
    errors: list[Exception] = []
    with torch_compat.quiet(), torch_compat.unchanged(step), torch.set_grad_enabled(mode is Mode.TRAIN):
        torch_compat.leave_meta(step, device)
        for name, front_end in FRONT_ENDS:
            for any_size in (True, False) if symbolic else (False,):
                try:
                    graph = tracer.trace(front_end, any_size)
                except PipecError:
                    raise
                except Exception as error:
                    log.info(
                        "%s%s failed: %s", name, " with a symbolic batch" if any_size else "", brief(error)
                    )
                    errors.append(error)
                    continue
                if mode is Mode.TRAIN:
                    _check_trained(graph)
                if graph.batch is None and symbolic:
                    log.warning(
                        "microbatches of %d rows are compiled on their own, and so is every other size: %s",
                        graph.batch_size,
                        brief(errors[0]),
                    )
                return graph
        raise capture_error(errors) from errors[0]


def _check_gradients(model: nn.Module, call: Call) -> None:
    """Refuse what the user expects of gradients and a pipeline would not do."""
    for path, leaf in zip(call.paths, call.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise InputError(
                f"{path} requires a gradient, but pipec computes gradients of parameters alone; "
                f"pass it detached, or make it a parameter of the model"
            )
    for fqn, parameter in model.named_parameters():
        if torch_compat.has_gradient_hook(parameter):
            raise CaptureError(
                f"{fqn} has a hook on its gradient, which a pipeline would not call; remove it, "
                "and change the gradient between step() and the optimizer's step"
            )


def _check_trained(graph: TrainingGraph) -> None:
    """Refuse a step that would train nothing, where eager torch refuses ``loss.backward()``."""
    if not any(isinstance(result, Gradient) for result in graph.results):
        raise InputError(
            "no parameter would get a gradient: none that the loss depends on has requires_grad set. "
            "Set it on those to train, or use eval_step() for the loss alone"
        )


class _Step(nn.Module):
    """What is traced: the model, and on top of it the loss."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, mode: Mode, batched: Sequence[bool]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.mode = mode
        self.batched = tuple(batched)
        self.training = model.training
        self.replaceable = tuple(_replaceable_buffers(model))

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The loss, or the output, and by name the buffers that were replaced by other tensors."""
        leaves = pytree.tree_leaves((args, kwargs, target))
        sizes = [leaf.shape[0] for leaf, batched in zip(leaves, self.batched, strict=True) if batched]
        for size in sizes[1:]:
            torch._check(size == sizes[0])  # else each tensor would have a batch symbol of its own
        before = [self.get_buffer(name) for name in self.replaceable]
        output = self.result(args, kwargs, target)
        after = [self.get_buffer(name) for name in self.replaceable]
        named = zip(self.replaceable, before, after, strict=True)
        return output, {name: new for name, old, new in named if new is not old}

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.mode is Mode.FORWARD:
            return output
        if self.loss_fn is not None:
            return self.loss_fn(output, target)
        if isinstance(output, Tensor):
            return output
        return output["loss"] if isinstance(output, Mapping) else output.loss


def _replaceable_buffers(model: nn.Module) -> Iterator[str]:
    """Names in ``_Step`` of buffers that ``self.name = tensor`` may replace; torch's own modules never do."""
    for path, module in model.named_modules(prefix="model"):
        if not type(module).__module__.startswith("torch.nn.modules."):
            yield from (f"{path}.{name}" for name, buffer in module._buffers.items() if buffer is not None)


class _Tracer:
    """Traces one call; attempts differ in front end and in whether the batch is symbolic."""

    def __init__(
        self, step: _Step, mode: Mode, call: Call, canonical: Mapping[str, str], device: torch.device
    ) -> None:
        self._step = step
        self._mode = mode
        self._call = call
        self._fqns, self._constants = _model_names(step, canonical)
        devices = (device if tensor.is_meta else tensor.device for tensor in step.model.parameters())
        self._device = next(devices, None)

    def trace(self, front_end: FrontEnd, symbolic: bool) -> TrainingGraph:
        size = self._call.batch_size
        sample = self._call.sample(max(size, 2) if symbolic else size, self._device)
        flags = sample.batched() if symbolic else [False] * len(sample.leaves)
        batched = [leaf for leaf, flag in zip(sample.leaves, flags, strict=True) if flag]
        captured = front_end(self._step, sample.tree, batched)
        operators = number_operators(captured.module)
        _warn_of_changed_state(self._step.model, captured.changed_state)
        joint = torch_compat.differentiate(captured, training=self._mode is Mode.TRAIN)
        return training_graph(
            Traced(joint, self._mode, operators, sample, size, symbolic, self._fqns, self._constants)
        )


def _model_names(step: _Step, canonical: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What the tensors of ``step`` are called in the model, and those that belong to the loss function alone.

    Raises InputError if the loss function has parameters of its own to train.
    """
    fqns: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    of_model: dict[int, str] = {}
    tensors = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if name.startswith("model."):
            fqn = name.removeprefix("model.")
            fqns[name] = of_model[id(tensor)] = canonical.get(fqn, fqn)
    for name, tensor in tensors:
        if name not in fqns:
            fqns[name] = of_model.get(id(tensor), f"constant.{name}")
            if id(tensor) not in of_model:
                constants[fqns[name]] = tensor
                if tensor.requires_grad and step.mode is Mode.TRAIN:
                    raise InputError(
                        f"{name} would be trained, but belongs to no stage: pipec trains the parameters of "
                        "the model. Make the loss a part of the model, which then returns it, or freeze it."
                    )
    return fqns, constants


def _warn_of_changed_state(model: nn.Module, changed: Sequence[str]) -> None:
    modules = {f"model.{path}" if path else "model" for path, _ in model.named_modules()}
    for path in sorted(modules.intersection(changed)):
        log.warning(
            "forward() of %s (%s) sets attributes of the module; pipelines run what was captured and leave "
            "them alone. State that changes from step to step belongs into a registered buffer.",
            path,
            type(model.get_submodule(path.removeprefix("model").removeprefix("."))).__name__,
        )
