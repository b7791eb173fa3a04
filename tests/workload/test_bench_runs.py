"""Runs against the null server: cache states, comparisons, and the command itself."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from workload_processes import NullServer, finished, forebay

from benchmarks import null_server as null
from forebay.errors import NotInEffectError, UsageError
from forebay.workload.bench.compare import Comparison, compare
from forebay.workload.bench.result import Result
from forebay.workload.bench.run import measure
from forebay.workload.bench.settings import BenchSettings, CacheTemperature, Workload

_SMALL = BenchSettings(workload=Workload.FIXED, sessions=8, concurrency=4, input_tokens=200, output_tokens=6, seed=1)


def _with(settings: BenchSettings, **changes: object) -> BenchSettings:
    from dataclasses import replace

    return replace(settings, **changes)  # type: ignore[arg-type]


async def _measured(options: null.Options, *settings: BenchSettings) -> list[Result]:
    server, _ = await null.start(options)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        return [await measure("null", url, one) for one in settings]
    finally:
        server.close()


async def test_cold_misses_and_warm_hits_with_the_same_prompts() -> None:
    cold = _with(_SMALL, cache=CacheTemperature.COLD)
    warm = _with(_SMALL, cache=CacheTemperature.WARM)
    first, second, third = await _measured(null.Options(cache_blocks=10**5), cold, warm, cold)
    assert (first.cache.seen, first.cached_tokens, third.cached_tokens) == (True, 0, 0)
    assert second.cached_tokens is not None
    assert second.cached_tokens > 0.8 * second.input_tokens
    assert any("measured the cache" in note for note in second.notes)
    assert not any("measured the cache" in note for note in first.notes)  # other notes depend on the machine
    assert first.output_tokens == 8 * 6


async def test_cold_on_a_server_that_cannot_flush_is_not_in_effect() -> None:
    with pytest.raises(NotInEffectError, match="cannot flush"):
        await _measured(null.Options(cache_blocks=10**5, flushable=False), _with(_SMALL, cache=CacheTemperature.COLD))


async def test_warm_on_a_server_whose_cache_is_too_small_is_not_in_effect() -> None:
    with pytest.raises(NotInEffectError, match="none of their tokens was cached"):
        await _measured(null.Options(cache_blocks=1), _with(_SMALL, cache=CacheTemperature.WARM))


async def test_a_server_that_does_not_report_hits_is_flushed_without_evidence() -> None:
    (result,) = await _measured(null.Options(), _with(_SMALL, cache=CacheTemperature.COLD))
    assert (result.cache.seen, result.cached_tokens) == (False, None)
    assert "reports no cached tokens" in result.cache.evidence


async def test_a_new_run_without_a_seed_hits_nothing_of_the_run_before() -> None:
    new = _with(_SMALL, seed=None)
    results = await _measured(null.Options(cache_blocks=10**5), new, new, _SMALL, _SMALL)
    assert [result.cached_tokens for result in results[:3]] == [0, 0, 0]
    assert (results[3].cached_tokens or 0) > 0


async def _compared(a: null.Options, b: null.Options, rounds: int) -> Comparison:
    settings = _with(_SMALL, seed=None, sessions=16, concurrency=16, output_tokens=20, input_tokens=20)
    servers = [(await null.start(options))[0] for options in (a, b)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    try:
        return await compare(*urls, settings, rounds=rounds)
    finally:
        for server in servers:
            server.close()


def test_servers_are_told_apart_when_they_differ() -> None:
    """One is three times as slow: that must show on any machine.
    What 5 % takes is a matter of statistics (test_bench_stats).
    """
    comparison = asyncio.run(_compared(null.Options(token_s=0.01), null.Options(token_s=0.03), 4))
    ratio = comparison.ratios["output"]
    assert ratio is not None
    assert ratio.differs
    assert ratio.value < 0.8
    assert "worse" in comparison.table()
    assert json.loads(json.dumps(comparison.as_json()))["ratios_b_over_a"]["output"]["differs"] is True


def test_the_same_server_twice_is_not_measured_through_a_warm_cache() -> None:
    async def both() -> Comparison:
        server, _ = await null.start(null.Options(cache_blocks=10**6))
        port = server.sockets[0].getsockname()[1]
        try:
            return await compare(f"http://127.0.0.1:{port}", f"http://localhost:{port}", _SMALL, rounds=2)
        finally:
            server.close()

    comparison = asyncio.run(both())
    assert all(result.cached_tokens == 0 for result in (*comparison.rounds_a, *comparison.rounds_b))


async def test_failures_are_counted_and_measured_as_nothing_else() -> None:
    (result,) = await _measured(null.Options(drop=0.4, seed=3), _with(_SMALL, sessions=40))
    assert result.requests + sum(result.errors.values()) == 40
    assert result.errors.get("broken", 0) > 5
    with pytest.raises(UsageError, match="no request succeeded"):
        await _measured(null.Options(drop=1.0), _SMALL)


def test_the_command_prints_a_table_and_writes_json_and_a_report(null_server: NullServer, tmp_path: Path) -> None:
    page, record = tmp_path / "r.html", tmp_path / "r.json"
    options = [
        "--sessions",
        "6",
        "--turns",
        "2",
        "--output-tokens",
        "5",
        "--cache",
        "cold",
        "--html",
        str(page),
        "--json",
        str(record),
    ]
    code, out, err = finished(forebay("bench", null_server.url, *options))
    assert (code, err) == (0, "")
    assert re.search(r"output +[\d,.]+ tok/s  \[", out)
    assert "cold (observed): probe: " in out
    assert json.loads(record.read_text())["cache"]["state"] == "cold"
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r'(src|href)="?(http|//)|<script', text)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 2, "neither an address nor a run"),
        (["http://127.0.0.1:9"], 4, "is not ready"),
        ([], 2, "name one server"),
        (["--compare", "http://127.0.0.1:9", "x.json"], 2, "neither an address nor a run"),
        (["http://127.0.0.1:9", "--workload", "trace"], 2, "needs a trace"),
    ],
)
def test_mistakes_end_in_one_line_and_the_right_code(
    arguments: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREBAY_TRACE", raising=False)
    found, out, err = finished(forebay("bench", *arguments))
    assert (found, out) == (code, "")
    assert says in err
    assert "Traceback" not in err
