"""Input rows and their keys.

A row's *digest* is a 16-byte hash of its id (when it has one) and its conversation. Equal rows have the same digest and
are numbered; the *key* is the digest, hashed with that ordinal when it is not 0. The position is not part of the key:
rows may be reordered, inserted and appended between two runs, and finished rows stay finished.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Malformed", "Row", "key_of", "parse_row"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
}
_LIST_FIELDS = ("conversations", "messages", "conversation")
_TEXT_FIELDS = ("prompt", "text", "instruction", "question")
_ENCODER = msgspec.json.Encoder()

Message = dict[str, str]


@dataclass(slots=True)
class Row:
    """A conversation to generate.

    Attributes:
        digest: 16 bytes; see the module's docstring.
        row_id: the id in the input, as text; None when there is none.
        system: the system messages' texts, in order.
        prompts: the user messages' texts; one answer is generated after each.
    """

    digest: bytes
    row_id: str | None
    system: tuple[str, ...]
    prompts: tuple[str, ...]

    def messages(self, answers: list[str]) -> list[Message]:
        """The messages to send for turn ``len(answers)``, given the answers so far."""
        out: list[Message] = [{"role": "system", "content": text} for text in self.system]
        for prompt, answer in zip(self.prompts, answers):
            out.append({"role": "user", "content": prompt})
            out.append({"role": "assistant", "content": answer})
        out.append({"role": "user", "content": self.prompts[len(answers)]})
        return out

    @property
    def prefix(self) -> tuple[str, ...]:
        """Sorting by this puts rows with the longest common prefix side by side."""
        return (*self.system, *self.prompts)


@dataclass(slots=True)
class Malformed:
    """An input row that is not a conversation; ``digest`` is a hash of its raw bytes."""

    digest: bytes
    row_id: str | None
    reason: str


@dataclass(slots=True)
class _Seen:
    system: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    previous: str = ""


def key_of(digest: bytes, ordinal: int) -> bytes:
    """The 16-byte key of the ``ordinal``-th of the rows with this digest."""
    if ordinal == 0:
        return digest
    return hashlib.blake2b(digest + ordinal.to_bytes(8, "big"), digest_size=16, person=b"ordinal").digest()


def parse_row(raw: bytes | dict[str, Any] | str, *, field_name: str | None = None) -> Row | Malformed:
    """Read one input row.

    Args:
        raw: a JSON line (an object, or a string that is the prompt), or a record of a columnar file.
        field_name: read the conversation or the prompt from this field instead of the usual names.
    """
    value: Any = raw
    if isinstance(raw, bytes):
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Malformed(_digest(raw, None), None, f"not JSON: {error}")
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        return _malformed(value, None, "neither a JSON object nor a string")
    row_id, problem = _read_id(value.get("id"))
    if problem is None:
        turns = _find_turns(value, field_name)
        if isinstance(turns, str):
            problem = turns
        else:
            seen = _Seen()
            problem = _read_turns(turns, seen)
            if problem is None:
                digest = _digest(_ENCODER.encode(turns), row_id)
                return Row(digest, row_id, tuple(seen.system), tuple(seen.prompts))
    return _malformed(value, row_id, problem)


def _malformed(value: Any, row_id: str | None, reason: str) -> Malformed:
    return Malformed(_digest(msgspec.json.encode(value, enc_hook=str), row_id), row_id, reason)


def _digest(content: bytes, row_id: str | None) -> bytes:
    hasher = hashlib.blake2b(content, digest_size=16)
    if row_id is not None:
        hasher.update(b"\x00id\x00" + row_id.encode("utf-8", "surrogatepass"))
    return hasher.digest()


def _read_id(value: Any) -> tuple[str | None, str | None]:
    if value is None or value == "":
        return None, None
    if isinstance(value, str):
        return value, None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value), None
    return None, f"id is a {type(value).__name__}; an id is text or a whole number"


def _find_turns(value: dict[str, Any], field_name: str | None) -> list[tuple[str, str]] | str:
    """The row's (role, text) pairs, or the reason why there are none."""
    names = (field_name,) if field_name else (*_LIST_FIELDS, *_TEXT_FIELDS)
    found: Any = None
    for name in names:
        found = value.get(name)
        if found is not None:
            break
    if found is None:
        return f"no conversation: none of the fields {', '.join(names)}"
    if isinstance(found, str):
        return [("user", found)]
    if not isinstance(found, list) or not found:
        return f"{name} is neither a non-empty list nor text"
    turns = []
    for number, message in enumerate(found):
        if not isinstance(message, dict):
            return f"message {number} is not an object"
        role = message.get("role", message.get("from"))
        known = _ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            return f"message {number} has the role {role!r}; known: {', '.join(_ROLES)}"
        text = _text_of(message.get("content", message.get("value")))
        if text is None:
            return f"message {number} has no text"
        turns.append((known, text))
    return turns


def _text_of(content: Any) -> str | None:
    """Plain text, or the joined text parts of OpenAI's list form; None for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part is not None)
    return None


def _read_turns(turns: list[tuple[str, str]], seen: _Seen) -> str | None:
    """Fill ``seen``; returns why the turns are not a conversation, or None. Old assistant texts are dropped here."""
    for number, (role, text) in enumerate(turns):
        if role != "assistant" and not text.strip():
            return f"message {number} ({role}) is empty"
        if role == "system":
            if seen.previous not in ("", "system"):
                return f"message {number}: a system message after the conversation began"
            seen.system.append(text)
        elif role == "user":
            if seen.previous == "user":
                return f"message {number}: two user messages in a row"
            seen.prompts.append(text)
        elif seen.previous != "user":
            return f"message {number}: an assistant message without a user message before it"
        seen.previous = role
    return None if seen.prompts else "no user message"
