"""``forebay logs``: a run's log, shown or followed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from forebay.cli._complete import run_names

__all__ = ["command"]


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", shell_complete=run_names)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended (Ctrl-C stops showing, not the run).")
@click.option("-n", "--lines", default=200, show_default=True, type=click.IntRange(0), help="Last lines shown first.")
@click.option("--events", is_flag=True, help="Forebay's own events (JSON lines) instead of the server's log.")
@click.option("--path", "path_only", is_flag=True, help="Print the file's path only.")
def command(name: str, follow: bool, lines: int, events: bool, path_only: bool) -> int:
    """Show the log of the run NAME."""
    from forebay.runs.run_record import open_run

    run = open_run(name)
    path = run.events_path if events else run.log_path
    if path_only:
        click.echo(path)
        return 0
    offset = _show_tail(path, lines)
    while follow:
        offset = _show_from(path, offset)
        if run.read().ended:
            _show_from(path, offset)
            return 0
        time.sleep(0.2)
    return 0


def _show_tail(path: Path, lines: int) -> int:
    """Print the last ``lines`` lines; returns the offset after them. Reads from the end, because a log may be large."""
    if not path.exists():
        return 0
    with path.open("rb") as source:
        size = source.seek(0, 2)
        block = min(size, max(1 << 16, lines * 512))
        source.seek(size - block)
        kept = source.read().splitlines(keepends=True)[-lines:] if lines else []
    sys.stdout.buffer.write(b"".join(kept))
    sys.stdout.flush()
    return size


def _show_from(path: Path, offset: int) -> int:
    if not path.exists():
        return offset
    with path.open("rb") as source:
        source.seek(offset)
        data = source.read()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
    return offset + len(data)
