"""``forebay plan`` and ``forebay machine`` as commands: exit codes, one-line errors, JSON,
and what they do not import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan_helpers import DATA, GB

SEED = ["kimi-k2.5", "--server", "sglang", "--tp", "8", "--gpus", "8x141GB", "--host-memory", "449GB", "--"]


def forebay(*words: str, width: int = 200) -> subprocess.CompletedProcess[str]:
    script = "from forebay.cli.main import main; main()"
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": str(width), "HOME": "/nonexistent"}
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=env, timeout=60)


def test_the_seed_case_is_refused_and_48_accepted() -> None:
    refused = forebay("plan", *SEED, "--hicache-size", "300")
    assert refused.returncode == 3
    assert "8 × 300 GB = 2,400 GB against 449 GB" in refused.stdout
    assert "host_pool_too_big" in refused.stdout
    accepted = forebay("plan", *SEED, "--hicache-size", "48")
    assert accepted.returncode == 0
    assert "683,061 distinct" in accepted.stdout
    assert "--hicache-size 48" in accepted.stdout


def test_json_has_the_documented_keys() -> None:
    done = forebay("plan", *SEED[:-1], "--json", "--", "--hicache-size", "300")
    data = json.loads(done.stdout)
    assert done.returncode == 3
    assert (data["fits"], data["server"], data["ranks"], data["schema"]) == (False, "sglang", 8, 1)
    assert data["kv_bytes_per_token_per_rank"] == 70_272
    assert data["kv_replicated"] is True
    assert data["host"]["total_bytes"] == 2400 * GB
    assert data["host"]["per_rank_bytes"] == 300 * GB
    assert data["host"]["available_bytes"] == 449 * GB
    assert set(data["problems"][0]) == {"code", "message", "fix"}
    assert isinstance(data["command"], list)
    assert isinstance(data["device"]["kv_tokens"], int)


def test_every_key_of_the_json_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    data = json.loads(forebay("plan", *SEED[:-1], "--json", "--", "--hicache-size", "48").stdout)
    for key in data:
        assert f"`{key}`" in text, key
    for part in ("device", "host"):
        for key in data[part]:
            assert f"`{part}.{key}`" in text, key


def test_explain_shows_the_arithmetic_line_by_line() -> None:
    text = forebay("plan", *SEED[:-1], "--explain", "--", "--hicache-size", "48").stdout
    assert "host pools in total = 384,000,000,000 B" in text
    assert "[formula] 384 GB // 70,272 B" in text


def test_a_narrow_terminal_still_shows_every_number() -> None:
    text = forebay("plan", *SEED, "--hicache-size", "48", width=80).stdout
    assert "683,061" in text
    assert "formula" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "kimi-k2.5", "--host-memory", "449"], "it could be 449GB"),
        (["plan", "kimi-k2.5", "--host-memory", "449XB"], "unknown unit 'XB'"),
        (["plan", "no-such-model"], "'no-such-model' is no folder"),
        (["plan", "/no/such/folder"], "no such folder or file"),
        (["plan", "smollm2", "--gpus", "many"], "'many' is not a size"),
        (["plan", "smollm2", "--gpus", "0x80GB"], "is not a number of GPUs"),
        (["plan", "smollm2", "--tp", "0"], "--tp 0: at least 1 is needed"),
        (["plan", "smollm2", "--machine", "/no/such/file"], "no such file"),
        (["plan", "smollm2", "--server", "sglang", "--", "--hicache-size", "48GB"], "is not a whole number"),
        (["plan", "--from-log", "/no/such.log"], "cannot be read"),
        (["plan"], "which model?"),
    ],
)
def test_bad_input_is_exit_2_and_one_clear_line(words: list[str], said: str) -> None:
    done = forebay(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("  fix:")]) == 1
    assert done.stdout == ""


def test_a_truncated_header_is_one_clear_line(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 10}))
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x10\x00\x00\x00\x00\x00\x00{")
    done = forebay("plan", str(tmp_path))
    assert done.returncode == 2
    assert "not a complete safetensors file" in done.stderr


def test_a_gpu_that_vanished_is_one_clear_line(tmp_path: Path) -> None:
    """NVML lists two GPUs and one of them does not answer, as after an Xid."""
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "class _Memory: total, free = 80 * 10**9, 79 * 10**9\n"
        "def nvmlInit(): pass\n"
        "def nvmlShutdown(): pass\n"
        "def nvmlSystemGetDriverVersion(): return '570'\n"
        "def nvmlDeviceGetCount(): return 2\n"
        "def nvmlDeviceGetHandleByIndex(i):\n"
        "    if i: raise NVMLError('GPU is lost')\n"
        "    return i\n"
        "def nvmlDeviceGetMemoryInfo(h): return _Memory\n"
        "def nvmlDeviceGetUUID(h): return 'GPU-0'\n"
        "def nvmlDeviceGetName(h): return 'H100'\n"
        "def nvmlDeviceGetCudaComputeCapability(h): return (9, 0)\n"
        "def nvmlDeviceGetComputeRunningProcesses(h): raise NVMLError('not supported')\n"
    )
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from forebay.cli.main import main; main()"
    words = [sys.executable, "-c", script, str(tmp_path), "plan", "qwen3-32b", "--server", "sglang", "--tp", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "GPU 1 is listed by the driver but does not answer: GPU is lost" in done.stderr
    assert "Traceback" not in done.stderr
    one = subprocess.run([*words[:4], "machine", "--json"], capture_output=True, text=True, timeout=60)
    readings = json.loads(one.stdout)["gpus"]
    assert [(gpu["free_bytes"], gpu["problem"]) for gpu in readings] == [(79 * 10**9, None), (0, "GPU is lost")]


def test_a_machines_file_stands_for_that_machine(tmp_path: Path) -> None:
    made = forebay("machine", "--json")
    facts = json.loads(made.stdout)
    facts["memory"] |= {"mem_available_bytes": 64 * GB, "total_bytes": 70 * GB, "cgroup": None}
    facts["gpus"] = [{"index": 0, "uuid": "", "name": "X", "total_bytes": 80 * GB, "free_bytes": 80 * GB}]
    path = tmp_path / "box.json"
    path.write_text(json.dumps(facts))
    done = forebay("plan", "qwen3-8b", "--server", "sglang", "--machine", str(path), "--json")
    data = json.loads(done.stdout)
    assert data["host"]["available_bytes"] == 64 * GB
    assert data["device"]["total_bytes"] == 80 * GB
    assert data["how"]["host.available_bytes"].startswith("measured")


def test_from_log_prints_json_with_the_documented_keys() -> None:
    log = DATA / "cases" / "sgl-project_sglang_18263.log"
    done = forebay("plan", "--from-log", str(log), "--model", "qwen3-30b-a3b", "--tp", "1", "--json")
    data = json.loads(done.stdout)
    assert data["reported"]["kv_tokens"] == 1_669_816
    assert data["predicted"]["kv_tokens"] == pytest.approx(1_669_816, rel=0.005)
    assert data["kv_bytes_per_token_per_rank"] == 98_304
    assert data["differences"] == []
    wrong = forebay("plan", "--from-log", str(log), "--model", "qwen3-8b", "--json")
    assert json.loads(wrong.stdout)["differences"]


def test_planning_imports_no_torch_and_nothing_slow() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['forebay', 'plan', 'kimi-k2.5', '--server', 'sglang', '--tp', '8', '--host-memory', '449GB']\n"
        "from forebay.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'aiohttp', 'starlette', 'safetensors', 'gguf'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []"
