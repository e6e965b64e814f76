"""SlotPool: which pages of the KV pool are free. Knows nothing about requests, prefixes or tokens.

A page is `page_size` consecutive slots; slot ids of page p are p * page_size … p * page_size + page_size - 1. Pages are
handed out whole, so position i of a row always lies in a slot with the same remainder modulo the page size.

Slots may be freed while plans that write them are still in flight: plans execute in order, and a freed slot is used
again only by a later plan, which overwrites it.
"""

from __future__ import annotations

import logging

import numpy as np

from radixcast.protocols.buffers import Int32Array

logger = logging.getLogger("radixcast.scheduler")

NO_SLOTS: Int32Array = np.empty(0, dtype=np.int32)


class BookkeepingError(AssertionError):
    """A conservation law of the KV pool is broken (raised only in strict mode: in tests)."""


class Slips:
    """What happens when bookkeeping is found wrong: tests raise, a serving process counts, logs and goes on."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.count = 0

    def report(self, message: str) -> None:
        """One slip, already or soon mended by the caller. Raises BookkeepingError in strict mode."""
        self.count += 1
        if self.strict:
            raise BookkeepingError(message)
        logger.error("bookkeeping slip (repaired): %s", message)


class OutOfSlots(Exception):
    """More pages were asked for than are free; the caller should have evicted or retracted first."""


class SlotPool:
    """A stack of free pages. All operations are O(pages handed over)."""

    def __init__(self, total_tokens: int, page_size: int, slips: Slips) -> None:
        self.page_size = page_size
        self.total_pages = total_tokens // page_size
        self._slips = slips
        self._stack = np.arange(self.total_pages - 1, -1, -1, dtype=np.int32)
        self._top = self.total_pages
        self._is_free = np.ones(self.total_pages, dtype=np.bool_)

    @property
    def total_tokens(self) -> int:
        """Slots that can be handed out (the pool's size without a broken last page)."""
        return self.total_pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that `take` can give."""
        return self._top

    @property
    def free_tokens(self) -> int:
        """Slots that `take` can give."""
        return self._top * self.page_size

    def take(self, pages: int) -> Int32Array:
        """Take `pages` pages: int32 [pages * page_size] slot ids. Raises OutOfSlots."""
        if pages > self._top:
            raise OutOfSlots(f"{pages} pages asked, {self._top} free")
        self._top -= pages
        taken = self._stack[self._top : self._top + pages]
        self._is_free[taken] = False
        return self._slots_of(taken)

    def give(self, slots: Int32Array) -> None:
        """Give back whole pages (int32 [n * page_size] slot ids). A page that is free already is a slip, and skipped."""
        if not len(slots):
            return
        pages = slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size
        if self._is_free[pages].any() or (self._slips.strict and len(np.unique(pages)) != len(pages)):
            twice = int(self._is_free[pages].sum())
            self._slips.report(f"{twice} of {len(pages)} pages freed twice")
            pages = np.unique(pages[~self._is_free[pages]])
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)
        self._is_free[pages] = True

    def free_mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Copy of bool [total_pages]: whether a page is free."""
        return self._is_free.copy()

    def rebuild(self, used: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Repair: from now on exactly the pages with used[page] False (bool [total_pages]) are free."""
        free = np.flatnonzero(~used).astype(np.int32)[::-1]
        self._stack[: len(free)] = free
        self._top = len(free)
        self._is_free = ~used

    def _slots_of(self, pages: Int32Array) -> Int32Array:
        if self.page_size == 1:
            return pages.copy()
        offsets = np.arange(self.page_size, dtype=np.int32)
        slots: Int32Array = (pages[:, None] * np.int32(self.page_size) + offsets).reshape(-1).astype(np.int32)
        return slots
