"""Scripts: what is sent, and what of it the workload itself repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.workload.bench.load_script import write_script
from forebay.workload.bench.prompts import PromptGenerator
from forebay.workload.bench.settings import BenchSettings, CacheTemperature, Workload
from forebay.workload.bench.summary import cache_note

_MAKER = PromptGenerator("salt", 1000)


def _trace(folder: Path) -> Path:
    """Three requests: the second shares one block with the first, the third is the second again."""
    rows = [
        {"timestamp": 1000, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 1000, "output_length": 20, "hash_ids": [0, 3]},
        {"timestamp": 3000, "input_length": 1000, "output_length": 20, "hash_ids": [0, 3]},
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_trace_keeps_its_lengths_times_and_shared_prefixes(tmp_path: Path) -> None:
    settings = BenchSettings(workload=Workload.TRACE, trace=_trace(tmp_path), speed=2.0)
    sessions = write_script(settings, _MAKER).sessions
    asks = [session.request(0, []) for session in sessions]
    prompts = [ask.body["prompt"] for ask in asks]
    assert [session.at for session in sessions] == [0.0, 0.0, 1.0]
    assert [len(prompt) for prompt in prompts] == [1500, 1000, 1000]
    assert [ask.max_tokens for ask in asks] == [10, 20, 20]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:520] != prompts[1][512:520]
    assert prompts[1] == prompts[2]
    assert [ask.reused_tokens for ask in asks] == [0, 512, 1000]


def test_a_trace_scales_down_as_a_whole_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    settings = BenchSettings(
        workload=Workload.TRACE, trace=_trace(tmp_path), block_tokens=64, max_input_tokens=150, timed=False
    )
    script = write_script(settings, _MAKER)
    assert [len(session.request(0, []).body["prompt"]) for session in script.sessions] == [125, 125]
    assert (script.left_out, script.timed) == (1, False)


def test_another_salt_shares_nothing_and_the_same_salt_everything() -> None:
    settings = BenchSettings(workload=Workload.FIXED, sessions=3, input_tokens=50)

    def prompts(generator: PromptGenerator) -> list[list[int]]:
        return [session.request(0, []).body["prompt"] for session in write_script(settings, generator).sessions]

    assert prompts(_MAKER) == prompts(_MAKER)
    firsts = [tuple(prompt[:8]) for generator in (_MAKER, _MAKER.with_salt("other")) for prompt in prompts(generator)]
    assert len(set(firsts)) == len(firsts)


def test_chat_groups_share_a_system_prompt_and_turns_carry_the_answers() -> None:
    settings = BenchSettings(workload=Workload.CHAT, sessions=4, groups=2, turns=2)
    first, second, third, _ = write_script(settings, _MAKER).sessions
    system = [session.request(0, []).body["messages"][0] for session in (first, second, third)]
    assert system[0] == system[2] != system[1]
    messages = first.request(1, ["an answer"]).body["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "an answer"
    assert (first.request(0, []).reused_tokens, third.request(0, []).reused_tokens) == (0, settings.system_tokens)


def test_a_run_that_measured_the_cache_is_told_apart_from_one_that_repeats_itself() -> None:
    assert cache_note(1000, 0, 0) is None
    assert cache_note(1000, 500, 500) is None
    assert "90.0%" in str(cache_note(1000, 900, 500))
    assert "unknown" in str(cache_note(1000, 900, None))


def test_bad_workloads_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a trace"):
        BenchSettings(workload=Workload.TRACE)
    with pytest.raises(UsageError, match="replayed twice in real time"):
        BenchSettings(workload=Workload.TRACE, trace=tmp_path, cache=CacheTemperature.WARM)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"bad\.jsonl:1 is no trace record"):
        write_script(BenchSettings(workload=Workload.TRACE, trace=bad), _MAKER)
