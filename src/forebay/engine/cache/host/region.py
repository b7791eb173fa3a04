"""The host tier's memory: one shared region per node, without a name, so that nothing is left of it when processes die.

    [status slots, 4096 bytes][pages of group 0][pages of group 1]...

It is created with O_TMPFILE in /dev/shm (memfd where that is missing), so it never has a name. Other ranks map it
through the creator's descriptor, opened as /proc/<pid>/fd/<n>. The memory is freed when the last of them ends.

It is in huge pages where the kernel has them: a page of the cache is many short pieces, and in 4 KB memory pages a
transfer spends more time on address translation than on bytes. Most systems give shared memory no huge pages by default
(``shmem_enabled`` is ``never``), but do when asked for one range at a time (MADV_COLLAPSE, Linux 6.1).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from forebay.causes import Cause
from forebay.errors import RefusedError
from forebay.hostmemory.shm import SHM_FOLDER
from forebay.kv.pool_sizes import STATUS_BYTES
from forebay.sizes import format_size

__all__ = ["READ_COMPLETE", "READ_FAILED", "READ_PENDING", "STATUS_BYTES", "HostRegion", "Progress"]

Progress = Callable[[int, int, float], None]
"""(bytes done, bytes in total, bytes per second)"""

READ_PENDING, READ_COMPLETE, READ_FAILED = 0, 1, -1

_CHUNK = 64 * 2**20
_HUGE = 2 * 2**20
_SMALL = 4096
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostRegion:
    """A mapping of the node's host pages; ``pages(g)`` is a (pages, page_bytes) array of bytes.

    Args:
        descriptor: an open file, at least as large as the layout. The region closes it in ``close``; when the
            constructor fails, the caller does.
        page_counts: pages of each group.
        page_bytes: canonical bytes of each group's page.
    """

    def __init__(self, descriptor: int, page_counts: Sequence[int], page_bytes: Sequence[int]) -> None:
        self.descriptor = descriptor
        self.page_counts = tuple(page_counts)
        self.page_bytes = tuple(page_bytes)
        self.nbytes = self.size(page_counts, page_bytes)
        self._map, whole = _map(descriptor, self.nbytes)
        self.read_status: npt.NDArray[np.int64] = whole[:STATUS_BYTES].view(np.int64)
        """The status slots, one per disk read: READ_PENDING, READ_COMPLETE or READ_FAILED."""
        self._whole = whole
        self._groups = []
        start = STATUS_BYTES
        for count, size in zip(page_counts, page_bytes):
            self._groups.append(whole[start : start + count * size].reshape(count, size))
            start += count * size

    @staticmethod
    def size(page_counts: Sequence[int], page_bytes: Sequence[int]) -> int:
        """Bytes of a region with these pages."""
        return STATUS_BYTES + sum(count * size for count, size in zip(page_counts, page_bytes))

    @classmethod
    def create(cls, page_counts: Sequence[int], page_bytes: Sequence[int], folder: str = SHM_FOLDER) -> HostRegion:
        """A new region in a memory file system; its memory is not allocated yet (see ``fault_in``).

        Raises:
            RefusedError: it cannot be mapped.
        """
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            descriptor = os.memfd_create("forebay-host-cache", os.MFD_CLOEXEC)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                os.ftruncate(descriptor, cls.size(page_counts, page_bytes))
                region = cls(descriptor, page_counts, page_bytes)
            except (OSError, ValueError, OverflowError) as error:
                size = format_size(cls.size(page_counts, page_bytes))
                raise RefusedError(f"host cache: cannot map {size} of shared memory: {error}") from error
            undo.pop_all()
        return region

    @classmethod
    def attach(cls, path: str, page_counts: Sequence[int], page_bytes: Sequence[int]) -> HostRegion:
        """Map another process's region through ``path``, its /proc/<pid>/fd/<descriptor>."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            region = cls(descriptor, page_counts, page_bytes)
            undo.pop_all()
        return region

    @property
    def path(self) -> str:
        """Where another process of the same user can open this region while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def pages(self, group: int) -> npt.NDArray[np.uint8]:
        """The pages of ``group``, shape (pages, page_bytes)."""
        return self._groups[group]

    def page(self, group: int, page: int) -> memoryview:
        """One page as a writable buffer."""
        return memoryview(self._groups[group][page])

    def fault_in(self, progress: Progress | None = None) -> float:
        """Allocate and map all the memory now, so that a lack of it shows now; returns seconds.

        Raises:
            RefusedError: there is not enough, for example because another process has filled /dev/shm meanwhile.
        """
        started = time.perf_counter()
        for start in range(0, self.nbytes, _CHUNK):
            done = min(self.nbytes, start + _CHUNK)
            try:
                self._allocate(start, done)
            except OSError as error:
                raise self._refusal(start, error) from error
            # The pages are allocated; writing to each maps it, so that no transfer waits for that later.
            self._whole[start:done:_SMALL] = 0
            if progress is not None:
                progress(done, self.nbytes, done / max(1e-9, time.perf_counter() - started))
        return time.perf_counter() - started

    def _refusal(self, allocated: int, error: OSError) -> RefusedError:
        largest = f"ask for at most --host-cache {allocated // 10**6}MB" if allocated else "leave out --host-cache"
        return RefusedError(
            f"host cache: only {format_size(allocated)} of {format_size(self.nbytes)} of shared memory could be "
            f"allocated: {error.strerror}",
            fix=f"{largest}, or free memory in /dev/shm",
            code=Cause.SHM_TOO_SMALL if error.errno == errno.ENOSPC else Cause.HOST_POOL_TOO_BIG,
        )

    def _allocate(self, start: int, stop: int) -> None:
        """Allocate memory for these bytes, in huge pages where the kernel has them. Raises OSError when there is none.

        By system calls: a memory access for which the file system has no page left is not an error but a SIGBUS.
        """
        for offset in range(start, stop - _HUGE + 1, _HUGE):
            # The kernel collapses only ranges of which at least one page exists.
            os.pwrite(self.descriptor, b"\0", offset)
        length = (stop - start) // _HUGE * _HUGE
        if length:
            _LIBC.madvise(self._whole.ctypes.data + start, length, _MADV_COLLAPSE)
        os.posix_fallocate(self.descriptor, start, stop - start)

    def close(self) -> None:
        """Unmap. Views that still exist keep the memory mapped."""
        self._groups = []
        del self._whole, self.read_status
        # While a view exists the mapping stays; it is unmapped with the last view.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.descriptor)


def _map(descriptor: int, nbytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """Map the file at a multiple of the huge page size: (the reserved address space, the file's bytes).

    Raises:
        OSError: no address space.
        ValueError: the file is smaller.
    """
    if os.fstat(descriptor).st_size < nbytes:
        raise ValueError(f"the file is smaller than the {nbytes} bytes of its layout")
    # Reserve more address space than needed; the file replaces an aligned part of it and is unmapped with it.
    space = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory: npt.NDArray[np.uint8] = np.frombuffer(space, dtype=np.uint8)
    skip = -memory.ctypes.data % _HUGE
    memory = memory[skip : skip + nbytes]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(memory.ctypes.data, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if address != memory.ctypes.data:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return space, memory
