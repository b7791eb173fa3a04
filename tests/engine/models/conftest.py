"""The kernel back ends that the model tests run on."""

import pytest


@pytest.fixture(scope="session", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> object:
    """Both kernel back ends; the native one where it can be built."""
    return _load(request.param, 1)


@pytest.fixture(scope="session")
def native() -> object:
    """The native back end: the one that promises the same bits whatever the batch."""
    return _load("native", 2)


def _load(name: str, threads: int) -> object:
    from forebay.engine.kernels import load_backend
    from forebay.errors import UsageError

    try:
        return load_backend(name, threads=threads)
    except UsageError as error:
        pytest.skip(str(error))
