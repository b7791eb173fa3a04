"""One rank's device pool: the KV tensors the kernels read and write, and the cache's view of them as plain memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from forebay.engine.memory.arena import huge_memory
from forebay.kv.spec import KVSpec

__all__ = ["DevicePool"]


class DevicePool:
    """A tensor (num_pages, heads of this rank, page_size, dim) for each (group, layer, part); implements DeviceBuffers.

    Args:
        spec: the model's page.
        num_pages: pages for each group.
        dtype: of the values; must have ``Part.value_bytes`` bytes.
        tp: number of ranks.
    """

    def __init__(self, spec: KVSpec, num_pages: Sequence[int], dtype: torch.dtype, tp: int = 1) -> None:
        if len(num_pages) != len(spec.groups):
            raise ValueError(f"{len(num_pages)} page counts for {len(spec.groups)} layer groups")
        self.spec = spec
        self.dtype = dtype
        self._num_pages = tuple(num_pages)
        self.tensors: list[list[tuple[torch.Tensor, ...]]] = []
        for group, pages in zip(spec.groups, num_pages):
            for part in group.parts:
                if part.value_bytes != dtype.itemsize:
                    raise ValueError(
                        f"part {part.name} has {part.value_bytes}-byte values, {dtype} has {dtype.itemsize}"
                    )
            shapes = [(pages, part.heads_per_rank(tp), spec.page_size, part.dim) for part in group.parts]
            self.tensors.append([tuple(_zeros(shape, dtype) for shape in shapes) for _ in group.layers])

    @property
    def nbytes(self) -> int:
        """Bytes this rank holds."""
        return sum(t.numel() * t.element_size() for group in self.tensors for parts in group for t in parts)

    def num_pages(self, group: int) -> int:
        return self._num_pages[group]

    def address(self, group: int, layer_index: int, part: int) -> int:
        return self.tensors[group][layer_index][part].data_ptr()

    def page_stride(self, group: int, part: int) -> int:
        tensor = self.tensors[group][0][part]
        return tensor.stride(0) * tensor.element_size()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in huge pages: a sequence's pages are all over the pool, and in small pages each needs TLB entries of its
    own.

    All of the memory is written, so that a pool that does not fit fails here and not during a request.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return huge_memory(count * dtype.itemsize).view(dtype).view(shape).zero_()
