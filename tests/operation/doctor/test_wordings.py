"""The doctor on wordings it has no recorded case of (``wordings.toml``)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forebay.operation.doctor import diagnose, read_text

WORDINGS = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WORDINGS["failures"])
def test_a_failure_in_another_wording_has_the_same_cause(name: str) -> None:
    row = WORDINGS["failures"][name]
    answer = diagnose([read_text(row["log"])])
    assert answer.cause == row["cause"], answer
    assert answer.fix, answer
    assert answer.evidence, answer


@pytest.mark.parametrize("name", WORDINGS["degraded"])
def test_a_server_that_runs_wrongly_is_named(name: str) -> None:
    row = WORDINGS["degraded"][name]
    answer = diagnose([read_text(row["log"])])
    assert answer.cause == row["cause"], answer
    assert answer.came_up is not False


@pytest.mark.parametrize("name", [name for name in WORDINGS["failures"] if not name.startswith("embedded_")])
def test_blanks_in_a_message_may_be_any_run_of_blanks(name: str) -> None:
    """A pattern's blank matches any run of blanks: copies through terminals and tables double them.

    (Lines of the embedded server are key=value records: there a blank is part of the format.)
    """
    row = WORDINGS["failures"][name]
    lines = [_doubled_after_prefix(line) for line in row["log"].split("\n")]
    assert diagnose([read_text("\n".join(lines))]).cause == row["cause"]


def _doubled_after_prefix(line: str) -> str:
    """Two blanks for one in the message; prefixes and indentation stay, since they are formats of their own."""
    head, mark, message = line.rpartition("] ")
    if line.lstrip().startswith(("File ", "usage:", "[--", '{"')) or line[:1] == " ":
        return line
    return head + mark + message.replace(" ", "  ")
