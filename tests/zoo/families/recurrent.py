"""Recurrent networks, and what takes their place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import TOKENS, VOCABULARY, words


class LanguageModel(nn.Module):
    """Layers of one kind, one on the other, and the next token's scores."""

    def __init__(self, kind: type[nn.RNNBase], num_layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, num_layers, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embed(ids))
        return self.head(hidden).mT


class Tagger(nn.Module):
    """Both directions, and a tag for every token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width // 2, 2, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids))[0]).mT


class Translator(nn.Module):
    """An encoder, and a decoder that attends to it at every step (Bahdanau et al., 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.words = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.cell = nn.GRUCell(2 * width, width)
        self.score = nn.Linear(2 * width, width)
        self.weigh = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, written: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(ids))
        state, scores = last[0], []
        for word in self.words(written).unbind(1):
            asked = state[:, None].expand_as(memory)
            weight = self.weigh(torch.tanh(self.score(torch.cat([asked, memory], -1)))).softmax(1)
            state = self.cell(torch.cat([word, (weight * memory).sum(1)], -1), state)
            scores.append(self.head(state))
        return torch.stack(scores, -1)


class Cells(nn.Module):
    """Two LSTM cells in a loop over time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(4, width), nn.LSTMCell(width, width)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [(zeros, zeros) for zeros in (x.new_zeros(x.shape[0], 32),) * 2]
        for value in x.unbind(1):
            for k, cell in enumerate(self.cells):
                states[k] = cell(value, states[k])
                value = states[k][0]
        return self.head(states[-1][0])


class ConvolutionalCell(nn.Module):
    """An LSTM whose gates are convolutions (Shi et al., ConvLSTM, 2015)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(3 + width, 4 * width, 3, padding=1)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, film: Tensor) -> Tensor:
        hidden = cell = film.new_zeros(film.shape[0], self.width, *film.shape[-2:])
        for frame in film.unbind(1):
            read, forget, write, new = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + read.sigmoid() * new.tanh()
            hidden = write.sigmoid() * cell.tanh()
        return self.head(hidden)


class Temporal(nn.Module):
    """Convolutions over the past, ever farther back (Bai et al., TCN, 2018)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, width, 1)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 2, dilation=2**k)) for k in range(3)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.mT)
        for k, layer in enumerate(self.layers):
            hidden = hidden + F.relu(layer(F.pad(hidden, (2**k, 0))))
        return self.head(hidden[..., -1])


class Quasi(nn.Module):
    """Gates by convolution, and a loop without weights (Bradbury et al., QRNN, 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gates = nn.ModuleList(
            [nn.Conv1d(4, 3 * width, 2, padding=1), nn.Conv1d(width, 3 * width, 2, padding=1)]
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.mT
        for gates in self.gates:
            new, forget, output = gates(hidden)[..., :-1].chunk(3, 1)
            cell, cells = torch.zeros_like(new[..., 0]), []
            for n, f in zip(new.tanh().unbind(-1), forget.sigmoid().unbind(-1), strict=True):
                cell = f * cell + (1 - f) * n
                cells.append(cell)
            hidden = output.sigmoid() * torch.stack(cells, -1)
        return self.head(hidden[..., -1])


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layers(packed)[1][0])


class Pointing(nn.Module):
    """Points at a place of its input (Vinyals et al., 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.LSTM(4, width, batch_first=True)
        self.decoder = nn.LSTM(4, width, batch_first=True)
        self.keys, self.queries, self.score = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        memory, state = self.encoder(x)
        asked, _ = self.decoder(x.flip(1), state)
        joint = torch.tanh(self.keys(memory)[:, None] + self.queries(asked)[:, :, None])
        return self.score(joint).squeeze(-1)


def text(rows: int) -> Inputs:
    return {"ids": words(rows), "target": words(rows)}


def tagged(rows: int) -> Inputs:
    return {"ids": words(rows), "target": torch.randint(5, (rows, TOKENS))}


def translations(rows: int) -> Inputs:
    return {"ids": words(rows), "written": words(rows, 5), "target": words(rows, 5)}


def series(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 8, 4), "target": torch.randint(3, (rows,))}


def films(rows: int) -> Inputs:
    return {"film": torch.randn(rows, 4, 3, 8, 8), "target": torch.randn(rows, 3, 8, 8)}


def lengths(rows: int) -> Inputs:
    return {**series(rows), "lengths": torch.randint(2, 9, (rows,))}


def places(rows: int) -> Inputs:
    return {"x": torch.randn(rows, 8, 4), "target": torch.randint(8, (rows, 8))}


CASES = (
    Case("LSTM language model", lambda: LanguageModel(nn.LSTM), text, F.cross_entropy),
    Case("GRU language model", lambda: LanguageModel(nn.GRU, 3), text, F.cross_entropy),
    Case("Elman network", lambda: LanguageModel(nn.RNN), text, F.cross_entropy),
    Case("Bidirectional tagger", Tagger, tagged, F.cross_entropy),
    Case("Attentive translator", Translator, translations, F.cross_entropy),
    Case("LSTM cells", Cells, series, F.cross_entropy),
    Case("ConvLSTM", ConvolutionalCell, films, F.mse_loss),
    Case("Temporal convolutions", Temporal, series, F.cross_entropy),
    Case("QRNN", Quasi, series, F.cross_entropy),
    Case("Pointer network", Pointing, places, F.cross_entropy),
    Case("Packed sequences", Packed, lengths, F.cross_entropy, refused="a packed sequence"),
)
