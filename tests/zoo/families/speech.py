"""Speech models of the transformers library, and recognisers with CTC written here."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import Apply, Residual, first_output, model, perceptron, turned
from zoo.model_case import Case, batch, integers, normal
from zoo.tiny_transformers import LABELS, transformer, words


def deep_speech() -> nn.Module:
    """Convolutions over the spectrum, then recurrent layers both ways (Amodei et al., 2015)."""
    first, second = nn.Conv1d(16, 32, 5, padding=2), nn.Conv1d(32, 32, 3, padding=1)
    convolutions = [first, nn.Hardtanh(0, 20), second, nn.Hardtanh(0, 20), turned()]
    recurrent = nn.GRU(32, 16, num_layers=2, bidirectional=True, batch_first=True)
    return nn.Sequential(*convolutions, first_output(recurrent), nn.Linear(32, 12))


@model(layer=lambda: nn.MultiheadAttention(32, 4, batch_first=True))
def attention(self, x: Tensor) -> Tensor:
    return self.layer(x, x, x, need_weights=False)[0]


def conformer() -> nn.Module:
    """Attention, then convolution, between halved feed-forward layers (Gulati et al., 2020)."""

    def half() -> nn.Module:
        layers = perceptron(32, 64, 32, activation=nn.SiLU)
        return Residual(nn.LayerNorm(32), layers, Apply(lambda x: x / 2))

    def convolution() -> nn.Module:
        depthwise = nn.Conv1d(32, 32, 5, padding=2, groups=32)
        layers = [nn.Conv1d(32, 64, 1), nn.GLU(1), depthwise, nn.GroupNorm(1, 32), nn.SiLU()]
        return Residual(turned(), *layers, nn.Conv1d(32, 32, 1), turned())

    def block() -> list[nn.Module]:
        return [half(), Residual(nn.LayerNorm(32), attention()), convolution(), half(), nn.LayerNorm(32)]

    return nn.Sequential(turned(), nn.Linear(16, 32), *block(), *block(), nn.Linear(32, 12))


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Every utterance has all frames and six letters."""
    scores = output.log_softmax(-1).transpose(0, 1)
    rows = output.shape[0]
    lengths = torch.full((rows,), output.shape[1]), torch.full((rows,), target.shape[1])
    return F.ctc_loss(scores, target, *lengths)


CONVOLUTIONS = {
    **{"conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 12, "pad_token_id": 0}
SPEECH2TEXT = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 24}
WRITER = {"max_target_positions": 12, "decoder_start_token_id": 1}
SPECTROGRAM = {"max_length": 24, "num_mel_bins": 16}
STRIDES = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4}

six_words = functools.partial(words, tokens=6)
WAVES = batch(input_values=normal(400), labels=integers(LABELS))
TRANSCRIBED = batch(input_values=normal(400), labels=six_words)
SPECTRA = batch(input_features=normal(8, 24), labels=six_words)
FRAMES = batch(input_features=normal(24, 8), labels=six_words)
CLASSIFIED = batch(input_values=normal(24, 16), labels=integers(LABELS))
SPOKEN = batch(input=normal(16, 20), target=lambda rows: torch.randint(1, 12, (rows, 6)))

CASES = (
    transformer("Wav2Vec2ForCTC", TRANSCRIBED, batched={"labels": 0}, **CONVOLUTIONS),
    transformer("HubertForCTC", TRANSCRIBED, batched={"labels": 0}, **CONVOLUTIONS),
    transformer("WavLMForSequenceClassification", WAVES, classifier_proj_size=16, **CONVOLUTIONS),
    transformer("SEWForCTC", TRANSCRIBED, **CONVOLUTIONS),
    transformer("WhisperForConditionalGeneration", SPECTRA, **WHISPER, **WRITER),
    transformer("Speech2TextForConditionalGeneration", FRAMES, **SPEECH2TEXT, **WRITER),
    transformer("ASTForAudioClassification", CLASSIFIED, **SPECTROGRAM, **STRIDES),
    Case("DeepSpeech", deep_speech, SPOKEN, ctc),
    Case("Conformer", conformer, SPOKEN, ctc),
)
