"""The doctor on wordings it has no recorded case of."""

from __future__ import annotations

import pytest
from doctor_wordings import DEGRADED, FAILURES

from forebay.operation.doctor import diagnose, read_text


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_in_another_wording_has_the_same_cause(name: str) -> None:
    cause, text = FAILURES[name]
    answer = diagnose([read_text(text)])
    assert answer.cause == cause, answer
    assert answer.fix, answer
    assert answer.evidence, answer


@pytest.mark.parametrize("name", DEGRADED)
def test_a_server_that_runs_wrongly_is_named(name: str) -> None:
    cause, text = DEGRADED[name]
    answer = diagnose([read_text(text)])
    assert answer.cause == cause, answer
    assert answer.came_up is not False
