"""What verify concludes from what a probe saw; the probe itself runs on the real servers (test_faults_*.py)."""

from __future__ import annotations

from forebay.operation.verify.cache_probe import CacheProbeResult, ProbeAnswer, probe_skipped
from forebay.operation.verify.verify import Report, Status, VerifyRow, _compare, _observed, _pools
from forebay.servers.base import Counters, Setting
from forebay.servers.registry import SERVERS

SGLANG = SERVERS["sglang"]


def probe(host: int | None, *, backed_up: float = 0.0, same: bool = True, warm_s: float = 0.2) -> CacheProbeResult:
    cached = None if host is None else {"device": 0, "host": host}
    return CacheProbeResult(
        None, ProbeAnswer(1.0, 900, {}, "a"), ProbeAnswer(warm_s, 900, cached, "a"), same,
        Counters(backed_up=0.0), Counters(backed_up=backed_up), "it costs nothing",
    )  # fmt: skip


def only(rows: list[VerifyRow], name: str) -> VerifyRow:
    return next(row for row in rows if row.name == name)


def test_hits_after_eviction_are_observed() -> None:
    rows = _observed(SGLANG, ("host",), probe(832))
    assert [row.status for row in rows] == [Status.OK] * 3
    assert "832 of 900" in rows[0].evidence


def test_written_and_never_read_is_found() -> None:
    row = only(_observed(SGLANG, ("host",), probe(0, backed_up=900.0)), "host tier")
    assert (row.status, row.code) == (Status.DIFFERS, "hicache_write_only")


def test_another_output_from_loaded_pages_is_found() -> None:
    row = only(_observed(SGLANG, ("host",), probe(832, same=False)), "same output from loaded pages")
    assert row.status is Status.DIFFERS


def test_a_tier_that_is_slower_than_computing_is_found() -> None:
    row = only(_observed(SGLANG, ("host",), probe(832, warm_s=3.0)), "first token sooner than computing")
    assert row.status is Status.DIFFERS


def test_without_evidence_it_is_unknown_and_names_the_flag() -> None:
    row = only(_observed(SGLANG, ("host",), probe(None)), "host tier")
    assert row.status is Status.UNKNOWN
    assert "--enable-metrics" in row.evidence
    skipped = only(_observed(SGLANG, ("host",), probe_skipped("requests of others")), "host tier")
    assert skipped.status is Status.UNKNOWN
    assert "requests of others" in skipped.evidence


def test_unknown_is_no_failure_and_what_is_missing_is() -> None:
    unknown = VerifyRow("a", "on", None, None, Status.UNKNOWN, "")
    off_asked, off = (
        VerifyRow("b", "on", "off", None, Status.OFF, ""),
        VerifyRow("c", None, "off", None, Status.OFF, ""),
    )
    assert Report((unknown, off), probe_skipped("")).in_effect
    assert not Report((off_asked,), probe_skipped("")).in_effect


def test_a_host_pool_no_larger_than_the_device_pool_is_useless() -> None:
    counters = Counters(pools={"device": 60000.0, "host": 43456.0})
    row = only(_pools(("host",), counters, [], {}), "host pool larger than device pool")
    assert (row.status, row.code) == (Status.DIFFERS, "host_pool_smaller_than_device")
    assert "useless" in row.evidence


def test_a_device_pool_below_one_request_has_collapsed() -> None:
    settings = [Setting("context tokens", None, "8192", "")]
    row = only(_pools((), Counters(pools={"device": 512.0}), settings, {}), "room for one request")
    assert (row.status, row.code) == (Status.DIFFERS, "kv_pool_collapsed")


def test_a_silently_rewritten_setting_differs_and_a_rounded_pool_does_not() -> None:
    rewritten = _compare(Setting("memory layout", "page_first", "page_first_direct", "/server_info"), {})
    assert rewritten.status is Status.DIFFERS
    rounded = _compare(Setting("device pool bytes", "60000000", "59719680", "", None, 0.02), {})
    assert rounded.status is Status.OK
    assert _compare(Setting("hierarchical cache", "on", "off", ""), {}).status is Status.OFF
    silent = _compare(Setting("host pool tokens", None, None, "/metrics", "--enable-metrics"), {})
    assert silent.status is Status.UNKNOWN
    assert "--enable-metrics" in silent.evidence
