"""The house rules as tests: who may import whom, who may look at the machine, and that the operator needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from forebay.remote.agent_bundle import BUNDLED_ROOMS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forebay"
OPERATOR = (
    "cli",
    "commands",
    "compiler",
    "hostmemory",
    "kv",
    "machine",
    "model",
    "planning",
    "remote",
    "runs",
    "servers",
    "operation",
    "workload",
)

# docs/architecture.md: imports follow the arrows only; a room may also skip a level downwards
MAY_IMPORT: dict[str, set[str]] = {
    "cli": {"commands", "remote", "operation", "planning", "workload", "runs", "servers", "machine", "model", "kv"},
    "commands": {"operation", "planning", "remote", "runs", "servers", "machine", "model"},
    "remote": {"machine"},
    "operation": {"runs", "servers", "machine", "model"},
    "planning": {"servers", "machine", "model", "kv"},
    "workload": {"runs", "servers", "machine", "model"},
    "runs": {"machine"},
    "servers": {"machine", "model"},
    "machine": {"hostmemory"},
    "hostmemory": set(),
    "compiler": set(),
    "model": set(),
    "kv": {"model"},
    "engine": {"model", "kv", "hostmemory", "compiler"},
}
SHARED = {"errors", "causes", "json_records", "sizes", "paths", "__version__"}

# Creates its shared memory in /dev/shm
ENGINE_LOOKS = {"engine/cache/host/region.py"}
MACHINE_FILES = ("/proc", "/sys/", "/dev/shm")
MACHINE_MODULES = {"socket", "psutil", "pynvml"}


def modules(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (SOURCE / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, in functions too;
    names imported from ``forebay`` count as its modules.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "forebay":
                yield from ((node.lineno, f"forebay.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE)}:{line}"


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_follow_the_arrows(room: str) -> None:
    allowed = MAY_IMPORT[room] | {room} | SHARED
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules(room)
        for line, name in imports(path)
        if name.startswith("forebay.") and name.split(".")[1] not in allowed
    ]
    assert wrong == []


def test_every_room_has_its_arrows() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert rooms == set(MAY_IMPORT)


LOOKS = {
    "open", "Path", "PurePath", "read", "read_bytes", "read_text", "tail", "listdir", "readlink", "stat", "statvfs",
    "space", "exists", "glob", "scandir", "walk", "unlink", "remove",
}  # fmt: skip
PROCESS_CALLS = {"kill", "killpg", "pidfd_open", "getpgid"}


def begins(node: ast.AST | None) -> str:
    """What a string or the first part of an f-string says; prose in messages is not looked at, only paths in calls."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def looks_at_the_machine(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that look into /proc, /sys or /dev/shm, paths kept for such calls, and calls on other processes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in LOOKS:
                yield from ((node.lineno, begins(arg)) for arg in node.args if begins(arg).startswith(MACHINE_FILES))
            on_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "os"
            if on_os and name in PROCESS_CALLS:
                yield node.lineno, f"os.{name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            text = begins(node.value) if isinstance(node.value, ast.Constant) else ""
            if text.startswith(MACHINE_FILES) and " " not in text:
                yield node.lineno, text


def test_only_machine_looks_at_the_machine() -> None:
    wrong = []
    for path in modules(*(set(MAY_IMPORT) - {"machine", "hostmemory", "engine"})):
        found = looks_at_the_machine(ast.parse(path.read_text(encoding="utf-8")))
        wrong += [f"{where(path, line)} {what!r}" for line, what in found]
        wrong += [f"{where(path, line)} imports {name}" for line, name in imports(path) if name in MACHINE_MODULES]
    for path in modules("engine"):  # it may signal its own children
        if str(path.relative_to(SOURCE)) not in ENGINE_LOOKS:
            found = looks_at_the_machine(ast.parse(path.read_text(encoding="utf-8")))
            wrong += [f"{where(path, line)} {what!r}" for line, what in found if not what.startswith("os.")]
    assert wrong == []


def test_the_test_above_finds_what_it_forbids() -> None:
    source = (
        "import os\nS = '/dev/shm'\nopen('/proc/1/stat')\nm.read(f'/sys/{x}')\nos.kill(1, 9)\n"
        "print('/proc is a folder')\n"
    )
    assert [line for line, _ in looks_at_the_machine(ast.parse(source))] == [2, 3, 4, 5]


def test_the_operator_and_the_workloads_import_without_torch_or_any_engine_package() -> None:
    """Every module in one process in which the extras' packages cannot be found."""
    names = [
        ".".join(("forebay", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in modules(*OPERATOR)
        if path.name != "__main__.py"
    ]
    script = f"""
import importlib, sys
blocked = {{"torch", "transformers", "safetensors", "tokenizers", "gguf", "jinja2", "starlette", "uvicorn"}}
blocked |= {{"zmq", "prometheus_client"}}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{{name}} is no part of the operator", name=name)
sys.meta_path.insert(0, Block())
failed = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed.append(f"{{name}}: {{error}}")
print("\\n".join(failed))
print("engine:", sorted(name for name in sys.modules if name.startswith("forebay.engine")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "engine: []"]


def test_what_is_sent_to_other_hosts_needs_nothing_but_python_3_10() -> None:
    """Standard library only (the exceptions are used where they are installed), and no newer syntax."""
    allowed = set(sys.stdlib_module_names) | {"forebay", "sre_constants", "sre_parse"}
    wrong = []
    for path in modules(*BUNDLED_ROOMS):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
        wrong += [
            f"{where(path, line)} imports {name}"
            for line, name in imports(path)
            if name.split(".")[0] not in allowed
            and (path.name, name) not in {("nvml.py", "pynvml"), ("scan_log.py", "re2"), ("read_log.py", "zstandard")}
        ]
    assert wrong == []


def test_the_rooms_that_are_sent_to_other_hosts_import_no_other_room() -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules(*BUNDLED_ROOMS)
        for line, name in imports(path)
        if name.startswith("forebay.") and name.split(".")[1] not in {*BUNDLED_ROOMS, *SHARED}
    ]
    assert wrong == []


def test_a_plain_install_brings_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heavy = ("torch", "transformers", "safetensors", "tokenizers", "ray", "vllm", "sglang")
    assert [item for item in project["dependencies"] if item.split(">")[0].split("=")[0].strip() in heavy] == []
    assert any(item.startswith("torch") for item in project["optional-dependencies"]["engine"])


def module_name(path: Path) -> str:
    return ".".join(("forebay", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module -> modules it imports, anywhere in the file: at the top, in functions and under TYPE_CHECKING."""
    names = {module_name(path) for path in SOURCE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {
                    full if (full := f"{node.module}.{alias.name}") in names else node.module for alias in node.names
                }
        graph[module_name(path)] = (found & names) - {module_name(path)}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The circles of a graph; a node in several circles is named in one of them."""
    sorter = TopologicalSorter({node: set(following) for node, following in graph.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        rest = {node: following - {circle[0]} for node, following in graph.items() if node != circle[0]}
        return [circle, *cycles(rest)]
    return []


def sibling_graphs(graph: dict[str, set[str]]) -> dict[str, dict[str, set[str]]]:
    """Folder -> (sub-folder -> sub-folders beside it that anything in it imports)."""
    folders = {module_name(path.parent / "__init__.py") for path in SOURCE.rglob("*.py")}
    result: dict[str, dict[str, set[str]]] = {}
    for importer, following in graph.items():
        for imported in following:
            ours, theirs = importer.split("."), imported.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            pair = [".".join(parts[: shared + 1]) for parts in (ours, theirs)]
            if pair[0] != pair[1] and all(name in folders for name in pair):
                siblings = result.setdefault(".".join(ours[:shared]), {})
                siblings.setdefault(pair[0], set()).add(pair[1])
                siblings.setdefault(pair[1], set())
    return result


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(import_graph()) == []


def test_no_folder_imports_itself_through_the_folders_beside_it() -> None:
    found = {folder: circles for folder, graph in sibling_graphs(import_graph()).items() if (circles := cycles(graph))}
    assert found == {}


def test_the_two_tests_above_find_circles() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    graph = {"forebay.kv.spec": {"forebay.model.hub"}, "forebay.model.source": {"forebay.kv.pool_sizes"}}
    assert cycles(sibling_graphs(graph)["forebay"]) != []


def test_a_public_class_name_means_one_thing() -> None:
    """Not counted: a type that a folder's ``__init__`` exports again."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_is_too_long_to_read() -> None:
    """docs: one noun a file, 150 to 400 lines; at 500 it must be split."""
    long = {
        str(path.relative_to(SOURCE)): count
        for path in SOURCE.rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert long == {}
