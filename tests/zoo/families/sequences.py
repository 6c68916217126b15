"""Encoder-decoder models of the transformers library."""

from typing import Any

from zoo.model_case import Case
from zoo.tiny_transformers import tiny, translated


def seq2seq(name: str, refused: str | None = None, **sizes: Any) -> Case:
    return Case(name, tiny(name, **sizes), translated, refused=refused)


CASES = (
    seq2seq("T5ForConditionalGeneration", decoder_start_token_id=0),
    seq2seq("MT5ForConditionalGeneration", decoder_start_token_id=0),
    seq2seq("BartForConditionalGeneration"),
    seq2seq("MBartForConditionalGeneration"),
    seq2seq("PegasusForConditionalGeneration"),
    seq2seq("MarianMTModel", decoder_start_token_id=0, pad_token_id=1),
    seq2seq("BlenderbotSmallForConditionalGeneration"),
    seq2seq("M2M100ForConditionalGeneration"),
    seq2seq(
        "ProphetNetForConditionalGeneration",
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
    ),
    seq2seq(
        "LongT5ForConditionalGeneration",
        decoder_start_token_id=0,
        local_radius=3,
    ),
    seq2seq(
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    seq2seq("PLBartForConditionalGeneration"),
)
