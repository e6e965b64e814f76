"""A byte-level tokenizer that costs nothing: id b is byte b, a few special tokens behind them.

Any text encodes to its UTF-8 bytes, so lengths are known without a model and a character is split over tokens at will.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID, PAD_ID = range(256, 256 + len(SPECIAL_TOKENS))
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_chars() -> list[str]:
    """The printable character that ByteLevel writes for each byte, in byte order (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {b: chr(b) for b in shown}
    hidden = (b for b in range(256) if b not in table)
    table.update({b: chr(256 + n) for n, b in enumerate(hidden)})
    return [table[b] for b in range(256)]


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """The tokenizer itself; 261 ids, no BOS added by itself."""
    vocabulary = {char: byte for byte, char in enumerate(byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


def write_byte_tokenizer(folder: str | Path) -> Path:
    """Write `tokenizer.json` into `folder` and return its path."""
    path = Path(folder) / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path


def ids_of(text: str) -> list[int]:
    """The ids of `text`: its UTF-8 bytes."""
    return list(text.encode())
