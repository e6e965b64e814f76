"""A model folder without weights: byte tokenizer, and tokens from a hash instead of a model. Costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.byte_tokenizer import BOS_ID, CHATML, EOS_ID, VOCAB_SIZE, write_byte_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "radixcast_weights": "free",
}


def write_free_model(folder: Path) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json into `folder` (made when missing); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHATML, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
