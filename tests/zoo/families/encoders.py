"""Bidirectional encoders of text, of the transformers library."""

from zoo.tiny_transformers import classified, masked, transformer

BOTTLENECK = {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}
LATENTS = {"d_latents": 32, "num_latents": 8, "qk_channels": 32, "v_channels": 32}
ATTENTION = {"num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4}

CASES = (
    transformer("BertForMaskedLM", masked),
    transformer("RobertaForSequenceClassification", classified),
    transformer("AlbertForMaskedLM", masked),
    transformer("DistilBertForSequenceClassification", classified),
    transformer("ElectraForSequenceClassification", classified),
    transformer("DebertaV2ForMaskedLM", masked),
    transformer("DebertaForSequenceClassification", classified),
    transformer("MPNetForMaskedLM", masked),
    transformer("FNetForMaskedLM", lambda rows: {**masked(rows), "attention_mask": None}),
    transformer("ModernBertForMaskedLM", masked, pad_token_id=0),
    transformer("RoFormerForSequenceClassification", classified),
    transformer("ConvBertForMaskedLM", masked),
    transformer("SqueezeBertForMaskedLM", masked),
    transformer("XLNetForSequenceClassification", classified),
    transformer("MobileBertForMaskedLM", masked, **BOTTLENECK),
    transformer("NystromformerForMaskedLM", masked, num_landmarks=12, segment_means_seq_len=12),
    transformer("FunnelForMaskedLM", masked, block_sizes=[1, 1], num_decoder_layers=1),
    transformer("LongformerForMaskedLM", masked, attention_window=4, pad_token_id=1),
    transformer("BigBirdForMaskedLM", masked, attention_type="original_full"),
    transformer("CanineForSequenceClassification", classified, local_transformer_stride=4),
    transformer("PerceiverForMaskedLM", masked, max_position_embeddings=12, **LATENTS, **ATTENTION),
)
