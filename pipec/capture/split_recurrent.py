"""Splits a call of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` into one operator for each layer and direction.

::

    y = gru(x, h, [w0, ..., w7], True, 2, 0.1, True, ...)     y0 = gru_layer(x, h[0], [w0, ..., w3], ...)
                                                          ->  y0 = dropout(y0, 0.1, True)
                                                              y = gru_layer(y0, h[1], [w4, ..., w7], ...)

Each layer and each direction is then an operator of its own, so that cuts fall between them.
``pipec.primitives`` has what they compute, as eager torch does.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipec.capture.node_insertion import fake_value, insert_part
from pipec.primitives import CUDNN_RNN, ONEDNN_LSTM, RECURRENCE
from pipec.torch_compat import computes_with_cudnn, computes_with_onednn

States = tuple[Tensor, ...]
"""The hidden state, and for an LSTM the cell state."""

_aten = torch.ops.aten


def split_recurrent_layers(captured: fx.GraphModule) -> None:
    """Take each recurrent call of a captured graph apart. Those of packed sequences stay as they are."""
    for module in captured.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target in _CELLS and not isinstance(node.args[3], list | tuple):
                    _RecurrentCall(node).separate()
            module.recompile()


def recurrent_layer(
    x: Tensor, states: States, weights: Sequence[Tensor], biased: bool, reverse: bool, cell: str
) -> States:
    """One direction of one layer: its output, of shape (length, rows, width), and its last states."""
    w_ih, w_hh, *others = weights
    h, c = states[0], states[1] if len(states) > 1 else None
    is_projected = len(others) % 2 == 1
    if cell == ONEDNN:
        biases = others or [torch.zeros_like(w_ih), torch.zeros_like(w_hh)]
        h, c = (state.contiguous() for state in states)
        output, *last, _ = ONEDNN_LSTM(x.contiguous(), w_ih, w_hh, *biases, h, c, reverse, biased)
    else:
        b_ih, b_hh = others[:2] if biased else (None, None)
        if not is_projected and computes_with_cudnn([x, *states, *weights]):
            output, *last, _ = CUDNN_RNN(cell, x, h, c, w_ih, w_hh, b_ih, b_hh, reverse)
        else:
            w_hr = others[-1] if is_projected else None
            gates = F.linear(x, w_ih, b_ih)
            output, *last, _ = RECURRENCE(cell, gates, h, c, w_hh, b_hh, w_hr, reverse)
    return output, *last[: len(states)]


ONEDNN = "onednn_lstm"

_CELLS: Mapping[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
    _aten.lstm.input: "lstm",
    _aten.gru.input: "gru",
    _aten.rnn_tanh.input: "tanh",
    _aten.rnn_relu.input: "relu",
}
"""The calls that are taken apart, as either front end writes them, and the cell of each."""


@dataclass(frozen=True)
class _RecurrentCall:
    """A recurrent call in a graph."""

    node: fx.Node

    def separate(self) -> None:
        arguments: tuple[Any, ...] = self.node.args
        x, states, weights, biased, num_layers, dropout, train, bidirectional, batch_first = arguments
        states = tuple(states) if isinstance(states, list | tuple) else (states,)
        x = self._put("", torch.transpose, x, 0, 1) if batch_first else x
        cell = self._cell(x, states, weights)
        suffixes, last = ("", "_reverse")[: 1 + bidirectional], list[list[fx.Node]]()
        size = len(weights) // (num_layers * len(suffixes))
        for number in range(num_layers):
            outputs = []
            for suffix in suffixes:
                begin = [self._put("", torch.select, state, 0, len(last)) for state in states]
                own = weights[len(last) * size : (len(last) + 1) * size]
                made = self._put(
                    f"l{number}{suffix}", recurrent_layer, x, tuple(begin), own, biased, bool(suffix), cell
                )
                outputs.append(self._item(made, 0))
                last.append([self._item(made, 1 + i) for i in range(len(states))])
            x = self._put("", torch.cat, outputs, -1) if bidirectional else outputs[0]
            if dropout and train and number < num_layers - 1:
                x = self._put("", torch.dropout, x, dropout, True)
        for user in list(self.node.users):
            index: Any = user.args[1]
            if index:
                result = self._put("", torch.stack, [states[index - 1] for states in last])
            else:
                result = self._put("", torch.transpose, x, 0, 1) if batch_first else x
            user.replace_all_uses_with(result)
            user.graph.erase_node(user)
        self.node.graph.erase_node(self.node)

    def _cell(self, x: fx.Node, states: Sequence[fx.Node], weights: Sequence[fx.Node]) -> str:
        cell = _CELLS[self.node.target]
        projects = cell == "lstm" and fake_value(states[0]).shape[-1] != fake_value(states[1]).shape[-1]
        if cell == "lstm" and not projects and computes_with_onednn(map(fake_value, [x, *states, *weights])):
            return ONEDNN
        return cell

    def _put(self, name: str, function: Callable[..., Any], *args: Any) -> fx.Node:
        return insert_part(self.node, name, function, *args, value_of=_layer_value if name else None)

    def _item(self, made: fx.Node, index: int) -> fx.Node:
        return self._put("", operator.getitem, made, index)


def _layer_value(x: Tensor, states: States, *others: object) -> States:
    """The shapes that a layer returns."""
    return x.new_empty(*x.shape[:2], states[0].shape[-1]), *map(torch.empty_like, states)
