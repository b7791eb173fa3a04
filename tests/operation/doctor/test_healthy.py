"""Nothing is wrong with these: warnings that look like errors, handled failures, cut-off logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.operation.doctor import diagnose, read_text

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
S = "[2026-03-04 10:20:30 TP0] "
V = "(EngineCore_DP0 pid=7) {level} 03-04 10:20:30 [x.py:1] "

LOOKS_BAD = {
    "fd_limit": V.format(level="WARNING")
    + "Found ulimit of 20000 and failed to automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    "no_deep_gemm": V.format(level="WARNING")
    + "Failed to import deep_gemm: ModuleNotFoundError: No module named 'deep_gemm'",
    "c_extension": V.format(level="WARNING")
    + "Failed to import from vllm._C with ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    "nixl": V.format(level="WARNING") + "NIXL is not available",
    "slow_broadcast": V.format(level="INFO")
    + "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work.",
    "length_override": V.format(level="WARNING")
    + "User-specified max_model_len (100000) is greater than the derived max_model_len (max_position_embeddings=8192.0). VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution.",
    "swap_space": V.format(level="WARNING")
    + "Possibly too large swap space. 4.00 GiB out of the 7.72 GiB total CPU memory is allocated for the swap space.",
    "bad_request": "(APIServer pid=1) ERROR 03-04 10:20:30 [serving_chat.py:200] Error in preprocessing prompt inputs\n(APIServer pid=1) ERROR 03-04 10:20:30 [serving_chat.py:200] Traceback (most recent call last):\n(APIServer pid=1) ERROR 03-04 10:20:30 [serving_chat.py:200] ValueError: This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
    "asgi": 'ERROR:    Exception in ASGI application\nTraceback (most recent call last):\n  File "/v/x.py", line 1, in f\nRuntimeError: boom',
    "import_error": S + "Ignore import error when loading sglang.srt.models.grok: No module named 'cutlass'",
    "allreduce": S
    + "Setup Custom allreduce failed with CUDA error: invalid argument. To silence this warning, specify --disable-custom-all-reduce explicitly.",
    "unbalanced": S
    + "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=1, local_gpu_memory=2",
    "port_moved": S + "Port 30010 is already in use, trying port 30011",
    "handled": S
    + 'HiCache prefetch transfer failed for request a2f75\nTraceback (most recent call last):\n  File "/s/srt/managers/cache_controller.py", line 1181, in _page_transfer\nRuntimeError: pin_memory=True requires a CUDA or other accelerator backend; no pinned memory allocator is available on this system.',
    "deprecated_flag": "[2026-03-04 10:20:30] \x1b[1;33m'--disable-cuda-graph' is deprecated and will be removed in a future release. Use '--cuda-graph-backend-{decode,prefill}=disabled' instead.\x1b[0m",
    "nccl_info": "host:1:1 [0] NCCL INFO NET/IB : No device found; failed to open libibverbs.so",
    "destroy_group": "[rank0]:[W823 09:11:05.020988021 ProcessGroupNCCL.cpp:1624] Warning: WARNING: destroy_process_group() was not called before program exit (function operator())",
    "tracker": "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 5 leaked shared_memory objects to clean up at shutdown",
}
UP = {
    True: '\n[2026-03-04 10:21:00] The server is fired up and ready to roll!\n[2026-03-04 10:21:30] INFO:     10.0.0.1:9 - "POST /generate HTTP/1.1" 200 OK\n',
    False: '\nINFO:     Application startup complete.\nINFO:     10.0.0.1:9 - "POST /v1/completions HTTP/1.1" 200 OK\n',
}


@pytest.mark.parametrize("name", LOOKS_BAD)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_line_that_looks_bad_in_a_healthy_log_is_no_cause(name: str, before: bool) -> None:
    line = LOOKS_BAD[name]
    up = UP["TP0" in line or "sglang" in line]
    start = (
        S + "Load weight begin. avail mem=77.10 GB\n"
        if "TP0" in line
        else "(APIServer pid=1) INFO 03-04 10:20:00 [api_utils.py:286] non-default args: {'model': '/m'}\n"
    )
    answer = diagnose([read_text(start + (line + up if before else up + line))])
    assert answer.cause is None, answer
    assert answer.came_up is True


@pytest.mark.parametrize(
    "name",
    [
        "fd_limit",
        "no_deep_gemm",
        "nixl",
        "slow_broadcast",
        "import_error",
        "allreduce",
        "unbalanced",
        "nccl_info",
        "destroy_group",
        "deprecated_flag",
    ],
)
def test_a_warning_in_a_start_under_way_is_no_cause(name: str) -> None:
    answer = diagnose([read_text(S + "Load weight begin. avail mem=77.10 GB\n" + LOOKS_BAD[name])])
    assert (answer.cause, answer.came_up) == (None, None), answer


@pytest.mark.parametrize(
    "path",
    [
        "sglang/good_start_l3_file.log",
        "sglang/good_start_minimal_flags.log",
        "vllm/start_eager/server.log",
        "vllm/stop_sigterm_drain/server.log",
        "vllm/tp3_bind/server.log",
    ],
)
def test_a_healthy_log_cut_anywhere_has_no_cause(path: str) -> None:
    lines = (CAPTURES / path).read_bytes().decode("utf-8", "replace").split("\n")
    for at in range(1, len(lines), max(1, len(lines) // 12)):
        for part in (lines[:at], lines[at:]):
            answer = diagnose([read_text("\n".join(part))])
            assert answer.cause is None, (at, answer)


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "\x00\x01\x02" * 500, "hello\n", "#\n# cause: bad_flag\n"],
    ids=["empty", "blank", "binary", "text", "notes"],
)
def test_what_is_no_log_has_no_cause(text: str) -> None:
    answer = diagnose([read_text(text)])
    assert (answer.cause, answer.server, answer.came_up) == (None, "unknown", None)
