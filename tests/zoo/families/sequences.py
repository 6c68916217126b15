"""Encoder-decoder models of the transformers library."""

import functools

from zoo.tiny_transformers import transformer, translated

seq2seq = functools.partial(transformer, batch=translated)
PROPHET = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2}
PLACES = {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}

CASES = (
    seq2seq("T5ForConditionalGeneration", decoder_start_token_id=0),
    seq2seq("MT5ForConditionalGeneration", decoder_start_token_id=0),
    seq2seq("BartForConditionalGeneration"),
    seq2seq("MBartForConditionalGeneration"),
    seq2seq("PegasusForConditionalGeneration"),
    seq2seq("MarianMTModel", decoder_start_token_id=0, pad_token_id=1),
    seq2seq("BlenderbotSmallForConditionalGeneration"),
    seq2seq("M2M100ForConditionalGeneration"),
    seq2seq("ProphetNetForConditionalGeneration", **PROPHET),
    seq2seq("LongT5ForConditionalGeneration", decoder_start_token_id=0, local_radius=3),
    seq2seq("LEDForConditionalGeneration", attention_window=4, **PLACES),
    seq2seq("PLBartForConditionalGeneration"),
)
