"""A runner without a model, and a cache whose loads the test controls.

The fake device pool keeps one number a token slot: a hash chain over all tokens up to it. A sampled token is a function
of the chain at the last position, so a wrong page, a missing page or a stale one gives a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.interface import Int32Array
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.prefix_cache import PrefixCache
from forebay.engine.model_executor.step import SampledToken, StepBatch, StepResult
from forebay.engine.sampling_params import SamplingParams
from forebay.engine.scheduler.sequence import Sequence
from forebay.kv.spec import KVSpec, LayerGroup, Part

VOCAB = 50
_PRIME = 1_000_003


def chain(before: int, token: int) -> int:
    return (before * 31 + int(token) + 7) % _PRIME


def expected_output(prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...], min_tokens: int) -> list[int]:
    """What a lone request gives, computed without pages."""
    state = 0
    for token in prompt:
        state = chain(state, token)
    output: list[int] = []
    while len(output) < max_tokens:
        banned = stop_ids if len(output) < min_tokens else ()
        token = pick(state, banned)
        output.append(token)
        if token in stop_ids:
            break
        state = chain(state, token)
    return output


def pick(state: int, banned: tuple[int, ...]) -> int:
    token = state % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


class FakeRunner:
    """Implements step.Runner over a pool of hash chains; records the size of every step."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pool = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.page_size = page_size
        self.steps: list[list[int]] = []

    def execute(self, batch: StepBatch) -> StepResult:
        failed = tuple(i for i, gate in enumerate(batch.gates) if not gate.wait_layer(0))
        if failed:
            return StepResult([None] * len(batch.seqs), failed)
        self.steps.append([len(seq.tokens) for seq in batch.seqs])
        return StepResult([self._run(seq) for seq in batch.seqs])

    def _run(self, seq: object) -> SampledToken | None:
        table = seq.page_tables[0]
        state = 0 if seq.start == 0 else int(self.pool[self._slot(table, seq.start - 1)])
        assert state >= 0, "a position was read that nobody has computed"
        for offset, token in enumerate(seq.tokens):
            state = chain(state, token)
            self.pool[self._slot(table, seq.start + offset)] = state
        return SampledToken(pick(state, seq.banned_tokens)) if seq.sample else None

    def _slot(self, table: Int32Array, position: int) -> tuple[int, int]:
        page = int(table[position // self.page_size])
        assert page >= 0, "a position has no page"
        return page, position % self.page_size


class FakeGate:
    """A load that arrives after some polls, or fails."""

    def __init__(self, polls: int, fails: bool) -> None:
        self.polls, self.fails = polls, fails

    def has_arrived(self, layer: int) -> bool:
        return self.polls <= 0

    def wait_layer(self, layer: int) -> bool:
        self.polls = 0
        return not self.fails


class LoadingCache(PrefixCache):
    """A device-only cache in which cached prefixes seem to be loaded, as ``make_gate`` says."""

    def __init__(self, spec: KVSpec, config: TierConfig, make_gate: Callable[[], FakeGate | None]) -> None:
        super().__init__(spec, config)
        self._make_gate = make_gate
        self._opened: set[CacheLease] = set()

    def open(self, tokens: Int32Array) -> CacheLease | None:
        lease = super().open(tokens)
        if lease is not None and lease.cached.total:
            lease.layer_events = self._make_gate()
            self._opened.add(lease)
        return lease

    def process_completions(self) -> None:
        for lease in list(self._opened):
            if lease.layer_events is not None:
                lease.layer_events.polls -= 1
                if lease.layer_events.polls < -1 and not lease.layer_events.fails:
                    lease.layer_events = None
        super().process_completions()

    def fail_load(self, lease: CacheLease) -> int:
        lease.layer_events = None
        return super().fail_load(lease)

    def close(self, lease: CacheLease) -> None:
        self._opened.discard(lease)
        super().close(lease)


def make_cache(num_pages: int, page_size: int, seed: int = 0, *, loads: bool = False) -> LoadingCache:
    spec = KVSpec((LayerGroup("full", (0,), (Part("k", 1, 4, 2),)),), page_size)
    rng = random.Random(seed)

    def gate() -> FakeGate | None:
        if not loads or rng.random() < 0.5:
            return None
        return FakeGate(rng.randrange(4), rng.random() < 0.3)

    return LoadingCache(spec, TierConfig(device_pages=(num_pages,)), gate)


def make_sequence(
    seq_id: int, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = (), min_tokens: int = 0
) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids)
    return Sequence(seq_id, np.asarray(prompt, dtype=np.int32), sampling)
