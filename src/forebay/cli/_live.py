"""Show a start as it happens: one JSON event per line, plain lines,
or (on a terminal) a live line with a progress bar.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from forebay.cli._verify_view import show_rows
from forebay.sizes import format_binary, format_size

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Screen"]

_QUIET = ("created", "launched", "exited", "down")


class Screen:
    """Shows events: as JSON lines on stdout with ``as_json``, else as text on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._live: Live | None = None
        self._url = ""
        self._tty = not as_json and sys.stderr.isatty()

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        """Show one event."""
        if self._json:
            click.echo(json.dumps(event))
            return
        kind = str(event["event"])
        if kind == "progress":
            self._progress(event)
        elif kind == "stage":
            self._line(f"  {event['stage']}{_percent(event.get('percent'))}")
        elif kind == "answer":
            self._answer(event)
        elif kind == "serving":
            self._serving(event)
        elif kind == "doing":
            self._line(f"    {event['doing']}")
        elif kind == "log":
            self._line(f"  log: {event['line']}")
        elif kind == "verified":
            self.close()
            show_rows(event["rows"], err=True)
        elif kind in ("plan", "preflight"):
            self._findings(kind, event)
        elif kind not in _QUIET:
            self._verdict(kind, event)

    def say(self, text: str) -> None:
        """A line for a person; nothing with ``--json``."""
        if not self._json:
            self._line(text)

    def close(self) -> None:
        """End the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _verdict(self, kind: str, event: Mapping[str, Any]) -> None:
        self.close()
        if kind in ("starting", "warming"):
            return
        after = f" after {event['after_s']} s" if "after_s" in event else ""
        self._line(f"{kind}{after}")
        for text in event.get("evidence", ()):
            self._line(f"    {text}")
        if event.get("cause"):
            self._line(f"  cause: {event['cause']}")
            for text in event.get("cause_evidence", ()):
                self._line(f"    {text}")
            if event.get("fix"):
                self._line(f"  fix: {event['fix']}")

    def _serving(self, event: Mapping[str, Any]) -> None:
        self._url = str(event.get("local_url") or event["url"])
        there = f" on {event['on']}" if "on" in event else ""
        here = f", here at {event['local_url']}/v1" if "local_url" in event else ""
        self._line(f"serving {event['model']}{there} at {event['url']}/v1{here}")
        if there and not here:
            self._line(f"  reach it from here: forebay forward {event['name']} --on {event['on']}")

    def _answer(self, event: Mapping[str, Any]) -> None:
        from forebay.operation.start.question import example_requests

        self.close()
        click.echo(f"\n  {event['question']}\n  {click.style(event['answer'], bold=True)}\n")
        for line in example_requests(self._url, str(event["model"]), str(event["question"]), event["flush_path"]):
            self._line(line)

    def _findings(self, kind: str, event: Mapping[str, Any]) -> None:
        """Warnings only: what refuses is the command's error message."""
        if kind == "preflight" and not event["refuses"]:
            self._line(f"note: {'; '.join(event['evidence'])}" + (f" ({event['fix']})" if event.get("fix") else ""))
        for warning in event.get("warnings", ()):
            self._line(f"note: {warning['message']}")

    def _progress(self, event: Mapping[str, Any]) -> None:
        text = _progress_text(event)
        if not self._tty:
            return
        from rich.text import Text

        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)


def _progress_text(event: Mapping[str, Any]) -> str:
    percent = event.get("percent")
    bar = ""
    if percent is not None:
        filled = round(percent / 5)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] {percent:.0f} %  "
    left = f", {event['left_s']:.0f} s left" if event.get("left_s") is not None else ""
    rates = []
    for key, word in (("read_bytes_per_s", "read"), ("grown_bytes_per_s", "grown")):
        if event.get(key, 0) > 1 << 20:
            rates.append(f"{word} {format_size(event[key])}/s")
    note = f"  ({event['note']})" if event.get("note") else ""
    shown = ", ".join([f"{format_binary(event['rss_bytes'])} resident", f"CPU {event['cpu']:.1f}", *rates])
    return f"  {event['stage']}  {bar}{event['stage_s']:.0f} s{left}  {shown}{note}"


def _percent(value: float | None) -> str:
    return "" if value is None else f" {value:.0f} %"
