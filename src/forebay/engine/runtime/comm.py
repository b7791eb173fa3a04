"""Collectives between the ranks of one model, as few as the models need. One rank: everything is free."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Comm", "SingleRank"]


class Comm(Protocol):
    """What the models and the runner ask for. Every rank calls the same operations in the same order."""

    rank: int
    size: int

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """out = the ranks' ``partial`` (fp32) summed in rank order, rounded once to ``out``'s dtype; same bits everywhere."""

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's ``part`` (equal shapes and dtypes), in rank order."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with ``source``'s."""


class SingleRank:
    """The only rank."""

    rank = 0
    size = 1

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(partial)

    def all_gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        return None
