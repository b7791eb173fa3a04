"""A run of ``generate``, from the lock to the manifest."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forebay.errors import DeadError, ForebayError, RefusedError
from forebay.workload.client import Client
from forebay.workload.concurrency_limit import ConcurrencyLimit
from forebay.workload.generate.dispatch import Dispatcher
from forebay.workload.generate.index import Counts, Index, build_index
from forebay.workload.generate.journal import Journal
from forebay.workload.generate.output import Written, check_output, write_output
from forebay.workload.generate.progress import Progress, Tally
from forebay.workload.generate.restart import ServerRestarter, up_command
from forebay.workload.generate.rows import Malformed, Row, parse_row
from forebay.workload.generate.run_fingerprint import check_asked, check_fingerprint, fingerprint_of
from forebay.workload.generate.server_pool import ServerEndpoint, ServerPool
from forebay.workload.generate.settings import GenerateSettings
from forebay.workload.generate.sources import RawRow, Source, open_source
from forebay.workload.loop import run_async

__all__ = ["JobOutcome", "make_endpoint", "run_job"]


class ProgressFactory(Protocol):
    """Makes the progress display for a number of rows."""

    def __call__(self, total: int) -> Progress: ...


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a run. ``written`` is None when it was interrupted; then the output is unchanged."""

    counts: Counts
    tally: Tally
    written: Written | None
    interrupted: bool
    changes: list[str]


def run_job(settings: GenerateSettings, make_progress: ProgressFactory) -> JobOutcome:
    """Generate the missing turns, then write the output.

    Raises:
        UsageError: the input, the output's name or the model's name is wrong.
        RefusedError: another process writes this output, or the run was begun with other settings.
        DeadError: no server was ready for too long, starting it failed too often, or the disk failed.
    """
    source = open_source(settings.source, split=settings.split)
    check_output(settings)
    folder = settings.work_folder
    with _disk_errors(folder), _folder_lock(folder):
        journal = Journal(folder / "journal.log")
        try:
            check_asked(folder / "run.json", settings, begun=journal.end > 0)
            return _run(settings, source, journal, make_progress)
        finally:
            journal.close()


def _run(settings: GenerateSettings, source: Source, journal: Journal, make_progress: ProgressFactory) -> JobOutcome:
    def parse(raw: RawRow) -> Row | Malformed:
        return parse_row(raw, field_name=settings.field_name)

    folder = settings.work_folder
    index = build_index(folder / "index.sqlite", source, parse, journal.path, limit=settings.limit)
    try:
        if index.check_unique():
            raise ForebayError("two input rows have the same key, which is a bug in forebay")
        before = index.counts()
        progress = make_progress(before.input)
        _report_start(progress, journal, before, index.broken_rows)
        tally = Tally(rows=before.input - before.pending, rejected=before.rejected)
        changes: list[str] = []
        interrupted = False
        if before.pending:
            changes, interrupted = run_async(_generate(settings, source, parse, index, journal, progress, tally))
        progress.finish()
        counts = index.counts()
        if interrupted:
            return JobOutcome(counts, tally, None, True, changes)
        if not counts.reconciled:
            raise ForebayError(f"rows do not add up, which is a bug in forebay: {counts}")
        written = write_output(settings, source, parse, index, journal, counts)
        return JobOutcome(counts, tally, written, False, changes)
    finally:
        index.close()


def _report_start(progress: Progress, journal: Journal, before: Counts, broken: int) -> None:
    repair = journal.repair
    if repair.torn_bytes or repair.damaged_lines:
        progress.event("journal_repaired", torn_bytes=repair.torn_bytes, damaged_lines=repair.damaged_lines)
    if broken:
        progress.event("rows_broken", rows=broken)
    if before.orphans:
        progress.event("rows_gone_from_input", rows=before.orphans)
    if journal.end:
        progress.event("continuing", rows=before.input, finished=before.input - before.pending)


async def _generate(
    settings: GenerateSettings,
    source: Source,
    parse: Callable[[RawRow], Row | Malformed],
    index: Index,
    journal: Journal,
    progress: Progress,
    tally: Tally,
) -> tuple[list[str], bool]:
    """Generate every pending row; returns the changes of the fingerprint, and whether the user interrupted."""
    pool = ServerPool(
        [make_endpoint(settings, url) for url in settings.servers],
        model=settings.model,
        restarter=ServerRestarter(up_command(settings.up)) if settings.up else None,
        wait_s=settings.server_wait_s,
        on_event=lambda name, url, detail: progress.event(name, server=url, detail=detail),
    )
    dispatch = Dispatcher(settings, pool, index, journal, progress, tally)
    try:
        with _drain_on_signal(dispatch):
            ready = asyncio.create_task(pool.first_ready())
            stop = asyncio.create_task(dispatch.stopping.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not ready.done():
                ready.cancel()
                return [], True
            identity = ready.result()
            changes = check_fingerprint(
                settings.work_folder / "run.json",
                fingerprint_of(settings, identity),
                begun=journal.end > 0,
                allow_change=settings.allow_change,
            )
            interrupted = await dispatch.run(source, parse)
            return changes, interrupted
    finally:
        await pool.close()


def make_endpoint(settings: GenerateSettings, url: str) -> ServerEndpoint:
    """The endpoint of one address, with a measured or a fixed limit."""
    client = Client(url, api_key=settings.api_key, read_timeout_s=settings.read_timeout_s)
    if settings.concurrency is not None:
        return ServerEndpoint(client.url, client, ConcurrencyLimit(start=settings.concurrency, fixed=True))
    return ServerEndpoint(client.url, client, ConcurrencyLimit(maximum=settings.max_concurrency))


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the disk and of the index into one line; the journal keeps every finished turn."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError) as error:
        full = "full" in str(error) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
        raise DeadError(
            f"{folder}: {'the disk is full' if full else error}",
            fix=f"{'make room' if full else 'repair the disk'}; finished rows are kept: the same command continues",
        ) from error


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel releases it when this process ends, in whatever way."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "another process"
            raise RefusedError(
                f"{folder} is being written by {holder}", fix="wait for it, or choose another output"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


@contextmanager
def _drain_on_signal(dispatch: Dispatcher) -> Iterator[None]:
    """Finish the turns in flight at the first Ctrl-C (or SIGTERM), and cancel them at the second."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    with suppress(RuntimeError, ValueError):  # not in the main thread: signals are left to the caller
        for number in signals:
            loop.add_signal_handler(number, dispatch.interrupt)
    try:
        yield
    finally:
        with suppress(RuntimeError, ValueError):
            for number in signals:
                loop.remove_signal_handler(number)
