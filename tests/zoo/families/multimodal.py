"""Models of more than one kind of input, and of time series, of the transformers library."""

import torch

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import LABELS, PIXELS, TOKENS, tiny, words


def pairs(rows: int) -> Inputs:
    return {
        "input_ids": words(rows),
        "pixel_values": torch.randn(rows, 3, PIXELS, PIXELS),
        "return_loss": True,
    }


def documents(rows: int) -> Inputs:
    boxes = torch.randint(0, 500, (rows, TOKENS, 4))
    boxes[..., 2:] += boxes[..., :2]
    return {"input_ids": words(rows), "bbox": boxes, "labels": torch.randint(LABELS, (rows,))}


def questions(rows: int) -> Inputs:
    image = torch.randn(rows, 3, PIXELS, PIXELS)
    return {"input_ids": words(rows), "pixel_values": image, "labels": torch.rand(rows, LABELS)}


def described(rows: int) -> Inputs:
    """Each row begins with the places of the image's patches."""
    ids = words(rows, 24)
    ids[:, :16] = 4
    return {"input_ids": ids, "pixel_values": torch.randn(rows, 3, PIXELS, PIXELS), "labels": ids}


def captioned(rows: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, PIXELS, PIXELS), "labels": words(rows, 6)}


def forecasts(rows: int) -> Inputs:
    return {"past_values": torch.randn(rows, 16, 2), "future_values": torch.randn(rows, 4, 2)}


def llava() -> torch.nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=PIXELS, patch_size=8, **sizes),
            text_config=LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes),
            image_token_index=4,
            vision_feature_layer=-1,
        )
    )


def captioner() -> torch.nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    vit = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    gpt = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=64,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        add_cross_attention=True,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt)
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    return VisionEncoderDecoderModel(config)


IMAGES = {"pixel_values": 0}
"""As many images as texts, which these models do not need."""

CASES = (
    Case("CLIPModel", tiny("CLIPModel", projection_dim=32), pairs, batched=IMAGES, by_microbatch=True),
    Case("SiglipModel", tiny("SiglipModel", projection_size=32), pairs, batched=IMAGES, by_microbatch=True),
    Case(
        "AltCLIPModel",
        tiny("AltCLIPModel", projection_dim=32, project_dim=32),
        pairs,
        batched=IMAGES,
        by_microbatch=True,
    ),
    Case(
        "ViltForQuestionAnswering", tiny("ViltForQuestionAnswering"), questions, refused="a branch on values"
    ),
    Case("LayoutLMForSequenceClassification", tiny("LayoutLMForSequenceClassification"), documents),
    Case("LlavaForConditionalGeneration", llava, described, batched=IMAGES),
    Case("VisionEncoderDecoderModel", captioner, captioned),
    Case(
        "PatchTSTForPrediction",
        tiny(
            "PatchTSTForPrediction",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
        ),
        forecasts,
    ),
    Case(
        "PatchTSMixerForPrediction",
        tiny(
            "PatchTSMixerForPrediction",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
        ),
        forecasts,
    ),
    Case(
        "DecisionTransformerModel",
        tiny("DecisionTransformerModel", state_dim=6, act_dim=2, max_ep_len=20),
        lambda rows: {
            "states": torch.randn(rows, 4, 6),
            "actions": torch.randn(rows, 4, 2),
            "rewards": torch.randn(rows, 4, 1),
            "returns_to_go": torch.randn(rows, 4, 1),
            "timesteps": torch.arange(4).repeat(rows, 1),
            "attention_mask": torch.ones(rows, 4),
            "target": torch.randn(rows, 4, 2),
        },
        lambda output, target: torch.nn.functional.mse_loss(output["action_preds"], target),
    ),
)
