"""Several ranks: one decides, all move bytes, a page is used only when all have it;
pages do not depend on their number.
"""

from __future__ import annotations

import ctypes
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from cache_world import FULL, LATENT, FakeDevice, disk_config, tier_config, tokens

from forebay.engine.cache.actions import Backup, Done, LoadBack, PageMapping
from forebay.engine.cache.cache_factory import build_cache, follow_cache
from forebay.engine.cache.config import TierConfig
from forebay.engine.cache.host.region import HostRegion
from forebay.engine.cache.interface import CachedTokens, Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.prefix_cache import PrefixCache
from forebay.engine.cache.transfer.copier import PageCopier, native_copy_runs
from forebay.engine.cache.transfer.page_layout import group_layouts
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.kv.spec import KVSpec, LayerGroup, Part

# Four ranks: keys and values sharded, and a part with fewer heads than ranks.
MIXED = KVSpec(
    (LayerGroup("full", (0, 1), (Part("k", 4, 4, 2), Part("v", 4, 4, 2), Part("rope", 2, 3, 2))),), page_size=4
)
A = tokens(*range(13))


class Ranks:
    """Rank 0's cache and the other ranks' transfers, in one process; their messages are queues."""

    def __init__(self, spec: KVSpec, config: TierConfig) -> None:
        self.spec = spec
        self.config = config
        self.others: list[RankTransfers] = []
        self.stuck: set[int] = set()
        self.forged: list[tuple[int, Done]] = []
        self.devices = [FakeDevice(spec, config.device_pages, config.tp) for _ in range(config.tp)]
        self.sent: list[deque[Backup | LoadBack]] = [deque() for _ in range(config.tp)]
        self.cache: PrefixCache = build_cache(
            spec, config, self.devices[0], broadcast=self._broadcast, collect=self._collect
        )
        assert self.cache.region is not None
        path = self.cache.region.path
        self.others = [follow_cache(spec, config, rank, self.devices[rank], path) for rank in range(1, config.tp)]

    def _broadcast(self, action: Backup | LoadBack) -> None:
        for rank in range(1, self.config.tp):
            self.sent[rank].append(action)

    def _collect(self) -> list[tuple[int, Done]]:
        """Messages travel, but not to or from ranks that are stuck."""
        reports = [*self.forged]
        self.forged = []
        for rank, transfers in enumerate(self.others, start=1):
            if rank not in self.stuck:
                while self.sent[rank]:
                    transfers.submit(self.sent[rank].popleft())
                reports += [(rank, done) for done in transfers.take_done()]
        return reports

    def drain(self, rounds: int = 400) -> bool:
        assert self.cache.executor is not None
        for _ in range(rounds):
            self.cache.process_completions()
            if not self.cache.is_busy:
                return True
            self.cache.executor.wait(0.005)
        return False

    def canonical(self, index: int, sequence: np.ndarray) -> np.ndarray:
        """What a page's bytes are, all heads."""
        content = sequence[: (index + 1) * self.spec.page_size].astype(np.int64)
        return np.random.default_rng(content).integers(0, 256, self.spec.page_bytes(0), dtype=np.uint8)

    def share(self, rank: int, page: np.ndarray) -> list[list[np.ndarray]]:
        """By layer and part: the bytes of a canonical page that a rank holds."""
        shares = []
        offset = 0
        for _ in self.spec.groups[0].layers:
            parts = []
            for part in self.spec.groups[0].parts:
                head = self.spec.page_size * part.dim * part.value_bytes
                first = part.first_head(rank, self.config.tp)
                count = part.heads_per_rank(self.config.tp)
                parts.append(page[offset + first * head : offset + (first + count) * head])
                offset += part.heads * head
            shares.append(parts)
        return shares

    def compute(self, lease: CacheLease, sequence: np.ndarray) -> None:
        assert self.cache.extend(lease, len(sequence))
        for rank, device in enumerate(self.devices):
            for index in range(len(sequence) // self.spec.page_size):
                for layer, parts in enumerate(self.share(rank, self.canonical(index, sequence))):
                    for part, data in enumerate(parts):
                        device.arrays[0][layer][part][int(lease.page_tables[0][index])] = data
        self.cache.commit(lease, sequence)

    def verify(self, lease: CacheLease, sequence: np.ndarray) -> None:
        for rank, device in enumerate(self.devices):
            for index in range(len(lease.nodes)):
                for layer, parts in enumerate(self.share(rank, self.canonical(index, sequence))):
                    for part, data in enumerate(parts):
                        held = device.arrays[0][layer][part][int(lease.page_tables[0][index])]
                        assert (held == data).all(), f"rank {rank} has other bytes in page {index}"

    def store(self, sequence: np.ndarray) -> None:
        lease = self.cache.open(sequence)
        assert lease is not None
        self.compute(lease, sequence)
        self.cache.close(lease)
        assert self.drain()

    def close(self) -> None:
        self.cache.close_tiers()
        for transfers in self.others:
            transfers.close()


def config(spec: KVSpec, tp: int) -> TierConfig:
    return tier_config(device_pages=(16,), host_bytes=32 * spec.page_bytes(0), tp=tp, host_reserve_bytes=0)


@pytest.mark.parametrize(("spec", "tp"), [(MIXED, 1), (MIXED, 2), (MIXED, 4), (LATENT, 4), (FULL, 2)])
def test_every_rank_gets_its_heads_back(spec: KVSpec, tp: int) -> None:
    ranks = Ranks(spec, config(spec, tp))
    ranks.store(A)
    ranks.cache.flush(Tier.DEVICE)
    for device in ranks.devices:
        for parts in device.arrays[0]:
            for array in parts:
                array[:] = 0
    lease = ranks.cache.open(A)
    assert lease is not None
    assert lease.cached == CachedTokens(host=12)
    assert ranks.drain()
    assert lease.layer_events is None
    ranks.verify(lease, A)
    assert {t.digest() for t in ranks.others} <= {ranks.cache.executor.digest()}  # type: ignore[union-attr]
    ranks.cache.close(lease)
    ranks.cache.check()
    ranks.close()


def test_copying_by_address_moves_the_same_bytes() -> None:
    """The native library's way of being told what to copy, carried out by memmove."""

    def fake_library(targets: int, sources: int, count: int, nbytes: int) -> None:
        pairs = [(ctypes.c_int64 * count).from_address(a) for a in (targets, sources)]
        for to, source in zip(*pairs):
            ctypes.memmove(to, source, nbytes)

    region = HostRegion.create([8], [MIXED.page_bytes(0)])
    for rank in range(4):
        device = FakeDevice(MIXED, (8,), 4)
        native = PageCopier(MIXED, rank, 4, device, region, native_copy_runs(fake_library))
        plain = PageCopier(MIXED, rank, 4, device, region)
        for page in range(8):
            device.write(0, page, bytes([rank, page]))
        mappings = PageMapping(0, (1, 5, 2), (0, 3, 7)), PageMapping(0, (1, 5, 2), (1, 4, 2))
        region.pages(0)[:] = 0
        assert plain.back_up(mappings[0]) == native.back_up(mappings[1])
        pages = region.pages(0)
        assert (pages[[0, 3, 7]] == pages[[1, 4, 2]]).all()
        native.load_layer(PageMapping(0, (6, 7), (4, 2)), 1)
        written = [heads.writes for heads in group_layouts(MIXED, rank, 4)[0].slices]
        for part, array in enumerate(device.arrays[0][1]):
            if written[part]:
                assert (array[[6, 7]] == array[[5, 2]]).all()
    region.close()


@pytest.mark.parametrize("spec", [MIXED, LATENT])
def test_the_host_keeps_one_copy_of_every_head(spec: KVSpec) -> None:
    stored = []
    for tp in (1, 2, 4):
        ranks = Ranks(spec, config(spec, tp))
        ranks.store(A)
        assert ranks.cache.region is not None
        nodes = list(ranks.cache.tree.nodes())
        pages = [ranks.cache.region.pages(0)[n.host.page].tobytes() for n in nodes if n.host is not None]
        assert pages == [ranks.canonical(i, A).tobytes() for i in range(3)]
        stored.append(ranks.cache.stats()["bytes"]["device_host"])
        ranks.close()
    assert stored == [3 * spec.page_bytes(0)] * 3, "replicated heads were written more than once"


def test_a_page_is_not_used_before_the_slowest_rank_has_it() -> None:
    ranks = Ranks(MIXED, config(MIXED, 4))
    ranks.stuck = {2}
    lease = ranks.cache.open(A)
    assert lease is not None
    ranks.compute(lease, A)
    ranks.cache.close(lease)
    assert not ranks.drain(rounds=20)
    # Its backup is under way on rank 2: the pages stay where they are.
    assert ranks.cache.pools.device_room(0) == 13
    assert all(n.host is None or n.host.arriving is not None for n in ranks.cache.tree.nodes())
    ranks.stuck = set()
    assert ranks.drain()
    assert ranks.cache.pools.device_room(0) == 16
    assert all(n.host is not None and n.host.arriving is None for n in ranks.cache.tree.nodes())
    ranks.close()


def test_a_load_that_fails_on_one_rank_fails(tmp_path: Path) -> None:
    ranks = Ranks(MIXED, config(MIXED, 2))
    ranks.store(A)
    ranks.cache.flush(Tier.DEVICE)
    lease = ranks.cache.open(A)
    assert lease is not None
    (load,) = ranks.sent[1]
    ranks.sent[1].clear()
    ranks.forged.append((1, Done(load.id, False, reason="load_failed")))
    assert ranks.drain()
    assert lease.layer_events is not None
    assert ranks.cache.fail_load(lease) == 0
    ranks.compute(lease, A)
    ranks.verify(lease, A)
    ranks.cache.close(lease)
    assert ranks.drain()
    ranks.cache.check()
    ranks.close()


def test_the_disk_is_readable_with_another_number_of_ranks(tmp_path: Path) -> None:
    def settings(tp: int) -> TierConfig:
        host = {"host_bytes": 32 * MIXED.page_bytes(0), "host_reserve_bytes": 0}
        return disk_config(tmp_path, tp=tp, **host)

    first = Ranks(MIXED, settings(4))
    first.store(A)
    first.close()
    for tp in (1, 2):
        again = Ranks(MIXED, settings(tp))
        lease = again.cache.open(A)
        assert lease is not None
        assert lease.cached == CachedTokens(disk=12)
        assert again.drain()
        again.verify(lease, A)
        again.cache.close(lease)
        again.close()
