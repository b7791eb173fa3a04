"""Scratch tensors for a step: allocated once, viewed at the step's number of rows.

A decode step of a small model is a few hundred kernel calls, and creating a tensor costs about as much as a call. So a
name is registered once with its shape per row, and ``views(rows)`` returns one dict of views per number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Views", "Workspace"]

_MAX_CACHED = 256
"""How many numbers of rows have their views kept. A mixed step has any number; a decode step's seldom changes."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    shape: tuple[int, ...]
    dtype: torch.dtype
    factor: int


class Workspace:
    """Named scratch tensors of shape (rows * factor, *shape)."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        self._derived: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self._constants: dict[str, Callable[[int], torch.Tensor]] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._views: dict[int, Views] = {}
        self.generation = 0
        """Incremented whenever a tensor moves: addresses from before are invalid."""

    def register(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, factor: int = 1) -> str:
        """Declare a scratch tensor; blocks that agree on name, shape and dtype share it. Returns the key to use."""
        key = f"{name}:{'x'.join(map(str, shape))}:{dtype}:{factor}"
        self._buffers[key] = _Buffer(shape, dtype, factor)
        return key

    def derive(self, key: str, source: str, view: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """Declare a view of another scratch tensor (a column range, another shape)."""
        name = f"{source}/{key}"
        self._derived[name] = (source, view)
        return name

    def constant(self, name: str, make: Callable[[int], torch.Tensor]) -> str:
        """Declare a tensor that depends on the number of rows only and is never written."""
        self._constants[name] = make
        return name

    def views(self, rows: int) -> Views:
        """All registered tensors at ``rows`` rows, created when first used. Contents are those of the last step."""
        found = self._views.get(rows)
        if found is None:
            if len(self._views) >= _MAX_CACHED:
                self._views.clear()
                if self._constants:
                    # They live in the views alone.
                    self.generation += 1
            found = self._views[rows] = Views(self, rows)
        return found

    def _make(self, key: str, views: Views) -> torch.Tensor:
        derived = self._derived.get(key)
        if derived is not None:
            return derived[1](views[derived[0]])
        make = self._constants.get(key)
        if make is not None:
            return make(views.rows)
        buffer = self._buffers[key]
        count = views.rows * buffer.factor * math.prod(buffer.shape)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < count:
            memory = self._memory[key] = torch.empty(count, dtype=buffer.dtype)
            self.generation += 1
            for other in self._views.values():
                other.forget(key)  # views of the smaller memory would keep it alive
        return memory[:count].view(views.rows * buffer.factor, *buffer.shape)


class Views(dict[str, torch.Tensor]):
    """Scratch tensors at one number of rows."""

    def __init__(self, workspace: Workspace, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self._workspace = workspace

    def __missing__(self, key: str) -> torch.Tensor:
        made = self[key] = self._workspace._make(key, self)
        return made

    def forget(self, source: str) -> None:
        """Drop a tensor and what was derived from it."""
        for key in [k for k in self if k == source or k.startswith(f"{source}/")]:
            del self[key]
