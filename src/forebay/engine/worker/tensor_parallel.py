"""Several ranks as one: rank 0 decides and broadcasts, the others follow, and a rank that disagrees ends the server.

    rank 0 -> rank r   plan r      Attach, Transfer, BroadcastStep, EndOfSteps, in the order of rank 0's decisions
    rank r -> rank 0   followed    Followed, after each step and whenever transfers have ended

Every rank hashes the steps it is given; ``StepAck`` carries the hash, and rank 0 compares it with its own at that step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zmq

from forebay.causes import Cause
from forebay.engine.cache.actions import Backup, Done, LoadBack
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.engine.ipc.messages import (
    AttachHostPool,
    BroadcastStep,
    EndedTransfer,
    EndOfSteps,
    PlanMessage,
    PlannedGate,
    PlannedSequence,
    StepAck,
    Transfer,
)
from forebay.engine.ipc.sockets import Endpoints, Inbox, Outbox, encode
from forebay.engine.model_executor.step import Runner, SeqStep, StepBatch, StepResult
from forebay.engine.sampling_params import SamplingParams
from forebay.errors import DeadError

__all__ = ["RankGroup", "TPFollower", "TPLeaderRunner"]

_KEPT_DIGESTS = 4096
_TRANSFER_WAIT_S = 0.002
"""A follower looks so often for transfers that have ended, while there are any."""
_IDLE_WAIT_S = 5.0
_RECORDS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (Backup, LoadBack)
}


class _StepDigest:
    """A running hash over the steps of one server."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, step: bytes) -> int:
        """Add one encoded BroadcastStep; returns the hash of all steps so far."""
        self._hash.update(step)
        value: int = self._hash.intdigest()
        return value


class RankGroup:
    """Rank 0's ends of the sockets to the other ranks.

    Args:
        context: of this process.
        endpoints: where the sockets are.
        size: number of ranks.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, size: int) -> None:
        self._plans = [Outbox(context, endpoints.plan(rank)) for rank in range(1, size)]
        self._inbox: Inbox[StepAck] = Inbox(context, endpoints.followed, StepAck, bind=True)
        self._digest = _StepDigest()
        self._digests: OrderedDict[int, int] = OrderedDict()
        self._step = 0
        self._ended: list[tuple[int, Done]] = []

    def attach(self, region_path: str | None) -> None:
        """Tell the other ranks where the host pages are, before anything else."""
        self._send(AttachHostPool(region_path))

    def broadcast(self, action: Backup | LoadBack) -> None:
        """Have every other rank carry out a transfer."""
        self._send(Transfer(type(action).__name__, msgspec.msgpack.encode(action)))

    def plan(self, batch: StepBatch) -> None:
        """Have every other rank run a step; also looks at what they say of earlier ones.

        Raises:
            DeadError: a rank has run other steps than we planned.
        """
        self._receive()
        self._step += 1
        seqs = [
            PlannedSequence(
                s.seq_id, _int32_bytes(s.tokens), s.start, tuple(map(_int32_bytes, s.page_tables)), s.sample
            )
            for s in batch.seqs
        ]
        gates = tuple(PlannedGate(gate.ids, gate.timeout_s) for gate in batch.gates)
        encoded = encode(BroadcastStep(self._step, seqs, gates))
        self._digests[self._step] = self._digest.add(encoded)
        while len(self._digests) > _KEPT_DIGESTS:
            self._digests.popitem(last=False)
        for outbox in self._plans:
            outbox.send_encoded(encoded)

    def collect(self) -> Iterator[tuple[int, Done]]:
        """Transfers that have ended on other ranks since the last call.

        Raises:
            DeadError: a rank has run other steps than we planned.
        """
        self._receive()
        ended, self._ended = self._ended, []
        return iter(ended)

    def end(self) -> None:
        """No more plans."""
        self._send(EndOfSteps())
        for outbox in self._plans:
            outbox.close()
        self._inbox.close()

    def _send(self, message: PlanMessage) -> None:
        for outbox in self._plans:
            outbox.send(message)

    def _receive(self) -> None:
        for message in self._inbox.drain():
            if self._digests.get(message.step, message.digest) != message.digest:
                raise DeadError(
                    f"rank {message.rank} disagrees at step {message.step}: it followed other plans than rank 0 made",
                    fix="report it with the log",
                    code=Cause.ENGINE_BUG,
                )
            for ended in message.transfers:
                self._ended.append(
                    (message.rank, Done(ended.id, ended.ok, ended.nbytes, ended.seconds, (), ended.reason))
                )


class TPLeaderRunner:
    """Rank 0's runner among several: every step is broadcast before it is run here.

    Args:
        runner: this rank's.
        group: the other ranks.
    """

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``step.Runner``."""
        self._group.plan(batch)
        return self._runner.execute(batch)


class TPFollower:
    """Another rank's loop: does what rank 0 says, in its order.

    Args:
        rank: this rank, 1 or more.
        context: of this process.
        endpoints: where the sockets are.
    """

    def __init__(self, rank: int, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints) -> None:
        self._rank = rank
        self._plans: Inbox[PlanMessage] = Inbox(context, endpoints.plan(rank), PlanMessage, bind=True)
        self._outbox = Outbox(context, endpoints.followed)
        self._digest = _StepDigest()
        self._step = self._digest_value = 0
        self._transfers: RankTransfers | None = None
        self._pending = 0

    def run(self, runner: Runner, attach: Callable[[str], RankTransfers], on_step: Callable[[int], None]) -> None:
        """Follow until rank 0 says that there is no more.

        Args:
            runner: this rank's.
            attach: host region's path -> this rank's transfers.
            on_step: told the number of steps done, for the heartbeat.
        """
        while True:
            for message in self._plans.drain(_TRANSFER_WAIT_S if self._pending else _IDLE_WAIT_S):
                match message:
                    case AttachHostPool():
                        self._transfers = None if message.region_path is None else attach(message.region_path)
                    case Transfer():
                        self._start(message)
                    case BroadcastStep():
                        self._run_step(message, runner)
                        on_step(self._step)
                    case EndOfSteps():
                        return
            if self._pending:
                self._report()

    def close(self) -> None:
        """Finish transfers and close the sockets."""
        if self._transfers is not None:
            self._transfers.close()
        self._plans.close()
        self._outbox.close()

    def _start(self, message: Transfer) -> None:
        assert self._transfers is not None, "a transfer without a host region"
        self._pending += 1
        self._transfers.submit(_RECORDS[message.kind].decode(message.record))

    def _run_step(self, plan: BroadcastStep, runner: Runner) -> None:
        gates: list[Any] = []
        if plan.gates:
            assert self._transfers is not None, "a step waits for loads without a host region"
            gates = [self._transfers.layer_events(gate.load_ids, gate.timeout_s) for gate in plan.gates]
        runner.execute(StepBatch([_sequence(planned) for planned in plan.seqs], gates))
        self._step, self._digest_value = plan.step, self._digest.add(encode(plan))
        self._report()

    def _report(self) -> None:
        ended = [] if self._transfers is None else self._transfers.take_done()
        self._pending -= len(ended)
        done = [EndedTransfer(d.id, d.ok, d.nbytes, d.seconds, d.reason) for d in ended]
        self._outbox.send(StepAck(self._rank, self._step, self._digest_value, done))


def _int32_bytes(values: npt.NDArray[np.int32]) -> bytes:
    """The array's bytes in one copy; never element by element."""
    return np.asarray(values, dtype=np.int32).tobytes()


def _sequence(planned: PlannedSequence) -> SeqStep:
    """How tokens are sampled is rank 0's business."""
    return SeqStep(
        planned.seq_id,
        np.frombuffer(planned.tokens, dtype=np.int32),
        planned.start,
        [np.frombuffer(table, dtype=np.int32) for table in planned.page_tables],
        planned.sample,
        SamplingParams(),
    )
