"""The sizes of the embedded server's pools. Planner and engine call the same functions, so plan and actual are equal.

Device pool: every layer group gets the same number of pages on each rank; ``--device-cache`` is in total over the
ranks. Host tier: one region per node, with one copy of every head whatever the number of ranks; ``--host-cache`` is
in total.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.kv.spec import KVSpec
from forebay.sizes import GIB

__all__ = [
    "DEFAULT_DEVICE_BYTES",
    "PAGE_SIZE",
    "STATUS_BYTES",
    "default_device_bytes",
    "default_host_reserve",
    "device_bytes_per_rank",
    "device_page_bytes",
    "device_pages",
    "host_pages",
    "host_region_bytes",
]

PAGE_SIZE = 16
STATUS_BYTES = 4096
"""Start of the host region: the status slots of disk reads."""
DEFAULT_DEVICE_BYTES = GIB
_DEFAULT_SHARE = 8
_UNKNOWN_MACHINE_BYTES = GIB // 2
_SEQUENCE_TOKENS = 4096


def default_device_bytes(available_bytes: int | None) -> int:
    """Without ``--device-cache``: an eighth of the available memory, at most 1 GiB, over all ranks.

    All of the pool is allocated at start; a larger one must be asked for.
    """
    if available_bytes is None:
        return _UNKNOWN_MACHINE_BYTES
    return min(available_bytes // _DEFAULT_SHARE, DEFAULT_DEVICE_BYTES)


def device_page_bytes(spec: KVSpec, tp: int) -> int:
    """Bytes of one page of every group, over all ranks."""
    return tp * sum(spec.page_bytes_per_rank(group, tp) for group in range(len(spec.groups)))


def device_pages(spec: KVSpec, tp: int, total_bytes: int) -> int:
    """Pages of each group's device pool on each rank, for ``total_bytes`` over all ranks; 0 where not one fits."""
    return total_bytes // device_page_bytes(spec, tp)


def device_bytes_per_rank(spec: KVSpec, tp: int, pages: int) -> int:
    """Bytes of one rank's device pool."""
    return pages * sum(spec.page_bytes_per_rank(group, tp) for group in range(len(spec.groups)))


def host_pages(spec: KVSpec, total_bytes: int, sequence_tokens: int = _SEQUENCE_TOKENS) -> tuple[int, ...]:
    """Pages of each group that fit in ``total_bytes``.

    A group with a window needs pages for its window only, a full group for the whole sequence, taken as
    ``sequence_tokens``. The groups' page counts are in that proportion.
    """
    shares = []
    for group in spec.groups:
        tokens = sequence_tokens if group.window is None else min(sequence_tokens, group.window + spec.page_size)
        shares.append(tokens / sequence_tokens)
    unit = sum(share * spec.page_bytes(number) for number, share in enumerate(shares))
    return tuple(int(share * (total_bytes / unit)) for share in shares)


def host_region_bytes(spec: KVSpec, pages: Sequence[int]) -> int:
    """Bytes of the node's host region with these pages of each group."""
    return STATUS_BYTES + sum(count * spec.page_bytes(group) for group, count in enumerate(pages))


def default_host_reserve(available_bytes: int | None) -> int:
    """Memory left to other processes: a twentieth of what is available, at least 0.5 and at most 8 GiB."""
    return GIB // 2 if available_bytes is None else min(8 * GIB, max(GIB // 2, available_bytes // 20))
