"""Bidirectional encoders of text, of the transformers library."""

from collections.abc import Callable
from typing import Any

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import classified, masked, tiny


def encoder(name: str, batch: Callable[[int], Inputs], refused: str | None = None, **sizes: Any) -> Case:
    return Case(name, tiny(name, **sizes), batch, refused=refused)


CASES = (
    encoder("BertForMaskedLM", masked),
    encoder("RobertaForSequenceClassification", classified),
    encoder("AlbertForMaskedLM", masked),
    encoder("DistilBertForSequenceClassification", classified),
    encoder("ElectraForSequenceClassification", classified),
    encoder("DebertaV2ForMaskedLM", masked),
    encoder("DebertaForSequenceClassification", classified),
    encoder("MPNetForMaskedLM", masked),
    encoder("FNetForMaskedLM", lambda rows: {**masked(rows), "attention_mask": None}),
    encoder("ModernBertForMaskedLM", masked, pad_token_id=0),
    encoder("RoFormerForSequenceClassification", classified),
    encoder("ConvBertForMaskedLM", masked),
    encoder("SqueezeBertForMaskedLM", masked),
    encoder("XLNetForSequenceClassification", classified),
    encoder(
        "MobileBertForMaskedLM", masked, embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32
    ),
    encoder("NystromformerForMaskedLM", masked, num_landmarks=12, segment_means_seq_len=12),
    encoder("FunnelForMaskedLM", masked, block_sizes=[1, 1], num_decoder_layers=1),
    encoder("LongformerForMaskedLM", masked, attention_window=4, pad_token_id=1),
    encoder("BigBirdForMaskedLM", masked, attention_type="original_full"),
    encoder("CanineForSequenceClassification", classified, local_transformer_stride=4),
    encoder(
        "PerceiverForMaskedLM",
        masked,
        d_latents=32,
        num_latents=8,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
        max_position_embeddings=12,
    ),
)
