"""The longest usable prefix: where its pages are, where a sequence can start, and what is worth loading."""

from __future__ import annotations

from forebay.engine.cache.config import LoadPolicy
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.interface import Int32Array
from forebay.engine.cache.prefix_match import DEVICE, DISK, HOST, NOWHERE, Match
from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.radix.page_hash import chain_digest
from forebay.engine.cache.radix.tree import token_bytes
from forebay.engine.cache.tiers import Tiers

__all__ = ["PrefixMatcher"]


class PrefixMatcher:
    """Finds prefixes in the tree and on disk. It changes nothing. O(prefix)."""

    def __init__(self, tiers: Tiers) -> None:
        load = tiers.config.settings.load
        self._spec = tiers.spec
        self._tree = tiers.pools.tree
        self._store = tiers.store if load is not LoadPolicy.NEVER else None
        self._has_host = tiers.has_host and load is not LoadPolicy.NEVER
        self._auto = load is LoadPolicy.AUTO
        self._rates = tiers.rates
        self._page = tiers.spec.page_size
        self._groups = range(len(tiers.spec.groups))
        self._windows = [group.window for group in tiers.spec.groups]
        self._full = [window is None for window in self._windows]
        self._native = native_radix()

    def first_readable(self, group: int, num_tokens: int) -> int:
        """The first page of ``group`` that the token at position ``num_tokens`` can read."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self._page

    def match_prefix(self, tokens: Int32Array, *, use_disk: bool = True) -> Match:
        """The prefix of ``tokens`` to start from, at most len(tokens) - 1 tokens."""
        limit = max(0, len(tokens) - 1) // self._page
        data = token_bytes(tokens[: limit * self._page])
        path = self._tree.walk(data, limit)
        store = self._store if use_disk else None
        where: list[list[int]] = [[] for _ in self._groups]
        found = self._follow_nodes(path, where, store)
        beyond: list[tuple[bytes, bytes]] = []
        if store is not None and found == len(path):
            beyond = self._follow_disk(path, data, limit, where, store)
            found += len(beyond)
        match = Match(0, path, beyond, where)
        self._choose(match, found)
        match.beyond = beyond[: max(0, match.length - len(path))]
        match.nodes = path[: match.length] if match.length < len(path) else path
        return match

    def _follow_nodes(self, path: list[Node], where: list[list[int]], store: DiskStore | None) -> int:
        """Fill ``where`` for nodes up to the first that a full group is missing from; returns how many."""
        if len(where) == 1 and self._full[0]:
            places = where[0]
            native = self._native
            is_here = native.on_device(path) if native is not None else all(node.device for node in path)
            if is_here:  # all on the device, as most are
                places.extend([DEVICE] * len(path))
                return len(path)
            for node in path:
                place = DEVICE if node.device is not None else self._place(node, 0, store)
                if not place:
                    break
                places.append(place)
            return len(places)
        for found, node in enumerate(path):
            for group in self._groups:
                place = self._place(node, group, store)
                if not place and self._full[group]:
                    for filled in where[:group]:
                        filled.pop()
                    return found
                where[group].append(place)
        return len(path)

    def _place(self, node: Node, group: int, store: DiskStore | None) -> int:
        slot = node.slot(group)
        if slot.device is not None:
            return DEVICE
        host = slot.host
        if host is not None:
            # One that is still coming from disk is another load's; it is not started twice.
            return HOST if self._has_host and host.arriving is None else NOWHERE
        if store is not None and node.digest is not None and store.has(group, node.digest):
            return DISK
        return NOWHERE

    def _follow_disk(
        self, path: list[Node], data: bytes, limit: int, where: list[list[int]], store: DiskStore
    ) -> list[tuple[bytes, bytes]]:
        """Go on by address where the tree ends."""
        digest = path[-1].digest if path else self._tree.root.digest
        assert digest is not None, "a page without an address with a disk tier"
        step = self._tree.key_bytes
        beyond: list[tuple[bytes, bytes]] = []
        any_full = any(self._full)
        for index in range(len(path), limit):
            key = data[index * step : (index + 1) * step]
            digest = chain_digest(digest, key)
            places = [DISK if store.has(group, digest) else NOWHERE for group in self._groups]
            if any(full and not place for full, place in zip(self._full, places)) or not (any_full or any(places)):
                break
            for group, place in enumerate(places):
                where[group].append(place)
            beyond.append((key, digest))
        return beyond

    def _choose(self, match: Match, found: int) -> None:
        """Set ``length`` and ``first``: the longest prefix whose windows are whole, or with ``auto`` the one that
        saves most time."""
        gains = self._gains(match, found) if self._auto else None
        runs = [_runs(match.where[group][:found]) if not self._full[group] else None for group in self._groups]
        best, best_gain, longest = 0, 0.0, 0
        for length in range(found, 0, -1):
            firsts = [self.first_readable(group, length * self._page) for group in self._groups]
            if any(run is not None and run[length - 1] < length - first for run, first in zip(runs, firsts)):
                continue
            longest = longest or length
            if gains is None:
                best = length
                break
            gain = gains[length] - self._window_cost(match, firsts, length)
            if gain > best_gain:
                best, best_gain = length, gain
        match.length = best
        match.declined = longest - best
        match.first = [self.first_readable(group, best * self._page) for group in self._groups]

    def _gains(self, match: Match, found: int) -> list[float] | None:
        """gains[n]: seconds saved by taking n pages from where they are, full groups counted; None: take them all."""
        recompute = self._rates.recompute_seconds(self._page)
        full = [group for group in self._groups if self._full[group]]
        if recompute is None or max((max(places, default=0) for places in match.where), default=0) <= DEVICE:
            return None
        gains = [0.0]
        costs = [self._page_costs(group) for group in self._groups]
        for index in range(found):
            gains.append(gains[-1] + recompute - sum(costs[group][match.where[group][index]] for group in full))
        return gains

    def _page_costs(self, group: int) -> tuple[float, float, float, float]:
        """Seconds to have one page of ``group`` on the device, by where it is."""
        size = self._spec.page_bytes(group)
        return 0.0, 0.0, self._rates.load_seconds(size, 0), self._rates.load_seconds(0, size)

    def _window_cost(self, match: Match, firsts: list[int], length: int) -> float:
        """Seconds to load what the groups with a window need for a start after ``length`` pages."""
        cost = 0.0
        for group in self._groups:
            if not self._full[group]:
                costs = self._page_costs(group)
                cost += sum(costs[place] for place in match.where[group][firsts[group] : length])
        return cost


def _runs(places: list[int]) -> list[int]:
    """For each page: how many pages up to and with it are somewhere, without a gap."""
    runs: list[int] = []
    run = 0
    for place in places:
        run = run + 1 if place else 0
        runs.append(run)
    return runs
