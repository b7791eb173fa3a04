"""From a checkpoint folder to a model: check the config, check the files, then stream the weights.

inspect(folder)   the checked config, before any weight is read: what the pool will look like
load(...)         the model, this rank's weights packed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.engine.checkpoint.checkpoint import Checkpoint, Progress, read_config
from forebay.engine.checkpoint.quantized_weights import check_quantization
from forebay.engine.checkpoint.rank_weights import RankWeights
from forebay.engine.distributed.collectives import Comm, SingleRank, with_kernels
from forebay.engine.kernels.interface import KernelBackend
from forebay.engine.memory.workspace import Workspace
from forebay.engine.models.decoder import Model
from forebay.engine.models.layers import ModelContext
from forebay.engine.models.registry import Architecture, architecture_of, text_config
from forebay.errors import UsageError
from forebay.kv.geometry_spec import kv_spec
from forebay.kv.spec import KVSpec
from forebay.model.families import read_geometry
from forebay.model.geometry import ModelGeometry

__all__ = ["Inspected", "LoadedModel", "inspect", "load"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Inspected:
    """A model folder whose config is sound and whose architecture we have; no weight has been read.

    Args:
        folder: the checkpoint.
        config: the language model's config.
        geometry: the planner's reading of the same config; the KV spec comes from it.
        dtype: activations, KV and dense weights.
        max_positions: the checkpoint's ``max_position_embeddings``.
        vocab_size: rows of the token table.
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: Architecture
    parsed: Any
    geometry: ModelGeometry
    dtype: torch.dtype
    max_positions: int
    vocab_size: int

    def kv_spec(self, page_size: int) -> KVSpec:
        """The model's page."""
        return kv_spec(self.geometry, page_size, self.dtype.itemsize)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights; ``weight_bytes`` are this rank's, as packed."""

    inspected: Inspected
    model: Model
    workspace: Workspace
    backend: KernelBackend
    comm: Comm
    weight_bytes: int


def inspect(folder: Path, *, dtype: str = "auto", tp: int = 1) -> Inspected:
    """Check the config against what we have.

    Args:
        folder: a Hugging Face model folder.
        dtype: ``bfloat16``, ``float32``, or ``auto``: the checkpoint's (float16 becomes bfloat16).
        tp: number of ranks.

    Raises:
        UsageError: no or bad config, an architecture, rotary scaling, activation or quantization we do not have, or a
            number of ranks that does not divide the model.
    """
    outer = read_config(folder)
    architecture = architecture_of(outer)
    config = text_config(outer)
    check_quantization(config)
    try:
        parsed = architecture.read(config, tp=tp)
    except KeyError as error:
        raise UsageError(f"{folder / 'config.json'} lacks {error}") from None
    return Inspected(
        folder=folder,
        config=config,
        architecture=architecture,
        parsed=parsed,
        geometry=read_geometry(outer, str(folder / "config.json")),
        dtype=_dtype_of(config, dtype),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        vocab_size=int(config["vocab_size"]),
    )


def load(
    inspected: Inspected,
    backend: KernelBackend,
    *,
    comm: Comm | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Check the files, then stream this rank's weights into ``backend``'s layout.

    Raises:
        UsageError: a missing, truncated or corrupt file, or a tensor that is missing or has another shape.
    """
    comm = with_kernels(comm or SingleRank(), backend)
    checkpoint = Checkpoint.open(inspected.folder)
    weights = RankWeights(
        checkpoint,
        backend,
        inspected.dtype,
        comm=comm,
        progress=progress,
    )
    workspace = Workspace()
    build = ModelContext(weights, workspace, backend, comm, inspected.dtype, inspected.kv_spec(1).groups)
    model = inspected.architecture.load(build, inspected.parsed)
    if progress is not None:
        progress(
            weights.total_bytes, weights.total_bytes
        )  # layers that are not run (multi-token prediction) count as done
    return LoadedModel(inspected, model, workspace, backend, comm, weights.nbytes)


def _dtype_of(config: Mapping[str, Any], asked: str) -> torch.dtype:
    if asked == "auto":
        stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return _DTYPES.get(stored, torch.bfloat16)
    found = _DTYPES.get(asked)
    if found is None:
        raise UsageError(f"--dtype {asked} is not one Forebay has", fix=f"use auto, {' or '.join(_DTYPES)}")
    return found
