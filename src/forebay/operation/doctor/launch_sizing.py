"""What the doctor asks of the planner, as plain records: the command line joins the two rooms (commands/sizer.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EvidenceBase
from forebay.operation.doctor.facts import HostFacts

__all__ = ["LaunchToSize", "SizedLaunch", "Sizer", "launch_to_size"]

_SIZED = {
    Cause.HOST_POOL_TOO_BIG,
    Cause.HOST_OOM_KILLED,
    Cause.PIN_FAILED,
    Cause.WEIGHTS_EXCEED_STATIC,
    Cause.NO_WINDOW,
    Cause.CTX_TOO_LONG_FOR_KV,
    Cause.CUDAGRAPH_OOM,
    Cause.RUNTIME_OR_INIT_OOM,
    Cause.GPU_TOO_SMALL,
    Cause.KV_UNDERCOUNTED,
}


@dataclass(frozen=True, slots=True)
class LaunchToSize:
    """The launch that a log shows, on a known machine.

    Attributes:
        server: ``sglang`` or ``vllm``.
        version: as the log prints it, or None.
        model: the path or id that the launch names.
        settings: flags asked for, by the server's own names (``tp_size``, ``hicache_size``).
        machine: what is known of the machine.
        cause: why the launch failed.
    """

    server: str
    version: str | None
    model: str
    settings: Mapping[str, str]
    machine: HostFacts
    cause: Cause


@dataclass(frozen=True, slots=True)
class SizedLaunch:
    """The planner's verdict on the launch, and one sentence with the values that fit this machine."""

    fits: bool
    text: str


Sizer = Callable[[LaunchToSize], SizedLaunch | None]
"""From a launch to the planner's verdict; None where the planner cannot tell."""


def launch_to_size(base: EvidenceBase, cause: Cause) -> LaunchToSize | None:
    """What to ask the planner about ``cause``; None where the log or the user does not say enough."""
    model = base.launch.asked.get("model_path") or base.launch.asked.get("model") or base.launch.asked.get("model_tag")
    if cause not in _SIZED or base.server not in ("sglang", "vllm") or not model or not base.machine.known:
        return None
    version = base.launch.versions.get(base.server)
    return LaunchToSize(base.server, version, model, dict(base.launch.asked), base.machine, cause)
