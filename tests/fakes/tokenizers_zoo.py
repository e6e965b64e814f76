"""Small tokenizers of every decoder kind, built on the spot."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<s>", "</s>", "<|sep|>")
WORDS = ("▁the", "▁cat", "▁", "s", "ing", "▁▁", "你", "好", "\n", "a▁b", "", "▁é", "😀", ".", ",")


def sentencepiece_like() -> Tokenizer:
    """Byte fallback, `▁` for a space and a leading space that is cut: as Llama 2's tokenizer.json."""
    pieces = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *(w for w in WORDS if w)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_specials(tokenizer)


def metaspace() -> Tokenizer:
    """Metaspace decoder, no byte fallback: as T5's or old Mistral's."""
    vocabulary = {piece: i for i, piece in enumerate([*SPECIALS, *(w for w in WORDS if w)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_specials(tokenizer)


def wordpiece() -> Tokenizer:
    """A decoder that looks at its neighbours and has no fast path: as BERT's."""
    words = [*SPECIALS, "[UNK]", "the", "cat", "##s", "##ing", "你", ".", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _with_specials(tokenizer)


def _with_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer
