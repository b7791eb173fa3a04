"""Collectives between the ranks of one model, as few as the models need. One rank: everything is free.

Sums go over the ranks in rank order, in fp32, and are rounded once, on every rank alike: the same bits everywhere and
every time. On one machine the ranks share a piece of memory (``SharedMemoryComm``); across machines they use gloo
(``GlooComm``).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from forebay.engine.kernels.interface import KernelBackend
    from forebay.engine.kernels.native_backend import NativeBackend

__all__ = [
    "Comm", "CommAbortedError", "GlooComm", "KernelComm", "SharedMemoryComm", "SingleRank", "shared_buffer",
    "with_kernels",
]  # fmt: skip

_LINE = 64
"""Bytes of a cache line: each rank's counter has its own."""
_SPIN_S = 100e-6
"""A rank that waits longer than this gives its core away between looks."""
_DOZE_S = 5e-3
"""And beyond this it sleeps: the others are busy with something long, or gone."""


class CommAbortedError(RuntimeError):
    """Another rank, or whoever watches the ranks, said that this group is over."""


class Comm(Protocol):
    """What the models and the runner ask for. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """out = the ranks' ``partial`` (fp32) summed in rank order, rounded once to ``out``'s dtype;
        same bits everywhere.
        """

    def gather_columns(self, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        """out (M, N) = the ranks' ``part``s side by side, rank r's at column r * ``each``;
        only ranks that want it give an ``out``. A part (M, n) has ``each`` columns, or fewer where N ends."""

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``part`` (equal shapes and dtypes), in rank order."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with ``source``'s."""

    def check(self) -> None:
        """Raise CommAbortedError if the group has been ended; what was exchanged meanwhile is void."""


class SingleRank:
    """The only rank."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(partial)

    def gather_columns(self, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        if out is not None:
            out.copy_(part)

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        return None

    def check(self) -> None:
        return None


def shared_buffer(size: int, slot_bytes: int = 4 << 20) -> int:
    """A file descriptor of memory for ``size`` ranks, to be inherited by each of them;
    nothing is left when all have closed it.

    Args:
        size: number of ranks.
        slot_bytes: what one rank can hand over at a time; larger tensors go in pieces.
    """
    fd = os.memfd_create("forebay-ranks")
    os.ftruncate(fd, _header_bytes(size) + 2 * size * slot_bytes)
    return fd


def _header_bytes(size: int) -> int:
    return -(-(size + 1) * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryComm:
    """Ranks on one machine over ``shared_buffer``'s memory.

    Each exchange has a number. A rank writes its part into its slot, then sets its counter to the number, and reads the
    others' slots once their counters have reached it. There are two sets of slots, used in turn: a rank that is at
    exchange n + 2 has seen every counter at n + 1, so nobody still reads the slots of n.
    """

    def __init__(self, rank: int, size: int, fd: int) -> None:
        self.rank, self.size = rank, size
        self._memory = mmap.mmap(fd, 0)
        header = _header_bytes(size)
        self._slot_bytes = (len(self._memory) - header) // (2 * size)
        per_line = _LINE // 8
        words = np.frombuffer(self._memory, dtype=np.int64, count=(size + 1) * per_line)
        self._counters = words[: size * per_line : per_line]
        self._aborted = words[size * per_line :]
        data = np.frombuffer(self._memory, dtype=np.uint8, offset=header).reshape(2, size, self._slot_bytes)
        self._slots = [[torch.from_numpy(data[half, r]) for r in range(size)] for half in range(2)]
        self._address = words.ctypes.data
        self._header_bytes = header
        self._fence = threading.Lock()

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        source, target = partial.reshape(-1), out.view(-1)
        step = self._slot_bytes // 4
        for first in range(0, source.numel(), step):
            piece = source[first : first + step]
            parts = [slot.view(torch.float32)[: piece.numel()] for slot in self._exchange(piece.view(torch.uint8))]
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            target[first : first + step] = total

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        source = part.view(-1).view(torch.uint8)
        results = [torch.empty_like(part) for _ in range(self.size)]
        for first in range(0, source.numel(), self._slot_bytes):
            piece = source[first : first + self._slot_bytes]
            for result, slot in zip(results, self._exchange(piece)):
                result.view(-1).view(torch.uint8)[first : first + piece.numel()] = slot[: piece.numel()]
        return results

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        tensor.copy_(self.all_gather(tensor)[source])

    def gather_columns(self, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        _gather_columns(self, part, each, out)

    def check(self) -> None:
        if self._aborted[0]:
            raise CommAbortedError(f"rank {self.rank}: the group of ranks was ended")

    @property
    def view(self) -> tuple[int, int, int, int, int]:
        """What the native library is told of this memory (native/abi.h, RanksView)."""
        return self._address, self.rank, self.size, self._header_bytes, self._slot_bytes

    def abort(self) -> None:
        """End the group: whoever waits, now or later, gets CommAbortedError. May be called from any thread."""
        self._aborted[0] = 1

    def _exchange(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Hand over ``piece`` (uint8); every rank's slot of this exchange, ready to be read until the next but one."""
        number = int(self._counters[self.rank]) + 1
        slots = self._slots[number % 2]
        slots[self.rank][: piece.numel()] = piece
        # Taking and leaving a lock twice orders what lies between: the part before the counter, and the others'
        # counters before their parts, on processors that reorder these too.
        with self._fence:
            pass
        with self._fence:
            self._counters[self.rank] = number
        self._wait(number)
        with self._fence:
            pass
        return slots

    def _wait(self, number: int) -> None:
        counters = self._counters
        if counters.min() >= number:
            return
        began = time.perf_counter()
        while counters.min() < number:
            self.check()
            waited = time.perf_counter() - began
            if waited > _DOZE_S:
                time.sleep(200e-6)
            elif waited > _SPIN_S:
                time.sleep(0)


class KernelComm:
    """``SharedMemoryComm`` with its frequent operations done by the kernel library,
    so that a recorded step has them too.

    Args:
        shared: the ranks' memory; both may be used in turn.
        backend: the library.
    """

    def __init__(self, shared: SharedMemoryComm, backend: NativeBackend) -> None:
        self.rank, self.size = shared.rank, shared.size
        self._shared, self._backend, self._view = shared, backend, shared.view

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        self._backend.all_reduce(self._view, partial, out)
        self._shared.check()

    def gather_columns(self, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        self._backend.gather_columns(self._view, part, each, out)
        self._shared.check()

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return self._shared.all_gather(part)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self._shared.broadcast(tensor, source)

    def check(self) -> None:
        self._shared.check()


def with_kernels(comm: Comm, backend: KernelBackend) -> Comm:
    """``comm``, its operations done by the native library where both can."""
    from forebay.engine.kernels.native_backend import NativeBackend

    if isinstance(comm, SharedMemoryComm) and isinstance(backend, NativeBackend):
        return KernelComm(comm, backend)
    return comm


def _gather_columns(comm: Comm, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
    """``Comm.gather_columns`` by ``all_gather``."""
    padded = part.new_zeros(part.shape[0], each)
    padded[:, : part.shape[1]] = part
    parts = comm.all_gather(padded)
    if out is not None:
        out.copy_(torch.cat(parts, dim=1)[:, : out.shape[1]])


class GlooComm:
    """Ranks on several machines, over torch.distributed's gloo.

    Args:
        rank: ours.
        size: number of ranks.
        init_method: torch.distributed's, such as ``tcp://10.0.0.1:29500``.
        timeout_s: for an exchange; a rank that is gone shows as this error.
    """

    def __init__(self, rank: int, size: int, init_method: str, timeout_s: float = 600.0) -> None:
        self.rank, self.size = rank, size
        torch.distributed.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        parts = self.all_gather(partial)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        out.copy_(total)

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        results = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(results, part)
        return results

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        torch.distributed.broadcast(tensor, source)

    def gather_columns(self, part: torch.Tensor, each: int, out: torch.Tensor | None) -> None:
        _gather_columns(self, part, each, out)

    def check(self) -> None:
        return None  # an exchange raises by itself

    def close(self) -> None:
        """Leave the group."""
        torch.distributed.destroy_process_group()
