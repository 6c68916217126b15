"""Models of more than one kind of input, and of time series, of the transformers library."""

import functools

import torch
from torch import Tensor, nn

from zoo.model_case import Case, Inputs, batch, integers, normal, uniform
from zoo.tiny_transformers import LABELS, PIXELS, TOKENS, config_of, transformer, words


def boxes(rows: int) -> Tensor:
    corners = torch.randint(0, 500, (rows, TOKENS, 4))
    corners[..., 2:] += corners[..., :2]
    return corners


def described(rows: int) -> Inputs:
    """Each row begins with the places of the image's patches."""
    ids = words(rows, 24)
    ids[:, :16] = 4
    return {"input_ids": ids, "pixel_values": IMAGE(rows), "labels": ids}


def captioner() -> nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    writer = config_of(GPT2Config, {"add_cross_attention": True, "n_positions": 16})
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(config_of(ViTConfig, {}), writer)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    return VisionEncoderDecoderModel(config)


IMAGE = normal(3, PIXELS, PIXELS)
PAIRS = batch(input_ids=words, pixel_values=IMAGE, return_loss=lambda rows: True)
QUESTIONS = batch(pixel_values=IMAGE, input_ids=words, labels=uniform(LABELS))
DOCUMENTS = batch(bbox=boxes, input_ids=words, labels=integers(LABELS))
CAPTIONED = batch(pixel_values=IMAGE, labels=functools.partial(words, tokens=6))
FORECASTS = batch(past_values=normal(16, 2), future_values=normal(4, 2))
EPISODES = batch(
    states=normal(4, 6),
    actions=normal(4, 2),
    rewards=normal(4, 1),
    returns_to_go=normal(4, 1),
    timesteps=lambda rows: torch.arange(4).repeat(rows, 1),
    attention_mask=lambda rows: torch.ones(rows, 4),
    target=normal(4, 2),
)


def action_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["action_preds"], target)


IMAGES = {"pixel_values": 0}
"""As many images as texts, which these models do not need."""

contrastive = functools.partial(transformer, batch=PAIRS, batched=IMAGES, by_microbatch=True)
PATCHES = {"context_length": 16, "patch_length": 4, "patch_stride": 4}
FORECAST = {"num_input_channels": 2, "prediction_length": 4}
LLAVA = {"image_token_index": 4, "vision_feature_layer": -1}
DECISIONS = {"state_dim": 6, "act_dim": 2, "max_ep_len": 20}

CASES = (
    contrastive("CLIPModel", projection_dim=32),
    contrastive("SiglipModel", projection_size=32),
    contrastive("AltCLIPModel", projection_dim=32, project_dim=32),
    transformer("ViltForQuestionAnswering", QUESTIONS, refused="a branch on values"),
    transformer("LayoutLMForSequenceClassification", DOCUMENTS),
    transformer("LlavaForConditionalGeneration", described, batched=IMAGES, **LLAVA),
    Case("VisionEncoderDecoderModel", captioner, CAPTIONED),
    transformer("PatchTSTForPrediction", FORECASTS, **FORECAST, **PATCHES),
    transformer("PatchTSMixerForPrediction", FORECASTS, **FORECAST, **PATCHES),
    transformer("DecisionTransformerModel", EPISODES, action_loss, **DECISIONS),
)
