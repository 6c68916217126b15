"""Rows in which several documents follow each other, none of which sees another one.

``position_ids`` begin at 0 with each document, and there is no attention mask: models of transformers then
make masks in blocks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import InputError


class PackedRows:
    """Collates rows of packed documents: ``input_ids``, ``labels`` and ``seq_lengths``.

    Shorter rows are filled with documents of one token. The first token of a document is no label.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def num_tokens(self, inputs: Mapping[str, Tensor]) -> int:
        """How many tokens of a batch are not there to fill rows."""
        fills = (inputs["input_ids"] == self._pad_token_id) & (inputs["position_ids"] == 0)
        return fills.numel() - int(fills.flip(1).cumprod(1).sum())

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        rows = [self._row(example, longest) for example in examples]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, example: dict[str, Any], longest: int) -> dict[str, Tensor]:
        tokens = torch.as_tensor(example["input_ids"])
        labels = torch.as_tensor(example.get("labels", tokens))
        missing = longest - len(tokens)
        lengths = example.get("seq_lengths", [len(tokens)])
        positions = torch.cat([*map(torch.arange, lengths), torch.zeros(missing, dtype=torch.long)])
        labels = torch.cat([labels, labels.new_full((missing,), -100)]).masked_fill(positions == 0, -100)
        tokens = torch.cat([tokens, tokens.new_full((missing,), self._pad_token_id)])
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}


@torch.no_grad()
def require_separate_documents(model: nn.Module) -> None:
    """Raise InputError if a document of a row changes what the model makes of the next one."""
    refusal = (
        "leave packing out, pass packing_strategy='wrapped', whose documents see each other, or load the "
        'model with attn_implementation="sdpa" or "eager"'
    )
    kind: Any = getattr(model.config, "_attn_implementation", None)
    if kind not in ("sdpa", "eager"):
        raise InputError(
            f"attention is computed by {kind!r}, whose rows cannot hold several documents; {refusal}"
        )
    first, second = torch.zeros(2, 8, dtype=torch.long), torch.arange(4).repeat(2)[None]
    first[1, :4] = 1
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=first, position_ids=second.expand(2, 8), use_cache=False).logits[:, 4:]
    finally:
        model.train(was_training)
    if not torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-5):
        raise InputError(
            f"packing: documents of a row see each other in {type(model).__name__}, which makes no masks of "
            f"position_ids; {refusal}"
        )
