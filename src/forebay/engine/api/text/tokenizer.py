"""Text to tokens and back, from ``tokenizer.json`` alone; no transformers."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders

from forebay.causes import Cause
from forebay.errors import UsageError

__all__ = ["Detokenizer", "ModelTokenizer"]


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text as they come; constant work a token."""

    def push(self, token: int) -> str:
        """The text that is certain now; an unfinished character is kept back."""

    def finish(self) -> str:
        """What was kept back, unfinished characters as U+FFFD."""


class ModelTokenizer:
    """One model's tokenizer.

    Args:
        folder: a Hugging Face folder with a ``tokenizer.json``.

    Raises:
        UsageError: there is none, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            found = "cannot be read" if path.exists() else "is missing"
            raise UsageError(
                f"{path}: {found}: {error}",
                fix="serve a folder that holds the model's tokenizer.json (a fast tokenizer)",
                code=Cause.TOKENIZER_MISSING,
            ) from error
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Releases the GIL while it works, which ``Tokenizer.encode`` does not."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens`` without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of one token's own spelling, such as ``<|im_end|>``."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_bytes(self, token: int) -> bytes:
        """One token's bytes as it stands alone, special tokens spelled out (for log-probabilities)."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one sequence; special tokens are left out of the text."""
        if self._is_byte_level:
            return _ByteDetokenizer(self, self._special)
        return _WindowDetokenizer(self._tokenizer, self._special)

    def _spell(self, token: int) -> bytes:
        spelling: str | None = self._tokenizer.id_to_token(token)
        if spelling is None:
            return b""
        if not self._is_byte_level:
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            return text.encode()
        try:
            return bytes(_BYTE_OF[character] for character in spelling)
        except KeyError:  # an added token that was never spelled in the byte alphabet
            return spelling.encode()


class _ByteDetokenizer:
    """Byte-level vocabularies: a token is bytes, the text their UTF-8."""

    def __init__(self, codec: ModelTokenizer, special: frozenset[int]) -> None:
        self._codec = codec
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._special else self._utf8.decode(self._codec.token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Any vocabulary: decode the last few tokens with and without the newest and take the difference.

    The window begins at a token whose text is out already, because decoders treat the first token of a text
    differently (a leading space is dropped). A character takes at most four byte tokens, so text that still ends in
    U+FFFD after more than that is wrong for good and goes out.
    """

    _LONGEST = 6

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < self._LONGEST:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._new_text() if self._pending else ""
        self._shown, self._pending = self._pending, []
        return text

    def _new_text(self) -> str:
        before: str = self._tokenizer.decode(self._shown, skip_special_tokens=True)
        after: str = self._tokenizer.decode(self._shown + self._pending, skip_special_tokens=True)
        return after[len(before) :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: printable Latin-1 bytes stand for themselves, the others for
    the characters from U+0100 on, in order (the ByteLevel pre-tokenizer of Hugging Face tokenizers)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
