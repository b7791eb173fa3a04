"""Why a log's pool differs from the prediction: the usual mistakes, each tried as a ratio."""

from __future__ import annotations

from forebay.model.geometry import LayerKind, ModelGeometry
from forebay.planning.log_check.figures import Figures, LoggedPool
from forebay.planning.log_check.report import Difference, PoolCheck
from forebay.sizes import GB, GIB

__all__ = ["explain"]

_CLOSE = 0.01


def explain(
    check: PoolCheck, logged: LoggedPool, figures: Figures, geometry: ModelGeometry, tp: int, *, dtype_said: bool
) -> Difference:
    """The explanation of a pool that is off by more than 1 %.

    Args:
        dtype_said: log or user name the KV dtype: where a factor of two can be either, that is then the likelier
            mistake.
    """
    assert check.predicted_tokens is not None
    real = logged.size_bytes / logged.tokens
    what, text = _cause(real, check, logged, figures, geometry, tp, dtype_said)
    return Difference(
        check.name, what, check.tokens, check.predicted_tokens, round(check.predicted_tokens / check.tokens, 4), text
    )


def _cause(
    real: float,
    check: PoolCheck,
    logged: LoggedPool,
    figures: Figures,
    geometry: ModelGeometry,
    tp: int,
    dtype_said: bool,
) -> tuple[str, str]:
    each = check.bytes_per_token or 1
    low, high = (logged.size_bytes - logged.slack_bytes) / each, (logged.size_bytes + logged.slack_bytes) / each
    if low <= logged.tokens <= high:
        return "rounding", f"within the printed digits: {low:,.0f} to {high:,.0f} tokens would print as these bytes"
    hybrid = len({layer.kind for layer in geometry.layers if layer.kind is not LayerKind.SHARED}) > 1
    if figures.server == "vllm" and hybrid:
        return "hybrid_groups", (
            "for hybrid models vLLM prints concurrency x max_model_len: no cost a token can be read from it; the "
            "groups' "
            "blocks depend on batch size and speculative settings the log does not carry"
        )
    for factor, what, text in _tries(each, geometry, tp, dtype_said):
        if abs(real / each / factor - 1) < _CLOSE:
            return what, text
    return "other_model", (
        f"the log's pool has {real:,.0f} B a token, this model {each:,} B: another model, TP or KV dtype than the log's"
    )


def _tries(each: int, geometry: ModelGeometry, tp: int, dtype_said: bool) -> list[tuple[float, str, str]]:
    """(bytes a token in the log / ours, code, sentence) of each usual mistake, the likelier first."""
    layers = len(geometry.layers)
    dtype = [
        (0.5, "dtype", "the log's pool has half the bytes a value: KV in fp8; give --kv-dtype fp8_e4m3"),
        (2.0, "dtype", "the log's pool has twice the bytes a value: KV in bf16 and not fp8"),
    ]
    other = [
        (GIB / GB, "wrong_unit", "the size was printed in GB and is GiB here, or the other way round"),
        (GB / GIB, "wrong_unit", "the size was printed in GiB and is GB here, or the other way round"),
        ((layers + 1) / layers, "draft", "a draft (MTP) layer shares the pool: one layer more a token"),
        (layers / (layers + 1), "draft", "one layer less a token than the model has"),
    ]
    if geometry.is_latent:
        index = sum(layer.index_dim + 4 if layer.index_dim else 0 for layer in geometry.layers)
        if index:
            other.append(((each + index) / each, "indexer", "the sparse-attention index is in the pool's bytes too"))
        return dtype + other
    wanted = max(1, geometry.num_kv_heads // tp)
    ranks = [
        (
            max(1, geometry.num_kv_heads // n) / wanted,
            "tp",
            f"these are the bytes of TP {n}, not TP {tp} (or of another KV dtype)",
        )
        for n in (1, 2, 4, 8, 16)
        if n != tp and max(1, geometry.num_kv_heads // n) != wanted
    ]
    if tp > geometry.num_kv_heads:
        text = f"{geometry.num_kv_heads} KV heads on {tp} ranks are replicated: each rank holds a whole head"
        other.append((geometry.num_kv_heads / tp, "replicated_heads", text))
    return (dtype + ranks if dtype_said else ranks + dtype) + other
