"""Weights on the fullest rank: from headers, by formula, or as the user says they load."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.model.parameters import rank_bytes, total_bytes
from forebay.planning.arithmetic.plan_builder import PlanBuilder
from forebay.planning.plan import Provenance
from forebay.planning.request import PlanRequest

__all__ = ["WeightMemory", "record_weights"]


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Bytes; None where neither the model's files nor the user say."""

    total_bytes: int | None
    per_rank_bytes: int | None


def record_weights(sheet: PlanBuilder, request: PlanRequest, tp: int, attention_tp: int, pp: int) -> WeightMemory:
    """Write down the weights in total and on the fullest of ``tp * pp`` ranks.

    ``--weights-bytes`` replaces the total (a load can differ from the disk: another dtype, padding, a repacked layout);
    its share a rank keeps the proportion of the checkpoint's components.
    """
    model = request.model
    components = model.components
    kv_heads = model.geometry.num_kv_heads
    on_disk = total_bytes(components) if components else None
    share = rank_bytes(components, kv_heads, tp, attention_tp, pp) if components else None
    how = Provenance.HEADER if model.kind != "catalogue" and "header" in model.weights_how else Provenance.FORMULA
    per_rank: int | None
    if request.weights_bytes is not None:
        per_rank = round(request.weights_bytes * (share / on_disk if share and on_disk else 1 / (tp * pp)))
        total: int | None = request.weights_bytes
        how, note = Provenance.GIVEN, "--weights-bytes"
    else:
        total, per_rank, note = on_disk, share, model.weights_how
    sheet.put("weights_bytes", "weights, one copy", total, "bytes", how, note)
    note = f"TP {tp} x PP {pp}: split by tensor kind; norms, routers, latent down-projections on every rank"
    if attention_tp != tp:
        note += f"; attention over {attention_tp}"
    sheet.put("weights_per_rank_bytes", "weights per rank", per_rank, "bytes", Provenance.FORMULA, note)
    return WeightMemory(total, per_rank)
