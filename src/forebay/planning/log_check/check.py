"""Recompute a start-up log's numbers from the model's geometry and the bytes the log reports, and explain what differs.

A prediction never uses the tokens the log states: it is bytes // bytes a token, rounded to pages as that server rounds,
or the size or token cap among the logged settings where the printed bytes agree with it.
"""

from __future__ import annotations

from pathlib import Path

from forebay.errors import UsageError
from forebay.model.catalogue import guess
from forebay.model.families import read_geometry
from forebay.model.geometry import ModelGeometry
from forebay.planning.log_check.differences import explain
from forebay.planning.log_check.figures import Figures, LoggedPool, read_figures
from forebay.planning.log_check.report import Difference, LogReport, PoolCheck
from forebay.planning.sglang import device_memory as sglang_memory
from forebay.planning.vllm import device_memory as vllm_memory
from forebay.sizes import GB

__all__ = ["check_log"]

_TOLERANCE = 0.01
# A bare fp8 or fp4 names how weights are packed; these name how a KV value is stored
_KV_NAMES = ("float8", "fp8_", "fp4_", "nvfp4", "mxfp8", "bfloat16", "float16", "float32")


def check_log(
    path: Path,
    *,
    model: str | None = None,
    tp: int | None = None,
    dtype: str | None = None,
    page_size: int | None = None,
) -> LogReport:
    """Read ``path`` and check its pools.

    Args:
        model: a folder, a GGUF file or a name; None: what the log says.
        dtype: of KV values, where neither log nor settings say; a bare ``fp8`` is the weights' and changes nothing
            here.

    Raises:
        UsageError: the log cannot be read, or ``model`` is an incomplete folder.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--from-log: {path} cannot be read: {error.strerror}") from error
    figures = read_figures(text)
    said = figures.settings
    ranks = tp or int(said.get("tp", 1))
    page = page_size or int(said.get("page_size", 0)) or _default_page(figures)
    kv_dtype = said.get("kv_dtype") or (dtype if dtype and dtype.startswith(_KV_NAMES) else None)
    name, geometry = _model(model, figures)
    if geometry is None or ranks < 1 or figures.server == "unknown":
        checks = tuple(PoolCheck(p.name, p.tokens, p.size_bytes, p.line, None, None) for p in figures.pools)
        notes = () if geometry is not None or model is None else (Difference.unknown_model(model),)
        return LogReport(str(path), figures.server, name, ranks, kv_dtype, page, checks, None, notes)
    judge = _check_sglang if figures.server == "sglang" else _check_vllm
    cell, checks, found_dtype = judge(figures, geometry, ranks, page, kv_dtype)
    differences = tuple(
        explain(pool, logged, figures, geometry, ranks, dtype_said=kv_dtype is not None)
        for pool, logged in zip(checks, figures.pools)
        if pool.difference is not None and abs(pool.difference) > _TOLERANCE
    )
    return LogReport(str(path), figures.server, name, ranks, found_dtype, page, checks, cell, differences)


def _default_page(figures: Figures) -> int:
    if figures.server == "vllm":
        return 128 if figures.settings.get("device") == "cpu" else 16
    return 1


def _model(model: str | None, figures: Figures) -> tuple[str | None, ModelGeometry | None]:
    """The model's name and geometry: what the user says, else what the log says."""
    text = model or figures.settings.get("model")
    if not text:
        return None, None
    path = Path(text).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        from forebay.model.source import resolve

        try:
            return text, resolve(text).geometry
        except UsageError:
            if model is not None:
                raise
    entry = guess(text)
    if entry is None:
        return text, None
    overrides = figures.settings.get("overrides") if model is None else None
    config = {**entry.config, **(overrides if isinstance(overrides, dict) else {})}
    return text, read_geometry(config, f"catalogue: {entry.name}")


def _check_sglang(
    figures: Figures, geometry: ModelGeometry, tp: int, page: int, kv_dtype: str | None
) -> tuple[int | None, tuple[PoolCheck, ...], str | None]:
    dp = int(figures.settings.get("dp", 1)) if figures.settings.get("dp_attention") else 1
    attention_tp = max(1, tp // dp)
    size = sglang_memory.cell(geometry, attention_tp, 1, kv_dtype)
    token_bytes = size.full_bytes or size.window_bytes
    if kv_dtype is None and figures.index_bytes and size.index_bytes:
        token_bytes, kv_dtype = _by_index(figures, geometry, size.index_bytes, token_bytes)
    device = [pool for pool in figures.pools if pool.name == "device"]
    checks = []
    for number, pool in enumerate(figures.pools):
        each = token_bytes
        if len(device) > 1 and size.window_bytes and size.full_bytes and pool.name == "device":
            # SWAKVPool builds the window's pool first, then the full one
            window = number == 0
            each = size.window_bytes if window else size.full_bytes
            name = "device_window" if window else "device"
            checks.append(_check(pool, name, each, pool.size_bytes // each // page * page))
            continue
        checks.append(_check(pool, pool.name, each, _sglang_tokens(pool, each, figures, page)))
    reported = token_bytes if not size.window_bytes else size.device_bytes - size.index_bytes
    return reported, tuple(checks), kv_dtype


def _check(pool: LoggedPool, name: str, each: int, predicted: int) -> PoolCheck:
    return PoolCheck(name, pool.tokens, pool.size_bytes, pool.line, each, predicted)


def _by_index(figures: Figures, geometry: ModelGeometry, index: int, default: int) -> tuple[int, str | None]:
    """The KV bytes a token that the index's bytes imply: the index is one byte a value whatever the KV's dtype."""
    host = next((pool for pool in figures.pools if pool.name == "host"), None)
    if host is None or not figures.index_bytes:
        return default, None
    tokens = figures.index_bytes / index
    for name in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):  # fp8_e5m2 here: raw latents, as on AMD and with TileLang
        each = sglang_memory.cell(geometry, 1, 1, name).full_bytes
        if abs(host.size_bytes / each / tokens - 1) < 0.005:
            return each, "fp8 (raw latent)" if name == "fp8_e5m2" else name
    return default, None


def _sglang_tokens(pool: LoggedPool, each: int, figures: Figures, page: int) -> int:
    """The tokens SGLang makes of the pool's bytes."""
    said = figures.settings
    if pool.name == "host":
        size = said.get("hicache_size")
        asked = (
            int(size) * GB if size and abs(int(size) * GB - pool.size_bytes) <= pool.slack_bytes else pool.size_bytes
        )
        return (int(asked // each) // page + 1) * page
    cap = said.get("cap_tokens")
    if cap and abs(int(cap) * each - pool.size_bytes) <= pool.slack_bytes + 2 * page * each:
        return int(cap) // page * page  # --max-total-tokens was below what the memory allows
    return (pool.size_bytes // each - page) // page * page  # the pool has one page more, for padding


def _check_vllm(
    figures: Figures, geometry: ModelGeometry, tp: int, page: int, kv_dtype: str | None
) -> tuple[int | None, tuple[PoolCheck, ...], str | None]:
    found = vllm_memory.groups(geometry, tp, kv_dtype)
    each = vllm_memory.bytes_per_token(found)
    checks = []
    for pool in figures.pools:
        if len(found) == 1:
            predicted = pool.size_bytes // (each * page) * page if pool.name == "device" else pool.size_bytes // each
        else:
            length = int(figures.settings.get("length", 0)) or pool.tokens
            predicted = vllm_memory.pool(found, pool.size_bytes, page, length, 8192).tokens
        checks.append(_check(pool, pool.name, each, predicted))
    return each, tuple(checks), kv_dtype
