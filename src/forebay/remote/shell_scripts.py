"""Reads of files, folders and commands as POSIX shell with coreutils, and their answers.

Each read prints what it found and then a line ``MARK STATUS``, MARK being a random word of the session, so that bytes
of any kind pass through unchanged. STATUS is 0 or an errno: the shell tells "not there" from "not readable", as a
local read does."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PRELUDE", "ShellAnswer", "command_script", "glob_script", "parse_answers", "quote", "read_script"]

_NUL = "\0"

# $M is the session's mark. Functions are defined once per session; every read is one short line after that.
PRELUDE = r"""
unset CDPATH ENV; LC_ALL=C; export LC_ALL; PATH=$PATH:/usr/bin:/bin:/usr/sbin:/sbin; export PATH
umask 077; set +e +u +f
_s() { printf '\n%s %d\n' "$M" "$1"; }
_w() { if [ ! -e "$1" ] && [ ! -L "$1" ]; then _s 2; elif [ ! -r "$1" ]; then _s 13; else return 0; fi; return 1; }
_e() { if [ "$1" = 0 ]; then _s 0; elif [ -e "$2" ]; then _s 5; else _s 2; fi; }
fr() { if _w "$1"; then cat "$1" 2>/dev/null; _e $? "$1"; fi; }
fp() { if _w "$1"; then tail -c "+$2" "$1" 2>/dev/null | head -c "$3"; _s 0; fi; }
fl() { if _w "$1"; then if [ -d "$1" ]; then for f in "$1"/* "$1"/.[!.]* "$1"/..?*; do
 if [ -e "$f" ] || [ -L "$f" ]; then printf '%s\000' "${f##*/}"; fi; done; _s 0; else _s 20; fi; fi; }
fk() { if [ -L "$1" ]; then readlink "$1" 2>/dev/null; _e $? "$1"; elif [ -e "$1" ]; then _s 22; else _s 2; fi; }
fs() { if [ -e "$1" ]; then stat -L -c '%s %b %B %Y %i %u %F' "$1" 2>/dev/null; _e $? "$1"; else _s 2; fi; }
fd() { if [ -e "$1" ]; then df -P -k "$1" 2>/dev/null | tail -n 1; _s 0; else _s 2; fi; }
fg() { for f in "$@"; do if [ -f "$f" ]; then
 printf '%s\000' "$f"; cat "$f" 2>/dev/null; printf '\n%s -\n' "$M"; fi; done; _s 0; }
fx() { { _o=$( { "$@" 2>&1 >&3 3>&-; } 3>&4 ); _r=$?; } 4>&1; printf '\n%s e\n%s' "$M" "$_o"; _s "$_r"; }
"""


@dataclass(frozen=True, slots=True)
class ShellAnswer:
    """One answer: what was printed, and 0 or an errno (of a command: its exit status)."""

    data: bytes
    status: int
    stderr: bytes = b""
    files: Mapping[str, bytes] | None = None

    def checked(self, path: str) -> bytes:
        """The data. Raises the OSError a local read of ``path`` would."""
        if self.status:
            raise OSError(self.status, _reason(self.status), path)
        return self.data


def quote(text: str) -> str:
    """``text`` as one word of a POSIX shell. Raises ValueError for a NUL, which no shell can hold."""
    if _NUL in text:
        raise ValueError("a NUL in a path or argument")
    return shlex.quote(text)


def read_script(kind: str, path: str, *numbers: int) -> str:
    """One read: ``fr`` whole file, ``fp`` from byte, ``fl`` folder, ``fk`` link, ``fs`` numbers, ``fd`` space."""
    return " ".join([kind, quote(path), *map(str, numbers)])


def glob_script(patterns: Iterable[str]) -> str:
    """All regular files that match ``patterns`` (``*``, ``?`` and ``[...]`` in plain paths), with their contents."""
    words = " ".join("".join(_glob_quoted(pattern)) for pattern in patterns)
    return f"fg {words}"


def command_script(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None) -> str:
    """A command with separate stdout and stderr; 124 where it took longer than ``timeout_s``."""
    words = " ".join(map(quote, argv))
    if env is not None:
        words = "env -i " + " ".join(quote(f"{name}={value}") for name, value in env.items()) + " " + words
    return f"fx timeout {max(1, round(timeout_s))} {words} </dev/null"


def parse_answers(data: bytes, mark: bytes) -> list[ShellAnswer]:
    """The answers in the output of a script, in order."""
    parts: list[ShellAnswer] = []
    chunks = re.split(rb"\n" + mark + rb" (-|e|\d+)\n?", data)
    files: dict[str, bytes] | None = None
    stdout: bytes | None = None
    for text, status in zip(chunks[0::2], chunks[1::2], strict=False):
        if status == b"-":
            name, _, content = text.partition(b"\0")
            files = files or {}
            files[name.decode("utf-8", "replace")] = content
        elif status == b"e":
            stdout = text
        elif stdout is not None:
            parts.append(ShellAnswer(stdout, int(status), stderr=text))
            stdout = None
        else:
            parts.append(ShellAnswer(text, int(status), files=files))
            files = None
    return parts


def _glob_quoted(pattern: str) -> Iterable[str]:
    for piece in re.split(r"([*?]|\[[^\]]*\])", pattern):
        if piece:
            yield piece if piece[0] in "*?[" else quote(piece)


def _reason(status: int) -> str:
    return {errno.ENOENT: "no such file or folder", errno.EACCES: "not readable"}.get(status, "cannot be read")
