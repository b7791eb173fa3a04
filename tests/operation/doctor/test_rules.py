"""The rules as data: each is proved by the cases it names, and every code has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forebay.causes import Cause
from forebay.operation.doctor import diagnose, read_file
from forebay.operation.doctor.rule import Rule
from forebay.operation.doctor.rules import RULES

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
PROVED = [(rule, case) for rule in RULES for case in rule.cases]


def _path(case: str) -> Path:
    server, _, name = case.partition("/")
    if not name:
        return DATA / "cases" / f"{case}.log"
    return DATA / "captures" / server / (f"{name}.log" if server == "sglang" else f"{name}/server.log")


@pytest.mark.parametrize(("rule", "case"), PROVED, ids=[f"{rule.id}-{case}" for rule, case in PROVED])
def test_a_rule_decides_the_cases_it_names(rule: Rule, case: str) -> None:
    assert diagnose([read_file(_path(case))]).cause == rule.cause.value


def test_rule_ids_are_unique() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))


def test_every_cause_that_a_line_can_show_has_a_rule() -> None:
    from_records_only = {Cause.FRONT_KILLED, Cause.STOPPED_ON_REQUEST, Cause.START_STALLED}
    assert set(Cause) - {rule.cause for rule in RULES} == from_records_only


def test_the_page_of_causes_and_the_codes_agree() -> None:
    headings = re.findall(r"^### (\S+)$", (ROOT / "docs" / "causes.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(cause.value for cause in Cause)
