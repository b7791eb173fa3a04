"""The same request gives the same bits, whatever is in the batch, however it is chunked, whatever the page size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from driving import drop_left_of_window, runner_for, seq, table_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, make_tiny

from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.model_executor.model_runner import ModelRunner
from forebay.engine.model_executor.step import StepBatch
from forebay.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.engine

KINDS = ["llama_tied_bias", "qwen3", "gemma3", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
PROMPTS = [[Random(i).randrange(4, VOCAB) for _ in range(length)] for i, length in enumerate((1, 3, 17, 40, 65))]
NEW_TOKENS = 6


@dataclass
class Request:
    """A sequence on its way: what it has, how much of it is computed, and the logits it sampled from."""

    number: int
    tokens: list[int]
    prompt: int
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.prompt + NEW_TOKENS


def step(runner: ModelRunner, parts: list[tuple[Request, int]]) -> None:
    """Compute the next ``count`` tokens of each request; one that reaches its end takes the greedy next token."""
    seqs = []
    for request, count in parts:
        tables = drop_left_of_window(runner, table_for(runner, request.number, 80), request.done)
        piece = request.tokens[request.done : request.done + count]
        last = request.done + count == len(request.tokens)
        seqs.append(seq(tables, piece, request.done, sample=last))
    rows = iter(runner.logits(StepBatch(seqs)))
    for (request, count), made in zip(parts, seqs):
        request.done += count
        if made.sample:
            request.logits.append(next(rows))
            request.tokens.append(int(request.logits[-1].argmax()))


def alone(runner: ModelRunner) -> list[Request]:
    """Each prompt by itself, its prompt in one chunk."""
    requests = [Request(i, list(p), len(p)) for i, p in enumerate(PROMPTS)]
    for request in requests:
        while not request.finished:
            step(runner, [(request, len(request.tokens) - request.done)])
    return requests


def together(runner: ModelRunner, random: Random) -> list[Request]:
    """All prompts in steps drawn at random: who takes part, and with how many tokens."""
    requests = [Request(i, list(p), len(p)) for i, p in enumerate(PROMPTS)]
    while open_requests := [r for r in requests if not r.finished]:
        chosen = random.sample(open_requests, random.randint(1, len(open_requests)))
        step(runner, [(r, random.randint(1, len(r.tokens) - r.done)) for r in chosen])
    return requests


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_any_mixture_of_batches_chunks_and_page_sizes_gives_the_lone_requests_bits(
    folder: Path, native: KernelBackend
) -> None:
    runners = {size: runner_for(folder, native, page_size=size, pages=512 // size) for size in (4, 16)}
    expected = alone(runners[16])

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False), st.sampled_from([4, 16]))
    def any_mixture(random: Random, page_size: int) -> None:
        for ours, lone in zip(together(runners[page_size], random), expected):
            assert ours.tokens == lone.tokens
            assert all(torch.equal(a, b) for a, b in zip(ours.logits, lone.logits, strict=True))

    any_mixture()


def test_sampled_tokens_depend_on_seed_and_position_only(tmp_path: Path, native: KernelBackend) -> None:
    folder = make_tiny("llama", tmp_path / "m")
    runner = runner_for(folder, native, pages=128)
    prompts = [PROMPTS[2], PROMPTS[3], PROMPTS[2]]
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=s) for s in (1, 2, 3)]

    def sample(which: list[int]) -> list[int]:
        seqs = [seq(table_for(runner, i, 48), prompts[i], 0, sampling=params[i]) for i in which]
        return [token.token_id for token in runner.execute(StepBatch(seqs)).tokens if token is not None]

    one_by_one = [sample([i])[0] for i in range(3)]
    assert sample([0, 1, 2]) == one_by_one
    assert sample([2, 1, 0]) == one_by_one[::-1]
