"""Every variant of the native library this machine runs, each as a back end of two threads."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forebay.engine.kernels import load_backend  # noqa: E402
from forebay.engine.kernels.library import variants  # noqa: E402
from forebay.engine.kernels.native.build import find_compiler  # noqa: E402
from forebay.engine.kernels.native_backend import NativeBackend  # noqa: E402

_NAMES = variants() if find_compiler() else []


@pytest.fixture(scope="session", params=_NAMES or [pytest.param("none", marks=pytest.mark.skip("no C++ compiler"))])
def native(request: pytest.FixtureRequest) -> NativeBackend:
    backend = load_backend(request.param, threads=2)
    assert isinstance(backend, NativeBackend)
    return backend


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
