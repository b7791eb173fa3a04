"""The operator as one file that a Python on another host can run: a zip archive of the rooms it needs.

The rooms use the standard library only. Python 3.10 is enough: the archive brings what 3.11 added and they use
(``enum.StrEnum``, ``tomllib``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import forebay

__all__ = ["BUNDLED_ROOMS", "Bundle", "make_bundle"]

BUNDLED_ROOMS = (
    "commands", "hostmemory", "kv", "machine", "model", "operation", "planning", "runs", "servers",
)  # fmt: skip
"""Rooms that also run on other hosts; tests/architecture holds them to the standard library."""

_MAIN = """import enum
import sys

if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0])
if not hasattr(enum, "StrEnum"):

    class StrEnum(str, enum.Enum):
        __str__ = str.__str__
        __format__ = str.__format__

        def _generate_next_value_(name, start, count, last_values):
            return name.lower()

    enum.StrEnum = StrEnum

from forebay.commands.host_main import main

main(sys.argv[1:])
"""
_TIME = (2020, 1, 1, 0, 0, 0)  # the same files give the same bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """The archive; ``digest`` names it on the hosts."""

    data: bytes
    digest: str


@functools.cache
def make_bundle() -> Bundle:
    """Pack the rooms of this installation."""
    root = Path(forebay.__file__).parent
    files = {f"forebay/{path.name}": path for path in root.glob("*.py")}
    for room in BUNDLED_ROOMS:
        found = (path for path in (root / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        files |= {f"forebay/{path.relative_to(root)}": path for path in found}
    files |= _tomllib()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _TIME), _MAIN, zipfile.ZIP_DEFLATED)
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _TIME), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    data = packed.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest()[:24])


def _tomllib() -> dict[str, Path]:
    """The standard library's own parser, for a Python that does not have it yet."""
    spec = importlib.util.find_spec("tomllib")
    if spec is None or spec.origin is None:
        return {}
    return {f"tomllib/{path.name}": path for path in Path(spec.origin).parent.glob("*.py")}
