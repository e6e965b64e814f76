"""Work that the tokenizer does beside its mailbox: one prompt to be made, or texts to be tokenised."""

from __future__ import annotations

from dataclasses import dataclass

from radixcast.protocols.public import Generate, Tokenize
from radixcast.protocols.sampling import SamplingParams


@dataclass(eq=False)
class Job:
    """A request whose prompt is being made in a thread, or whose grammar is being proved."""

    client: str
    message: Generate | Tokenize
    chars: int
    aborted: bool = False


def chars_of(message: Generate | Tokenize) -> int:
    """About how much text a job works on."""
    if isinstance(message, Tokenize):
        texts = sum(map(len, message.texts))
    else:
        texts = len(message.text or "") + len(message.input_ids or b"") + _grammar_chars(message.sampling)
    return texts + (sum(len(str(m.get("content", ""))) for m in message.chat.messages) if message.chat else 0)


def _grammar_chars(sampling: SamplingParams) -> int:
    texts = (sampling.regex, sampling.json_schema, sampling.ebnf, sampling.structural_tag, *sampling.choices)
    return sum(len(text) for text in texts if text)
