"""Fixtures of the operator's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_suites import Case
from operator_driving import Driver


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """`forebay` in a home of its own; whatever a test brings up is taken down after it."""
    found = Driver(tmp_path / "home")
    yield found
    found.clean()


@pytest.fixture(scope="module")
def shared_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One home for a module, for a server that several tests share."""
    found = Driver(tmp_path_factory.mktemp("home"))
    yield found
    found.clean()


@pytest.fixture(scope="class")
def served(request: pytest.FixtureRequest, case: Case, shared_driver: Driver) -> Driver:
    """One good start that the tests of a class share, in the order in which they stand."""
    name = request.cls.name
    up = case.up(shared_driver, name, "--detach", "--no-verify")
    assert up.code == 0, f"{up.told}\n{shared_driver.log_tail(name)}"
    return shared_driver
