"""``make up``: the small real model served here, one question asked and answered, then served until Ctrl-C."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import click

from forebay.errors import DeadError, ExitCode, ForebayError, RefusedError

__all__ = ["main"]

_MODEL = "smollm2"
_QUESTION = "What is the capital of France?"
_PORTS = range(8000, 8010)
_HOST_CACHE_BYTES = 10**9
_KEPT_LINES = 20


def main() -> int:
    """Start, wait, ask, show, serve; returns the exit code."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "forebay.engine", _MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--host-cache", f"{_host_cache_bytes()}B", "--log-format", "json"),
    ]
    click.echo(f"starting: forebay serve {shlex.join(command[3:-2])}")
    # A group of its own: Ctrl-C reaches us, and we pass it on once.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        events = _events(server)
        _wait_ready(server, events)
        threading.Thread(target=_show_trouble, args=(events,), daemon=True).start()
        _show_answer(f"http://127.0.0.1:{port}")
        return server.wait()
    except KeyboardInterrupt:
        click.echo("\nstopping (Ctrl-C again ends it at once)")
        return _stop(server)
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait()


def _stop(server: subprocess.Popen[str]) -> int:
    """Pass on each Ctrl-C until the server has ended: the first drains, the second does not wait."""
    while True:
        server.send_signal(signal.SIGINT)
        try:
            server.wait()
            return int(ExitCode.DONE)
        except KeyboardInterrupt:
            continue


def _free_port() -> int:
    from forebay.machine.interface import BindResult
    from forebay.machine.local import LocalMachine

    machine = LocalMachine()
    for port in _PORTS:
        if machine.try_bind("127.0.0.1", port) is BindResult.FREE:
            return port
    raise RefusedError(
        f"ports {_PORTS[0]} to {_PORTS[-1]} are all in use here",
        fix="stop what listens there, or: forebay serve --port",
    )


def _host_cache_bytes() -> int:
    """A gigabyte, or a quarter of what memory and /dev/shm have left on a small machine."""
    from forebay.machine.local import LocalMachine
    from forebay.machine.memory import read_memory

    memory = read_memory(LocalMachine())
    rooms = [memory.available_bytes, *([memory.shm.free_bytes] if memory.shm else [])]
    return min(_HOST_CACHE_BYTES, *(room // 4 for room in rooms))


def _events(server: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The server's log, event by event, until it ends; a line that is no event becomes one."""
    assert server.stderr is not None
    for line in server.stderr:
        try:
            yield json.loads(line)
        except ValueError:
            yield {"level": "INFO", "event": "output", "message": line.rstrip()}


def _wait_ready(server: subprocess.Popen[str], events: Iterator[dict[str, Any]]) -> None:
    """Show the start's stages until the server says ready.

    Raises:
        DeadError: it ended before.
    """
    last: list[dict[str, Any]] = []
    for event in events:
        last = [*last[-_KEPT_LINES:], event]
        if event["event"] == "ready":
            _progress(f"ready after {event['seconds']:.1f} s", last=True)
            return
        if event["event"] == "stage":
            percent = "" if event.get("progress") is None else f" {event['progress']:.0%}"
            _progress(f"{event.get('doing') or event['name']}{percent}")
        elif event["event"] == "kernels":
            _progress(str(event["message"]))
    code = server.wait()
    failed = next((event for event in reversed(last) if event["level"] == "ERROR"), None)
    reason = failed.get("reason", failed.get("message")) if failed else "see the lines above"
    error = DeadError(
        f"the server ended with status {code} before it was ready: {reason}",
        fix=failed.get("fix") if failed else None,
        code=failed.get("code") if failed else None,
    )
    if code in set(ExitCode):
        error.exit_code = ExitCode(code)
    raise error


def _progress(text: str, *, last: bool = False) -> None:
    """One line that rewrites itself on a terminal, one line a change elsewhere."""
    if sys.stdout.isatty():
        click.echo(f"\r\x1b[K  {text}", nl=last)
    else:
        click.echo(f"  {text}")


def _show_trouble(events: Iterator[dict[str, Any]]) -> None:
    """After the start: only what a person must see."""
    for event in events:
        if event["level"] != "INFO":
            click.echo(json.dumps(event), err=True)


def _show_answer(url: str) -> None:
    answer = _ask(url)
    message = answer["choices"][0]["message"]["content"].strip()
    click.echo(f"\n  {_QUESTION}\n  {click.style(message, bold=True)}\n")
    body = json.dumps(_question(), ensure_ascii=False)
    ask = f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    click.echo(
        "Ask it yourself:\n"
        f"  {ask}\n"
        "See the host tier at work: drop the device copies, ask again, and read usage...cached_tokens_details.host:\n"
        f"  curl -s -X POST '{url}/flush_cache?tier=device' && {ask}\n"
        f"Watch it: {url}/   Metrics: {url}/metrics   The cache: curl -s {url}/cache\n"
        f"Any OpenAI client works with base_url={url}/v1 and model={_MODEL}. Serving until Ctrl-C."
    )


def _question() -> dict[str, Any]:
    return {"model": _MODEL, "messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "max_tokens": 64}


def _ask(url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(_question()).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


if __name__ == "__main__":
    try:
        status = main()
    except ForebayError as failure:
        click.echo(f"forebay: {failure.message}" + (f" [{failure.code}]" if failure.code else ""), err=True)
        if failure.fix:
            click.echo(f"  fix: {failure.fix}", err=True)
        status = int(failure.exit_code)
    sys.exit(status)
