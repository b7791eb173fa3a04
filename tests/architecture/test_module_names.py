"""Files that Python can import by their bare name must not hide an installed package.

pytest puts the folder of every test file into ``sys.path``, and ``python FILE`` puts the folder of FILE there. With
``benchmarks/kernels.py`` in such a folder, ``import transformers`` found that file in place of the package ``kernels``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]


def importable_by_bare_name() -> Iterator[Path]:
    """Python files and packages below tests, benchmarks and scripts, but for those that only their package imports."""
    for top in ("tests", "benchmarks", "scripts"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py", "conftest.py") and "stubs" not in path.parts:
                yield path


def test_no_file_hides_an_installed_package_or_a_standard_module() -> None:
    installed = {name for name, owners in packages_distributions().items() if owners != ["forebay"]}
    taken = installed | sys.stdlib_module_names
    assert {"pytest", "json"} <= taken
    hiding = [str(path.relative_to(ROOT)) for path in importable_by_bare_name() if path.stem in taken]
    assert hiding == []


def test_no_two_test_files_have_one_name() -> None:
    """Imported by their bare names, the second would be taken for the first."""
    seen: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("conftest.py", "__init__.py"):
            seen.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in seen.items() if len(paths) > 1} == {}
