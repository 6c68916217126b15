"""Recurrent layers, one direction of each.

torch decomposes a recurrent layer into several operators for each step of the sequence, or has one operator
that saves nothing for a backward unless autograd runs it. The operators here are one node of a graph, for any
length. They make the same calls as eager torch, forward and backward, in its order, so the bits are eager's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten

_library = torch.library.Library("pipec", "FRAGMENT")


# an LSTM's layer under oneDNN

_library.define(
    "onednn_lstm(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c, "
    "bool reverse, bool biased) -> (Tensor, Tensor, Tensor, Tensor)"
)

ONEDNN_LSTM = torch.ops.pipec.onednn_lstm.default
"""Output, last states, and the tensor that the backward reads. Without biases, pass zeros."""

_LSTM = 2
"""oneDNN's number for an LSTM."""


def _onednn_lstm(*arguments: Any) -> tuple[Tensor, ...]:
    """oneDNN's layer saves tensors for its backward only in grad mode."""
    *tensors, reverse, biased = arguments
    h = tensors[5]
    with torch.enable_grad():
        made = _aten.mkldnn_rnn_layer(
            *(tensor.detach() for tensor in tensors),
            reverse,
            batch_sizes=[],
            mode=_LSTM,
            hidden_size=h.shape[-1],
            num_layers=1,
            has_biases=biased,
            bidirectional=False,
            batch_first=False,
            train=True,
        )
    return tuple(made)


def _like_onednn_lstm(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """oneDNN chooses the layout of the saved tensor. Measured: for each row and step 24 bytes for each of its
    inputs or outputs, whichever are more, and 36 for each output."""
    length, rows, width = x.shape
    size = (length + 1) * rows * (24 * max(width, h.shape[1]) + 36 * h.shape[1])
    output = x.new_empty(length, rows, h.shape[1])
    return output, torch.empty_like(h), torch.empty_like(h), x.new_empty(size, dtype=torch.uint8)


def _keep_onednn_lstm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.reverse, ctx.biased = inputs[7:]


def _onednn_lstm_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, output, h, c, workspace = ctx.saved_tensors
    grad_x, grad_ih, grad_hh, grad_b, _, grad_h, grad_c = _aten.mkldnn_rnn_layer_backward(
        *inputs,
        output,
        h,
        c,
        *gradients[:3],
        ctx.reverse,
        _LSTM,
        inputs[5].shape[-1],
        1,
        ctx.biased,
        True,
        False,
        [],
        False,
        workspace,
    )
    biases = (grad_b, grad_b) if ctx.biased else (None, None)
    return grad_x, grad_ih, grad_hh, *biases, grad_h, grad_c, None, None


# a layer under cuDNN

_library.define(
    "cudnn_rnn(str cell, Tensor x, Tensor h, Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
    "Tensor? b_hh, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "cudnn_rnn_backward(str cell, Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h, "
    "Tensor? c, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor output, Tensor saved, "
    "bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

CUDNN_RNN = torch.ops.pipec.cudnn_rnn.default
"""Output, last states, and the tensor that the backward reads, for the cells of ``RECURRENCE``.

An LSTM alone has a cell state ``c``. The biases are both given, or neither. cuDNN has no layer that goes
backwards alone: its input and output are turned around.
"""

CUDNN_RNN_BACKWARD = torch.ops.pipec.cudnn_rnn_backward.default
"""The gradients of ``x``, ``h``, ``c``, ``w_ih``, ``w_hh``, ``b_ih`` and ``b_hh``, empty for what is None."""

_CUDNN_MODES = {"relu": 0, "tanh": 1, "lstm": _LSTM, "gru": 3}
"""cuDNN's numbers for the cells (``cudnnRNNMode_t``)."""


_CUDNN_SAVED = {"relu": 1, "tanh": 1, "lstm": 5, "gru": 6}


def _cudnn_rnn(
    cell: str,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    weights = _present(w_ih, w_hh, b_ih, b_hh)
    x, states = _turned(x, reverse), [None if state is None else state[None].contiguous() for state in (h, c)]
    output, last_h, last_c, saved, _ = _aten._cudnn_rnn(
        x, weights, len(weights), None, *states, *_layer_options(cell, h), [], None
    )
    return _turned(output, reverse), last_h[0], _like(c, h) if c is None else last_c[0], saved


def _like_cudnn_rnn(cell: str, x: Tensor, h: Tensor, c: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """cuDNN chooses the size of the saved tensor. Measured with cuDNN 9.19 on an H200: some numbers for each
    step, row and unit, and 256 bytes."""
    length, rows, _ = x.shape
    size = length * rows * _CUDNN_SAVED[cell] * h.shape[-1] * x.dtype.itemsize + 256
    output = x.new_empty(length, rows, h.shape[-1])
    return output, torch.empty_like(h), _like(c, h), x.new_empty(size, dtype=torch.uint8)


def _keep_cudnn_rnn(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    cell, *tensors, reverse = inputs
    ctx.mark_non_differentiable(*output[3 if cell == "lstm" else 2 :])
    ctx.save_for_backward(*tensors, output[0], output[3])
    ctx.cell, ctx.reverse = cell, reverse


def _gradients_of_cudnn_rnn(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = CUDNN_RNN_BACKWARD(ctx.cell, *gradients[:3], *saved, ctx.reverse)
    return None, *(None if of is None else x for of, x in zip(saved[:7], found, strict=True)), None


def _cudnn_rnn_backward(
    cell: str,
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    output: Tensor,
    saved: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """cuDNN writes into what it saved, and takes the weights as one tensor, which is made again here."""
    weights, options = _present(w_ih, w_hh, b_ih, b_hh), _layer_options(cell, h)
    mode, width, projected, num_layers, batch_first, _, _, bidirectional = options
    whole = _aten._cudnn_rnn_flatten_weight(
        [weight.detach() for weight in weights],
        *(len(weights), x.shape[-1], mode, width, projected, num_layers, batch_first, bidirectional),
    )
    grad_x, grad_h, grad_c, grads = _aten._cudnn_rnn_backward(
        _turned(x, reverse),
        weights,
        len(weights),
        whole,
        *(None if state is None else state[None].contiguous() for state in (h, c)),
        _turned(output, reverse),
        None if grad_output is None else _turned(grad_output, reverse),
        *(None if grad is None else grad[None].contiguous() for grad in (grad_h, grad_c)),
        *options,
        [],
        None,
        saved.clone(),
        [True, True, c is not None, True],
    )
    none = h.new_empty(0)
    biases = grads[2:] if b_ih is not None else (none, none)
    return _turned(grad_x, reverse), grad_h[0], none if c is None else grad_c[0], *grads[:2], *biases


def _like_cudnn_rnn_backward(
    cell: str, grad_output: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, *others: Any
) -> Sequence[Tensor]:
    *tensors, _, _, _ = others
    return [_like(tensor, tensors[0]) for tensor in tensors]


def _present(*weights: Tensor | None) -> list[Tensor]:
    return [weight for weight in weights if weight is not None]


def _turned(steps: Tensor, reverse: bool) -> Tensor:
    return (steps.flip(0) if reverse else steps).contiguous()


def _layer_options(cell: str, h: Tensor) -> tuple[Any, ...]:
    """One layer in one direction, without projection and dropout, in training."""
    return _CUDNN_MODES[cell], h.shape[-1], 0, 1, False, 0.0, True, False


# the steps of a layer, one after the other

_library.define(
    "recurrence(str cell, Tensor gates, Tensor h, Tensor? c, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, "
    "bool reverse) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "recurrence_backward(str cell, Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, Tensor h, Tensor? c, "
    "Tensor w_hh, Tensor? b_hh, Tensor? w_hr, Tensor output, Tensor saved, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

RECURRENCE = torch.ops.pipec.recurrence.default
"""Output, last states, and the values of each step that the backward reads.

``gates`` of shape (length, rows, ...) are what the layer's input gives to the cell, which is ``lstm``,
``gru``, ``tanh`` or ``relu``. An LSTM alone has a cell state ``c``, and may project its output with ``w_hr``.
"""

RECURRENCE_BACKWARD = torch.ops.pipec.recurrence_backward.default
"""The gradients of ``gates``, ``h``, ``c``, ``w_hh``, ``b_hh`` and ``w_hr``, empty for what is None."""

_NUM_SAVED = {"lstm": 6, "gru": 4, "tanh": 0, "relu": 0}
"""The number of tensors that a cell saves per step, each as wide as its state."""


def _recurrence(
    cell: str,
    gates: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    output, last_h, last_c, saved = _like_recurrence(cell, gates, h, c, w_hh, b_hh, w_hr, reverse)
    for step in _steps(gates, reverse):
        h, c = _FORWARD[cell](gates[step], F.linear(h, w_hh, b_hh), h, c, saved[step])
        h = h if w_hr is None else F.linear(h, w_hr)
        output[step] = h
    return output, last_h.copy_(h), last_c if c is None else last_c.copy_(c), saved


def _like_recurrence(
    cell: str, gates: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    length, rows, _ = gates.shape
    width = (h if c is None else c).shape[-1]
    saved = gates.new_empty(length, rows, _NUM_SAVED[cell] * width)
    return gates.new_empty(length, rows, h.shape[-1]), torch.empty_like(h), _like(c, h), saved


def _like(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other.new_empty(0) if tensor is None else torch.empty_like(tensor)


def _keep_recurrence(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    cell, _, h, c, w_hh, b_hh, w_hr, reverse = inputs
    ctx.mark_non_differentiable(*output[3 if cell == "lstm" else 2 :])
    ctx.save_for_backward(h, c, w_hh, b_hh, w_hr, output[0], output[3])
    ctx.cell, ctx.reverse = cell, reverse


def _gradients_of_recurrence(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    _, c, _, b_hh, w_hr, *_ = ctx.saved_tensors
    found = RECURRENCE_BACKWARD(ctx.cell, *gradients[:3], *ctx.saved_tensors, ctx.reverse)
    gates, grad_h, grad_c, grad_hh, grad_b, grad_hr = found
    optional = [None if of is None else x for of, x in ((c, grad_c), (b_hh, grad_b), (w_hr, grad_hr))]
    return None, gates, grad_h, optional[0], grad_hh, *optional[1:], None


def _recurrence_backward(
    cell: str,
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    output: Tensor,
    saved: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Back through the steps. Sums are in autograd's order: its bits depend on that."""
    grad_gates = output.new_empty(*output.shape[:2], w_hh.shape[0])
    grad_hh, grad_b, grad_hr = _Sum(h), _Sum(h), _Sum(h)
    steps = list(_steps(output, reverse))
    carried: tuple[Tensor | None, ...] = (grad_h,)
    for step, before in zip(reversed(steps), [*reversed(steps[:-1]), None], strict=True):
        h_before = h if before is None else output[before]
        grad = _total([None if grad_output is None else grad_output[step], *carried], h)
        state, kept_before = saved[step], None if before is None else saved[before]
        if w_hr is not None:
            grad_hr.add(grad.t() @ _lstm_output(state))
            grad = grad @ w_hr
        grad_x, grad_linear, direct, grad_c = _BACKWARD[cell](
            grad, grad_c, h_before, _cell_state(kept_before, c), output[step], state
        )
        grad_gates[step] = grad_x
        grad_hh.add(grad_linear.t() @ h_before)
        if b_hh is not None:
            grad_b.add(grad_linear.sum(0))
        carried = direct, grad_linear @ w_hh
    last = _total(carried, h)
    of_c = h.new_empty(0) if grad_c is None else grad_c
    return grad_gates, last, of_c, grad_hh.total, grad_b.total, grad_hr.total


class _Sum:
    """The sum of the terms that steps add; an empty tensor if none does."""

    def __init__(self, like: Tensor) -> None:
        self.total = like.new_empty(0)

    def add(self, term: Tensor) -> None:
        self.total = self.total.add_(term) if self.total.numel() else term


def _steps(gates: Tensor, reverse: bool) -> Iterable[int]:
    length = gates.shape[0]
    return range(length - 1, -1, -1) if reverse else range(length)


def _total(terms: Iterable[Tensor | None], like: Tensor) -> Tensor:
    present = [term for term in terms if term is not None]
    return sum(present[1:], present[0]) if present else torch.zeros_like(like)


# cells: one step, and its gradients

Step = Callable[[Tensor, Tensor, Tensor, Any, Tensor], tuple[Tensor, Tensor | None]]
"""Returns the new states, from the gates of input and state and the states; fills ``saved``."""


def _lstm(x: Tensor, linear: Tensor, h: Tensor, c: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = linear.add_(x).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = (f * c).add_(i * g)
    tanh_c = c.tanh()
    torch.cat([i, f, g, o, tanh_c, c], 1, out=saved)
    return o * tanh_c, c


def _gru(x: Tensor, linear: Tensor, h: Tensor, c: None, saved: Tensor) -> tuple[Tensor, None]:
    x_r, x_z, x_n = x.chunk(3, 1)
    h_r, h_z, h_n = linear.chunk(3, 1)
    r, z = (h_r + x_r).sigmoid_(), (h_z + x_z).sigmoid_()
    n = (x_n + h_n * r).tanh_()
    torch.cat([r, z, n, h_n], 1, out=saved)
    return (h - n).mul_(z).add_(n), None


def _tanh(x: Tensor, linear: Tensor, h: Tensor, c: None, saved: Tensor) -> tuple[Tensor, None]:
    return linear.add_(x).tanh_(), None


def _relu(x: Tensor, linear: Tensor, h: Tensor, c: None, saved: Tensor) -> tuple[Tensor, None]:
    return linear.add_(x).relu_(), None


_FORWARD: dict[str, Step] = {"lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The gradients of the gates of the input and of the state, and of the states themselves."""


def _lstm_backward(
    grad: Tensor, grad_c: Tensor | None, h: Tensor, c: Tensor, output: Tensor, saved: Tensor
) -> Gradients:
    i, f, g, o, tanh_c, _ = saved.chunk(6, 1)
    through_h = _aten.tanh_backward(grad * o, tanh_c)
    grad_c = through_h if grad_c is None else through_h + grad_c
    gates = [
        _aten.sigmoid_backward(grad_c * g, i),
        _aten.sigmoid_backward(grad_c * c, f),
        _aten.tanh_backward(grad_c * i, g),
        _aten.sigmoid_backward(grad * tanh_c, o),
    ]
    both = torch.cat(gates, 1)
    return both, both, None, grad_c * f


def _gru_backward(grad: Tensor, grad_c: None, h: Tensor, c: None, output: Tensor, saved: Tensor) -> Gradients:
    r, z, n, h_n = saved.chunk(4, 1)
    direct = grad * z
    of_z = _aten.sigmoid_backward(grad * (h - n), z)
    of_n = _aten.tanh_backward(grad - direct, n)
    of_r = _aten.sigmoid_backward(of_n * h_n, r)
    return torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1), direct, None


def _tanh_backward(
    grad: Tensor, grad_c: None, h: Tensor, c: None, output: Tensor, saved: Tensor
) -> Gradients:
    gates = _aten.tanh_backward(grad, output)
    return gates, gates, None, None


def _relu_backward(
    grad: Tensor, grad_c: None, h: Tensor, c: None, output: Tensor, saved: Tensor
) -> Gradients:
    gates = _aten.threshold_backward(grad, output, 0)
    return gates, gates, None, None


_BACKWARD: dict[str, Callable[..., Gradients]] = {
    "lstm": _lstm_backward,
    "gru": _gru_backward,
    "tanh": _tanh_backward,
    "relu": _relu_backward,
}


def _lstm_output(saved: Tensor) -> Tensor:
    """The tensor that an LSTM projects: its output gate times the hyperbolic tangent of its cell state."""
    _, _, _, o, tanh_c, _ = saved.chunk(6, 1)
    return o * tanh_c


def _cell_state(saved: Tensor | None, first: Tensor | None) -> Tensor | None:
    """The cell state at the start of a step, from what the previous step saved; else ``first``."""
    return first if saved is None or first is None else saved.chunk(6, 1)[5]


def _like_recurrence_backward(
    cell: str,
    grad_output: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    output: Tensor,
    *others: Any,
) -> Sequence[Tensor]:
    gates = output.new_empty(*output.shape[:2], w_hh.shape[0])
    return gates, torch.empty_like(h), _like(c, h), torch.empty_like(w_hh), _like(b_hh, h), _like(w_hr, h)


for _name, _computes, _fake in (
    ("onednn_lstm", _onednn_lstm, _like_onednn_lstm),
    ("cudnn_rnn", _cudnn_rnn, _like_cudnn_rnn),
    ("cudnn_rnn_backward", _cudnn_rnn_backward, _like_cudnn_rnn_backward),
    ("recurrence", _recurrence, _like_recurrence),
    ("recurrence_backward", _recurrence_backward, _like_recurrence_backward),
):
    _library.impl(_name, _computes, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipec::{_name}", _fake, lib=_library)

torch.library.register_autograd(
    "pipec::onednn_lstm", _onednn_lstm_backward, setup_context=_keep_onednn_lstm, lib=_library
)
torch.library.register_autograd(
    "pipec::cudnn_rnn", _gradients_of_cudnn_rnn, setup_context=_keep_cudnn_rnn, lib=_library
)
torch.library.register_autograd(
    "pipec::recurrence", _gradients_of_recurrence, setup_context=_keep_recurrence, lib=_library
)
