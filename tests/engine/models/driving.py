"""A runner driven by hand: one sequence, or several at once, without a scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.engine.distributed.collectives import SharedMemoryComm, shared_buffer
from forebay.engine.kernels import load_backend
from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.kernels.torch_fallback import TorchBackend
from forebay.engine.model_executor.model_runner import ModelRunner, make_runner
from forebay.engine.model_executor.step import SeqStep, StepBatch, StepResult
from forebay.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def runner_for(
    folder: Path, backend: KernelBackend | None = None, *, pages: int = 64, page_size: int = 8, dtype: str = "auto"
) -> ModelRunner:
    return make_runner(folder, backend or TorchBackend(), num_pages=pages, page_size=page_size, dtype=dtype)


class Ranks:
    """A model split over ``tp`` ranks, each in a thread of its own; steps run on all, and rank 0's answer counts."""

    def __init__(self, folder: Path, tp: int, backend: str, *, dtype: str = "auto") -> None:
        self._fd = shared_buffer(tp, slot_bytes=1 << 16)
        self._comms = [SharedMemoryComm(rank, tp, self._fd) for rank in range(tp)]
        self._pool = ThreadPoolExecutor(tp)
        backends = [load_backend(backend, threads=1) for _ in range(tp)]
        self.runners = self._on_all(
            lambda r: make_runner(folder, backends[r], num_pages=64, page_size=8, dtype=dtype, comm=self._comms[r])
        )
        self.spec, self.pool = self.runners[0].spec, self.runners[0].pool

    def _on_all(self, work: Callable[[int], Any]) -> list[Any]:
        futures = [self._pool.submit(work, rank) for rank in range(len(self._comms))]
        for future in futures:
            future.add_done_callback(lambda f: f.exception() and [c.abort() for c in self._comms])
        return [future.result() for future in futures]

    def logits(self, batch: StepBatch) -> torch.Tensor:
        return self._on_all(lambda r: self.runners[r].logits(batch))[0]

    def execute(self, batch: StepBatch) -> StepResult:
        return self._on_all(lambda r: self.runners[r].execute(batch))[0]

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


AnyRunner = ModelRunner | Ranks


def table_for(runner: AnyRunner, number: int, tokens: int) -> list[np.ndarray]:
    """Page tables of the ``number``-th sequence of at most ``tokens`` tokens: scattered,
    and disjoint from the others'.
    """
    size = runner.spec.page_size
    need = -(-tokens // size)
    tables = []
    for group in range(len(runner.spec.groups)):
        pages = np.random.default_rng(7).permutation(runner.pool.num_pages(group)).astype(np.int32)
        tables.append(pages[number * need : (number + 1) * need])
        assert len(tables[-1]) == need, "the test's pool is too small"
    return tables


def seq(
    tables: list[np.ndarray],
    tokens: Sequence[int],
    start: int,
    *,
    sample: bool = True,
    sampling: SamplingParams = GREEDY,
    seq_id: int = 0,
) -> SeqStep:
    return SeqStep(seq_id, np.asarray(tokens, dtype=np.int32), start, tables, sample, sampling)


def drop_left_of_window(runner: AnyRunner, tables: list[np.ndarray], start: int) -> list[np.ndarray]:
    """What the cache does to a sliding group's table: pages that no query from ``start`` on can read become -1."""
    dropped = []
    for group, table in zip(runner.spec.groups, tables):
        table = table.copy()
        if group.window is not None:
            first = max(0, start - group.window + 1) // runner.spec.page_size
            table[:first] = -1
        dropped.append(table)
    return dropped


def teacher_forced(runner: AnyRunner, tokens: Sequence[int], prompt: int, chunk: int) -> torch.Tensor:
    """Logits after each of tokens[prompt - 1 : -1], the prompt in chunks and the rest one by one: (n, vocabulary)."""
    tables = table_for(runner, 0, len(tokens))
    start, rows = 0, []
    while start < len(tokens) - 1:
        count = min(chunk, prompt - start) if start < prompt else 1
        last = start + count
        visible = drop_left_of_window(runner, tables, start)
        step = seq(visible, tokens[start:last], start, sample=last >= prompt)
        logits = runner.logits(StepBatch([step]))
        if last >= prompt:
            rows.append(logits[0])
        start = last
    return torch.stack(rows)


def generate(
    runner: AnyRunner,
    prompt: Sequence[int],
    count: int,
    *,
    chunk: int = 1 << 30,
    number: int = 0,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """``count`` tokens of a lone sequence."""
    tables = table_for(runner, number, len(prompt) + count)
    start, made = 0, []
    while start < len(prompt):
        piece = list(prompt[start : start + chunk])
        last = start + len(piece) == len(prompt)
        result = runner.execute(StepBatch([seq(tables, piece, start, sample=last, sampling=sampling)]))
        start += len(piece)
    for _ in range(count):
        token = result.tokens[0]
        assert token is not None
        made.append(token.token_id)
        if len(made) < count:
            result = runner.execute(StepBatch([seq(tables, made[-1:], start, sampling=sampling)]))
            start += 1
    return made


def bf16_ulp(value: float) -> float:
    """The distance between neighbouring bf16 numbers at ``value``."""
    return float(2.0 ** (np.floor(np.log2(max(abs(value), 2.0**-126))) - 7))


def assert_within_rounding(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Each of our choices is the reference's, or a token whose reference logit is within 2 bf16 ulps of the best."""
    chosen = ours.argmax(-1)
    best = reference.max(-1).values
    taken = reference.gather(-1, chosen[:, None])[:, 0]
    wrong = [
        f"step {i}: ours {int(chosen[i])} has {taken[i]:.5f} there, its best {int(reference[i].argmax())} has "
        f"{best[i]:.5f}"
        for i in range(len(chosen))
        if float(best[i] - taken[i]) > 2 * bf16_ulp(float(best[i]))
    ]
    assert not wrong, "; ".join(wrong)
