"""Executes a StepBatch on one rank: lays the batch out, runs the model, samples on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from forebay.engine.checkpoint.checkpoint import Progress
from forebay.engine.distributed.collectives import Comm, KernelComm
from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.memory.device_pool import DevicePool
from forebay.engine.model_executor.batch_layout import BatchLayout, LaidOut
from forebay.engine.model_executor.decode_graph import DecodeGraphs, recorder_of
from forebay.engine.model_executor.load_model import LoadedModel, inspect, load
from forebay.engine.model_executor.sampling import all_greedy, sample
from forebay.engine.model_executor.step import LayerEvents, SampledToken, SeqStep, StepBatch, StepResult
from forebay.engine.models.layers import ForwardContext, LoadBackFailed
from forebay.errors import UsageError

__all__ = ["ModelRunner", "make_runner"]


class ModelRunner:
    """Implements ``step.Runner``. One thread calls it.

    Args:
        loaded: the model with its weights.
        num_pages: device pages for each layer group.
        page_size: token slots a page.
        context_length: the most positions a sequence may have; None: the checkpoint's.
        max_seqs: the most sequences a step may have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_pages: Sequence[int],
        page_size: int,
        *,
        context_length: int | None = None,
        max_seqs: int = 256,
    ) -> None:
        inspected = loaded.inspected
        self.loaded = loaded
        self.spec = inspected.kv_spec(page_size)
        self.context_length = context_length or inspected.max_positions
        self.pool = DevicePool(self.spec, num_pages, inspected.dtype, loaded.comm.size)
        loaded.model.bind(self.pool, self.context_length)
        self._model = loaded.model
        self._comm = loaded.comm
        self._workspace = loaded.workspace
        self._layout = BatchLayout(len(self.spec.groups), page_size, self.context_length, max_seqs)
        whole = loaded.comm.size == 1 or isinstance(loaded.comm, KernelComm)  # every operation is the back end's
        recorder = recorder_of(loaded.backend) if whole and loaded.model.replayable else None
        self._programs = None if recorder is None else DecodeGraphs(recorder, self._generation)

        self._argmax: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        if loaded.comm.rank == 0:
            self._argmax = getattr(loaded.backend, "argmax", None)
        self._ids = self._workspace.register("ids", (), torch.int64)

    def _generation(self) -> tuple[int, int]:
        return self._workspace.generation, self._layout.generation

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step to its end; see ``step.Runner``."""
        began = time.perf_counter()
        laid = self._layout.lay_out(batch.seqs)
        failed: set[int] = set()
        step = self._step(laid, self._waiter(batch.gates, failed) if batch.gates else None)
        seqs = [batch.seqs[i] for i in laid.sampling]
        chosen = self._forward(step, laid, len(batch.seqs), all_greedy(seqs))
        if batch.gates and self._comm.size > 1:
            failed = self._agree(failed, len(batch.gates))
        tokens: list[SampledToken | None] = [None] * len(batch.seqs)
        if chosen is not None and not failed and self._comm.rank == 0:
            for index, token in zip(laid.sampling, self._sample(chosen, seqs)):
                tokens[index] = token
        return StepResult(tokens, tuple(sorted(failed)), time.perf_counter() - began)

    def _forward(self, step: ForwardContext, laid: LaidOut, seqs: int, greedy: bool) -> torch.Tensor | None:
        """Run the model: logits (S, vocabulary), or, where the back end can take the largest itself, token ids (S,).

        A plain decode step (a row a sequence, all sampling) runs from its recorded program, where there is one.
        """
        argmax = self._argmax if greedy else None

        def forward() -> torch.Tensor | None:
            logits = self._model.forward(step)
            if logits is None or argmax is None:
                return logits
            ids = self._workspace.views(len(logits))[self._ids]
            argmax(logits, ids)
            return ids

        if self._programs is not None and step.wait is None and laid.rows == seqs and laid.last_rows is None:
            chosen: torch.Tensor = self._programs.run((seqs, greedy), forward)
            self._comm.check()
            return chosen
        try:
            return forward()
        except LoadBackFailed:
            return None

    def _sample(self, chosen: torch.Tensor, seqs: list[SeqStep]) -> list[SampledToken]:
        if chosen.dim() == 1:
            return [SampledToken(token) for token in chosen.tolist()]
        return sample(chosen.numpy(), seqs)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """The sampling rows' logits (S, vocabulary), fp32, without sampling (tests and measurements)."""
        with torch.inference_mode():
            laid = self._layout.lay_out(batch.seqs)
            logits = self._forward(self._step(laid), laid, len(batch.seqs), False)
            return torch.empty(0) if logits is None else logits.clone()

    def _step(self, laid: LaidOut, wait: Callable[[int], None] | None = None) -> ForwardContext:
        final = None
        if laid.final_tokens is not None:
            final = ForwardContext(laid.final_tokens, laid.final_batches, self._workspace.views(len(laid.sampling)))
        return ForwardContext(laid.tokens, laid.batches, self._workspace.views(laid.rows), laid.last_rows, final, wait)

    def _waiter(self, gates: list[LayerEvents], failed: set[int]) -> Callable[[int], None]:
        """What the model calls before a layer touches KV.

        Alone, a failure abandons the step at once. Among ranks the others would wait for us in the next collective, so
        the step runs on with whatever the pages hold, and the ranks agree at its end that it does not count.
        """

        def wait(layer: int) -> None:
            for index, gate in enumerate(gates):
                if index not in failed and not gate.wait_layer(layer):
                    failed.add(index)
            if failed and self._comm.size == 1:
                raise LoadBackFailed

        return wait

    def _agree(self, failed: set[int], count: int) -> set[int]:
        flags = torch.zeros(count, dtype=torch.float32)
        flags[list(failed)] = 1.0
        together = torch.cat([part.view(1, -1) for part in self._comm.all_gather(flags)])
        return set(together.amax(0).nonzero().view(-1).tolist())


def make_runner(
    folder: Path,
    backend: KernelBackend,
    *,
    num_pages: Sequence[int] | int,
    page_size: int = 16,
    dtype: str = "auto",
    context_length: int | None = None,
    max_seqs: int = 256,
    comm: Comm | None = None,
    progress: Progress | None = None,
) -> ModelRunner:
    """Inspect, load and bind in one call; an int for ``num_pages`` means as many for every group.

    Raises:
        UsageError: see ``loader.inspect`` and ``loader.load``; or a context longer than the rotary embedding can reach.
    """
    inspected = inspect(folder, dtype=dtype, tp=comm.size if comm else 1)
    if context_length is not None and context_length < 1:
        raise UsageError(f"--context-length {context_length} is not positive")
    loaded = load(inspected, backend, comm=comm, progress=progress)
    groups = len(inspected.kv_spec(page_size).groups)
    pages = [num_pages] * groups if isinstance(num_pages, int) else list(num_pages)
    return ModelRunner(loaded, pages, page_size, context_length=context_length, max_seqs=max_seqs)
