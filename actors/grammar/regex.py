"""Regular expressions that whole outputs must match: from what a client writes to what an automaton library gets.

The dialect is Python's `re` without look-around, back references, word boundaries, atomic and possessive parts. The match is
full, so ``^`` and ``$`` at the outer ends are dropped. ``\\d``, ``\\w``, ``\\s`` are ASCII; ``.`` is any character but a line
break. Lazy loops end as `regex_lazy` says, endless ones as `regex_bounds` says: what is enforced is always a subset of
the expression.
"""

from __future__ import annotations

from radixcast.actors.grammar.interface import GrammarError
from radixcast.actors.grammar.regex_bounds import bound_loops
from radixcast.actors.grammar.regex_lazy import narrow_lazy
from radixcast.actors.grammar.regex_parse import parse, refused
from radixcast.actors.grammar.regex_tree import EMPTY, NEVER, Ranges, without, write
from radixcast.protocols.limits import MAX_GRAMMAR_BYTES

MAX_REGEX_CHARS = 64 << 10
"""Characters of an expression."""


def normalize(pattern: str, max_tokens: int = 0, unwritable: Ranges = ()) -> str:
    """`pattern` as all backends read it, for outputs of at most `max_tokens` tokens (0: not known).

    `unwritable`: characters that the model has no tokens for; an output that needs one would be stuck before it. Raises
    GrammarError: invalid_regex with the position, or grammar_too_large.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise GrammarError(
            f"the regular expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed",
            code="grammar_too_large",
            param="regex",
        )
    try:
        tree = without(bound_loops(narrow_lazy(parse(pattern)), max_tokens), unwritable)
        text = write(tree)
    except RecursionError:
        raise refused("it is nested too deep") from None
    if tree == NEVER:
        raise refused("no text can match it")
    if tree == EMPTY:
        raise refused("only the empty text matches it")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise GrammarError("the regular expression is too large", code="grammar_too_large", param="regex")
    return text
