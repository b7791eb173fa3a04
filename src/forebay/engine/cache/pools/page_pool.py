"""A pool of page ids with a free list: the device pool of a layer group, or the host pool."""

from __future__ import annotations

__all__ = ["PagePool"]


class PagePool:
    """Ids 0 .. size - 1, each free or owned by exactly one holder. Who holds what is the caller's business."""

    __slots__ = ("_free", "_used", "free", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._used = bytearray(size)
        self.free = size
        """Pages that nobody owns."""

    @property
    def used(self) -> int:
        """Pages that have an owner."""
        return self.size - self.free

    def take(self, count: int) -> list[int]:
        """``count`` pages, in a fresh pool consecutive ones; the caller has seen that there are as many."""
        assert count <= self.free, f"{count} pages asked of a pool with {self.free} free"
        if not count:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        self.free -= count
        used = self._used
        for page in pages:
            used[page] = 1
        return pages

    def give(self, page: int) -> None:
        """Return one page."""
        assert self._used[page], f"page {page} was freed twice"
        self._used[page] = 0
        self._free.append(page)
        self.free += 1

    def is_used(self, page: int) -> bool:
        """True while ``page`` has an owner."""
        return bool(self._used[page])

    def check(self, owners: dict[int, str]) -> None:
        """``owners`` (page -> who) are exactly the used pages, and the free list holds each other page once."""
        assert self.free == len(self._free), "the count of free pages is wrong"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert len(self._free) + sum(self._used) == self.size, "free and used pages do not add up to the pool"
        for page, who in owners.items():
            assert self._used[page], f"page {page} of {who} is marked free"
        lost = [page for page in range(self.size) if self._used[page] and page not in owners]
        assert not lost, f"pages without an owner: {lost[:8]}"
