"""A pool of page ids with a free list: the device pool of a layer group, or the host pool."""

from __future__ import annotations

__all__ = ["PagePool"]


class PagePool:
    """Page ids 0 .. size - 1, each free or allocated. The caller keeps track of which page belongs to whom."""

    __slots__ = ("_free", "_used", "num_free", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._used = bytearray(size)
        self.num_free = size
        """Pages that are not allocated."""

    @property
    def num_used(self) -> int:
        """Pages that are allocated."""
        return self.size - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` pages (consecutive ones in a new pool). The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} pages asked from a pool with {self.num_free} free"
        if not count:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        self.num_free -= count
        used = self._used
        for page in pages:
            used[page] = 1
        return pages

    def free(self, page: int) -> None:
        """Free one page."""
        assert self._used[page], f"page {page} was freed twice"
        self._used[page] = 0
        self._free.append(page)
        self.num_free += 1

    def check(self, owners: dict[int, str]) -> None:
        """``owners`` (page -> who) are exactly the used pages, and the free list holds each other page once."""
        assert self.num_free == len(self._free), "the count of free pages is wrong"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert len(self._free) + sum(self._used) == self.size, "free and used pages do not add up to the pool"
        for page, who in owners.items():
            assert self._used[page], f"page {page} of {who} is marked free"
        lost = [page for page in range(self.size) if self._used[page] and page not in owners]
        assert not lost, f"pages without an owner: {lost[:8]}"
