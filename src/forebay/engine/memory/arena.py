"""Memory for packed weights and for the device pool: in huge pages, and separate from the allocator's heap.

Loading allocates packed weights, which stay, between buffers for file contents, which are freed. In one heap the
packed weights would keep the freed memory between them mapped: measured, a third of a small mixture-of-experts
model's weights.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["Arena", "huge_memory"]

_SLAB_BYTES = 64 << 20
_LINE = 64


class Arena:
    """Allocates from large mappings; a mapping is unmapped when the last of its tensors is freed."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate ``nbytes`` bytes (uint8), aligned to cache lines; the memory is mapped when first written."""
        room = -(-nbytes // _LINE) * _LINE
        if room > self._slab.numel():
            self._slab = huge_memory(max(room, _SLAB_BYTES))
        piece, self._slab = self._slab[:nbytes], self._slab[room:]
        return piece


def huge_memory(nbytes: int) -> torch.Tensor:
    """``nbytes`` zero bytes (uint8) in a mapping of their own, in huge pages where the system has them.

    The memory is mapped when it is first written.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a hint: kernels without huge pages refuse it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
