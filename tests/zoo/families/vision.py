"""Image models of the transformers library."""

import functools

from zoo.model_case import batch, integers, normal
from zoo.tiny_transformers import LABELS, PIXELS, images, transformer

vision = functools.partial(transformer, batch=images)
SEGMENTED = batch(pixel_values=normal(3, PIXELS, PIXELS), labels=integers(LABELS, PIXELS, PIXELS))

STAGED = {"depths": [1, 1], "hidden_sizes": [16, 32]}
SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
BLOCKS = {"num_encoder_blocks": 2, "strides": [4, 2], **STAGED}
NARROW = {"width_coefficient": 0.25, "depth_coefficient": 0.25}
POOLED = {"patch_sizes": [7, 3], "padding": [2, 1]}
FOCAL = {"focal_levels": [2, 2], "focal_windows": [3, 3]}
NECK = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 24, 32]}
PYRAMID = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]}
RATIOS = {"sequence_reduction_ratios": [4, 2, 1, 1], "mlp_ratios": [2] * 4}
HALVED = [["Subsample", 8, size, 4, 2, 2] for size in (2, 3)]
LEVELS = {"hidden_sizes": [16, 24, 32], "depths": [1] * 3, "key_dim": [8] * 3, "down_ops": HALVED}
CONVOLVED = {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}
NO_DROPOUT = dict.fromkeys(("drop_rate", "attention_drop_rate", "drop_path_rate"), [0.0] * 3)
REDUCED = {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}

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
    vision("MobileViTForImageClassification", patch_size=2, **NECK),
    vision("EfficientNetForImageClassification", drop_connect_rate=0.0, hidden_dim=320, **NARROW),
    vision("PoolFormerForImageClassification", patch_size=16, mlp_ratio=2.0, **POOLED, **BLOCKS),
    vision("Dinov2ForImageClassification"),
    vision("PvtForImageClassification", **PYRAMID, **RATIOS),
    vision("LevitForImageClassification", num_attention_heads=[2] * 3, patch_size=16, **LEVELS),
    vision("BitForImageClassification", embedding_size=16, num_groups=4, **STAGED),
    vision("FocalNetForImageClassification", embed_dim=16, patch_size=4, **FOCAL, **STAGED),
    vision("CvtForImageClassification", **CONVOLVED, **NO_DROPOUT),
    transformer(
        "SegformerForSemanticSegmentation", SEGMENTED, num_attention_heads=[1, 2], **REDUCED, **BLOCKS
    ),
)
