"""The settings of a run of ``generate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.workload.generate.quality_filters import FilterPolicy

__all__ = ["GenerateSettings", "Sampling"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` leaves one to the server.

    Attributes:
        max_tokens: longest answer in tokens; retries of truncated answers ask for more.
        seed: makes sampled answers repeatable: each turn gets a seed derived from this one, the row and the turn.
        extra: further fields of the request body.
    """

    max_tokens: int = 2048
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(
                f"--max-tokens is {self.max_tokens}; an answer has at least 1 token", fix="--max-tokens 2048"
            )
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature is {self.temperature}; it is 0 or more", fix="--temperature 0")


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """One run of ``generate``.

    Attributes:
        source: the input file or folder.
        output: a ``.jsonl`` or ``.parquet`` file, or a folder for shards.
        servers: addresses.
        up: arguments of ``forebay up`` that start the server; None when somebody else starts it.
        concurrency: a fixed number of requests in flight per server; None measures it.
        row_tries: errors, over all turns of a row, after which the row is failed.
        window_rows: rows read ahead and sorted, so that rows with a common prefix are sent together.
        server_wait_s: how long all servers may be down before the run ends (exit 4).
    """

    source: Path
    output: Path
    servers: tuple[str, ...]
    sampling: Sampling = field(default_factory=Sampling)
    filters: FilterPolicy = field(default_factory=FilterPolicy.default)
    model: str | None = None
    api_key: str | None = None
    up: str | None = None
    split: str | None = None
    field_name: str | None = None
    limit: int | None = None
    output_format: str | None = None
    shard_rows: int = 100_000
    concurrency: int | None = None
    max_concurrency: int = 1024
    row_tries: int = 5
    window_rows: int = 8192
    server_wait_s: float = 600.0
    read_timeout_s: float = 1800.0
    allow_change: bool = False

    @property
    def format(self) -> str:
        """``jsonl`` or ``parquet``: ``output_format`` if given, else by the output's name."""
        if self.output_format:
            return self.output_format
        return "parquet" if self.output.suffix == ".parquet" else "jsonl"

    @property
    def work_folder(self) -> Path:
        """The folder of journal, lock and index, beside the output."""
        return self.output.with_name(self.output.name + ".journal")
