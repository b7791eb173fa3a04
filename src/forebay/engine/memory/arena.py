"""Memory for packed weights and for the device pool: private, in huge pages, and apart from the allocator's heap.

Loading alternates between what stays (packed weights) and what goes (what was read from files). In one heap the first
would pin the holes that the second leaves: measured, a third of a small mixture's weights.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["Arena", "huge_memory"]

_SLAB_BYTES = 64 << 20
_LINE = 64


class Arena:
    """Hands out pieces of large mappings; a mapping is returned when the last of its tensors is gone."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes (uint8), aligned to cache lines, not yet touched."""
        room = -(-nbytes // _LINE) * _LINE
        if room > self._slab.numel():
            self._slab = huge_memory(max(room, _SLAB_BYTES))
        piece, self._slab = self._slab[:nbytes], self._slab[room:]
        return piece


def huge_memory(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes (uint8) of a mapping of its own, zero and not yet touched;
    in huge pages where the system has them.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a hint: kernels without huge pages refuse it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
