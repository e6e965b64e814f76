"""All text-level stops of one request as one scan: strings and expressions, one match, one hold-back."""

from __future__ import annotations

from radixcast.actors.detokenizer.stop_regex import StopRegexScan, stop_regex
from radixcast.actors.detokenizer.stop_strings import Match, StopStringScan, stop_strings
from radixcast.protocols.sampling import SamplingParams


class StopScan:
    """Strings and expressions side by side; the earlier end wins, at the same end the longer match, then the string."""

    def __init__(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for an expression that can't be matched in linear time and bounded length."""
        self._scans: list[StopStringScan | StopRegexScan] = []
        if sampling.stop:
            self._scans.append(StopStringScan(stop_strings(sampling.stop)))
        if sampling.stop_regex:
            self._scans.append(StopRegexScan(stop_regex(sampling.stop_regex)))

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._scans)

    @property
    def hold(self) -> int:
        """Characters at the end of the text that may still become part of a match."""
        return max((scan.hold for scan in self._scans), default=0)

    def feed(self, text: str) -> Match | None:
        """Go on with `text`; the first stop in it, after which the scan is over."""
        best: Match | None = None
        for scan in self._scans:
            match = scan.feed(text if best is None else text[: best.end])
            if match and (best is None or (match.end, -match.length) < (best.end, -best.length)):
                best = match
        return best
