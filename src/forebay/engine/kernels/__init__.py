"""Kernel back ends: the interface, the binding of the native library, and the torch fallback.

``load_backend`` returns the one to use; it imports torch, the library and the fallback when called.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.engine.kernels.interface import KernelBackend

__all__ = ["load_backend"]

_log = logging.getLogger(__name__)


def load_backend(
    prefer: str = "auto", *, threads: int | None = None, progress: Callable[[str], None] | None = None
) -> KernelBackend:
    """The back end to compute with.

    Args:
        prefer: ``auto``: the native library, or torch with a warning where it cannot be built; ``native``: the library
            or an error; ``torch``: the fallback; or a variant of the library by name (``amx``, ``avx512_bf16``,
            ``avx2``, ``generic``). ``auto`` follows ``$FOREBAY_KERNELS`` when that is set.
        threads: compute threads, the caller included; default: the CPUs this process may run on.
        progress: called with a line of text at each step of a build.

    Raises:
        UsageError: no such back end, or this machine does not support it.
    """
    from forebay.errors import UsageError

    if prefer == "auto":
        prefer = os.environ.get("FOREBAY_KERNELS") or "auto"
    count = threads or len(os.sched_getaffinity(0))
    if prefer != "torch":
        from forebay.engine.kernels.native_backend import open_native

        backend, reason = open_native(None if prefer in ("auto", "native") else prefer, count, progress)
        if backend is not None:
            return backend
        if prefer != "auto":
            raise UsageError(f"kernels {prefer!r}: {reason}", fix="use `auto`, or `torch` for the slow fallback")
        _log.warning("native kernels are not available (%s): serving with the much slower torch fallback", reason)
    import torch

    from forebay.engine.kernels.torch_fallback import TorchBackend

    torch.set_num_threads(count)
    return TorchBackend()
