"""The result of checking a start-up log: each pool beside its prediction, and what explains a difference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SCHEMA", "Difference", "LogReport", "PoolCheck"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference over 1 %, and what explains it."""

    pool: str
    what: str
    reported_tokens: int | None
    predicted_tokens: int | None
    ratio: float | None
    explanation: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unknown_model(cls, model: str) -> Difference:
        """``--model`` names nothing that is known here."""
        text = f"model {model!r} is no folder, no .gguf file and not in the catalogue: nothing can be predicted"
        return cls("", "unknown_model", None, None, None, text)


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """One pool of the log beside its prediction; None: unknown."""

    name: str
    tokens: int
    size_bytes: int
    line: int
    bytes_per_token: int | None
    predicted_tokens: int | None

    @property
    def difference(self) -> float | None:
        """(predicted - reported) / reported."""
        return None if self.predicted_tokens is None else self.predicted_tokens / self.tokens - 1


@dataclass(frozen=True, slots=True)
class LogReport:
    """What ``forebay plan --from-log`` says."""

    source: str
    server: str
    model: str | None
    tp: int
    kv_dtype: str | None
    page_size: int
    pools: tuple[PoolCheck, ...]
    kv_bytes_per_token_per_rank: int | None
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """The documented JSON; what cannot be known is ``"unknown"``."""
        main = next((pool for pool in self.pools if pool.name in ("device", "host", "needed")), None)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "server": self.server,
            "model": self.model or "unknown",
            "tp": self.tp,
            "kv_dtype": self.kv_dtype or "auto",
            "page_size": self.page_size,
            "reported": {
                "kv_tokens": main.tokens if main else "unknown",
                "kv_bytes": main.size_bytes if main else "unknown",
                "pool": main.name if main else "unknown",
            },
            "predicted": {"kv_tokens": _known(main.predicted_tokens if main else None)},
            "kv_bytes_per_token_per_rank": _known(self.kv_bytes_per_token_per_rank),
            "pools": [
                {
                    "name": pool.name,
                    "line": pool.line,
                    "reported_tokens": pool.tokens,
                    "reported_bytes": pool.size_bytes,
                    "bytes_per_token": _known(pool.bytes_per_token),
                    "predicted_tokens": _known(pool.predicted_tokens),
                }
                for pool in self.pools
            ],
            "differences": [item.to_json() for item in self.differences],
        }


def _known(value: int | None) -> int | str:
    return "unknown" if value is None else value
