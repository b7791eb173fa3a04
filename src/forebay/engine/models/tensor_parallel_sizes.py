"""Which numbers of ranks a model can be split over."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.errors import UsageError

__all__ = ["check_ranks"]


def check_ranks(tp: int, *, heads: int, kv_heads: int | None, widths: dict[str, int]) -> None:
    """Refuse a number of ranks that does not divide the model.

    Args:
        tp: number of ranks.
        heads: attention heads; each rank has as many.
        kv_heads: KV heads: split, or shared evenly where there are fewer than ranks. None: a latent, on every rank.
        widths: what else is split, by name: MLP and expert columns.

    Raises:
        UsageError: with the numbers that work.
    """

    def works(n: int) -> bool:
        kv = kv_heads is None or kv_heads % n == 0 or n % kv_heads == 0
        return heads % n == 0 and kv and all(width % n == 0 for width in widths.values())

    if works(tp):
        return
    fine = [str(n) for n in range(1, heads + 1) if works(n)]
    kv = "" if kv_heads is None else f", {kv_heads} KV heads"
    also = "".join(f", {width:,} {name}" for name, width in widths.items())
    raise UsageError(
        f"--tp {tp}: a model with {heads} attention heads{kv}{also} cannot be divided over {tp} ranks",
        fix=f"use --tp {' or '.join(fine)}",
        code=Cause.TP_NOT_DIVISIBLE,
    )
