"""Kills at any moment: the output is that of an unbroken run, byte for byte,
and no finished turn was asked for twice.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from workload_processes import EngineServer, NullServer, finished, forebay, write_conversations

from forebay.workload.generate.journal import scan


def _files(output: Path) -> dict[str, bytes]:
    """Everything a user sees of an output."""
    stem = output.with_suffix("").name
    return {
        path.name.replace(stem, "X"): path.read_bytes() for path in output.parent.glob(f"{stem}.*") if path.is_file()
    }


def _size(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def _run_with_kills(
    rows: Path,
    output: Path,
    server: NullServer | EngineServer,
    kills: int,
    whole_bytes: int,
    seed: int,
    options: list[str],
    server_share: float,
) -> None:
    """Kill client or server ``kills`` times over a journal of about ``whole_bytes``, then let it finish.

    Each kill comes within its share of what is left, so that a fast machine, which runs on while the kill is on its
    way, still has work left for the last one.
    """
    chosen = random.Random(seed)
    journal = output.with_name(output.name + ".journal") / "journal.log"
    command = ["generate", str(rows), "-o", str(output), "-s", server.url, *options]
    client = forebay(*command)
    for kill in range(kills):
        left = max(0, whole_bytes - _size(journal))
        aim = _size(journal) + chosen.randint(0, int(0.7 * left / (kills - kill)))
        while _size(journal) < aim and client.poll() is None:
            time.sleep(0.005)
        time.sleep(chosen.random() * 0.02)
        assert client.poll() is None, "every kill must meet a run at work"
        if chosen.random() < server_share:
            server.kill()
            server.restart()
        else:
            client.kill()
            client.communicate()
            client = forebay(*command)
    for _ in range(10):
        code, _, errors = finished(client)
        if code == 0:
            return
        assert code == 9, errors  # rows whose server was killed too often failed; they are tried again
        client = forebay(*command)
    pytest.fail("the run never ended with every row")


def _exactly_once(
    tmp_path: Path, server: NullServer | EngineServer, *, conversations: int, kills: int, seed: int, options: list[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    write_conversations(rows, conversations, seed=seed)
    options = [*options, "--concurrency", "8", "--server-wait", "400"]
    try:
        whole = tmp_path / "whole.jsonl"
        code, _, errors = finished(forebay("generate", str(rows), "-o", str(whole), "-s", server.url, *options), 600)
        assert code == 0, errors
        broken = tmp_path / "broken.jsonl"
        whole_bytes = _size(tmp_path / "whole.jsonl.journal" / "journal.log")
        server_share = 0.3 if isinstance(server, EngineServer) else 0.5
        _run_with_kills(rows, broken, server, kills, whole_bytes, seed, options, server_share)
    finally:
        server.kill()
    expected, found = _files(whole), _files(broken)
    assert len(expected["X.jsonl"].splitlines()) > conversations * 0.9
    expected["X.manifest.json"] = expected["X.manifest.json"].replace(b"whole.jsonl", b"broken.jsonl")
    assert found == expected
    asked = [(record.k, record.t) for _, _, record in scan(tmp_path / "broken.jsonl.journal" / "journal.log") if record]
    turns = [pair for pair in asked if pair[1] >= 0]
    assert len(turns) == len(set(turns))


def _tiny_engine(folder: Path) -> tuple[EngineServer, list[str]]:
    """A tiny random model, and options that keep whatever it says."""
    from tiny_models import make_tiny

    keep = [
        flag
        for filter_ in ("truncated", "empty", "repeating", "unclosed-reasoning")
        for flag in (f"--on-{filter_}", "keep")
    ]
    return EngineServer(make_tiny("llama", folder / "model", max_position_embeddings=2048)), [
        "--max-tokens",
        "32",
        *keep,
    ]


def test_twenty_kills_over_two_hundred_conversations_change_nothing(tmp_path: Path) -> None:
    """Against the null server, whose answers are a hash of all that was asked: a wrong history changes the answer."""
    server = NullServer("--token-s", "0.006", "--cache-blocks", "10000")
    _exactly_once(tmp_path, server, conversations=200, kills=20, seed=6, options=["--max-tokens", "8"])


@pytest.mark.engine
def test_twenty_kills_of_client_or_embedded_server_change_nothing(tmp_path: Path) -> None:
    server, options = _tiny_engine(tmp_path)
    _exactly_once(tmp_path, server, conversations=200, kills=20, seed=8, options=options)


@pytest.mark.soak
def test_three_hundred_kills_over_five_thousand_conversations_change_nothing(tmp_path: Path) -> None:
    server, options = _tiny_engine(tmp_path)
    _exactly_once(tmp_path, server, conversations=5000, kills=300, seed=7, options=options)
