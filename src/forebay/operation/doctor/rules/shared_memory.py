"""/dev/shm: full, or too small."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.rule import Requirement, Rule
from forebay.sizes import format_binary

__all__ = ["RULES"]

VLLM = ("vllm",)


def _shm_fix(found: EventMatch) -> str:
    return (
        "free /dev/shm: list it (`ls -la /dev/shm`), remove files that no live process maps (`forebay down` proves it), or "
        "mount it larger (docker --shm-size, Kubernetes emptyDir medium Memory with a sizeLimit)"
    )


def _nccl_shm(found: EventMatch) -> str:
    size = found.number("size")
    one = f" (one segment of {format_binary(size)} did not fit)" if size else ""
    return f"give the container at least --shm-size=16g, or --ipc=host{one}; Docker's default is 64 MiB"


def _device_or_offload(found: EventMatch) -> bool:
    """The shared region, not a small NCCL segment, is what filled it."""
    return "nccl" not in found.line.text.lower()


RULES = (
    Rule(
        "offload_region_bus",
        Cause.SHM_FULL,
        "offload_region_bus",
        "The shared offload region could not be filled: /dev/shm ran out while its pages were faulted in.",
        _shm_fix,
        servers=VLLM,
        needs=(Requirement("offload_region_named"),),
        cases=("index_63288554571",),
    ),
    Rule(
        "shm_no_space",
        Cause.SHM_FULL,
        "shm_no_space",
        "/dev/shm is full.",
        _shm_fix,
        needs=(
            Requirement(
                "shared_memory_named",
                "block",
            ),
        ),
        check=_device_or_offload,
        excludes=(Requirement("nccl_segment_named", "block"),),
    ),
    Rule(
        "bus_error",
        Cause.SHM_FULL,
        "bus_error",
        "A write into shared memory died with a bus error: /dev/shm had no page left to give.",
        _shm_fix,
        excludes=(Requirement("dataloader_named"),),
        rules_out=((Cause.NCCL_ERROR, "ranks that time out waiting for the dead one are fallout"),),
        cases=("sgl-project_sglang_40723",),
    ),
    Rule(
        "nccl_segment",
        Cause.SHM_TOO_SMALL,
        "nccl_segment",
        "/dev/shm is too small for NCCL's segments ({size} bytes each).",
        _nccl_shm,
        cases=("sgl-project_sglang_5096",),
    ),
    Rule(
        "nccl_segment_other",
        Cause.SHM_TOO_SMALL,
        "nccl_segment_other",
        "/dev/shm is too small for the communication library's segments.",
        _nccl_shm,
    ),
)
