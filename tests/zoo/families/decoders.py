"""Decoder language models of the transformers library."""

from zoo.tiny_transformers import decoder

CASES = (
    decoder("GPT2LMHeadModel"),
    decoder("LlamaForCausalLM"),
    decoder("MistralForCausalLM", sliding_window=4),
    decoder("Qwen2ForCausalLM"),
    decoder("Qwen3ForCausalLM"),
    decoder("Gemma2ForCausalLM"),
    decoder("Gemma3ForCausalLM"),
    decoder("PhiForCausalLM"),
    decoder("Phi3ForCausalLM", pad_token_id=0),
    decoder("FalconForCausalLM"),
    decoder("BloomForCausalLM"),
    decoder("MptForCausalLM"),
    decoder("OPTForCausalLM"),
    decoder("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]]),
    decoder("GPTNeoXForCausalLM"),
    decoder("GPTJForCausalLM"),
    decoder("CodeGenForCausalLM"),
    decoder("GPTBigCodeForCausalLM"),
    decoder("CohereForCausalLM"),
    decoder("OlmoForCausalLM"),
    decoder("StableLmForCausalLM"),
    decoder("BioGptForCausalLM"),
    decoder("XGLMForCausalLM", attention_heads=4, num_layers=2),
    decoder("NemotronForCausalLM", num_key_value_heads=2),
    decoder("Glm4ForCausalLM", pad_token_id=0),
    decoder("SmolLM3ForCausalLM", pad_token_id=0),
)
