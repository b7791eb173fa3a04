"""The C++ passes over the tree are used where they can be built: falling back without notice would only be slow."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import CachedPage, Edge, Node
from forebay.engine.kernels.native.build import find_compiler


def test_the_passes_are_native_where_a_compiler_and_pythons_headers_are_installed() -> None:
    if find_compiler() is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no C++ compiler, or Python's headers are not installed")
    native = native_radix()
    assert native is not None
    nodes = [Node(None, bytes([page] * 4)) for page in range(5)]
    for page, node in enumerate(nodes):
        node.device = CachedPage(node, 40 + page)
    assert native.on_device(nodes)
    edge = Edge(bytearray(b"".join(node.key for node in nodes)), nodes)
    other = b"\0\0\0\0\1\1\1\1\2\2\2\3"
    assert native.common_prefix_len(edge, other, 0, len(other), 4) == 2
    table = np.zeros(5, dtype=np.int32)
    native.fill_table(nodes, table)
    assert table.tolist() == [40, 41, 42, 43, 44]
