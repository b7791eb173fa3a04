"""What rank 0 sends the other ranks each step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from forebay.engine.ipc.messages import BroadcastStep, PlanMessage
from forebay.engine.ipc.sockets import Endpoints, Inbox
from forebay.engine.model_executor.step import SeqStep, StepBatch
from forebay.engine.sampling_params import SamplingParams
from forebay.engine.worker.tensor_parallel import RankGroup

pytestmark = pytest.mark.engine


def test_a_steps_arrays_are_sent_as_bytes_and_never_element_by_element() -> None:
    class Bytes(np.ndarray):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("packed one object per element")

    table = np.arange(1024, dtype=np.int32)
    endpoints, context = Endpoints.create(), zmq.Context()
    try:
        inbox: Inbox[PlanMessage] = Inbox(context, endpoints.plan(1), PlanMessage, bind=True)
        group = RankGroup(context, endpoints, 2)
        tokens = np.array([5], dtype=np.int32).view(Bytes)
        group.plan(StepBatch([SeqStep(1, tokens, 7, [table.view(Bytes)], True, SamplingParams())]))
        [step] = inbox.drain(10.0)
        assert isinstance(step, BroadcastStep)
        assert np.frombuffer(step.seqs[0].page_tables[0], dtype=np.int32).tolist() == table.tolist()
        assert np.frombuffer(step.seqs[0].tokens, dtype=np.int32).tolist() == [5]
    finally:
        context.destroy(linger=0)
        endpoints.remove()
