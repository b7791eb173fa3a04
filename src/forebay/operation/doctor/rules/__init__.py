"""The doctor's rules, as data, by subject. The order matters only between equals."""

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
    settings,
    shared_memory,
)

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    *host_memory.RULES,
    *shared_memory.RULES,
    *device_memory.RULES,
    *gpus.RULES,
    *flags.RULES,
    *settings.RULES,
    *files.RULES,
    *network.RULES,
    *engine.RULES,
    *degraded.RULES,
)
