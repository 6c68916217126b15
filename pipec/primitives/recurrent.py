"""A layer of an LSTM, GRU or RNN as one operator, in one direction or in both.

torch traces a recurrent network step by step. Here each layer is one node of a graph, for any length. It
calls torch's own function, so that eager torch's kernels compute it. Its backward calls the function again,
under autograd, and so needs nothing but the inputs. cuDNN copies the weights into one piece of memory in each
call.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pipec.torch_compat import pytree

_FUNCTIONS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "tanh": torch.rnn_tanh,
    "relu": torch.rnn_relu,
}
"""torch's functions, by the cell of the network."""

warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)

_INPUTS = (
    "Tensor x, Tensor h, Tensor? c, Tensor[] weights, str cell, bool biased, bool train, bool grad_enabled"
)

torch.library.define("pipec::recurrent_layer", f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "pipec::recurrent_layer_backward",
    f"(Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, {_INPUTS}) -> Tensor[]",
)

RECURRENT_LAYER = torch.ops.pipec.recurrent_layer.default
"""Output and last states of a layer.

``x`` has the shape (length, rows, width), the states ``h`` and ``c`` (directions, rows, width). An LSTM alone
has a cell state ``c``; the last one is empty for other cells. ``weights`` are those of the layer, in torch's
order. ``grad_enabled`` is what eager torch chooses some kernels by.
"""

RECURRENT_LAYER_BACKWARD = torch.ops.pipec.recurrent_layer_backward.default
"""The gradients of ``x``, ``h``, ``c`` and the weights; that of ``c`` is empty if there is none."""


def recurrent_network(
    cell: str,
    x: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    biased: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What ``torch.lstm`` or one of its siblings returns, layer by layer."""
    h, c = states if cell == "lstm" else (states, None)
    x = torch.transpose(x, 0, 1) if batch_first else x
    num_directions, num_weights = 1 + bidirectional, len(weights) // num_layers
    last = list[Any]()
    for layer in range(num_layers):
        own = slice(layer * num_directions, (layer + 1) * num_directions)
        begin: Any = [state[own] if state is not None and num_layers > 1 else state for state in (h, c)]
        of_layer = [*weights[layer * num_weights : (layer + 1) * num_weights]]
        last.append(recurrent_layer(x, begin[0], begin[1], of_layer, cell, biased, train))
        x = last[-1][0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    output = torch.transpose(x, 0, 1) if batch_first else x
    ends = [[made[item] for made in last] for item in range(1, 3 if cell == "lstm" else 2)]
    return output, *(each[0] if num_layers == 1 else torch.cat(each) for each in ends)


def recurrent_layer(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    cell: str,
    biased: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A ``RECURRENT_LAYER`` in the current gradient mode and, under autocast, in its dtype."""
    if has_torch_function((x,)):
        arguments = x, h, c, weights, cell, biased, train
        return handle_torch_function(recurrent_layer, (x,), *arguments)
    tensors = x, h, c, [*weights]
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = pytree.tree_map_only(
            Tensor, lambda each: each if each.dtype is torch.float64 else each.to(dtype), tensors
        )
    made: tuple[Tensor, Tensor, Tensor] = RECURRENT_LAYER(
        *tensors, cell, biased, train, torch.is_grad_enabled()
    )
    return made


def _layer(x: Tensor, h: Tensor, c: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    *inputs, grad_enabled = others
    with torch.set_grad_enabled(grad_enabled):
        made = _call(x, h, c, *inputs)
    return made if c is not None else (*made, h.new_empty(0))


def _call(
    x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor], cell: str, *options: Any
) -> tuple[Tensor, ...]:
    (biased, train), states, bidirectional = options, h if c is None else (h, c), h.shape[0] == 2
    return _FUNCTIONS[cell](x, states, weights, biased, 1, 0.0, train, bidirectional, False)


def _like_layer(x: Tensor, h: Tensor, c: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    length, rows, _ = x.shape
    output = x.new_empty(length, rows, h.shape[0] * h.shape[-1])
    return output, torch.empty_like(h), h.new_empty(0) if c is None else torch.empty_like(c)


def _layer_backward(
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    *options: Any,
) -> list[Tensor]:
    given: list[Any] = [None if x is None else x.detach().requires_grad_() for x in (x, h, c, *weights)]
    with torch.enable_grad():
        made = _call(*given[:3], given[3:], *options[:-1])
    known = zip(made, (grad_output, grad_h, grad_c), strict=False)
    results, gradients = zip(*((y, grad) for y, grad in known if grad is not None), strict=True)
    found = iter(torch.autograd.grad(results, [x for x in given if x is not None], gradients))
    return [h.new_empty(0) if x is None else next(found) for x in given]


def _like_layer_backward(
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    *options: Any,
) -> list[Tensor]:
    return [h.new_empty(0) if each is None else torch.empty_like(each) for each in (x, h, c, *weights)]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, h, c, weights, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, h, c, *weights)
    if c is None:
        ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    x, h, c, *weights = ctx.saved_tensors
    grad_x, grad_h, grad_c, *grads = RECURRENT_LAYER_BACKWARD(*gradients, x, h, c, weights, *ctx.options)
    return grad_x, grad_h, None if c is None else grad_c, grads, None, None, None, None


for _name, _computes, _fake in (
    ("recurrent_layer", _layer, _like_layer),
    ("recurrent_layer_backward", _layer_backward, _like_layer_backward),
):
    torch.library.impl(f"pipec::{_name}", "default", _computes)
    torch.library.register_fake(f"pipec::{_name}", _fake)

torch.library.register_autograd("pipec::recurrent_layer", _gradients, setup_context=_keep_inputs)
