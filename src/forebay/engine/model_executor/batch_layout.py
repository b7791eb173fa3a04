"""A step's sequences as the flat arrays the kernels take.

The arrays are allocated once and filled in numpy; the tensors handed out are views of them and hold until the next
call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from forebay.engine.kernels.interface import AttentionBatch
from forebay.engine.model_executor.step import SeqStep

__all__ = ["BatchLayout", "LaidOut"]


@dataclass(slots=True)
class LaidOut:
    """One step's arrays.

    Args:
        rows: M.
        tokens, batches: of all rows.
        sampling: the indices of the sequences that sample.
        last_rows: int64, their last rows; None where these are all the rows.
        final_tokens, final_batches: the last rows alone, as a step that reads what all rows have written.
    """

    rows: int
    tokens: torch.Tensor
    batches: list[AttentionBatch]
    sampling: list[int]
    last_rows: torch.Tensor | None = None
    final_tokens: torch.Tensor | None = None
    final_batches: list[AttentionBatch] = field(default_factory=list)


class BatchLayout:
    """Lays batches out.

    Args:
        groups: number of layer groups.
        page_size: token slots a page.
        context_length: the most positions a sequence may have.
        max_seqs: sequences the arrays are made for at first; they grow.
    """

    def __init__(self, groups: int, page_size: int, context_length: int, max_seqs: int) -> None:
        self._page_size = page_size
        self._max_pages = -(-context_length // page_size)
        self._groups = groups
        self.generation = 0
        """Goes up whenever an array moves: addresses noted before are void."""
        self._allocate_seqs(max_seqs)
        self._allocate_rows(4096)

    def _allocate_seqs(self, count: int) -> None:
        self.generation += 1
        self._query_start = np.zeros(count + 1, dtype=np.int32)
        self._context_len = np.zeros(count, dtype=np.int32)
        self._tables = [np.full((count, self._max_pages), -1, dtype=np.int32) for _ in range(self._groups)]
        self._table_tensors = [torch.from_numpy(table) for table in self._tables]
        self._query_start_tensor = torch.from_numpy(self._query_start)
        self._context_len_tensor = torch.from_numpy(self._context_len)

    def _allocate_rows(self, count: int) -> None:
        self.generation += 1
        self._tokens = np.zeros(count, dtype=np.int32)
        self._positions = np.zeros(count, dtype=np.int32)
        self._slots = [np.zeros(count, dtype=np.int64) for _ in range(self._groups)]
        self._tokens_tensor = torch.from_numpy(self._tokens)
        self._positions_tensor = torch.from_numpy(self._positions)
        self._slot_tensors = [torch.from_numpy(slots) for slots in self._slots]

    def lay_out(self, seqs: list[SeqStep]) -> LaidOut:
        """Fill the arrays for ``seqs``."""
        count = len(seqs)
        rows = sum([len(seq.tokens) for seq in seqs])
        if count > len(self._context_len):
            self._allocate_seqs(2 * count)
        if rows > len(self._tokens):
            self._allocate_rows(2 * rows)
        tokens, positions, query_start, context_len = (
            self._tokens,
            self._positions,
            self._query_start,
            self._context_len,
        )
        row, sampling, sample_rows = 0, [], []
        for index, seq in enumerate(seqs):
            length = len(seq.tokens)
            end = row + length
            if length == 1:
                tokens[row], positions[row] = seq.tokens[0], seq.start
            else:
                tokens[row:end] = seq.tokens
                positions[row:end] = np.arange(seq.start, seq.start + length, dtype=np.int32)
            row = end
            query_start[index + 1] = end
            context_len[index] = seq.start + length
            for table, pages in zip(self._tables, seq.page_tables):
                table[index, : len(pages)] = pages
            if seq.sample:
                sampling.append(index)
                sample_rows.append(end - 1)
        self._fill_slots(count, rows)
        batches = [self._batch(group, count, rows) for group in range(self._groups)]
        laid = LaidOut(rows, self._tokens_tensor[:rows], batches, sampling)
        if len(sampling) < rows:
            laid.last_rows = torch.tensor(sample_rows, dtype=torch.int64)
            if sampling:
                laid.final_tokens = laid.tokens[laid.last_rows]
                laid.final_batches = [self._final(batch, laid.last_rows, sampling) for batch in batches]
        return laid

    def _final(self, batch: AttentionBatch, rows: torch.Tensor, sampling: list[int]) -> AttentionBatch:
        """The last rows of the sequences that sample, one a sequence."""
        all_of_them = len(sampling) == len(batch.context_len)
        return AttentionBatch(
            page_table=batch.page_table if all_of_them else batch.page_table[sampling],
            query_start=torch.arange(len(sampling) + 1, dtype=torch.int32),
            context_len=batch.context_len if all_of_them else batch.context_len[sampling],
            slots=batch.slots[rows],
            positions=batch.positions[rows],
            page_size=batch.page_size,
        )

    def _fill_slots(self, count: int, rows: int) -> None:
        page, offset = np.divmod(self._positions[:rows], self._page_size)
        lengths = np.diff(self._query_start[: count + 1])
        seq_of_row = np.arange(count) if rows == count else np.repeat(np.arange(count), lengths)
        for table, slots in zip(self._tables, self._slots):
            np.multiply(table[seq_of_row, page], self._page_size, out=slots[:rows], dtype=np.int64)
            slots[:rows] += offset

    def _batch(self, group: int, count: int, rows: int) -> AttentionBatch:
        return AttentionBatch(
            page_table=self._table_tensors[group][:count],
            query_start=self._query_start_tensor[: count + 1],
            context_len=self._context_len_tensor[:count],
            slots=self._slot_tensors[group][:rows],
            positions=self._positions_tensor[:rows],
            page_size=self._page_size,
        )
