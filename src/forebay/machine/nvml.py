"""GPUs through NVML (the nvidia-ml-py package, imported only here and only when asked)."""

from __future__ import annotations

import importlib.util
from typing import Any

from forebay.machine.interface import GpuReading

__all__ = ["has_nvml", "read_gpus"]


def has_nvml() -> bool:
    """Whether the nvidia-ml-py package is installed."""
    return importlib.util.find_spec("pynvml") is not None


def read_gpus() -> list[GpuReading]:
    """Every GPU NVML lists; empty without a driver. A GPU that cannot be read is listed with its ``problem``."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(_try(pynvml, pynvml.nvmlSystemGetDriverVersion))
        return [_read_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        _try(pynvml, pynvml.nvmlShutdown)


def _read_gpu(nvml: Any, index: int, driver: str | None) -> GpuReading:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuReading(index, "", "", 0, 0, driver=driver, problem=str(error))
    capability = _try(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GpuReading(
        index=index,
        uuid=uuid or "",
        name=name or "",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=_processes(nvml, handle),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        driver=driver,
    )


def _processes(nvml: Any, handle: Any) -> dict[int, int]:
    holders = _try(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return {int(item.pid): int(item.usedGpuMemory or 0) for item in holders}


def _try(nvml: Any, call: Any, *args: Any) -> Any:
    """A figure that not every driver gives: None where it does not."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
