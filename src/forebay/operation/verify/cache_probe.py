"""The probe that makes a cache show itself: ask, evict, ask again; then compare counters, time and output.

    1  ask P (one token)       computed: the time to first token without any cache
    2  ask P (eight tokens)    from the device tier: the output to compare with
    3  evict                   the server's own flush where it has one, else prompts that fill the device pool
    4  ask P (one token)       from the lower tier, or computed again: the counters say which
    5  ask P (eight tokens)    from what was loaded back: must be the output of step 2

What it will cost is known after step 1 (prefill rate x tokens to fill) and is said before step 3.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.machine.interface import Machine
from forebay.servers.base import Counters, Server, TokenReading
from forebay.servers.http_client import Address, ServerAnswer, send

__all__ = ["Asked", "CacheProbe", "CacheProbeResult", "not_run"]

_WORDS = ("blue", "green", "amber", "white", "violet", "brown", "silver", "orange", "golden", "black")
_PROMPT_TOKENS = 1024
_FILL = 1.2
_OUTPUT_TOKENS = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: seconds until its answer, prompt tokens, and tokens taken from each tier (None: it does not say)."""

    seconds: float
    prompt_tokens: int
    cached: Mapping[str, int] | None
    text: str


@dataclass(frozen=True, slots=True)
class CacheProbeResult:
    """What the probe saw; ``why_not`` when it was not run, or not to its end."""

    why_not: str | None = None
    computed: Asked | None = None
    again: Asked | None = None
    same_output: bool | None = None
    before: Counters = field(default_factory=Counters)
    after: Counters = field(default_factory=Counters)
    cost: str = ""

    def taken_from(self, tier: str) -> int | None:
        """Tokens of the second asking that came from ``tier``: its usage, else the counters; None where neither says."""
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


def not_run(why: str) -> CacheProbeResult:
    """A probe that did not happen."""
    return CacheProbeResult(why_not=why)


class CacheProbe:
    """One probe of one server.

    Args:
        limit_s: the longest it may take, as estimated after the first question.
        tell: what it costs and whom it evicts, before it does.
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
        """Run it. ``counters`` are as read just before; ``context_tokens`` bounds each prompt."""
        device = counters.pools.get("device")
        flush = self._server.flush_path
        if device is None and flush is None:
            return not_run("the size of the device pool is not known, so it cannot be filled")
        longest = min(value for value in (context_tokens, int(device * 0.5) if device else None, 1 << 20) if value)
        size = min(_PROMPT_TOKENS, int(longest * 0.6))
        prompt, per_line = self._calibrated(size)
        if prompt is None:
            return not_run("the first question was not answered")
        computed = self._ask(prompt, 1)
        first = self._ask(prompt, _OUTPUT_TOKENS)
        if computed is None or first is None:
            return not_run("a question was not answered")
        cost, refused = self._announce(computed, device, flush)
        if refused is not None:
            return CacheProbeResult(why_not=refused, computed=computed, before=counters, after=counters)
        before = self._counters()
        if not self._evict(device, flush, int(longest * 0.8 / per_line)):
            return CacheProbeResult(why_not="the device tier could not be evicted", computed=computed, cost=cost)
        again = self._ask(prompt, 1)
        second = self._ask(prompt, _OUTPUT_TOKENS)
        same = None if again is None or second is None else second.text == first.text
        return CacheProbeResult(None, computed, again, same, before, self._counters(), cost)

    def _announce(self, computed: Asked, device: float | None, flush: str | None) -> tuple[str, str | None]:
        if flush is not None:
            text = f"the probe drops every device copy (POST {flush}); lower tiers keep theirs"
            self._tell(text)
            return text, None
        tokens = (device or 0) * _FILL
        rate = computed.prompt_tokens / max(computed.seconds, 1e-3)
        seconds = tokens / rate
        text = f"the probe computes {tokens:,.0f} tokens (about {seconds:.0f} s) and evicts everything from the device tier"
        if seconds > self._limit_s:
            return text, f"{text}: more than --probe-seconds {self._limit_s:g}"
        self._tell(text)
        return text, None

    def _calibrated(self, tokens: int) -> tuple[str | None, float]:
        """A prompt of about ``tokens`` tokens, and the tokens of one of its lines."""
        short = self._ask(_prompt(f"{self._nonce} short", 8), 1)
        if short is None:
            return None, 1.0
        per_line = max(1.0, short.prompt_tokens / 9)
        return _prompt(f"{self._nonce} first", max(1, int(tokens / per_line) - 2)), per_line

    def _evict(self, device: float | None, flush: str | None, lines: int) -> bool:
        if flush is not None:
            return send(self._machine, self._address, "POST", flush, timeout_s=_TIMEOUT_S).ok
        filled, number = 0, 0
        while filled < (device or 0) * _FILL:
            answer = self._ask(_prompt(f"{self._nonce} filler {number}", max(1, lines)), 1)
            if answer is None:
                return False
            filled, number = filled + answer.prompt_tokens, number + 1
        return True

    def _ask(self, prompt: str, tokens: int) -> Asked | None:
        ask = self._server.build_probe_request(self._model, prompt, tokens)
        body = None if ask.body is None else dict(ask.body)
        began = time.monotonic()
        answer = send(self._machine, self._address, ask.method, ask.path, body, timeout_s=_TIMEOUT_S)
        reading: TokenReading = self._server.read_token(answer)
        if not reading.ok or not reading.prompt_tokens:
            return None
        return Asked(time.monotonic() - began, reading.prompt_tokens, reading.cached, reading.text)

    def _counters(self) -> Counters:
        answer: ServerAnswer = send(self._machine, self._address, "GET", "/metrics", timeout_s=10.0)
        return self._server.counters(answer.text) if answer.ok else Counters()


def _prompt(head: str, lines: int) -> str:
    """A text no cache has seen (its first words are ours alone) that ends in a pattern with one clear continuation.

    The ending makes the greedy answer certain by a wide margin, so that rounding cannot change it.
    """
    facts = [f"Fact {number}: the box is {_WORDS[(number * 7 + len(head)) % len(_WORDS)]}." for number in range(lines)]
    return "\n".join([f"Run {head}.", *facts, "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"])
