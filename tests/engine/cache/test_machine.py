"""Random requests, transfers in random order and faults, against a reference that knows every byte.

The machine decides when each transfer moves. After every step the cache's own check runs, and every page that claims to
be on the device or in the host tier is compared with what its tokens must have produced.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, HYBRID, LATENT, Int32, ManualExecutor, World, pattern, tier_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.engine.cache.config import Eviction, LoadPolicy, WritePolicy
from forebay.engine.cache.interface import Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.pools import cache_pools
from forebay.engine.cache.prefix import allocate, match
from forebay.engine.cache.radix import tree
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.radix.page_hash import chain_digest
from forebay.kv.spec import KVSpec

POINTS = ["backup", "load", "load_layer", "disk_write", "disk_read"]
ERRORS = [errno.EIO, errno.ENOSPC]


@dataclass
class Request:
    """A sequence that is being computed; tokens 0 .. computed - 1 have their KV."""

    lease: CacheLease
    sequence: Int32
    computed: int


def sequence(pages: list[int], tail: int) -> Int32:
    """Pages of a few kinds, so that prefixes are shared often, and the start of another page."""
    body = [np.full(4, 10 * (i + 1) + kind, dtype=np.int32) for i, kind in enumerate(pages)]
    return np.concatenate([*body, np.arange(tail, dtype=np.int32)])


class CacheMachine(RuleBasedStateMachine):
    """Small pools, so that everything is short of room all the time."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.seen: list[Int32] = []
        self.faults: Counter[str] = Counter()
        self.error = errno.EIO
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-machine-"))
        self.patches = pytest.MonkeyPatch()

    def before(self, point: str) -> None:
        if self.faults[point]:
            self.faults[point] -= 1
            raise OSError(self.error, "injected")

    @initialize(
        spec=st.sampled_from([FULL, HYBRID, LATENT]),
        policy=st.sampled_from(list(WritePolicy)),
        eviction=st.sampled_from(list(Eviction)),
        device=st.integers(5, 12),
        host=st.sampled_from([0, 0, 4, 12, 30]),
        disk=st.booleans(),
        native=st.booleans(),
    )
    def start(
        self,
        spec: KVSpec,
        policy: WritePolicy,
        eviction: Eviction,
        device: int,
        host: int,
        disk: bool,
        native: bool,
    ) -> None:
        self.choose_passes(native)
        self.config = tier_config(
            device_pages=(device,) * len(spec.groups),
            host_bytes=host * sum(spec.page_bytes(g) for g in range(len(spec.groups))),
            host_sequence_tokens=16,
            disk_dir=str(self.folder) if disk else None,
            disk_bytes=60 * 400 if disk else 0,
            fingerprint="model",
            write_policy=policy,
            eviction=eviction,
            load=LoadPolicy.ALWAYS,
            staging_pages=6,
        )
        self.spec = spec
        self.world = World(spec, self.config, before=self.before)

    def choose_passes(self, native: bool) -> None:
        """The tree's passes in C++, however few pages there are, or in Python."""
        self.patches.setattr(cache_pools, "FEW_PAGES", 0)
        if not native:
            for module in (tree, match, allocate, cache_pools):
                self.patches.setattr(module, "native_radix", lambda: None)

    # -- requests -------------------------------------------------------------------------------------------------

    @rule(pages=st.lists(st.integers(0, 1), min_size=1, max_size=5), tail=st.integers(0, 3))
    def open(self, pages: list[int], tail: int) -> None:
        self.ask(sequence(pages, tail))

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 99), tail=st.integers(0, 3))
    def open_again(self, which: int, tail: int) -> None:
        """The next turn of a conversation."""
        self.ask(np.append(self.seen[which % len(self.seen)], np.arange(tail, dtype=np.int32)))

    @rule(pages=st.lists(st.integers(0, 1), min_size=2, max_size=5), drain=st.booleans())
    def serve(self, pages: list[int], drain: bool) -> None:
        """A whole request, with or without waiting for what it has started."""
        self.ask(sequence(pages, 1))
        if self.requests:
            self.compute(-1, 99, False)
            self.close(-1)
        if drain:
            self.drain()

    @rule(pages=st.lists(st.integers(0, 1), min_size=3, max_size=5), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def serve_flush_and_serve_again(self, pages: list[int], tier: Tier) -> None:
        while self.requests:
            self.close(0)
        self.serve(pages, True)
        self.world.cache.flush(tier)
        self.serve(pages, False)

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 99), tier=st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]))
    def ask_for_what_was_flushed(self, which: int, tier: Tier) -> None:
        while len(self.requests) > 1:
            self.close(0)
        self.world.cache.flush(tier)
        self.ask(np.append(self.seen[which % len(self.seen)], np.int32(7)))

    def ask(self, tokens: Int32) -> None:
        expected = self.reference_prefix(tokens)
        lease = self.world.cache.open(tokens)
        if lease is None:
            return
        if self.world.store is None:
            assert lease.cached.total == expected, "not the longest usable prefix"
        else:
            # Without host pages to read into, what is on disk is recomputed.
            assert lease.cached.total <= expected, "more than there is"
        self.requests.append(Request(lease, tokens, lease.cached.total))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), more=st.integers(1, 9), grow=st.booleans())
    def compute(self, which: int, more: int, grow: bool) -> None:
        request = self.requests[which % len(self.requests)]
        cache, lease = self.world.cache, request.lease
        if lease.layer_events is not None:
            if not self.world.wait(lease):
                request.computed = cache.fail_load(lease)
            cache.process_completions()
        self.world.verify(lease, request.sequence)
        if grow and request.computed == len(request.sequence):
            request.sequence = np.append(request.sequence, np.int32(len(request.sequence) % 3))
        stop = min(len(request.sequence), request.computed + more)
        if not cache.extend(lease, stop):
            return
        tokens = request.sequence[:stop]
        self.world.compute(lease, tokens, request.computed)
        request.computed = stop
        cache.commit(lease, tokens)
        self.world.verify(lease, tokens)
        self.seen = [*self.seen[-7:], tokens]

    @precondition(lambda self: any(r.lease.layer_events is not None for r in self.requests))
    @rule()
    def lose_patience(self) -> None:
        """A lease's waiting time is up while the load is still under way."""
        request = next(r for r in self.requests if r.lease.layer_events is not None)
        request.computed = self.world.cache.fail_load(request.lease)
        self.world.verify(request.lease, request.sequence)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        self.world.cache.close(self.requests.pop(which % len(self.requests)).lease)

    # -- time -----------------------------------------------------------------------------------------------------

    @rule(thread=st.integers(0, 4))
    def move(self, thread: int) -> None:
        assert isinstance(self.world.executor, ManualExecutor)
        self.world.executor.step(thread)

    @rule()
    def process_completions(self) -> None:
        self.world.cache.process_completions()

    @rule()
    def drain(self) -> None:
        assert self.world.cache.drain(5.0), "transfers did not come to an end"

    @rule(tier=st.sampled_from([None, *Tier]))
    def flush(self, tier: Tier | None) -> None:
        self.world.cache.flush(tier)

    # -- faults ---------------------------------------------------------------------------------------------------

    @rule(point=st.sampled_from(POINTS), error=st.sampled_from(ERRORS), count=st.integers(1, 3))
    def fail(self, point: str, error: int, count: int) -> None:
        self.faults[point] += count
        self.error = error

    @precondition(lambda self: self.world.store is not None)
    @rule(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip_a_bit_on_disk(self, position: float, bit: int) -> None:
        files = [p for p in sorted(self.folder.glob("segment-*.kv")) if p.stat().st_size]
        if files:
            where = position * len(files)
            path = files[int(where)]
            data = bytearray(path.read_bytes())
            data[int((where % 1) * len(data))] ^= 1 << bit
            with path.open("r+b") as file:
                file.write(data)

    @precondition(lambda self: self.world.store is not None)
    @rule(which=st.integers(0, 99))
    def delete_a_file(self, which: int) -> None:
        files = sorted(self.folder.glob("segment-*.kv"))
        if files:
            files[which % len(files)].unlink()

    @precondition(lambda self: self.world.store is not None)
    @rule(cut=st.one_of(st.none(), st.floats(0, 1)))
    def restart(self, cut: float | None) -> None:
        """Stop, and perhaps find the last segment cut somewhere, as after a kill."""
        self.requests.clear()
        self.faults.clear()
        self.world.close()
        files = sorted(self.folder.glob("segment-*.kv"))
        if cut is not None and files:
            with files[-1].open("r+b") as file:
                file.truncate(int(cut * files[-1].stat().st_size))
        self.world = World(self.spec, self.config, before=self.before)

    # -- truth ----------------------------------------------------------------------------------------------------

    def reference_prefix(self, tokens: Int32) -> int:
        """The longest usable prefix by the definition, page by page and length by length."""
        cache, size = self.world.cache, self.spec.page_size
        present: list[list[bool]] = [[] for _ in self.spec.groups]
        node: Node | None = cache.tree.root
        digest = cache.tree.root.digest
        limit = max(0, len(tokens) - 1) // size
        for index in range(limit):
            key = tokens[index * size : (index + 1) * size].tobytes()
            node = cache.tree.child(node, key) if node is not None else None
            digest = chain_digest(digest, key) if digest is not None else None
            for group in range(len(self.spec.groups)):
                slot = node.slot(group) if node is not None else None
                here = slot is not None and (
                    slot.device is not None
                    or (slot.host is not None and slot.host.arriving is None)
                    or (slot.host is None and self.on_disk(group, digest))
                )
                present[group].append(here or (slot is None and self.on_disk(group, digest)))
        for length in range(limit, 0, -1):
            if all(self.is_whole(group, present[group], length) for group in range(len(self.spec.groups))):
                return length * size
        return 0

    def on_disk(self, group: int, digest: bytes | None) -> bool:
        return self.world.store is not None and digest is not None and self.world.store.has(group, digest)

    def is_whole(self, group: int, present: list[bool], length: int) -> bool:
        window = self.spec.groups[group].window
        position = length * self.spec.page_size
        first = 0 if window is None else max(0, position - window + 1)
        return all(present[p // self.spec.page_size] for p in range(first, position))

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.cache.check()
        for node in self.world.cache.tree.nodes():
            content = self.content(node)
            for group in range(len(self.spec.groups)):
                slot = node.slot(group)
                if slot.device is not None and slot.device.arriving is None:
                    assert self.world.device.holds(group, slot.device.page, content), "a device page has other bytes"
                if slot.host is not None and slot.host.arriving is None:
                    page = self.world.region.pages(group)[slot.host.page]
                    assert bytes(page) == self.canonical(group, content), "a host page has other bytes"

    @staticmethod
    def content(node: Node) -> bytes:
        keys: list[bytes] = []
        at: Node | None = node
        while at is not None:
            keys.append(at.key)
            at = at.parent
        return b"".join(reversed(keys))

    def canonical(self, group: int, content: bytes) -> bytes:
        layers = range(len(self.spec.groups[group].layers))
        parts = range(len(self.spec.groups[group].parts))
        size = self.world.device.page_stride
        return b"".join(bytes(pattern(content, group, layer, p, size(group, p))) for layer in layers for p in parts)

    def teardown(self) -> None:
        self.patches.undo()
        if hasattr(self, "world"):
            for request in self.requests:
                self.world.cache.close(request.lease)
            assert self.world.cache.drain(5.0), "transfers did not come to an end"
            self.world.cache.check()
            assert not self.world.cache.leases, "a lease was never let go"
            assert all(pool.num_free + len(queue) == pool.size for pool, queue in self.pools()), (
                "pages are held by nobody"
            )
            self.world.close()
        shutil.rmtree(self.folder)

    def pools(self) -> list[tuple[object, object]]:
        pools = self.world.cache.pools
        return [*zip(pools.device, pools.device_queue), *zip(pools.host, pools.host_queue)]


CacheMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestCacheMachine = CacheMachine.TestCase
