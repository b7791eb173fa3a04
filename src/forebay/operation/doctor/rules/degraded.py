"""Servers that run, wrongly: hung, starved, or with a cache that does less than it seems."""

from __future__ import annotations

import re

from forebay.causes import Cause
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import floor_to, ranks_of, say
from forebay.operation.doctor.patterns import pattern
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Kind, Requirement, Rule
from forebay.sizes import format_binary, format_size

__all__ = ["RULES"]

SGLANG = ("sglang",)
VLLM = ("vllm",)

_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs?, (?:Swapped: \d+ reqs?, )?(?:Waiting|Pending): (?P<waiting>\d+) reqs?"
)


def starved(found: EventMatch) -> bool:
    """All of the last statistics lines: requests wait, none runs, no token moves."""
    lines = found.base.transcript.sources[found.source].stats
    readings = [_STATS.search(line.text) for line in lines]
    return bool(readings) and all(
        reading is not None
        and float(reading["prompt"]) == 0
        and float(reading["generation"]) == 0
        and int(reading["waiting"]) > 0
        for reading in readings
    )


def _host_tokens(found: EventMatch) -> int:
    return int(found.number("host") or 0)


def _device_tokens(found: EventMatch) -> int | None:
    """The device pool of the same rank: the largest statement of it (a hybrid model prints one per group)."""
    return found.base.transcript.bytes_setting("device_pool_tokens") or found.base.transcript.bytes_setting(
        "kv_cache_tokens"
    )


def _host_smaller(found: EventMatch) -> bool:
    device, host = _device_tokens(found), _host_tokens(found)
    if device is not None:
        return host < device
    return _split_budget(found)


def _split_budget(found: EventMatch) -> bool:
    """No device pool in this log. A hybrid model's --hicache-size is split over KV, state and index pools, draft layers included,
    which is how a budget that looks ample ends up below the device pool."""
    hybrid = found.base.transcript.search(pattern(r"Tree cache initialized: .*hybrid_ssm=True"))
    return hybrid is not None and "packed MTP" in found.line.text


def _host_fix(found: EventMatch) -> str:
    device, host, size = _device_tokens(found), _host_tokens(found), found.number("gb") or 0.0
    if device is None or not host:
        return (
            f"of --hicache-size only {size:g} GB a rank is left for KV ({host} tokens) after state and index pools: compare with "
            "max_total_num_tokens, and raise --hicache-size until the host pool is at least twice the device pool"
        )
    wanted = size * 2 * device / host
    return (
        f"the host pool ({host} tokens) is smaller than the device pool ({device}): set --hicache-size {floor_to(wanted + 1, 1):g} (GB per rank; "
        f"{f'x {ranks_of(found)} ranks' if ranks_of(found) else 'times the ranks of a host'}) for twice the device pool, or leave the tier off"
    )


def _misread(found: EventMatch) -> bool:
    """The pool's bytes divided by the printed tokens is no whole number of layers of this cache format."""
    size, tokens = found.base.transcript.bytes_setting("device_pool_bytes"), found.number("tokens")
    if not size or not tokens:
        return False
    per_token = size / tokens
    for layer_bytes in (656, 656 + 132):  # fp8_ds_mla: 512 fp8 + scales + 64 bf16 rope; with the sparse indexer's 132
        for layers in (27, 60, 61, 62, 78, 79):
            if abs(per_token / (layer_bytes * layers) - 1) < 0.015:
                return False
    return True


def _misread_fix(found: EventMatch) -> str:
    size, tokens = found.base.transcript.bytes_setting("device_pool_bytes") or 0, int(found.number("tokens") or 0)
    return (
        f"do not plan from it: {format_binary(size)} / {tokens:,} tokens = {size / max(tokens, 1) / 1024:.1f} KiB is not the cost of a token of this hybrid "
        "cache; the figure is concurrency x max_model_len. Count with `forebay plan`, or with the number of blocks"
    )


def _collapsed(found: EventMatch) -> bool:
    tokens, context = found.number("tokens"), found.number("context")
    if not tokens:
        return False
    asked = found.base.launch.asked.get("max_total_tokens", "")
    if asked.isdigit() and int(asked) <= tokens * 1.1:
        return False  # it is as small as it was asked to be
    return tokens < 1024 or bool(context and tokens * 12 < context)


def _collapsed_fix(found: EventMatch) -> str:
    tokens, context = int(found.number("tokens") or 0), found.number("context")
    need = f"; one full request needs {int(context)}" if context else ""
    return f"the pool holds {tokens} tokens{need}: raise --mem-fraction-static, lower the context length, or free the GPU of other processes"


def _metric(found: EventMatch, name: str) -> float:
    total = 0.0
    wanted = pattern(rf"^{name}(?:\{{[^}}]*\}})? (?P<n>[\d.eE+]+)$")
    for entry in found.base.transcript.entries:
        match = wanted.search(entry.line.text)
        if match:
            total += float(match["n"])
    return total


def _never_read(found: EventMatch) -> bool:
    """Backed up and evicted many tokens, loaded back none."""
    backed = _metric(found, "sglang:hicache_backup_tokens_total")
    evicted = _metric(found, "sglang:evicted_tokens_total")
    loaded = _metric(found, "sglang:load_back_tokens_total")
    from_host = _metric(found, "sglang:cached_tokens_total")
    return backed > 10_000 and evicted > 10_000 and loaded == 0 and from_host == 0


_MANY_RETRACTIONS = 4
_MANY_REFUSALS = 3


def _retracts_often(found: EventMatch) -> bool:
    return len(found.base.events["request_retracted"]) >= _MANY_RETRACTIONS


def _retract_fix(found: EventMatch) -> str:
    times = len(found.base.events["request_retracted"])
    often = f"{times} times in this log"
    if found.base.server == "vllm":
        return f"requests were put back {often}: lower --max-num-seqs, or give the KV cache more (--gpu-memory-utilization, fewer context tokens)"
    if found.base.server == "sglang":
        return (
            f"requests were put back {often}: lower --max-running-requests, raise --schedule-conservativeness (1.3), or give the pool more "
            "(--mem-fraction-static, an fp8 KV cache)"
        )
    return f"requests were put back {often}: run fewer at once, or give the KV pool more"


def _refuses_often(found: EventMatch) -> bool:
    return len(found.base.events["tier_store_refused"]) >= _MANY_REFUSALS


def _tier_fix(found: EventMatch) -> str:
    if "lmcache_named" in found.base.events:
        return (
            "raise LMCache's max_local_cpu_size (GB per rank), or let it evict: what is pinned by running requests or by a slow lower tier "
            "(local disk, remote) cannot be evicted"
        )
    if found.base.server == "sglang":
        return "raise --hicache-size (or --hicache-ratio), or make the storage tier faster: what is being written cannot be evicted"
    return "make the host tier larger, or the tier below it faster: what is being written cannot be evicted"


def _asked_for_cache(found: EventMatch) -> bool:
    """The cache that is switched off was asked for: by a flag in the log, or in the line itself."""
    asked = found.base.launch.asked
    on = (
        "enable_hierarchical_cache",
        "enable_prefix_caching",
        "hicache_size",
        "hicache_ratio",
        "kv_offloading_size",
        "kv_transfer_config",
    )
    wanted = [name for name in on if asked.get(name, "None") not in ("None", "False", "0", "")]
    text = found.line.text.lower()
    if "hierarchical" in text or "hicache" in text or "offload" in text:
        return (
            "enable_hierarchical_cache" in wanted
            or "kv_offloading_size" in wanted
            or "ignored" in text
            or "no effect" in text
        )
    return any(
        name in wanted
        for name in ("enable_prefix_caching", "enable_hierarchical_cache", "kv_offloading_size", "kv_transfer_config")
    )


def _never_hits(found: EventMatch) -> bool:
    return len(found.base.events["tier_missed"]) >= 50


RULES = (
    Rule(
        "vllm_starved",
        Cause.ENGINE_HUNG,
        "vllm_starved",
        "{waiting} requests wait, none runs and no token moves, while the front goes on answering 200: the engine hangs.",
        say(
            "ask for one token with a timeout to be sure (`forebay wait URL`), look at the engine (`py-spy dump`), then restart it: /health stays 200 while the engine hangs"
        ),
        kind=Kind.DEGRADED,
        servers=VLLM,
        check=starved,
        cases=("vllm-project_vllm_39863",),
    ),
    Rule(
        "health_stall",
        Cause.HEALTH_STALL,
        "health_stall",
        "No token came back for {seconds} s: the scheduler hangs, or one prefill takes longer than the health check waits.",
        lambda found: _stall_fix(found),
        kind=Kind.DEGRADED,
        servers=SGLANG,
        cases=("sgl-project_sglang_10856",),
    ),
    Rule(
        "not_on_decode",
        Cause.HICACHE_NOT_ON_DECODE,
        "not_on_decode",
        "On a decode leg the radix cache is forced off: the host pool is allocated and never used.",
        lambda found: _decode_fix(found),
        kind=Kind.DEGRADED,
        servers=SGLANG,
        needs=(Requirement("host_pool_seen"),),
        cases=("index_66854815458",),
    ),
    Rule(
        "host_smaller_said",
        Cause.HOST_POOL_SMALLER_THAN_DEVICE,
        "host_smaller_said",
        "The host pool ({host} tokens) is smaller than the device pool ({device} tokens): it holds little that the device does not.",
        lambda found: (
            f"raise --hicache-ratio to 2 or more, or --hicache-size until the host pool holds {2 * int(found.number('device') or 0)} tokens, or leave the tier off"
        ),
        kind=Kind.DEGRADED,
        servers=SGLANG,
    ),
    Rule(
        "host_smaller",
        Cause.HOST_POOL_SMALLER_THAN_DEVICE,
        "host_smaller",
        "The host pool ({host} tokens, {gb} GB a rank) does not outgrow the device pool.",
        _host_fix,
        kind=Kind.DEGRADED,
        servers=SGLANG,
        check=_host_smaller,
        cases=("index_69732802710",),
    ),
    Rule(
        "report_misread",
        Cause.KV_REPORT_MISREAD,
        "report_misread",
        "The printed number of tokens is derived for a cache of unequal layers; it is not what the pool can hold.",
        _misread_fix,
        kind=Kind.DEGRADED,
        servers=VLLM,
        needs=(Requirement("fp8_ds_mla_format"),),
        check=_misread,
        cases=("vllm-project_vllm_51041",),
    ),
    Rule(
        "pool_collapsed",
        Cause.KV_POOL_COLLAPSED,
        "pool_collapsed",
        "The device pool holds only {tokens} tokens.",
        _collapsed_fix,
        kind=Kind.DEGRADED,
        servers=SGLANG,
        check=_collapsed,
    ),
    Rule(
        "retract_storm",
        Cause.RETRACT_STORM,
        "request_retracted",
        "The device KV pool is full again and again: running requests are put back and computed anew.",
        _retract_fix,
        kind=Kind.DEGRADED,
        check=_retracts_often,
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "tier_full",
        Cause.CACHE_TIER_FULL,
        "tier_store_refused",
        "The host tier has no room left and stores nothing: what is evicted from the device is lost.",
        _tier_fix,
        kind=Kind.DEGRADED,
        check=_refuses_often,
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "cache_switched_off",
        Cause.CACHE_DISABLED,
        "cache_switched_off",
        "The cache was asked for, and the server switched it off[: {why}].",
        say(
            "remove the flag that excludes it (the line names it), choose a model, attention backend or version that supports it, or do "
            "without and drop the cache's flags"
        ),
        kind=Kind.DEGRADED,
        check=_asked_for_cache,
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "tier_never_hit",
        Cause.CACHE_NEVER_HIT,
        "tier_missed",
        "The lower cache tier is asked again and again and never has anything.",
        say(
            "check that prompts share a beginning longer than one chunk (LMCache chunk_size, SGLang page size), that writers and readers use "
            "the same model name, dtype and tensor parallel size, and that the tier stores at all"
        ),
        kind=Kind.DEGRADED,
        excludes=(Requirement("tier_hit"),),
        check=_never_hits,
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "write_only",
        Cause.HICACHE_WRITE_ONLY,
        "write_only",
        "The host tier is written ({tokens} tokens) and never read: evicted prefixes are computed again.",
        say(
            "check with `forebay verify`; try --hicache-write-policy write_back; hybrid (linear-attention) models need a version whose state is restored too"
        ),
        kind=Kind.DEGRADED,
        servers=SGLANG,
        check=_never_read,
    ),
)


def _stall_fix(found: EventMatch) -> str:
    gap = ""
    tic, beat = found.text("tic"), found.text("beat")
    if tic and beat:
        seconds = _clock(tic) - _clock(beat)
        gap = f" (the last sign of life was {seconds % 86_400} s earlier)"
    return (
        f"if one prefill takes that long, lower --chunked-prefill-size to 2048 or set SGLANG_HEALTH_CHECK_TIMEOUT=120; else the scheduler hangs{gap}: "
        "look at it with py-spy, and restart"
    )


def _clock(text: str) -> int:
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def _decode_fix(found: EventMatch) -> str:
    size = found.base.transcript.bytes_setting("host_pool_bytes")
    held = f" ({format_size(size)} a rank held for nothing)" if size else ""
    return f"drop --enable-hierarchical-cache on the decode leg{held}; keep it on prefill"
