"""`forebay serve` with what cannot work: one clear line that names it, exit 2, and no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from operator_driving import Driver
from ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such/folder",), "/no/such/folder: no such folder"),
        (("no-such-name",), "no-such-name: no such folder"),
        (("smollm2", "--host-cache", "12"), "12GB (12,000,000,000 bytes) or 12GiB"),
        (("smollm2", "--device-cache", "lots"), "'lots' is not a size"),
        (("smollm2", "--tp", "0"), "--tp: 0 is too small"),
        (("smollm2", "--disk-size", "1GB"), "--disk-cache and --disk-size belong together"),
        (("smollm2", "--no-such-flag"), "No such option '--no-such-flag'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_serve_refuses_with_one_clear_line(driver: Driver, words: tuple[str, ...], said: str) -> None:
    done = driver("serve", *words, "--port", str(free_port()), timeout_s=60)
    assert done.code == 2, done.err
    lines = [line for line in (done.out + done.err).splitlines() if said in line]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err


def test_serve_refuses_a_folder_that_is_no_model(driver: Driver, tmp_path: Path) -> None:
    done = driver("serve", str(tmp_path), "--port", str(free_port()), timeout_s=60)
    assert done.code == 2, done.err
    assert "has no config.json" in done.err
