"""A probe of the cache: send a prompt, evict it, send it again; then compare counters, time and output.

    1  prompt P, one token      computed: the time to first token without any cache
    2  prompt P, eight tokens   from the device tier: the output to compare with
    3  evict                    by the server's own flush where it has one, else by prompts that fill the device pool
    4  prompt P, one token      from the lower tier, or computed again: the counters tell which
    5  prompt P, eight tokens   from the pages loaded back: the output must be that of step 2

The cost is known after step 1 (prefill rate x tokens to fill) and is told before step 3.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.machine.interface import Machine
from forebay.servers.base import Counters, Server, TokenReading
from forebay.servers.http_client import Address, ServerAnswer, send

__all__ = ["CacheProbe", "CacheProbeResult", "ProbeAnswer", "probe_skipped"]

_WORDS = ("blue", "green", "amber", "white", "violet", "brown", "silver", "orange", "golden", "black")
_PROMPT_TOKENS = 1024
_FILL = 1.2
_OUTPUT_TOKENS = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One answer: seconds it took, prompt tokens, and tokens from each tier (None: the server does not report them)."""

    seconds: float
    prompt_tokens: int
    cached: Mapping[str, int] | None
    text: str


@dataclass(frozen=True, slots=True)
class CacheProbeResult:
    """What the probe observed. ``skipped``: why it was not run, or not to its end."""

    skipped: str | None = None
    computed: ProbeAnswer | None = None
    again: ProbeAnswer | None = None
    same_output: bool | None = None
    before: Counters = field(default_factory=Counters)
    after: Counters = field(default_factory=Counters)
    cost: str = ""

    def hit_tokens(self, tier: str) -> int | None:
        """Prompt tokens of step 4 that came from ``tier``, by its usage or else by the counters; None where unknown."""
        if self.again is not None and self.again.cached is not None and tier in self.again.cached:
            return self.again.cached[tier]
        if tier in self.after.hits:
            return int(self.after.hits[tier] - self.before.hits.get(tier, 0.0))
        return None

    @property
    def backed_up(self) -> int | None:
        """Tokens written to lower tiers during the probe; None where no counter says."""
        if self.after.backed_up is None:
            return None
        return int(self.after.backed_up - (self.before.backed_up or 0.0))


def probe_skipped(why: str) -> CacheProbeResult:
    """The result of a probe that was not run."""
    return CacheProbeResult(skipped=why)


class CacheProbe:
    """One probe of one server.

    Args:
        model: the name the server gives its model, or None.
        limit_s: the longest it may take, by the estimate after step 1.
        tell: takes what the probe costs, before the eviction.
    """

    def __init__(
        self,
        machine: Machine,
        server: Server,
        address: Address,
        model: str | None,
        *,
        limit_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._server = server
        self._address = address
        self._model = model
        self._limit_s = limit_s
        self._tell = tell
        self._nonce = uuid.uuid4().hex[:12]

    def run(self, counters: Counters, context_tokens: int | None) -> CacheProbeResult:
        """Run all steps.

        Args:
            counters: the server's counters, read just before.
            context_tokens: the longest prompt the server accepts, or None.
        """
        device = counters.pools.get("device")
        flush = self._server.flush_path
        if device is None and flush is None:
            return probe_skipped("the size of the device pool is not known, so it cannot be filled")
        longest = min(value for value in (context_tokens, int(device * 0.5) if device else None, 1 << 20) if value)
        size = min(_PROMPT_TOKENS, int(longest * 0.6))
        prompt, per_line = self._calibrated(size)
        if prompt is None:
            return probe_skipped("the first prompt was not answered")
        computed = self._send_prompt(prompt, 1)
        first = self._send_prompt(prompt, _OUTPUT_TOKENS)
        if computed is None or first is None:
            return probe_skipped("a prompt was not answered")
        cost, refused = self._announce(computed, device, flush)
        if refused is not None:
            return CacheProbeResult(skipped=refused, computed=computed, before=counters, after=counters)
        before = self._counters()
        if not self._evict(device, flush, int(longest * 0.8 / per_line)):
            return CacheProbeResult(skipped="the device tier could not be evicted", computed=computed, cost=cost)
        again = self._send_prompt(prompt, 1)
        second = self._send_prompt(prompt, _OUTPUT_TOKENS)
        same = None if again is None or second is None else second.text == first.text
        return CacheProbeResult(None, computed, again, same, before, self._counters(), cost)

    def _announce(self, computed: ProbeAnswer, device: float | None, flush: str | None) -> tuple[str, str | None]:
        if flush is not None:
            text = f"the probe drops every device copy (POST {flush}); lower tiers keep theirs"
            self._tell(text)
            return text, None
        tokens = (device or 0) * _FILL
        rate = computed.prompt_tokens / max(computed.seconds, 1e-3)
        seconds = tokens / rate
        cost = f"{tokens:,.0f} tokens (about {seconds:.0f} s)"
        text = f"the probe computes {cost} and evicts everything from the device tier"
        if seconds > self._limit_s:
            return text, f"{text}: more than --probe-seconds {self._limit_s:g}"
        self._tell(text)
        return text, None

    def _calibrated(self, tokens: int) -> tuple[str | None, float]:
        """A prompt of about ``tokens`` tokens, and the tokens per line of it; None where the server did not answer."""
        short = self._send_prompt(_prompt(f"{self._nonce} short", 8), 1)
        if short is None:
            return None, 1.0
        per_line = max(1.0, short.prompt_tokens / 9)
        return _prompt(f"{self._nonce} first", max(1, int(tokens / per_line) - 2)), per_line

    def _evict(self, device: float | None, flush: str | None, lines: int) -> bool:
        if flush is not None:
            return send(self._machine, self._address, "POST", flush, timeout_s=_TIMEOUT_S).ok
        filled, number = 0, 0
        while filled < (device or 0) * _FILL:
            answer = self._send_prompt(_prompt(f"{self._nonce} filler {number}", max(1, lines)), 1)
            if answer is None:
                return False
            filled, number = filled + answer.prompt_tokens, number + 1
        return True

    def _send_prompt(self, prompt: str, tokens: int) -> ProbeAnswer | None:
        request = self._server.build_probe_request(self._model, prompt, tokens)
        body = None if request.body is None else dict(request.body)
        began = time.monotonic()
        answer = send(self._machine, self._address, request.method, request.path, body, timeout_s=_TIMEOUT_S)
        reading: TokenReading = self._server.read_token(answer)
        if not reading.ok or not reading.prompt_tokens:
            return None
        return ProbeAnswer(time.monotonic() - began, reading.prompt_tokens, reading.cached, reading.text)

    def _counters(self) -> Counters:
        answer: ServerAnswer = send(self._machine, self._address, "GET", "/metrics", timeout_s=10.0)
        return self._server.counters(answer.text) if answer.ok else Counters()


def _prompt(head: str, lines: int) -> str:
    """A prompt that no cache holds (its first words are random) and whose ending has one clear continuation.

    So the greedy answer leads by a wide margin, and rounding cannot change it.
    """
    facts = [f"Fact {number}: the box is {_WORDS[(number * 7 + len(head)) % len(_WORDS)]}." for number in range(lines)]
    return "\n".join([f"Run {head}.", *facts, "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"])
