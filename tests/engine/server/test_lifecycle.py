"""How the server starts, ends and dies: real processes, real signals, nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from server_process import Answer, ServerProcess, is_alive, left_behind

pytestmark = pytest.mark.engine

LONG = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


def in_background(server: ServerProcess, body: dict[str, object], answers: list[Answer]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    return thread


def ask_and_be_cut_off(server: ServerProcess) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.post("/v1/completions", LONG)


def test_it_says_how_far_it_is_then_limits_its_queue_then_drains(
    smollm2: Path, tmp_path: Path, private_tmp: Path
) -> None:
    server = ServerProcess(
        str(smollm2), tmp_path / "log", "--served-model-name", "smollm2", "--max-running", "1", "--max-queue", "1",
        "--drain-seconds", "200", wait=False,
        tmp=private_tmp,
    )  # fmt: skip
    try:
        stages = set()
        while (health := server.get("/health")).status != 200:
            assert health.status == 503
            assert "ok" not in health.text.lower()
            stages.add(health.json().get("stage"))
            refused = server.post("/v1/completions", LONG)
            assert refused.status in (200, 503)
            assert refused.status == 200 or "ok" not in refused.text.lower()
        assert "loading" in stages
        assert health.json()["status"] == "ok"

        worker = server.worker_pid
        answers: list[Answer] = []
        threads = [in_background(server, LONG, answers) for _ in range(2)]
        server.wait_until(lambda: server.metric("forebay_requests") == 2, "two requests in the engine")
        full = server.post("/v1/completions", LONG)
        assert full.status == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"

        server.process.send_signal(signal.SIGTERM)
        server.wait_for("INFO stopping signal=SIGTERM")
        draining = server.get("/health")
        assert (draining.status, draining.json()["status"]) == (503, "draining")
        assert server.post("/v1/completions", LONG).status == 503
        for thread in threads:
            thread.join()
        assert [answer.status for answer in answers] == [200, 200]
        assert server.process.wait(30) == 0
        assert not is_alive(worker)
        assert "ERROR" not in server.text()
    finally:
        server.kill()
    assert not left_behind(private_tmp)


def slow_to_tokenize(server: ServerProcess, answers: list[Answer]) -> threading.Thread:
    """A request whose text takes seconds to tokenize, begun; the server has accepted its body."""
    body = {"model": server.model_name, "prompt": "the water basin wheel " * 400_000, "max_tokens": 1}
    thread = in_background(server, body, answers)
    server.wait_until(lambda: server.get("/status").json()["http_requests"] == 1, "the request is accepted")
    return thread


@pytest.mark.parametrize(
    ("drain_s", "status", "code"), [(60, 400, "context_length_exceeded"), (0, 503, "shutting_down")]
)
def test_a_request_that_is_still_tokenized_at_sigterm_gets_its_answer_or_a_503(
    drain_s: int, status: int, code: str, tiny_folder: Path, tmp_path: Path
) -> None:
    server = ServerProcess(str(tiny_folder), tmp_path / "log", "--drain-seconds", str(drain_s))
    try:
        answers: list[Answer] = []
        thread = slow_to_tokenize(server, answers)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert [(answer.status, answer.json()["error"]["code"]) for answer in answers] == [(status, code)]
        assert server.process.wait(30) == 0
        assert " ERROR " not in server.text()
    finally:
        server.kill()


def test_a_second_signal_ends_it_at_once(smollm2: Path, tmp_path: Path) -> None:
    server = ServerProcess(str(smollm2), tmp_path / "log", "--served-model-name", "smollm2")
    try:
        worker = server.worker_pid
        answers: list[Answer] = []
        thread = in_background(server, {**LONG, "max_tokens": 2000}, answers)
        server.wait_until(lambda: server.metric("forebay_requests") == 1, "a running request")
        server.process.send_signal(signal.SIGINT)
        server.wait_for("INFO stopping signal=SIGINT")
        assert server.process.poll() is None
        assert server.end(signal.SIGINT) == 130
        thread.join()
        assert answers[0].status == 503
        assert not is_alive(worker)
    finally:
        server.kill()


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_a_killed_front_leaves_no_worker(moment: str, smollm2: Path, tmp_path: Path, private_tmp: Path) -> None:
    server = ServerProcess(
        str(smollm2), tmp_path / "log", "--served-model-name", "smollm2", "--host-cache", "64MB",
        wait=moment == "serving",
        tmp=private_tmp,
    )  # fmt: skip
    try:
        worker = server.worker_pid
        if moment == "serving":
            threading.Thread(target=ask_and_be_cut_off, args=(server,)).start()
            server.wait_until(lambda: server.metric("forebay_requests") == 1, "a running request")
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 10
        while is_alive(worker):
            assert time.monotonic() < deadline, "the worker outlived its front"
            time.sleep(0.02)
    finally:
        server.kill()
    assert not left_behind(private_tmp)


def test_a_killed_worker_ends_the_server_with_a_reason(smollm2: Path, tmp_path: Path, private_tmp: Path) -> None:
    server = ServerProcess(str(smollm2), tmp_path / "log", "--served-model-name", "smollm2", tmp=private_tmp)
    try:
        answers: list[Answer] = []
        thread = in_background(server, LONG, answers)
        server.wait_until(lambda: server.metric("forebay_requests") == 1, "a running request")
        os.kill(server.worker_pid, signal.SIGKILL)
        assert server.process.wait(30) == 4
        thread.join()
        assert answers[0].status == 500
        assert answers[0].json()["error"]["code"] == "engine_dead"
        errors = [line for line in server.text().splitlines() if " ERROR " in line]
        assert len(errors) == 1
        assert "code=worker_killed" in errors[0]
        assert "rank 0 was killed by SIGKILL" in errors[0]
    finally:
        server.kill()
    assert not left_behind(private_tmp)


def test_a_stopped_worker_is_hung_and_a_stopped_client_is_not(smollm2: Path, tmp_path: Path) -> None:
    server = ServerProcess(str(smollm2), tmp_path / "log", "--rank-timeout", "3")
    try:
        time.sleep(3.5)  # an idle worker beats
        assert server.get("/health").status == 200
        os.kill(server.worker_pid, signal.SIGSTOP)
        assert server.process.wait(30) == 6
        assert "code=engine_hung" in server.text()
    finally:
        server.kill()


def run_to_exit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forebay.engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_to_exit("smollm2", "--port", str(port))
    assert ended.returncode == 3
    lines = ended.stderr.splitlines()
    assert len(lines) == 1
    assert "code=port_in_use" in lines[0]
    assert f"--port {port + 1}" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["/no/such/model"], 2, "no such folder"),
        (["smollm2", "--host-cache", "300"], 2, "300GiB"),
        (["smollm2", "--disk-cache", "/tmp/x"], 2, "--disk-size"),
        (["smollm2", "--no-such-flag"], 2, "no-such-flag"),
        (["smollm2", "--context-length", "9000"], 3, "ctx_too_long_for_model"),
        (["smollm2", "--context-length", "8000", "--device-cache", "20MB"], 3, "ctx_too_long_for_kv"),
        (["smollm2", "--device-cache", "1KB"], 3, "no_window"),
        (["smollm2", "--host-cache", "900TB"], 3, "host_pool_too_big"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: list[str], code: int, says: str, smollm2: Path) -> None:
    arguments = [str(smollm2) if word == "smollm2" else word for word in arguments]
    ended = run_to_exit(*arguments, "--port", "0")
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert sum(" ERROR " in line for line in ended.stderr.splitlines()) <= 1


def test_an_api_key_guards_all_but_health_and_metrics(smollm2: Path, tmp_path: Path) -> None:
    server = ServerProcess(str(smollm2), tmp_path / "log", "--api-key", "s3cret", "--log-format", "text")
    try:
        assert server.get("/health").status == 200
        assert server.get("/metrics").status == 200
        for path in ("/v1/models", "/server_info", "/cache", "/status", "/health_generate"):
            wrong = server.get(path)
            assert (wrong.status, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
            assert server.get(path, authorization="Bearer s3cret").status == 200
        assert server.post("/flush_cache").status == 401
        assert "s3cret" not in server.get("/server_info", authorization="Bearer s3cret").text
        assert "s3cret" not in server.text()
        worker_environment = Path(f"/proc/{server.worker_pid}/cmdline").read_text()
        assert "s3cret" not in worker_environment
        assert server.end() == 0
    finally:
        server.kill()


def test_the_api_server_imports_neither_torch_nor_transformers(smollm2: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "import forebay.engine.__main__, forebay.engine.api.api_server\n"
        "from forebay.engine.api.service import ModelTextAssets\n"
        "text = ModelTextAssets(pathlib.Path(sys.argv[1]))\n"
        "text.codec.encode(text.template.render([{'role': 'user', 'content': 'x'}]), add_special_tokens=False)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(smollm2)], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("format", [["--log-format", "json"], ["--log-format=json"]])
@pytest.mark.parametrize(
    ("wrong", "event"),
    [(["--port", "0"], "died"), (["--host-cache", "300"], "refused"), (["--no-such-flag"], "refused")],
)
def test_json_logs_are_one_object_per_line(format: list[str], wrong: list[str], event: str) -> None:
    ended = run_to_exit("/no/such/model", *wrong, *format)
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [entry["event"] for entry in events if entry["level"] == "ERROR"] == [event]


def test_a_word_json_elsewhere_is_not_the_log_format() -> None:
    ended = run_to_exit("json", "--host-cache", "300")
    assert " ERROR refused " in ended.stderr


SIGNALS_WHILE_SPAWNING = """
import os, signal, subprocess, sys
from forebay.engine.api.worker_processes import WorkerGroup
from forebay.engine.config import EngineConfig, ModelConfig
from forebay.engine.ipc.sockets import Endpoints

WORKER = '''
import sys, time
from forebay.engine.worker.start import ignore_stop_signals
sys.stdin.readline()
ignore_stop_signals()
print("alive", flush=True)
'''
seen = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: seen.append(signal.Signals(number).name))

class Interrupted(subprocess.Popen):
    def __init__(self, *args, **options):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        super().__init__([sys.executable, "-c", WORKER], **options)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.send_signal(number)
        assert seen == [], "handled before the process exists"

subprocess.Popen = Interrupted
group = WorkerGroup(EngineConfig(model=ModelConfig(model="x")), Endpoints("/nowhere"), None)
group.spawn(0)
print(sorted(seen), flush=True)
group.end(30)
"""


def test_a_stop_signal_while_a_worker_starts_is_kept_and_the_worker_is_not_hit() -> None:
    """Signals in the very moment of the start: this process handles them right after it,
    the new one never sees its own.
    """
    command = [sys.executable, "-c", SIGNALS_WHILE_SPAWNING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert sorted(ended.stdout.splitlines()) == ["['SIGINT', 'SIGTERM']", "alive"], ended.stderr


def test_sigterm_before_the_server_is_set_up_ends_it_in_order(smollm2: Path, tmp_path: Path, private_tmp: Path) -> None:
    server = ServerProcess.__new__(ServerProcess)
    server.log = tmp_path / "log"
    command = [sys.executable, "-m", "forebay.engine", str(smollm2), "--port", "0"]
    with server.log.open("wb") as out:
        server.process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"TMPDIR": str(private_tmp)}
        )
    server.wait_until(lambda: list(private_tmp.glob("forebay-ipc-*/lock")), "the sockets' folder")
    assert server.end() == 0
    server.wait_until(lambda: not left_behind(private_tmp), "nothing is left")
