"""A mixture of experts: route, the experts' products over only the rows routed to them, weighted sum,
shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forebay.engine.checkpoint.rank_weights import LinearPart, shard
from forebay.engine.models.layers import ForwardContext, ModelContext
from forebay.engine.models.mlp import GatedMLP, activation_of
from forebay.engine.models.routing import Router

__all__ = ["ExpertNames", "ExpertShape", "MixtureOfExperts"]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How the checkpoint calls an expert's three matrices."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts.

    Args:
        count: experts.
        per_token: experts a token goes to.
        intermediate: an expert's, over all ranks.
        activation: as in the config.
        wide_logits: router logits in fp32 (DeepSeek); False: rounded to the model's dtype first.
    """

    count: int
    per_token: int
    intermediate: int
    activation: str = "silu"
    wide_logits: bool = False


class MixtureOfExperts:
    """Every rank has a slice of every expert's intermediate dimension; the router is the same on all.

    Args:
        build: the context.
        name: the module's name, such as ``model.layers.3.mlp``.
        shape: the routed experts.
        router: from logits to experts.
        shared: the name of the shared experts' module and their intermediate dimension together.
        names: how an expert's matrices are called.
    """

    def __init__(
        self,
        build: ModelContext,
        name: str,
        shape: ExpertShape,
        router: Router,
        *,
        shared: tuple[str, int] | None = None,
        names: ExpertNames | None = None,
    ) -> None:
        comm, weights, ws = build.comm, build.weights, build.workspace
        names = names or ExpertNames()
        span = shard(shape.intermediate, comm.rank, comm.size, what="expert columns")
        self.gate = weights.linear([LinearPart(f"{name}.gate")])
        self.gate_up, self.down = [], []
        for expert in range(shape.count):
            at = f"{name}.experts.{expert}"
            self.gate_up.append(
                weights.linear([LinearPart(f"{at}.{names.gate}", span), LinearPart(f"{at}.{names.up}", span)])
            )
            self.down.append(weights.linear([LinearPart(f"{at}.{names.down}")], cols=span))
        self.shared = GatedMLP(build, shared[0], shared[1], shape.activation) if shared else None
        self.shape = shape
        self._route = router
        self._backend, self._comm = build.backend, comm
        self._act = getattr(build.backend, activation_of(shape.activation))
        k, width, hidden = shape.per_token, span[1] - span[0], self.down[0].out_features
        logits_dtype = torch.float32 if shape.wide_logits else build.dtype
        self._logits = ws.register("router", (shape.count,), logits_dtype)
        self._gate_up = ws.register("expert_gate_up", (2 * width,), build.dtype, k)
        self._mid = ws.register("expert_mid", (width,), build.dtype, k)
        self._out = ws.register("expert_out", (hidden,), build.dtype, k)
        self._each = ws.constant(f"each:{k}", lambda rows: torch.arange(rows * k, dtype=torch.int32))
        self._sum = ws.register("expert_sum", (hidden,), torch.float32)
        self._partial = ws.register("partial", (hidden,), torch.float32)
        self._hidden = ws.register("hidden", (hidden,), build.dtype)

    def __call__(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """x (M, H), normed -> (M, H) in scratch."""
        views, backend, k = step.views, self._backend, self.shape.per_token
        logits = views[self._logits]
        backend.linear(x, self.gate, logits)
        route = self._route(logits.float().numpy())
        flat = route.experts.reshape(-1)
        order = np.argsort(flat, kind="stable")
        starts = torch.from_numpy(np.searchsorted(flat[order], np.arange(self.shape.count + 1)).astype(np.int32))
        rows = torch.from_numpy((order // k).astype(np.int32))
        gate_up, mid, out = views[self._gate_up], views[self._mid], views[self._out]
        backend.grouped_linear(x, self.gate_up, rows, starts, gate_up)
        self._act(gate_up, mid)
        backend.grouped_linear(mid, self.down, views[self._each], starts, out)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        total = views[self._sum]
        shares = torch.from_numpy(np.ascontiguousarray(route.weights))
        backend.combine(out, torch.from_numpy(place.reshape(-1, k)), shares, total)
        return self._finish(x, total, step)

    def _finish(self, x: torch.Tensor, total: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Add the shared experts, and sum over the ranks."""
        views = step.views
        if self.shared is not None:
            partial = views[self._partial]
            self._backend.linear(self.shared.activated(x, step), self.shared.down.linear, partial)
            total.add_(partial)
        hidden = views[self._hidden]
        self._comm.all_reduce(total, hidden)
        return hidden
