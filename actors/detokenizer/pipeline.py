"""TextPipeline: token ids of one output in, text to show out. No I/O, no clock.

::

    ids ──► decoder ──► scan for stops ──► held back ──► shown
             (UTF-8)      (strings, regex)    (could still be part of a stop)

There is one hold-back rule: text is shown as soon as it is certain, and it is certain when no later token can change it
or make it part of a stop. The result depends on the tokens alone, not on how they are cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixcast.actors.detokenizer.decoding import stream_decoder
from radixcast.actors.detokenizer.stop import StopScan
from radixcast.actors.detokenizer.stop_strings import Match
from radixcast.actors.detokenizer.token_table import TokenTable
from radixcast.protocols.sampling import SamplingParams


class TextPipeline:
    """State of one output's text."""

    def __init__(self, table: TokenTable, sampling: SamplingParams, context: Sequence[int] = ()) -> None:
        """`context`: the last prompt ids (see `stream_decoder`). Raises InvalidRequest for a bad stop expression."""
        self._decoder = stream_decoder(table, skip_special=sampling.skip_special_tokens, context=context)
        self._scan = StopScan(sampling)
        self._has_stops = bool(self._scan)
        self._keep_stop = sampling.no_stop_trim
        self._held = ""
        self.tokens = 0
        """Output tokens that count so far: those fed, up to and with the one that completed a stop."""
        self.match: Match | None = None
        """The stop that ended the text."""

    def feed(self, ids: Sequence[int]) -> str:
        """Decode `ids`; the text that became certain. After a stop (`match`) everything is ignored."""
        if self.match:
            return ""
        if not self._has_stops:
            self.tokens += len(ids)
            return self._decoder.push_many(ids)
        shown = []
        push = self._decoder.push
        for token in ids:
            self.tokens += 1
            text = push(token)
            if text:
                shown.append(self._take(text))
                if self.match:
                    break
        return "".join(shown)

    def end(self) -> str:
        """No token follows: the rest of the text, which may still complete a stop."""
        if self.match:
            return ""
        text = self._take(self._decoder.end())
        if not self.match:
            text, self._held = text + self._held, ""
        return text

    def count_silent(self) -> None:
        """Count a token whose text is not shown: the EOS or stop id that ended the output."""
        if not self.match:
            self.tokens += 1

    def _take(self, text: str) -> str:
        """Look for stops in new text; what may be shown of it and of the text held so far."""
        if not self._has_stops:
            return text
        match = self._scan.feed(text)
        known = self._held + text
        if match:
            self.match = match
            stop = len(known) - len(text) + match.end
            self._held = ""
            return known[: stop if self._keep_stop else stop - match.length]
        shown = len(known) - self._scan.hold
        self._held = known[shown:]
        return known[:shown]
