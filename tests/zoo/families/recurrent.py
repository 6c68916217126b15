"""Recurrent networks, and what takes their place."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Apply, Residual, first_output, model, perceptron, turned
from zoo.model_case import Case, batch, integers, normal
from zoo.tiny_transformers import TOKENS, VOCABULARY, words

WIDTH = 32


def language_model(kind: type[nn.RNNBase], num_layers: int = 2) -> nn.Module:
    """Layers of one kind, one on the other, and the next token's scores."""
    layers = first_output(kind(WIDTH, WIDTH, num_layers, batch_first=True))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layers, nn.Linear(WIDTH, VOCABULARY), turned())


def tagger() -> nn.Module:
    """Both directions, and a tag for every token."""
    layers = first_output(nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True, batch_first=True))
    head = perceptron(WIDTH, WIDTH, 5, activation=nn.Tanh)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layers, head, turned())


@model(
    source=lambda: nn.Embedding(VOCABULARY, WIDTH),
    words=lambda: nn.Embedding(VOCABULARY, WIDTH),
    encoder=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    cell=lambda: nn.GRUCell(2 * WIDTH, WIDTH),
    score=lambda: nn.Linear(2 * WIDTH, WIDTH),
    weigh=lambda: nn.Linear(WIDTH, 1, bias=False),
    head=lambda: nn.Linear(WIDTH, VOCABULARY),
)
def translator(self, ids: Tensor, written: Tensor) -> Tensor:
    """An encoder, and a decoder that attends to it at every step (Bahdanau et al., 2015)."""
    memory, last = self.encoder(self.source(ids))
    state, scores = last[0], []
    for word in self.words(written).unbind(1):
        asked = state[:, None].expand_as(memory)
        weight = self.weigh(torch.tanh(self.score(torch.cat([asked, memory], -1)))).softmax(1)
        state = self.cell(torch.cat([word, (weight * memory).sum(1)], -1), state)
        scores.append(self.head(state))
    return torch.stack(scores, -1)


@model(
    cells=lambda: nn.ModuleList(nn.LSTMCell(width, WIDTH) for width in (4, WIDTH)),
    head=lambda: nn.Linear(WIDTH, 3),
)
def lstm_cells(self, x: Tensor) -> Tensor:
    """Two LSTM cells in a loop over time."""
    states = [(zeros, zeros) for zeros in (x.new_zeros(x.shape[0], WIDTH),) * 2]
    for value in x.unbind(1):
        for k, cell in enumerate(self.cells):
            states[k] = cell(value, states[k])
            value = states[k][0]
    return self.head(states[-1][0])


@model(gates=lambda: nn.Conv2d(3 + 8, 4 * 8, 3, padding=1), head=lambda: nn.Conv2d(8, 3, 1))
def convolutional_cell(self, film: Tensor) -> Tensor:
    """An LSTM whose gates are convolutions (Shi et al., ConvLSTM, 2015)."""
    hidden = cell = film.new_zeros(film.shape[0], 8, *film.shape[-2:])
    for frame in film.unbind(1):
        read, forget, write, new = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
        cell = forget.sigmoid() * cell + read.sigmoid() * new.tanh()
        hidden = write.sigmoid() * cell.tanh()
    return self.head(hidden)


def temporal() -> nn.Module:
    """Convolutions over the past, ever farther back (Bai et al., TCN, 2018)."""
    layers = [turned(), nn.Conv1d(4, WIDTH, 1)]
    for reach in (1, 2, 4):
        layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 2, dilation=reach))
        layers.append(Residual(nn.ConstantPad1d((reach, 0), 0.0), layer, nn.ReLU()))
    return nn.Sequential(*layers, Apply(lambda x: x[..., -1]), nn.Linear(WIDTH, 3))


@model(
    gates=lambda: nn.ModuleList(nn.Conv1d(width, 3 * WIDTH, 2, padding=1) for width in (4, WIDTH)),
    head=lambda: nn.Linear(WIDTH, 3),
)
def quasi(self, x: Tensor) -> Tensor:
    """Gates by convolution, and a loop without weights (Bradbury et al., QRNN, 2017)."""
    hidden = x.mT
    for gates in self.gates:
        new, forget, output = gates(hidden)[..., :-1].chunk(3, 1)
        cell, cells = torch.zeros_like(new[..., 0]), []
        for n, f in zip(new.tanh().unbind(-1), forget.sigmoid().unbind(-1), strict=True):
            cell = f * cell + (1 - f) * n
            cells.append(cell)
        hidden = output.sigmoid() * torch.stack(cells, -1)
    return self.head(hidden[..., -1])


@model(layers=lambda: nn.GRU(4, WIDTH, batch_first=True), head=lambda: nn.Linear(WIDTH, 3))
def packed(self, x: Tensor, lengths: Tensor) -> Tensor:
    """Sequences of several lengths, packed."""
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.head(self.layers(packed)[1][0])


@model(
    encoder=lambda: nn.LSTM(4, WIDTH, batch_first=True),
    decoder=lambda: nn.LSTM(4, WIDTH, batch_first=True),
    keys=lambda: nn.Linear(WIDTH, WIDTH),
    queries=lambda: nn.Linear(WIDTH, WIDTH),
    score=lambda: nn.Linear(WIDTH, 1, bias=False),
)
def pointing(self, x: Tensor) -> Tensor:
    """Points at a place of its input (Vinyals et al., 2015)."""
    memory, state = self.encoder(x)
    asked, _ = self.decoder(x.flip(1), state)
    joint = torch.tanh(self.keys(memory)[:, None] + self.queries(asked)[:, :, None])
    return self.score(joint).squeeze(-1)


five_words = functools.partial(words, tokens=5)
SERIES = {"x": normal(8, 4), "target": integers(3)}

TEXT = batch(input=words, target=words)
TRANSLATIONS = batch(ids=words, written=five_words, target=five_words)
FILMS = batch(film=normal(4, 3, 8, 8), target=normal(3, 8, 8))
LENGTHS = batch(**SERIES, lengths=lambda rows: torch.randint(2, 9, (rows,)))

CASES = (
    Case("LSTM language model", lambda: language_model(nn.LSTM), TEXT, F.cross_entropy),
    Case("GRU language model", lambda: language_model(nn.GRU, 3), TEXT, F.cross_entropy),
    Case("Elman network", lambda: language_model(nn.RNN), TEXT, F.cross_entropy),
    Case("Bidirectional tagger", tagger, batch(input=words, target=integers(5, TOKENS)), F.cross_entropy),
    Case("Attentive translator", translator, TRANSLATIONS, F.cross_entropy),
    Case("LSTM cells", lstm_cells, batch(**SERIES), F.cross_entropy),
    Case("ConvLSTM", convolutional_cell, FILMS, F.mse_loss),
    Case("Temporal convolutions", temporal, batch(input=normal(8, 4), target=integers(3)), F.cross_entropy),
    Case("QRNN", quasi, batch(**SERIES), F.cross_entropy),
    Case("Pointer network", pointing, batch(x=normal(8, 4), target=integers(8, 8)), F.cross_entropy),
    Case("Packed sequences", packed, LENGTHS, F.cross_entropy, refused="a packed sequence"),
)
