"""Speech models of the transformers library, and recognisers with CTC written here."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import LABELS, tiny, words

CONVOLUTIONS: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_kernel": [8, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def waves(rows: int) -> Inputs:
    return {"input_values": torch.randn(rows, 400), "labels": torch.randint(LABELS, (rows,))}


def transcribed(rows: int) -> Inputs:
    return {"input_values": torch.randn(rows, 400), "labels": words(rows, 6)}


def spectra(rows: int) -> Inputs:
    return {"input_features": torch.randn(rows, 8, 24), "labels": words(rows, 6)}


def frames(rows: int) -> Inputs:
    return {"input_features": torch.randn(rows, 24, 8), "labels": words(rows, 6)}


class DeepSpeech(nn.Module):
    """Convolutions over the spectrum, then recurrent layers both ways (Amodei et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(16, 32, 5, padding=2),
            nn.Hardtanh(0, 20),
            nn.Conv1d(32, 32, 3, padding=1),
            nn.Hardtanh(0, 20),
        )
        self.recurrent = nn.GRU(32, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, spectrum: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.front(spectrum).transpose(1, 2))
        return self.head(hidden)


class Conformer(nn.Module):
    """Attention, then convolution, between halved feed-forward layers (Gulati et al., 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.front = nn.Linear(16, width)
        self.blocks = nn.ModuleList(ConformerBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 12)

    def forward(self, spectrum: Tensor) -> Tensor:
        hidden = self.front(spectrum.transpose(1, 2))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class ConformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(2)
        )
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.group_norm = nn.GroupNorm(1, width)
        self.pointwise = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before(x) / 2
        normalised = self.norm(x)
        x = x + self.attention(normalised, normalised, normalised, need_weights=False)[0]
        convolved = self.depthwise(F.glu(self.gate(x.transpose(1, 2)), dim=1))
        x = x + self.pointwise(F.silu(self.group_norm(convolved))).transpose(1, 2)
        return self.last(x + self.after(x) / 2)


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Every utterance has all frames and six letters."""
    scores = output.log_softmax(-1).transpose(0, 1)
    rows = output.shape[0]
    lengths = torch.full((rows,), output.shape[1]), torch.full((rows,), target.shape[1])
    return F.ctc_loss(scores, target, *lengths)


def spoken(rows: int) -> Inputs:
    return {"spectrum": torch.randn(rows, 16, 20), "target": torch.randint(1, 12, (rows, 6))}


CASES = (
    Case(
        "Wav2Vec2ForCTC",
        tiny("Wav2Vec2ForCTC", **CONVOLUTIONS),
        transcribed,
        batched={"labels": 0},
    ),
    Case(
        "HubertForCTC",
        tiny("HubertForCTC", **CONVOLUTIONS),
        transcribed,
        batched={"labels": 0},
    ),
    Case(
        "WavLMForSequenceClassification",
        tiny("WavLMForSequenceClassification", classifier_proj_size=16, **CONVOLUTIONS),
        waves,
    ),
    Case("SEWForCTC", tiny("SEWForCTC", **CONVOLUTIONS), transcribed),
    Case(
        "WhisperForConditionalGeneration",
        tiny(
            "WhisperForConditionalGeneration",
            num_mel_bins=8,
            max_source_positions=12,
            max_target_positions=12,
            pad_token_id=0,
            decoder_start_token_id=1,
        ),
        spectra,
    ),
    Case(
        "Speech2TextForConditionalGeneration",
        tiny(
            "Speech2TextForConditionalGeneration",
            input_feat_per_channel=8,
            conv_channels=16,
            max_source_positions=24,
            max_target_positions=12,
            decoder_start_token_id=1,
        ),
        frames,
    ),
    Case(
        "ASTForAudioClassification",
        tiny(
            "ASTForAudioClassification",
            max_length=24,
            num_mel_bins=16,
            patch_size=4,
            frequency_stride=4,
            time_stride=4,
        ),
        lambda rows: {"input_values": torch.randn(rows, 24, 16), "labels": torch.randint(LABELS, (rows,))},
    ),
    Case("DeepSpeech", DeepSpeech, spoken, ctc),
    Case("Conformer", Conformer, spoken, ctc),
)
