"""What every grammar backend offers. Packed masks: bit t % 32 of word t // 32 says that token t may come next.

A `Compiled` is immutable and shared; a `Matcher` is the state of one output. Backends never raise for a token that is not
allowed, never end a process, and never fall back to no constraint.
"""

from __future__ import annotations

from typing import Protocol

from radixcast.protocols.buffers import Int32Array
from radixcast.protocols.errors import InvalidRequest


class GrammarError(InvalidRequest):
    """A grammar can't be used.

    `code` is one of unsupported_schema_keyword, invalid_schema, unsatisfiable_schema, invalid_regex, invalid_grammar,
    grammar_too_large, grammar_timeout; `param` points at the place (a JSON pointer for schemas).
    """

    code = "invalid_grammar"


class Matcher(Protocol):
    """The state of one output under a grammar."""

    def fill(self, mask_W: Int32Array) -> None:
        """Write the tokens that may come next into `mask_W` (int32 [ceil(vocabulary rows / 32)], overwritten).

        EOS ids are allowed exactly when `complete`. All zero: a dead end.
        """

    def accept(self, token: int) -> bool:
        """Advance by one token; False, and no change, when it is not allowed. An EOS id is accepted when `complete`."""

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted tokens."""

    def fork(self) -> Matcher:
        """An independent copy."""

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next, whatever the model says (in the model's canonical tokenisation)."""

    @property
    def complete(self) -> bool:
        """The output may end here."""

    @property
    def finished(self) -> bool:
        """The output must end here: nothing but its end is allowed."""

    @property
    def error(self) -> str:
        """Why the matcher can't go on (fuel spent, a dead end); empty: it can."""


class Compiled(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A matcher at the start of the output."""

    @property
    def nbytes(self) -> int:
        """About how much memory it holds."""
