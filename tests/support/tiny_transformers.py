"""Tiny models of transformers with random weights, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

END: Final = "<end>"
CHAT: Final = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONTEXT: Final = 128


def write_tokenizer(folder: Path, **options: Any) -> int:
    """A token for each byte, and END, which is token 0. Returns how many tokens there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    written = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, **options)
    written.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def write_language_model(folder: Path, kind: str = "llama", *, spread: float = 1.0, **options: Any) -> Path:
    """A causal language model. `kind`: of the network. `spread`: of its weights; with 1 a token depends on
    all before it, and on where they are. `options`: of the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = write_tokenizer(folder, **options)
    config = AutoConfig.for_model(
        kind, **_SHAPES[kind], vocab_size=vocabulary, bos_token_id=None, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in net.named_parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=spread if "embed" in name or "wte" in name else spread / 4)
    net.save_pretrained(folder)
    return folder


def write_encoder(folder: Path) -> Path:
    """An encoder for texts, with vectors of 16 numbers."""
    import torch
    from transformers import BertConfig, BertModel

    vocabulary = write_tokenizer(folder, model_max_length=40)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


_ROTARY: Final = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama": _ROTARY,
    "qwen2": _ROTARY,
    "mistral": _ROTARY | {"sliding_window": 6},
    "gemma2": _ROTARY | {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": CONTEXT},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
