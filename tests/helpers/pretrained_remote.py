"""A model whose code is saved with its weights."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RemoteConfig(PreTrainedConfig):
    model_type = "pipec_remote"
    vocab_size: int = 48


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
        found = self.table(input_ids)
        for layer in self.layers:
            found = layer(found).tanh()
        logits = self.head(found)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalLMOutput(loss=loss, logits=logits)
