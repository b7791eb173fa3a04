"""Compare what was asked for with what is in effect and what a probe observes; each row with evidence and a status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forebay.causes import Cause
from forebay.machine.interface import Machine
from forebay.operation.verify.cache_probe import CacheProbe, CacheProbeResult, probe_skipped
from forebay.runs.run_record import Run
from forebay.servers.base import Counters, Server, Setting
from forebay.servers.http_client import Address, parse_address, send
from forebay.servers.log_patterns import EffectiveSetting, effective_settings
from forebay.servers.openai_api import first_model
from forebay.servers.registry import server_named

__all__ = ["Report", "Status", "VerifyRow", "VerifyTarget", "rows_in_effect", "verify", "verify_run"]

_LOG_NAMES = {
    "device pool tokens": "device_pool_tokens",
    "host pool tokens per rank": "host_pool_tokens",
    "context tokens": "context_tokens",
}


class Status(StrEnum):
    """The status of a row."""

    OK = "ok"
    DIFFERS = "differs"
    OFF = "off"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One setting or effect: as asked for, as the server reports it, as the probe observed it."""

    name: str
    asked: str | None
    effective: str | None
    observed: str | None
    status: Status
    evidence: str
    code: str | None = None
    fix: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """The record behind ``--json``."""
        return {
            "name": self.name, "asked": self.asked, "effective": self.effective, "observed": self.observed,
            "status": self.status.value, "evidence": self.evidence, "cause": self.code, "fix": self.fix,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, and the probe behind them."""

    rows: tuple[VerifyRow, ...]
    probe: CacheProbeResult

    @property
    def in_effect(self) -> bool:
        """Nothing that was asked for is known to be missing. An unknown row is shown and is no failure."""
        return rows_in_effect([row.as_json() for row in self.rows])


@dataclass(frozen=True, slots=True)
class VerifyTarget:
    """The server to verify. ``argv``: its command line, empty where unknown; ``log``: path of its log, or None."""

    server: Server
    address: Address
    argv: tuple[str, ...]
    log: str | None = None


def rows_in_effect(rows: Sequence[Mapping[str, str | None]]) -> bool:
    """Whether no row, as ``VerifyRow.as_json`` writes it, shows that something asked for is missing."""
    return not any(row["status"] == Status.DIFFERS or (row["status"] == Status.OFF and row["asked"]) for row in rows)


def verify_run(
    machine: Machine, run: Run, *, probe_s: float, api_key: str = "", tell: Callable[[str], None] = lambda _t: None
) -> Report:
    """Verify a run of Forebay and keep the rows in its record."""
    record = run.read()
    target = VerifyTarget(
        server_named(record.server), parse_address(record.url, api_key), tuple(record.command), str(run.log_path)
    )
    report = verify(machine, target, probe_s=probe_s, tell=tell)
    run.update(lambda now: setattr(now, "verify", [row.as_json() for row in report.rows]))
    return report


def verify(
    machine: Machine,
    target: VerifyTarget,
    *,
    probe_s: float,
    force: bool = False,
    tell: Callable[[str], None] = lambda _t: None,
) -> Report:
    """Compare the settings, and probe the lower tiers where some were asked for.

    Args:
        probe_s: the longest probe in seconds; 0 sends none.
        force: probe although requests of others run (the probe evicts the pages they use).
        tell: takes what the probe costs, before it runs.
    """
    server, address = target.server, target.address
    answers = {path: send(machine, address, "GET", path, timeout_s=10.0) for path in server.info_paths}
    metrics = send(machine, address, "GET", "/metrics", timeout_s=10.0)
    counters = server.counters(metrics.text) if metrics.ok else Counters()
    info = server.info(answers, metrics.text if metrics.ok else "")
    logged = _log_settings(target)
    settings = server.settings(target.argv, info, counters)
    rows = [_compare(item, logged) for item in settings]
    rows += _pools(server.offload_tiers(target.argv), counters, settings, logged)
    tiers = server.offload_tiers(target.argv)
    probe = probe_skipped("no lower tier was asked for")
    if tiers:
        probe = _probe(machine, target, counters, settings, probe_s, force, tell)
    rows += _observed(server, tiers, probe)
    return Report(tuple(rows), probe)


def _compare(item: Setting, logged: Mapping[str, EffectiveSetting]) -> VerifyRow:
    effective, evidence = item.effective, item.evidence
    line = logged.get(_LOG_NAMES.get(item.name, ""))
    if line is not None and effective is None:
        effective, evidence = str(line.value), f"log line {line.line}: {line.text[:120]}"
    if effective is None:
        missing = f"; {item.missing_flag} would tell" if item.missing_flag else ""
        return VerifyRow(item.name, item.asked, None, None, Status.UNKNOWN, f"{evidence} does not say{missing}")
    if item.asked is None or _same(item.asked, effective, item.tolerance):
        return VerifyRow(item.name, item.asked, effective, None, Status.OK, evidence)
    if effective == "off":
        return VerifyRow(item.name, item.asked, effective, None, Status.OFF, evidence)
    fix = f"it was rewritten at start: ask for {effective}, or for what goes with {item.asked}"
    return VerifyRow(item.name, item.asked, effective, None, Status.DIFFERS, evidence, None, fix)


def _same(asked: str, effective: str, tolerance: float) -> bool:
    if asked == effective:
        return True
    try:
        return abs(float(asked) - float(effective)) <= tolerance * float(asked)
    except ValueError:
        return False


def _pools(
    tiers: Sequence[str], counters: Counters, settings: Sequence[Setting], logged: Mapping[str, EffectiveSetting]
) -> list[VerifyRow]:
    """Pools that came out too small: a device pool below one request, a host pool no larger than the device pool."""
    rows = []
    device = _tokens("device", counters, logged)
    context = next((item.effective for item in settings if item.name == "context tokens"), None)
    if device is not None and context is not None and context.isdigit() and device < int(context):
        text = f"the device pool holds {device:,} tokens, one full request is {int(context):,}"
        fix = f"lower the context to {device}, or give the pool more memory"
        rows.append(
            VerifyRow(
                "room for one request", context, str(device), None, Status.DIFFERS, text, Cause.KV_POOL_COLLAPSED, fix
            )
        )
    host = _tokens("host", counters, logged)
    if "host" in tiers and device is not None and host is not None:
        useless = host <= device
        text = f"the host pool holds {host:,} tokens, the device pool {device:,}"
        if useless:
            text += ": useless, it can hold nothing that the device pool does not hold already"
        rows.append(
            VerifyRow("host pool larger than device pool", "yes", "no" if useless else "yes", None,
                Status.DIFFERS if useless else Status.OK, text,
                Cause.HOST_POOL_SMALLER_THAN_DEVICE if useless else None,
                f"make the host pool more than {device:,} tokens" if useless else None)
        )  # fmt: skip
    return rows


def _tokens(tier: str, counters: Counters, logged: Mapping[str, EffectiveSetting]) -> int | None:
    if tier in counters.pools:
        return int(counters.pools[tier])
    line = logged.get(f"{tier}_pool_tokens")
    return int(line.value) if line is not None else None


def _log_settings(target: VerifyTarget) -> Mapping[str, EffectiveSetting]:
    if target.log is None:
        return {}
    try:
        with Path(target.log).open(errors="replace") as lines:
            return effective_settings(lines, target.server.name)
    except OSError:
        return {}


def _probe(
    machine: Machine,
    target: VerifyTarget,
    counters: Counters,
    settings: Sequence[Setting],
    probe_s: float,
    force: bool,
    tell: Callable[[str], None],
) -> CacheProbeResult:
    if probe_s <= 0:
        return probe_skipped("no probe was asked for (--probe-seconds 0)")
    if counters.busy and not force:
        running = (counters.running or 0) + (counters.waiting or 0)
        return probe_skipped(f"{running:.0f} requests of others are running, and the probe would evict what they use")
    context = next((item.effective for item in settings if item.name == "context tokens"), None)
    model = first_model(send(machine, target.address, "GET", "/v1/models", timeout_s=10.0))
    prober = CacheProbe(machine, target.server, target.address, model, limit_s=probe_s, tell=tell)
    return prober.run(counters, int(context) if context is not None and context.isdigit() else None)


def _observed(server: Server, tiers: Sequence[str], probe: CacheProbeResult) -> list[VerifyRow]:
    if not tiers:
        return [
            VerifyRow(
                "lower tiers", None, "off", None, Status.OFF, "none was asked for: no host, disk or external cache"
            )
        ]
    hits = {tier: probe.hit_tokens(tier) for tier in tiers}
    name = " or ".join(tiers) + " tier"
    if probe.skipped is not None:
        return [VerifyRow(name, "on", None, None, Status.UNKNOWN, f"not probed: {probe.skipped}")]
    taken = sum(count for count in hits.values() if count)
    if all(count is None for count in hits.values()):
        missing = f"neither usage nor counters say where tokens came from; {server.evidence_flag} would tell"
        return [VerifyRow(name, "on", None, None, Status.UNKNOWN, missing)]
    rows = [_tier_row(name, taken, probe)]
    if taken:
        rows += _gain_rows(probe)
    return rows


def _tier_row(name: str, taken: int, probe: CacheProbeResult) -> VerifyRow:
    if taken:
        text = f"after eviction {taken:,} of {_prompt_tokens(probe):,} prompt tokens came from it; {probe.cost}"
        return VerifyRow(name, "on", None, f"{taken} tokens", Status.OK, text)
    wrote = probe.backed_up
    if wrote:
        text = f"{wrote:,} tokens were written to it and none was read back after eviction; {probe.cost}"
        return VerifyRow(name, "on", None, "written, never read", Status.DIFFERS, text, Cause.HICACHE_WRITE_ONLY,
                   "see `forebay doctor` for its log; a lower tier that is not read only costs")  # fmt: skip
    text = f"after eviction none of {_prompt_tokens(probe):,} prompt tokens came from it; {probe.cost}"
    return VerifyRow(name, "on", None, "no hit", Status.DIFFERS, text, None, "check its size and its write policy")


def _gain_rows(probe: CacheProbeResult) -> list[VerifyRow]:
    assert probe.computed is not None
    assert probe.again is not None
    cold, warm = probe.computed.seconds, probe.again.seconds
    sooner = warm < cold
    rows = [
        VerifyRow("first token sooner than computing", None, None, f"{cold:.2f} s -> {warm:.2f} s",
            Status.OK if sooner else Status.DIFFERS,
            f"computed in {cold:.2f} s, from the lower tier in {warm:.2f} s",
            None, None if sooner else "loading costs more than computing here: the tier does not pay")
    ]  # fmt: skip
    if probe.same_output is not None:
        same = probe.same_output
        rows.append(
            VerifyRow("same output from loaded pages", None, None, "same" if same else "another",
                Status.OK if same else Status.DIFFERS, "eight greedy tokens before eviction and after loading back",
                None, None if same else "the pages that came back are not those that were written: turn the tier off")
        )  # fmt: skip
    return rows


def _prompt_tokens(probe: CacheProbeResult) -> int:
    return probe.again.prompt_tokens if probe.again is not None else 0
