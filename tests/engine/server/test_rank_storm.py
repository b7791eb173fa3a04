"""Two and four ranks under random kills, stops, slow ranks and slow loads: the same tokens,
or an end with a name and a reason.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import zmq
from rank_storm import Storm
from tiny_models import make_tiny

from forebay.engine.ipc.messages import StepAck
from forebay.engine.ipc.sockets import Endpoints, Outbox
from forebay.engine.model_executor.step import StepBatch
from forebay.engine.worker.tensor_parallel import RankGroup
from forebay.errors import DeadError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("ranks") / "m", decisive=True)


def live(model: Path, tp: int, folder: Path, ends: list[str], seed: int, events: int) -> None:
    """One life after another over the same disk tier."""
    rng, known = random.Random(seed), {}
    print(f"seed {seed}")
    for end in ends:
        storm = Storm(model, tp, rng, folder, known)
        try:
            storm.weather(events)
            getattr(storm, f"end_{end}")()
        finally:
            storm.close()


@pytest.mark.parametrize(("tp", "ends"), [(2, ["by_kill", "by_hang"]), (4, ["by_kill"])])
def test_ranks_under_random_misfortune(tp: int, ends: list[str], model: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("FOREBAY_TEST_SEED", random.randrange(1 << 30)))
    live(model, tp, tmp_path, ends, seed, events=6)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tp", [2, 4])
def test_many_lives_of_ranks(tp: int, model: Path, tmp_path: Path) -> None:
    rng = random.Random(tp)
    ends = [rng.choice(["by_kill", "by_kill", "by_hang", "in_order"]) for _ in range(40)]
    live(model, tp, tmp_path, ends, tp, events=30)


def look_until_it_came(group: RankGroup) -> None:
    for _ in range(1000):
        list(group.collect())
        time.sleep(0.01)


def test_a_rank_that_followed_other_plans_is_found_and_named(tmp_path: Path) -> None:
    context = zmq.Context()
    endpoints = Endpoints(str(tmp_path))
    group = RankGroup(context, endpoints, 2)
    liar = Outbox(context, endpoints.followed)
    try:
        group.plan(StepBatch([]))
        liar.send(StepAck(1, 1, 12345, []))
        with pytest.raises(DeadError, match="rank 1 disagrees at step 1"):
            look_until_it_came(group)
    finally:
        liar.close()
        group.end()
        context.destroy(linger=0)
