"""What crosses the borders between the front and the ranks: msgspec records, arrays on the wire.

    front  -> rank 0     FrontMessage:  Submit, Abort, Call, Stop
    rank r -> front      WorkerMessage: Hello, StageReport, Resolved, Ready, Failed, StepReport, Reply, Heartbeat
    rank 0 -> ranks > 0  PlanMessage:   Attach, BroadcastStep, Transfer, EndOfSteps
    rank r -> rank 0     Followed: what a rank has done, with the digest of all decisions so far

Token arrays travel as int32 bytes (all processes are on one machine). Nothing here imports torch or numpy: the front
does without them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from forebay.engine.sampling_params import SamplingParams

__all__ = [
    "Abort",
    "AttachHostPool",
    "BroadcastStep",
    "EndOfSteps",
    "EndedTransfer",
    "Failed",
    "FrontMessage",
    "Heartbeat",
    "ModelResolved",
    "PlanMessage",
    "PlannedGate",
    "PlannedSequence",
    "Ready",
    "RpcRequest",
    "RpcResponse",
    "StageReport",
    "StepAck",
    "StepReport",
    "Stop",
    "Submit",
    "TokenEvent",
    "Transfer",
    "WorkerMessage",
    "WorkerStarted",
    "pack_tokens",
]


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32 bytes in this machine's order."""
    return array("i", tokens).tobytes()


class _Wire(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages."""


# front -> rank 0


class Submit(_Wire, frozen=True):
    """One sequence to generate."""

    seq_id: int
    prompt: bytes
    sampling: SamplingParams


class Abort(_Wire, frozen=True):
    """The client went away, or a stop string was found: free the sequences' pages before the next step."""

    seq_ids: tuple[int, ...]


class RpcRequest(_Wire, frozen=True):
    """A question between steps: ``stats``, ``cache`` or ``flush`` (with ``tier``); answered by a Reply."""

    call_id: int
    method: str
    tier: str | None = None


class Stop(_Wire, frozen=True):
    """End now; the front has already drained."""


FrontMessage = Submit | Abort | RpcRequest | Stop


# rank -> front


class WorkerStarted(_Wire, frozen=True):
    """The rank's process runs and its sockets are connected."""

    rank: int
    pid: int


class StageReport(_Wire, frozen=True):
    """Start-up has reached ``stage``; ``progress`` 0..1 where it is known, ``doing`` in words where that helps."""

    rank: int
    stage: str
    progress: float | None = None
    doing: str | None = None


class ModelResolved(_Wire, frozen=True):
    """MODEL is this local Hugging Face folder; ``comm_path`` is the memory over which ranks exchange tensors."""

    folder: str
    comm_path: str | None = None


class Ready(_Wire, frozen=True):
    """The rank can execute steps; rank 0's ``info`` describes pools and limits for /server_info."""

    rank: int
    info: dict[str, Any]


class Failed(_Wire, frozen=True):
    """The rank could not start or go on; it exits after this."""

    rank: int
    message: str
    exit_code: int
    fix: str | None = None
    code: str | None = None


class TokenEvent(msgspec.Struct, array_like=True, frozen=True):
    """One sequence's new token (or its end without one, ``token`` < 0)."""

    seq_id: int
    token: int
    finish: str | None = None
    """``stop``, ``length``, or None while the sequence goes on."""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    cached: tuple[int, int, int] | None = None
    """With the first token: prompt tokens taken from device, host and disk."""


class StepReport(_Wire, frozen=True):
    """One step's outcome: all its tokens in one message, and the gauges that move with every step."""

    step: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    events: list[TokenEvent]
    running: int
    waiting: int
    loading: int
    preemptions: int


class RpcResponse(_Wire, frozen=True):
    """The answer to a Call; ``error`` where it failed."""

    call_id: int
    result: dict[str, Any]
    error: str | None = None


class Heartbeat(_Wire, frozen=True):
    """Sent by a thread of its own once a second; ``cpu_s`` is the process's CPU time."""

    rank: int
    step: int
    cpu_s: float


WorkerMessage = WorkerStarted | StageReport | ModelResolved | Ready | Failed | StepReport | RpcResponse | Heartbeat


# rank 0 -> ranks > 0, and back


class PlannedSequence(msgspec.Struct, array_like=True, frozen=True):
    """A step.SeqStep without what only rank 0 needs (sampling)."""

    seq_id: int
    tokens: bytes
    start: int
    page_tables: tuple[bytes, ...]
    sample: bool


class PlannedGate(msgspec.Struct, array_like=True, frozen=True):
    """The loads whose layers a step must wait for, and how long it may wait for all of them."""

    load_ids: tuple[int, ...]
    timeout_s: float


class BroadcastStep(_Wire, frozen=True):
    """Run this step."""

    step: int
    seqs: list[PlannedSequence]
    gates: tuple[PlannedGate, ...] = ()


class AttachHostPool(_Wire, frozen=True):
    """The host region is here (a path every rank can open); None: there is none. The first plan."""

    region_path: str | None


class Transfer(_Wire, frozen=True):
    """Start this transfer; ``record`` is a cache.actions.Backup or Load, as ``kind`` says, in msgpack."""

    kind: str
    record: bytes


class EndOfSteps(_Wire, frozen=True):
    """No more steps: free everything and exit."""


PlanMessage = AttachHostPool | BroadcastStep | Transfer | EndOfSteps


class EndedTransfer(msgspec.Struct, array_like=True, frozen=True):
    """A cache.actions.Done of one rank."""

    id: int
    ok: bool
    nbytes: int
    seconds: float
    reason: str


class StepAck(_Wire, frozen=True):
    """A rank has done everything up to ``step``; ``digest`` hashes every step it was given, in order."""

    rank: int
    step: int
    digest: int
    transfers: list[EndedTransfer]
