"""The disk tier outlives a change of the number of ranks: a page's bytes do not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_models import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FIRST = [10 + (7 * i) % 480 for i in range(100)]
SECOND = [10 + (11 * i) % 480 for i in range(100)]
WHOLE_PAGES = 96


def answer(server: ServerProcess, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    """Eight greedy tokens, and where the prompt was found."""
    made = server.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    return made["choices"][0]["token_ids"], made["usage"]["prompt_tokens_details"]["cached_tokens_details"]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])  # divided by heads, and on every rank
def test_pages_written_at_one_number_of_ranks_are_read_at_another(kind: str, tmp_path: Path) -> None:
    model = make_tiny(kind, tmp_path / "m", decisive=True)
    known: dict[int, list[int]] = {}

    def life(tp: int, found: list[tuple[list[int], int]]) -> None:
        """One server: for each prompt, how many of its tokens the disk already has."""
        server = ServerProcess(
            str(model), tmp_path / f"{len(known)}-{tp}.log", "--served-model-name", "smollm2", "--tp", str(tp),
            "--host-cache", "4MB", "--disk-cache", str(tmp_path / "disk"), "--disk-size", "20MB", "--load", "always",
        )  # fmt: skip
        try:
            for prompt, on_disk in found:
                tokens, cached = answer(server, prompt)
                assert cached == {"device": 0, "host": 0, "disk": on_disk}
                assert tokens == known.setdefault(id(prompt), tokens)
            new = sum(not on_disk for _, on_disk in found) * WHOLE_PAGES
            server.wait_until(lambda: server.metric("forebay_tier_tokens", tier="disk", state="used") >= new, "on disk")
            assert server.end() == 0
        finally:
            server.kill()

    life(1, [(FIRST, 0)])
    life(2, [(FIRST, WHOLE_PAGES), (SECOND, 0)])
    life(1, [(FIRST, WHOLE_PAGES), (SECOND, WHOLE_PAGES)])
