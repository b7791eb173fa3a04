"""Rows: what is a conversation, what is not, and by what a row is known."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.workload.generate.index import Index, build_index
from forebay.workload.generate.journal import Journal, Record
from forebay.workload.generate.rows import Malformed, Row, parse_row
from forebay.workload.generate.sources import open_source


def _row(raw: object) -> Row:
    row = parse_row(json.dumps(raw).encode())
    assert isinstance(row, Row), row
    return row


def test_both_dialects_and_plain_prompts_mean_the_same_conversation() -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]}
    openai = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert (
        _row(sharegpt).prompts
        == _row(openai).prompts
        == _row({"prompt": "hi"}).prompts
        == _row("hi").prompts
        == ("hi",)
    )
    assert _row(parts).digest == _row({"prompt": "hi"}).digest
    assert _row(sharegpt).digest == _row(openai).digest
    assert parse_row({"q": "hi"}, field_name="q") == _row({"prompt": "hi"})


def test_a_turn_is_asked_with_the_new_answers_and_never_the_old_ones() -> None:
    row = _row(
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "1"},
                {"from": "gpt", "value": "old"},
                {"from": "human", "value": "2"},
            ]
        }
    )
    assert row.messages(["new"]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "new"},
        {"role": "user", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{nope", "not JSON"),
        (b"[1]", "neither a JSON object nor a string"),
        (b"{}", "no conversation"),
        (b'{"conversations": []}', "neither a non-empty list nor text"),
        (b'{"conversations": ["x"]}', "message 0 is not an object"),
        (b'{"conversations": [{"from": "tool", "value": "x"}]}', "role 'tool'"),
        (b'{"conversations": [{"from": "gpt", "value": "x"}]}', "without a user message before it"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "is empty"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "no text"),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "two user messages"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
            "after the conversation",
        ),
        (b'{"id": 1.5, "prompt": "a"}', "id is a float"),
    ],
)
def test_a_malformed_row_says_why(raw: bytes, reason: str) -> None:
    row = parse_row(raw)
    assert isinstance(row, Malformed)
    assert reason in row.reason


def _index(folder: Path, rows: list[dict[str, object]]) -> Index:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return build_index(folder / "index.sqlite", open_source(path), parse_row, folder / "journal.log")


_ROWS = st.lists(
    st.fixed_dictionaries({"prompt": st.sampled_from("abc")}, optional={"id": st.sampled_from([1, "1", "two"])}),
    max_size=12,
)


@given(rows=_ROWS, order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_identity_needs_no_position(tmp_path_factory: pytest.TempPathFactory, rows: list, order) -> None:  # type: ignore[no-untyped-def,type-arg]
    """Every row has its own key; shuffled rows have the same keys, unless an id clash makes the first one win."""
    folder = tmp_path_factory.mktemp("identity")
    index = _index(folder, rows)
    assert index.check_unique() == 0
    entries = index.window(0, len(rows))
    contents: dict[str, str] = {}
    for row, entry in zip(rows, entries, strict=True):
        known = contents.setdefault(str(row["id"]), row["prompt"]) if "id" in row else row["prompt"]
        assert (entry.state == "rejected") == (known != row["prompt"])
    shuffled = list(rows)
    order.shuffle(shuffled)
    again = _index(folder, shuffled).window(0, len(rows))
    assert Counter(entry.key for entry in again) == Counter(entry.key for entry in entries)


def test_rows_may_be_inserted_and_reordered_between_two_runs(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a"}, {"prompt": "a"}, {"id": 7, "prompt": "b"}]
    first = _index(tmp_path, rows)
    journal = Journal(tmp_path / "journal.log")
    for entry in first.window(0, 3):
        journal.append(Record(entry.key.hex(), 0, "", "done", e="ok"))
    journal.close()
    counts = _index(tmp_path, [{"prompt": "new"}, rows[2], rows[0], {"id": 7, "prompt": "other"}, rows[1]]).counts()
    assert (counts.ok, counts.pending, counts.rejected, counts.orphans) == (3, 1, 1, 0)
    assert _index(tmp_path, rows[:1]).counts().orphans == 2


def test_equal_rows_are_two_rows_and_a_failed_one_is_pending_again(tmp_path: Path) -> None:
    index = _index(tmp_path, [{"prompt": "a"}, {"prompt": "a"}])
    first, second = index.window(0, 2)
    assert first.key != second.key
    journal = Journal(tmp_path / "journal.log")
    done, failed = Record(first.key.hex(), 0, e="ok"), Record(second.key.hex(), e="failed", w="why")
    index.add_turn(done, *journal.append(done))
    journal.append(failed)
    index.add_failure(second.key, "why")
    journal.close()
    assert (index.counts().ok, index.counts().failed) == (1, 1)
    again = _index(tmp_path, [{"prompt": "a"}, {"prompt": "a"}]).counts()
    assert (again.ok, again.failed, again.pending) == (1, 0, 1)
