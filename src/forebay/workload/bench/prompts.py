"""Prompts made from ids: equal ids give equal blocks, and another salt gives other blocks for all ids.

A block is token ids (exact lengths) or words (lengths by the measured tokens per word).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forebay.workload.client import COMPLETIONS, Client
from forebay.workload.failures import FailureKind, RequestFailure

__all__ = ["PromptGenerator", "probe_prompt_generator"]

# Short, frequent English words: one token each in most vocabularies; the real number of tokens per word is measured
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
]
_MIN_ID = 20  # lower ids are special tokens in many vocabularies
_MAX_IDS = (30000, 8000, 1000, 250)  # tried in turn, because the size of the server's vocabulary is not known


@dataclass(frozen=True, slots=True)
class PromptGenerator:
    """Makes blocks of tokens or words.

    Attributes:
        salt: text hashed into every block.
        highest_id: token ids are drawn below this; None makes words.
        tokens_per_word: as measured at the server; used for words only.
    """

    salt: str
    highest_id: int | None
    tokens_per_word: float = 1.0

    def ids(self, name: Hashable, count: int) -> tuple[int, ...]:
        """``count`` token ids of the block ``name``; a shorter block is a prefix of a longer one."""
        assert self.highest_id is not None, "this generator makes words"
        return _draw(self.salt, name, count, _MIN_ID, self.highest_id)

    def text(self, name: Hashable, tokens: int) -> str:
        """Words of about ``tokens`` tokens, for the block ``name``."""
        count = max(1, round(tokens / self.tokens_per_word))
        return " ".join(WORDS[number] for number in _draw(self.salt, name, count, 0, len(WORDS)))

    def with_salt(self, salt: str) -> PromptGenerator:
        """The same generator with another salt."""
        return PromptGenerator(salt, self.highest_id, self.tokens_per_word)


@lru_cache(maxsize=4096)
def _draw(salt: str, name: Hashable, count: int, low: int, high: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{salt}\x00{name!r}".encode(), digest_size=8).digest()
    return tuple(np.random.default_rng(int.from_bytes(digest, "big")).integers(low, high, size=count).tolist())


async def probe_prompt_generator(client: Client, model: str, salt: str, *, tokens: bool) -> PromptGenerator:
    """Find out how prompts can be sent: as token ids below some bound, else as words, and how many tokens a word is.

    Raises:
        RequestFailure: the server accepts neither.
    """
    if tokens:
        for highest in _MAX_IDS:
            body = {"model": model, "prompt": [_MIN_ID, highest - 1], "max_tokens": 1, "temperature": 0}
            try:
                answer = await client.chat(body, path=COMPLETIONS)
            except RequestFailure as failure:
                if failure.kind in (FailureKind.REFUSED, FailureKind.NOT_ALLOWED, FailureKind.SERVER_ERROR):
                    continue
                raise
            if answer.usage is not None and answer.usage.prompt_tokens in (2, 3):  # 3: with a beginning-of-text token
                return PromptGenerator(salt, highest)
            break
    counted = []
    for words in (64, 192):
        text = PromptGenerator(salt, None).text("how many tokens is a word", words)
        message = [{"role": "user", "content": text}]
        answer = await client.chat({"model": model, "messages": message, "max_tokens": 1, "temperature": 0})
        counted.append(answer.usage.prompt_tokens if answer.usage else words)
    return PromptGenerator(salt, None, max(0.25, (counted[1] - counted[0]) / 128))
