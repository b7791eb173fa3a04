"""The servers a benchmark compares, each at its best settings on two cores, started and stopped the same way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.client import run_streams

__all__ = ["Server", "cpu_seconds", "forebay", "llama_cpp", "start", "stop", "tree_rss_bytes", "vllm"]


@dataclass
class Server:
    """A server as a command line; ``extra`` is what its completions request needs beyond OpenAI's fields."""

    name: str
    argv: list[str]
    port: int
    model: str
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    settings: str = ""
    process: subprocess.Popen[bytes] | None = None
    first_token_s: float = 0.0
    log: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def forebay(model: Path, port: int, *flags: str, threads: int = 2) -> Server:
    """Our own embedded server from this environment."""
    argv = [sys.executable, "-m", "forebay.cli", "serve", str(model), "--port", str(port)]
    argv += ["--threads", str(threads), "--served-model-name", "m", *flags]
    return Server("forebay", argv, port, "m", settings=" ".join(argv[5:]))


def llama_cpp(binary: Path, gguf: Path, port: int, *flags: str, slots: int = 32, context: int = 2304) -> Server:
    """llama.cpp's server: continuous batching over ``slots`` of ``context`` tokens, flash attention, both threads."""
    argv = [str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "-t", "2", "-tb", "2"]
    argv += ["-np", str(slots), "-c", str(slots * context), "-b", "2048", "-ub", "512", "-fa", "on", *flags]
    return Server("llama.cpp", argv, port, "m", settings=" ".join(argv[7:]))


def vllm(python: Path, model: Path, port: int, *flags: str, eager: bool = False) -> Server:
    """vLLM's CPU wheel with both cores bound and Intel's OpenMP where its environment has it;
    compiled unless ``eager``.
    """
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--served-model-name", "m", "--max-model-len", "4096", "--no-enable-log-requests"]
    argv += [*(["--enforce-eager"] if eager else []), *flags]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    chosen = " ".join(argv[7:]) + " VLLM_CPU_OMP_THREADS_BIND=0-1"
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)  # vLLM's own log asks for it
        chosen += " LD_PRELOAD=libiomp5.so"
    return Server("vllm", argv, port, "m", env, settings=chosen)


def start(server: Server, log_dir: Path, timeout_s: float = 300) -> None:
    """Launch ``server`` in a session of its own and wait until it has answered one real token."""
    server.log = log_dir / f"{server.name}.log"
    began = time.perf_counter()
    with server.log.open("wb") as log:
        server.process = subprocess.Popen(
            server.argv, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **server.env}
        )
    while time.perf_counter() - began < timeout_s:
        if server.process.poll() is not None:
            tail = server.log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{server.name} exited with {server.process.returncode} while starting:\n{tail}")
        try:
            asyncio.run(run_streams(server.url, server.model, [[1, 2, 3, 4]], 1, server.extra))
        except (OSError, RuntimeError):
            time.sleep(0.05)
            continue
        server.first_token_s = time.perf_counter() - began
        return
    raise RuntimeError(f"{server.name}: no token within {timeout_s:.0f} s; log: {server.log}")


def stop(server: Server) -> None:
    """SIGTERM, then SIGKILL to the server's own session."""
    if server.process is None:
        return
    pid = server.process.pid
    server.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    server.process.wait()


def session_pids(server: Server) -> list[int]:
    """Processes of the server's session."""
    if server.process is None:
        return []
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == server.process.pid:
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def tree_rss_bytes(server: Server) -> int:
    """Proportional resident bytes of the server's processes (shared pages counted once)."""
    total = 0
    for pid in session_pids(server):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def cpu_seconds(server: Server) -> float:
    """CPU time of the server's processes so far."""
    ticks = 0
    for pid in session_pids(server):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def sglang(recipe: Path, model: Path, port: int, device_tokens: int, host_ratio: float) -> Server:
    """SGLang on CPU with HiCache, its host pool ``host_ratio`` times the device pool, in pages of 16 tokens.

    ``recipe``: bin/python, cpu/launch.py and cpu/stubs (its copy functions are the recipe's). Without AMX it computes
    with torch alone and binds no threads, so OMP_NUM_THREADS says that both cores work.
    """
    argv = [
        str(recipe / "bin" / "python"),
        str(recipe / "cpu" / "launch.py"),
        "--model-path",
        str(model),
        "--device",
        "cpu",
    ]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--mem-fraction-static", "0.3"]
    argv += ["--max-total-tokens", str(device_tokens), "--enable-metrics", "--enable-cache-report"]
    argv += ["--enable-hierarchical-cache", "--hicache-ratio", f"{host_ratio:.3f}"]
    argv += ["--hicache-write-policy", "write_through", "--hicache-io-backend", "direct", "--page-size", "16"]
    env = {
        "PYTHONPATH": str(recipe / "cpu" / "stubs"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
    }
    return Server("sglang", argv, port, "m", env, settings=" ".join(argv[8:]) + " OMP_NUM_THREADS=2")
