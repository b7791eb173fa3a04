"""The number of concurrent requests for a server: raised until its throughput stops rising.

Throughput comes from the server's own count of generated tokens where it counts them at each step; a measurement then
takes seconds, however long the answers are. Otherwise it comes from Little's law: with ``n`` requests in flight it is
``n x tokens / duration``, both sums over requests that began and ended under the same limit, so that waves of equally
long answers do not change it. Times are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ConcurrencyLimit", "ThroughputSample"]

_MIN_GAIN = 1.03  # a higher limit is kept when throughput rises by this factor
_MAX_LOSS = 0.99  # a lower limit is kept when throughput stays above this factor
_MIN_EPOCH_S = 1.0  # least length of a measurement
_SETTLE_S = 2.0  # by the server's count: from a change of the limit until new requests are past their prompts
_WINDOW_S = 4.0  # and then the time over which tokens are counted
_HOLD_S = 20.0  # time between probes, once settled
_BACK_OFF = 0.75  # factor of the limit after a 429
_RECOVER_S = 10.0  # time after a 429 until the ceiling rises again


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """One measurement: the limit and its throughput in tokens per second."""

    limit: int
    rate: float


class ConcurrencyLimit:
    """The limit of one server. ``value`` is how many requests may be in flight now.

    Args:
        start: the first limit.
        maximum: upper bound.
        fixed: do not measure; ``value`` stays ``start``, except after a 429.
    """

    def __init__(self, *, start: int = 16, maximum: int = 1024, fixed: bool = False) -> None:
        maximum = start if fixed else maximum
        self.value = min(start, maximum)
        self.best: ThroughputSample | None = None
        self.samples: list[ThroughputSample] = []
        self._maximum = maximum
        self._ceiling = maximum
        self._fixed = fixed
        self._state = "climb"
        self._changed_at = float("-inf")
        self._throttled_at = float("-inf")
        self._settled_at = 0.0
        self._next_probe = 1.25
        self._by_counter = False
        self._base: tuple[float, float] | None = None  # when the window began, and the server's count then
        self._first: float | None = None  # when the epoch's first request began
        self._tokens = 0
        self._duration = 0.0
        self._count = 0

    @property
    def settled(self) -> bool:
        """Whether the first rise is over; probes may still change the limit."""
        return self._state != "climb"

    def finished(self, started: float, now: float, tokens: int) -> None:
        """Note a finished request: it began at ``started`` and brought ``tokens``."""
        if self._fixed or self._by_counter:
            self._recover(now)
            return
        if started < self._changed_at:
            return
        if self._first is None:
            self._first = started
        self._tokens += max(tokens, 1)
        self._duration += max(now - started, 1e-6)
        self._count += 1
        if self._count >= max(self.value, 8) and now - self._first >= _MIN_EPOCH_S:
            self._epoch_ended(ThroughputSample(self.value, self.value * self._tokens / self._duration), now)

    def counted(self, generated: float, now: float, *, full: bool) -> None:
        """Note the server's count of generated tokens; ``full``: as many requests as allowed are in flight."""
        if self._fixed:
            return
        self._by_counter = True
        restarted = self._base is not None and generated < self._base[1]
        if not full or restarted or now - self._changed_at < _SETTLE_S:
            self._base = None
        elif self._base is None:
            self._base = (now, generated)
        elif now - self._base[0] >= _WINDOW_S:
            began, before = self._base
            self._base = None
            self._epoch_ended(ThroughputSample(self.value, (generated - before) / (now - began)), now)

    def throttled(self, started: float, now: float) -> None:
        """Note a 429 to a request sent at ``started``. A burst of them counts once."""
        if started < self._throttled_at:
            return
        self._throttled_at = now
        self._ceiling = max(1, int(self.value * _BACK_OFF))
        self._move(self._ceiling, now)
        self._settle(now)

    def failed(self, started: float, now: float) -> None:
        """Note a failure of the server: halve the limit, and raise it again from there."""
        if started < self._changed_at or self._fixed:
            return
        self._move(max(1, self.value // 2), now)
        self._state, self.best = "climb", None

    def _epoch_ended(self, sample: ThroughputSample, now: float) -> None:
        self.samples = [*self.samples[-63:], sample]
        self._recover(now)
        best = self.best
        if self._state == "climb":
            if best is None or sample.rate >= best.rate * _MIN_GAIN:
                self.best = sample
                self._raise_limit(now)
            else:
                self._move(best.limit if sample.rate < best.rate else sample.limit, now)
                self._settle(now)
        elif self._state == "probe":
            self._end_probe(sample, now)
        else:
            self.best = sample
            if now - self._settled_at >= _HOLD_S:
                self._probe(now)
            self._reset()

    def _raise_limit(self, now: float) -> None:
        if self.value >= self._ceiling:
            self._settle(now)
            self._reset()
        else:
            self._move(min(self.value * 2, self._ceiling), now)

    def _probe(self, now: float) -> None:
        """Try a limit next to the settled one, higher and lower in turn."""
        wanted = min(max(1, round(self.value * self._next_probe)), self._ceiling)
        self._next_probe = 0.8 if self._next_probe > 1 else 1.25
        if wanted == self.value:
            self._settled_at = now
            return
        self._state = "probe"
        self._move(wanted, now)

    def _end_probe(self, sample: ThroughputSample, now: float) -> None:
        before = self.best
        assert before is not None, "a probe starts from a measured limit"
        upward = sample.limit > before.limit
        if sample.rate >= before.rate * (_MIN_GAIN if upward else _MAX_LOSS):
            self.best = sample
        else:
            self._move(before.limit, now)
        self._settle(now)
        self._reset()

    def _recover(self, now: float) -> None:
        if self._ceiling < self._maximum and now - self._throttled_at >= _RECOVER_S:
            self._ceiling = min(self._maximum, self._ceiling + max(1, self._ceiling // 10))
            self._throttled_at = now
            if self._fixed:
                self.value = min(self._ceiling, self._maximum)

    def _settle(self, now: float) -> None:
        self._state, self._settled_at = "hold", now

    def _move(self, value: int, now: float) -> None:
        if value != self.value:
            self.value = value
            self._changed_at = now
        self._reset()

    def _reset(self) -> None:
        self._base = None
        self._first = None
        self._tokens = 0
        self._duration = 0.0
        self._count = 0
