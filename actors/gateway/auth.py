"""Who may do what. Every route has a level; a request that matches no route needs a key like any other (default deny).

    open     anybody: liveness, metrics, the greeting
    normal   --api-key (or the admin key) when one is set
    admin    --admin-api-key when one is set, else --api-key

Without a key the door is the address: on a loopback address the Host header must name a loopback host and a browser's
Origin must be one too (a foreign page, also one that rebinds its DNS name, gets 403); on any other address admin routes are
closed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from enum import Enum
from urllib.parse import urlsplit

from radixcast.protocols.errors import Forbidden, Unauthorized
from radixcast.protocols.server_args import ServerArgs

_UNSPECIFIED = ("0.0.0.0", "::")
"""Addresses that programs dial to mean this machine; being no names, they can't be rebound."""


class Level(Enum):
    """What a route asks of its caller."""

    OPEN = "open"
    NORMAL = "normal"
    ADMIN = "admin"


class Guard:
    """Decides whether a request may pass. Holds digests of the keys, never the keys."""

    def __init__(self, args: ServerArgs) -> None:
        self._api = _digest(args.api_key) if args.api_key else None
        self._admin = _digest(args.admin_api_key) if args.admin_api_key else None
        self._loopback = is_loopback(args.host)

    def check(self, level: Level, headers: Mapping[str, str]) -> None:
        """Raises Unauthorized (no valid key) or Forbidden (a valid one that does not open this, or a foreign page)."""
        if self._api is None and self._loopback:
            _check_browser(headers)
        if level is Level.OPEN:
            return
        if self._admin is None and self._api is None:
            if level is Level.ADMIN and not self._loopback:
                raise Forbidden("admin routes are closed: this server listens beyond loopback and has no key")
            return
        if level is Level.NORMAL and self._api is None:
            return
        is_api, is_admin = self._presented(headers)
        if not (is_api or is_admin):
            raise Unauthorized("this route needs a key: send Authorization: Bearer KEY")
        if level is Level.ADMIN and self._admin is not None and not is_admin:
            raise Forbidden("this route needs the admin key")

    def _presented(self, headers: Mapping[str, str]) -> tuple[bool, bool]:
        """Whether the bearer is the API key and whether it is the admin key. Takes the same time for every answer."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        digest = _digest(token.strip() if scheme.lower() == "bearer" else "")
        none = b"\0" * len(digest)
        is_api = hmac.compare_digest(digest, self._api or none)
        is_admin = hmac.compare_digest(digest, self._admin or none)
        return is_api, is_admin


def is_loopback(host: str) -> bool:
    """Whether `host` (name or address, with or without brackets) is this machine and nothing but this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _check_browser(headers: Mapping[str, str]) -> None:
    host = headers.get("Host")
    if host and not (is_loopback(name := _hostname(f"//{host}")) or name in _UNSPECIFIED):
        raise Forbidden("the Host header must name a loopback host, or the server needs an --api-key", code="foreign_host")
    origin = headers.get("Origin")
    if origin and not is_loopback(_hostname(origin)):
        raise Forbidden("requests from other origins are refused, or the server needs an --api-key", code="foreign_origin")
    if headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
        raise Forbidden("another site's page may not call this server without a key", code="foreign_origin")


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
