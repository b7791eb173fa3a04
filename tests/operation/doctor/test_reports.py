"""The doctor on excerpts from public issue threads (``tests/data/doctor/reports.toml``)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forebay.operation.doctor import diagnose, read_text

REPORTS = tomllib.loads((Path(__file__).parents[2] / "data" / "doctor" / "reports.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_has_a_cause_that_its_thread_confirms(name: str) -> None:
    row = REPORTS[name]
    answer = diagnose([read_text(row["log"].lstrip("\n"))])
    assert (answer.cause or "") in row["cause"], answer
    assert answer.server in (row["server"], "unknown"), answer
