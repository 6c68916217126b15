"""Image models of the transformers library."""

from typing import Any

import torch

from zoo.model_case import Case, Inputs
from zoo.tiny_transformers import LABELS, PIXELS, images, tiny


def vision(name: str, refused: str | None = None, **sizes: Any) -> Case:
    return Case(name, tiny(name, **sizes), images, refused=refused)


def segmented(rows: int) -> Inputs:
    return {
        "pixel_values": torch.randn(rows, 3, PIXELS, PIXELS),
        "labels": torch.randint(LABELS, (rows, PIXELS, PIXELS)),
    }


STAGED = {"depths": [1, 1], "hidden_sizes": [16, 32]}
SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}

CASES = (
    vision("ViTForImageClassification"),
    vision("DeiTForImageClassification"),
    vision("BeitForImageClassification"),
    vision("SwinForImageClassification", **SWIN),
    vision("Swinv2ForImageClassification", **SWIN),
    vision("ConvNextForImageClassification", num_stages=2, patch_size=4, **STAGED),
    vision("ConvNextV2ForImageClassification", num_stages=2, patch_size=4, **STAGED),
    vision("ResNetForImageClassification", embedding_size=16, **STAGED),
    vision("RegNetForImageClassification", embedding_size=16, groups_width=8, **STAGED),
    vision("MobileNetV2ForImageClassification", depth_multiplier=0.25),
    vision(
        "MobileViTForImageClassification",
        hidden_sizes=[16, 24, 32],
        patch_size=2,
        neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 32],
    ),
    vision(
        "EfficientNetForImageClassification",
        width_coefficient=0.25,
        depth_coefficient=0.25,
        drop_connect_rate=0.0,
        hidden_dim=320,
    ),
    vision(
        "PoolFormerForImageClassification",
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        mlp_ratio=2.0,
        patch_size=16,
    ),
    vision("Dinov2ForImageClassification"),
    vision(
        "PvtForImageClassification",
        depths=[1] * 4,
        hidden_sizes=[8, 16, 24, 32],
        sequence_reduction_ratios=[4, 2, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2] * 4,
    ),
    vision(
        "LevitForImageClassification",
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
        patch_size=16,
    ),
    vision(
        "BitForImageClassification", embedding_size=16, num_groups=4, depths=[1, 1], hidden_sizes=[16, 32]
    ),
    vision(
        "FocalNetForImageClassification",
        embed_dim=16,
        depths=[1, 1],
        hidden_sizes=[16, 32],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        patch_size=4,
    ),
    vision(
        "CvtForImageClassification",
        embed_dim=[16, 16, 32],
        num_heads=[1, 2, 2],
        depth=[1, 2, 3],
        drop_rate=[0.0] * 3,
        attention_drop_rate=[0.0] * 3,
        drop_path_rate=[0.0] * 3,
    ),
    Case(
        "SegformerForSemanticSegmentation",
        tiny(
            "SegformerForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[16, 32],
            sr_ratios=[2, 1],
            patch_sizes=[3, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
        ),
        segmented,
    ),
)
