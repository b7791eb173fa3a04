"""SGLang's command line, and the combinations it rewrites, ignores or refuses (``arg_groups/hicache_hook.py``,
0.5.23).
"""

from __future__ import annotations

from forebay.causes import Cause
from forebay.planning.arithmetic.flag_parser import render
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.request import PlanRequest
from forebay.planning.sglang.flags import flag

__all__ = ["check_flags", "command", "wants_host"]

_ORDER = ("tp_size", "dp_size", "enable_dp_attention", "pp_size", "dtype", "kv_cache_dtype", "context_length")


def wants_host(request: PlanRequest) -> bool:
    """Whether a host tier was asked for, with or without the switch that turns it on."""
    flags = request.flags
    return bool(
        flags.get("enable_hierarchical_cache")
        or flags.get("hicache_size")
        or flags.get("hicache_ratio")
        or request.host_cache_bytes
    )


def command(request: PlanRequest, hicache_size: int | None = None) -> tuple[str, ...]:
    """The argv that starts what was planned.

    Args:
        hicache_size: GB a rank, where the user gave ``--host-cache`` in total instead of the server's flag.
    """
    settings = dict(request.flags)
    settings |= {"tp_size": request.tp}
    for dest, value, default in (("dp_size", request.dp, 1), ("pp_size", request.pp, 1)):
        if value != default:
            settings[dest] = value
    for dest, said in (
        ("dtype", request.dtype),
        ("kv_cache_dtype", request.kv_dtype),
        ("context_length", request.context),
        ("hicache_size", hicache_size),
    ):
        if said is not None:
            settings[dest] = said
    if wants_host(request):
        settings["enable_hierarchical_cache"] = True
    settings.pop("model_path", None)
    words = ["python", "-m", "sglang.launch_server", "--model-path", request.model.location]
    for dest in (*_ORDER, *(name for name in settings if name not in _ORDER)):
        if dest in settings:
            words += render(flag(dest), settings[dest])
    return (*words, *request.passthrough)


def check_flags(sheet: PlanBuilder, request: PlanRequest) -> None:
    """Write down what SGLang would refuse, rewrite or ignore."""
    flags = request.flags
    _check_conflicts(sheet, request)
    if not wants_host(request):
        return
    if not flags.get("enable_hierarchical_cache"):
        sheet.warn(
            Cause.FLAG_CONFLICT,
            "a host cache size without --enable-hierarchical-cache has no effect in SGLang",
            "the command below has --enable-hierarchical-cache",
        )
    layout, backend = flags.get("hicache_mem_layout", "page_first"), flags.get("hicache_io_backend", "kernel")
    if layout == "page_first_direct" and backend == "kernel":
        sheet.warn(
            Cause.FLAG_CONFLICT,
            "SGLang silently turns --hicache-io-backend kernel into direct: kernel cannot copy layout "
            "page_first_direct",
            "--hicache-io-backend direct, or --hicache-mem-layout page_first",
        )
    if layout == "page_first" and backend == "direct":
        sheet.warn(
            Cause.FLAG_CONFLICT,
            "SGLang silently turns --hicache-mem-layout page_first into page_first_direct: direct cannot copy "
            "page_first",
            "--hicache-mem-layout page_first_direct, or --hicache-io-backend kernel",
        )
    if layout == "layer_first" and flags.get("hicache_storage_backend") in ("mooncake", "npu_memcache"):
        becomes = {"direct": "page_first_direct", "kernel": "page_first"}.get(backend, layout)
        sheet.warn(
            Cause.FLAG_CONFLICT,
            f"SGLang silently turns layout layer_first into {becomes} for storage {flags['hicache_storage_backend']}",
            f"--hicache-mem-layout {becomes}",
        )
    if flags.get("device") == "cpu" and backend == "kernel":
        sheet.warn(
            Cause.HICACHE_KERNEL_UNSUPPORTED,
            "io back end kernel runs on CUDA only: on a CPU SGLang dies at the first backup",
            "--hicache-io-backend direct",
        )


def _check_conflicts(sheet: PlanBuilder, request: PlanRequest) -> None:
    flags = request.flags
    host = wants_host(request)
    if host and flags.get("disable_radix_cache"):
        sheet.refuse(
            Cause.FLAG_CONFLICT,
            "--enable-hierarchical-cache needs the radix cache that --disable-radix-cache turns off",
            "leave out --disable-radix-cache",
        )
    if host and flags.get("enable_lmcache"):
        sheet.refuse(
            Cause.FLAG_CONFLICT,
            "--enable-lmcache and --enable-hierarchical-cache exclude each other",
            "keep one of them",
        )
    if host and flags.get("enable_unified_cache_external_linker"):
        sheet.refuse(
            Cause.FLAG_CONFLICT,
            "--enable-unified-cache-external-linker and --enable-hierarchical-cache exclude each other",
            "keep one of them",
        )
    if host and flags.get("disaggregation_mode") == "decode":
        sheet.refuse(
            Cause.HICACHE_NOT_ON_DECODE,
            "a decode server runs without the radix cache, so a hierarchical cache on it does nothing or is refused",
            "use --enable-hierarchical-cache on the prefill servers only",
        )
    linker = flags.get("enable_unified_cache_external_linker")
    mooncake = flags.get("unified_cache_external_linker_backend", "mooncake") == "mooncake"
    if flags.get("enable_linker_mla_dedup") and not (linker and mooncake):
        sheet.refuse(
            Cause.FLAG_CONFLICT,
            "--enable-linker-mla-dedup works only with --enable-unified-cache-external-linker and Mooncake, never with "
            "HiCache",
            "leave out --enable-linker-mla-dedup",
        )
    dp = request.dp
    if flags.get("enable_dp_attention") and (dp < 2 or request.tp % dp):
        sheet.refuse(
            Cause.FLAG_CONFLICT,
            f"--enable-dp-attention needs a --dp-size of 2 or more that divides TP {request.tp}, got {dp}",
            f"--dp-size {request.tp}",
        )
