"""The ranks' collectives: the same bits on every rank, and an end when the group is ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import GREEDY, Ranks, seq, table_for
from tiny_models import make_tiny

from forebay.engine.distributed.collectives import CommAbortedError, KernelComm, SharedMemoryComm, shared_buffer
from forebay.engine.kernels import load_backend
from forebay.engine.kernels.native_backend import NativeBackend
from forebay.engine.model_executor.step import StepBatch

pytestmark = pytest.mark.engine


def on_ranks(size: int, work: Callable[[SharedMemoryComm], Any], slot_bytes: int = 4096) -> list[Any]:
    fd = shared_buffer(size, slot_bytes)
    comms = [SharedMemoryComm(rank, size, fd) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        try:
            return [future.result(60) for future in [pool.submit(work, comm) for comm in comms]]
        finally:
            comms[0].abort()
            os.close(fd)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_rank_order_and_alike_on_all_ranks(size: int, dtype: torch.dtype) -> None:
    """Also of tensors larger than a slot, many times over, with ranks that run ahead."""
    parts = [torch.randn(7, 500, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(size)]
    expected = parts[0] + parts[1]
    for part in parts[2:]:
        expected = expected + part

    def work(comm: SharedMemoryComm) -> list[torch.Tensor]:
        outs = [torch.empty(7, 500, dtype=dtype) for _ in range(20)]
        for out in outs:
            comm.all_reduce(parts[comm.rank], out)
        return outs

    for outs in on_ranks(size, work):
        assert all(torch.equal(out, expected.to(dtype)) for out in outs)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_library_exchanges_the_same_bits(size: int, dtype: torch.dtype) -> None:
    """In turn with the other way over the same memory; tensors larger than a slot;
    a vocabulary that does not divide.
    """
    parts = [torch.randn(7, 500, generator=torch.Generator().manual_seed(r)) * 10**r for r in range(size)]
    columns = 500 * size - 3

    def work(comm: SharedMemoryComm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        kernels = KernelComm(comm, native_backend())
        part = parts[comm.rank]
        ours, theirs = torch.empty(7, 500, dtype=dtype), torch.empty(7, 500, dtype=dtype)
        whole = torch.zeros(7, columns) if comm.rank == 0 else None
        for _ in range(5):
            kernels.all_reduce(part, ours)
            comm.all_reduce(part, theirs)
        last = comm.rank == size - 1
        kernels.gather_columns(part[:, :-3].contiguous() if last else part, 500, whole)
        return ours, theirs, whole

    results = on_ranks(size, work)
    for ours, theirs, _ in results:
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, results[0][0])
    assert torch.equal(results[0][2], torch.cat(parts, dim=1)[:, :columns])


def native_backend() -> NativeBackend:
    backend = load_backend("auto", threads=1)
    if not isinstance(backend, NativeBackend):
        pytest.skip("no C++ compiler")
    return backend


def test_everyone_gathers_everyones_part_in_rank_order() -> None:
    def work(comm: SharedMemoryComm) -> tuple[list[torch.Tensor], torch.Tensor]:
        told = torch.full((3,), comm.rank)
        comm.broadcast(told, source=1)
        return comm.all_gather(torch.full((2, 3000), comm.rank, dtype=torch.int64)), told

    for gathered, told in on_ranks(3, work):
        assert [int(g.unique()) for g in gathered] == [0, 1, 2]
        assert told.tolist() == [1, 1, 1]


def test_a_rank_that_waits_for_one_that_is_gone_is_released() -> None:
    fd = shared_buffer(2)
    comms = [SharedMemoryComm(rank, 2, fd) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(comms[0].all_gather, torch.ones(3))
        comms[1].abort()
        with pytest.raises(CommAbortedError):
            waiting.result(60)
    os.close(fd)


class Gate:
    """A transfer that fails at one layer, on this rank only."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at

    def wait_layer(self, layer: int) -> bool:
        return layer != self.fails_at


@pytest.mark.parametrize("tp", [1, 2])
def test_a_gate_that_fails_on_one_rank_fails_the_step_on_all(tp: int, tmp_path: Path) -> None:
    ranks = Ranks(make_tiny("llama", tmp_path / "m"), tp, "torch")
    tables = table_for(ranks, 0, 16)

    def run(fails_at: int | None) -> list[Any]:
        def batch(rank: int) -> StepBatch:
            gates = [Gate(None), Gate(fails_at if rank == tp - 1 else None)]
            return StepBatch([seq(tables, [5, 6, 7], 0, sampling=GREEDY)], gates)

        return ranks._on_all(lambda rank: ranks.runners[rank].execute(batch(rank)))

    for result in run(1):
        assert result.failed_gates == (1,)
        assert result.tokens == [None]
    good = run(None)
    assert good[0].failed_gates == ()
    assert good[0].tokens[0] is not None
    ranks.close()
