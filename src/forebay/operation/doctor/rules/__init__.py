"""The doctor's rules, as data, by subject. Of rules that start from the same line the one listed first is chosen."""

from forebay.operation.doctor.rule import Rule
from forebay.operation.doctor.rules import (
    degraded,
    device_memory,
    engine,
    files,
    flags,
    gpus,
    host_memory,
    network,
    pinning,
    settings,
    shared_memory,
)

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    *host_memory.RULES,
    *pinning.RULES,
    *shared_memory.RULES,
    *gpus.RULES,
    *device_memory.RULES,
    *flags.RULES,
    *settings.RULES,
    *files.RULES,
    *network.RULES,
    *engine.RULES,
    *degraded.RULES,
)
