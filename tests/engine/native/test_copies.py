"""Copies of runs: every way this machine has moves exactly the bytes asked for, whatever their addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.cache.transfer.copier import native_copy_runs
from forebay.engine.kernels.library import best_copy, load_library
from forebay.engine.kernels.native.build import build_library, find_compiler

pytestmark = [pytest.mark.engine, pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")]


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.sampled_from([1, 63, 64, 1000, 1024, 1088, 1100, 4096, 6144]),
    slots=st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True),
    shift=st.sampled_from([0, 0, 16, 1]),
    in_a_row=st.booleans(),
    seed=st.integers(0, 9),
)
def test_exactly_the_runs_move(nbytes: int, slots: list[int], shift: int, in_a_row: bool, seed: int) -> None:
    path = build_library()
    assert path is not None
    library = load_library(path)
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 16 * nbytes, dtype=np.uint8)
    before = rng.integers(0, 256, 16 * nbytes + 192, dtype=np.uint8)
    places = sorted(slots) if in_a_row else slots
    origins = places if in_a_row else rng.permutation(16)[: len(slots)].tolist()
    start = 64 + shift
    expected = before.copy()
    for place, origin in zip(places, origins, strict=True):
        expected[start + place * nbytes :][:nbytes] = source[origin * nbytes :][:nbytes]
    at = np.array([source.ctypes.data + origin * nbytes for origin in origins], dtype=np.int64)
    for way in range(library.fb_copy_way() + 1):
        target = on_a_line(before)
        to = np.array([target.ctypes.data + start + place * nbytes for place in places], dtype=np.int64)
        library.fb_copy_runs(way, to.ctypes.data, at.ctypes.data, len(to), nbytes)
        assert (target == expected).all(), f"way {way}"
    target[:] = before
    native_copy_runs(best_copy(library))(to, at, nbytes)
    assert (target == expected).all()


def on_a_line(values: np.ndarray) -> np.ndarray:
    """A copy that begins on a cache line, where streaming stores may be used."""
    memory = np.empty(len(values) + 64, np.uint8)
    target = memory[-memory.ctypes.data % 64 :][: len(values)]
    target[:] = values
    return target
