"""The gated MLP."""

from __future__ import annotations

import torch

from forebay.engine.checkpoint.rank_weights import LinearPart, shard
from forebay.engine.models.layers import ForwardContext, ModelContext, RowLinear
from forebay.errors import UsageError

__all__ = ["GatedMLP", "activation_of"]

_ACTIVATIONS = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


def activation_of(name: str) -> str:
    """The back end's operation for a config's activation.

    Raises:
        UsageError: one we do not have.
    """
    operation = _ACTIVATIONS.get(name)
    if operation is None:
        raise UsageError(f"config.json asks for activation {name!r}", fix=f"Forebay has {', '.join(_ACTIVATIONS)}")
    return operation


class GatedMLP:
    """down(act(gate(x)) * up(x)), the intermediate dimension split over the ranks.

    Args:
        build: the context.
        name: the module's name, such as ``model.layers.0.mlp``.
        intermediate: over all ranks.
        activation: as in the config.
    """

    def __init__(self, build: ModelContext, name: str, intermediate: int, activation: str = "silu") -> None:
        comm, ws = build.comm, build.workspace
        span = shard(intermediate, comm.rank, comm.size, what="MLP columns")
        self.gate_up = build.weights.linear(
            [LinearPart(f"{name}.gate_proj", span), LinearPart(f"{name}.up_proj", span)]
        )
        self.down = RowLinear(
            build, build.weights.linear([LinearPart(f"{name}.down_proj")], cols=span, bias=comm.rank == 0)
        )
        self._gated_linear = build.backend.gated_linear
        self._gelu = activation_of(activation) == "gelu_tanh_mul"
        width = span[1] - span[0]
        self._mid = ws.register("mid", (width,), build.dtype)
        self._hidden = ws.register("hidden", (self.down.linear.out_features,), build.dtype)

    def __call__(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """x (M, H), normed -> (M, H) in scratch."""
        views = step.views
        hidden = views[self._hidden]
        self.down(self.activated(x, step), hidden, views)
        return hidden

    def activated(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """This rank's columns of act(gate(x)) * up(x), the input of ``down``."""
        mid = step.views[self._mid]
        self._gated_linear(x, self.gate_up, mid, gelu=self._gelu)
        return mid
