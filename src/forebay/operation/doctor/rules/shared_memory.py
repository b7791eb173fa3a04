"""/dev/shm: full, or too small."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.rule import Found, Need, Rule, Where, pattern
from forebay.sizes import format_binary

__all__ = ["RULES"]

VLLM = ("vllm",)


def _shm_fix(found: Found) -> str:
    return (
        "free /dev/shm: list it (`ls -la /dev/shm`), remove files that no live process maps (`forebay down` proves it), or "
        "mount it larger (docker --shm-size, Kubernetes emptyDir medium Memory with a sizeLimit)"
    )


def _nccl_shm(found: Found) -> str:
    size = found.number("size")
    one = f" (one segment of {format_binary(size)} did not fit)" if size else ""
    return f"give the container at least --shm-size=16g, or --ipc=host{one}; Docker's default is 64 MiB"


def _device_or_offload(found: Found) -> bool:
    """The shared region, not a small NCCL segment, is what filled it."""
    return "nccl" not in found.line.text.lower()


RULES = (
    Rule(
        "offload_region_bus",
        Cause.SHM_FULL,
        pattern(r"OSError: \[Errno 14\] Bad address"),
        "The shared offload region could not be filled: /dev/shm ran out while its pages were faulted in.",
        _shm_fix,
        servers=VLLM,
        needs=(Need(pattern(r"madvise|mmap|vllm_offload|/dev/shm")),),
        cases=("index_63288554571",),
    ),
    Rule(
        "shm_no_space",
        Cause.SHM_FULL,
        pattern(r"No space left on device"),
        "/dev/shm is full.",
        _shm_fix,
        needs=(
            Need(
                pattern(r"/dev/shm|shared_memory|SharedMemory|_posixshmem|shm_open|\bshm\b|vllm_offload|sgl_shm"),
                "block",
            ),
        ),
        check=_device_or_offload,
        excludes=(Need(pattern(r"/dev/shm/nccl-|NCCL"), "block"),),
    ),
    Rule(
        "bus_error",
        Cause.SHM_FULL,
        pattern(r"(?:Fatal Python error: )?Bus error|\bSIGBUS\b"),
        "A write into shared memory died with a bus error: /dev/shm had no page left to give.",
        _shm_fix,
        excludes=(Need(pattern(r"insufficient shared memory|DataLoader worker")),),
        rules_out=((Cause.NCCL_ERROR, "ranks that time out waiting for the dead one are fallout"),),
        cases=("sgl-project_sglang_40723",),
    ),
    Rule(
        "nccl_segment",
        Cause.SHM_TOO_SMALL,
        pattern(r"[Ee]rror while creating shared memory segment /dev/shm/nccl-\S+ \(size (?P<size>\d+)\)"),
        "/dev/shm is too small for NCCL's segments ({size} bytes each).",
        _nccl_shm,
        where=Where.ANY,
        cases=("sgl-project_sglang_5096",),
    ),
    Rule(
        "nccl_segment_other",
        Cause.SHM_TOO_SMALL,
        pattern(
            r"(?:posix_fallocate|ftruncate|shm_open|mmap)\b.*No space left on device|/dev/shm/nccl-\S+.*(?:No space left|failed)|insufficient shared memory|out of shared memory|raise your shared memory limit|unable to open shared memory object"
        ),
        "/dev/shm is too small for the communication library's segments.",
        _nccl_shm,
        where=Where.ANY,
    ),
)
