"""`format`: the ones that are enforced, as regular expressions (Rust syntax) that match a subset of what the format allows.

A format of the standard is enforced or refused; any other name is an annotation, as the standard says. Sources: RFC 3339
(dates and times, without leap seconds and lower-case letters; day numbers follow the calendar), RFC 1123 (host names; no
`--` in the third and fourth place, which only encoded names have), RFC 3986 (URI references), RFC 6570 (templates), RFC 6901.
"""

from __future__ import annotations

NATIVE = frozenset(("uuid", "email", "ipv4", "ipv6", "uri", "duration"))
"""Formats that llguidance enforces itself."""

_YEAR = "(?:[1-9][0-9]{3}|0(?:[1-9][0-9]{2}|0(?:[1-9][0-9]|0[1-9])))"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"

_LETTER = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
_LABEL = f"{_LETTER}(?:(?:{_INNER}{{0,2}}|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}){_LETTER})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,7}}"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_PLAIN = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPED})"
_SEGMENT = f"(?:[A-Za-z0-9._~!$&'()*+,;=@:-]|{_ESCAPED})"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_ABSOLUTE = f"[A-Za-z][A-Za-z0-9+.-]*:(?://[A-Za-z0-9._~-]+(?::[0-9]{{1,5}})?)?(?:/{_SEGMENT}+)*/?"
_RELATIVE = f"(?:{_PLAIN}+(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?)?"
_REFERENCE = f"(?:{_ABSOLUTE}|{_RELATIVE}){_TAIL}"

_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = rf"(?:[A-Za-z0-9._~!$&()*+,;=@:/?#\[\]-]|{_ESCAPED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

_ONE = r"(?:[A-Za-z0-9 _,:;=<>@#%&'!~`/.\x{80}-\x{D7FF}-]|\\[dDwWsS.*+?()\[\]{}|^$/\\]|\[\^?(?:[A-Za-z0-9_ ]|a-z|A-Z|0-9)+\])"
_MANY = r"(?:[*+?]|\{[0-9]{1,2}\})?"


def _expression(one: str) -> str:
    return rf"(?:{one}{_MANY})*(?:\|(?:{one}{_MANY})*)*"


_GROUPED = rf"(?:{_ONE}|\({_expression(_ONE)}\))"
_REGEX = rf"\^?{_expression(_GROUPED)}\$?"

ENFORCED = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "uri-template": _TEMPLATE,
    "regex": _REGEX,
}
"""Formats that become a pattern (to be anchored)."""

LONGEST = {"hostname": 253, "idn-hostname": 253}
"""Formats with a longest length (characters)."""

ALIASES = {"idn-email": "email", "iri": "uri"}
"""Formats of which a narrower one is enforced: each ASCII address is also an internationalised one."""
