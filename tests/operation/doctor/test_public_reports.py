"""Starts that failed for people who reported it: the last words of each, in the shape of that server's log.

Written after the reports named with each (the messages are the servers' own; the logs around them are reconstructed). Not
knowing is allowed where no rule can know; a wrong cause never is.
"""

from __future__ import annotations

import pytest

from forebay.operation.doctor import diagnose, read_text

_SGLANG = "[2026-03-04 10:00:00] server_args={'model_path': '/m', 'tp_size': 8}\n"
_LOADING = "[2026-03-04 10:00:40 TP0] Load weight begin. avail mem=77.10 GB\n"


def scheduler(
    message: str,
    frames: str = '  File "/sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py", line 2580, in run_scheduler_process\n    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank)\n',
    rank: str = "TP0",
) -> str:
    return f"[2026-03-04 10:01:00 {rank}] Scheduler hit an exception: Traceback (most recent call last):\n{frames}{message}\n\n[2026-03-04 10:01:01] Received sigquit from a child process. It usually means the child failed.\n"


_VLLM = "(APIServer pid=100) INFO 03-04 10:00:00 [utils.py:233] non-default args: {'model': '/m'}\n(EngineCore_DP0 pid=120) INFO 03-04 10:00:10 [core.py:93] Initializing a V1 LLM engine (v0.12.0) with config: model='/m', speculative_config=None\n"


def core(message: str, frames: str = "") -> str:
    prefix = "(EngineCore_DP0 pid=120) ERROR 03-04 10:00:37 [core.py:866] "
    lines = [
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "/v/vllm/v1/engine/core.py", line 857, in run_engine_core',
        "    engine_core = EngineCoreProc(*args, **kwargs)",
        *frames.split("\n"),
        *message.split("\n"),
    ]
    tail = '(APIServer pid=100) Traceback (most recent call last):\n(APIServer pid=100)   File "/v/vllm/v1/engine/utils.py", line 900, in wait_for_engine_startup\n(APIServer pid=100) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n'
    return "".join(prefix + line + "\n" for line in lines if line) + tail


def worker(message: str, frames: str = "") -> str:
    prefix = "(Worker_TP1 pid=131) ERROR 03-04 10:00:36 [multiproc_executor.py:857] "
    lines = [
        "WorkerProc failed to start.",
        "Traceback (most recent call last):",
        *frames.split("\n"),
        *message.split("\n"),
    ]
    return "".join(prefix + line + "\n" for line in lines if line) + core(
        "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
    )


_USAGE = "usage: launch_server.py [-h] --model-path MODEL_PATH [--tokenizer-path TOKENIZER_PATH]\n                        [--enable-metrics] [--reasoning-parser {a,b}] [--disable-radix-cache]\n"
REPORTS: list[tuple[str, str, set[str | None]]] = [
    (
        "sgl-project/sglang#5032",
        _USAGE + "launch_server.py: error: unrecognized arguments: --enable_metrics\n",
        {"bad_flag"},
    ),
    (
        "sgl-project/sglang#12818",
        _USAGE + "launch_server.py: error: unrecognized arguments: --reasoning_parser kimi_k2\n",
        {"bad_flag"},
    ),
    (
        "sgl-project/sglang#4116",
        _USAGE + "launch_server.py: error: unrecognized arguments: --enable-reasoning\n",
        {"flag_renamed", "bad_flag"},
    ),
    ("sgl-project/sglang#34226", "error: unrecognized arguments: --served-model-name minimax-h3\n", {"bad_flag"}),
    (
        "radixark/miles_diffusion#99",
        "ValueError: Removed server argument(s): warmup -> warmup_mode=request or warmup_mode=off\nray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task\n",
        {"flag_renamed"},
    ),
    ("areal#428", "launch_server.py: error: unrecognized arguments: --max-loaded-loras 1\n", {"bad_flag"}),
    (
        "sgl-project/sglang#6005",
        _SGLANG
        + _LOADING
        + "[2026-03-04 10:01:00] The server is fired up and ready to roll!\nException in thread Thread-3 (load_thread_func_layer_by_layer):\nTraceback (most recent call last):\n  File \"/usr/lib/python3.12/threading.py\", line 1075, in _bootstrap_inner\n    self.run()\n  File \"/s/sglang/srt/mem_cache/memory_pool.py\", line 955, in load\n    x = self.start_layer\nAttributeError: 'MHATokenToKVPoolHost' object has no attribute 'start_layer'\n",
        {"engine_bug", None, "unknown"},
    ),
    (
        "Ascend/sglang#335",
        _SGLANG
        + _LOADING
        + scheduler(
            "ValueError: Unsupported io_backend: kernel_ascend.",
            '  File "/s/sglang/srt/mem_cache/memory_pool_host.py", line 300, in backup\n    raise ValueError(f"Unsupported io_backend: {io_backend}")\n',
        ),
        {"hicache_kernel_unsupported", "bad_flag", "unknown"},
    ),
    (
        "sgl-project/sglang#28396",
        _SGLANG
        + _LOADING
        + scheduler(
            "RuntimeError: cudaMemcpyBatchAsync failed (invalid argument)",
            '  File "/s/sglang/srt/mem_cache/memory_pool_host.py", line 300, in load_to_device_per_layer\n    transfer_kv_direct(\n',
        ),
        {"engine_bug", "hicache_kernel_unsupported", "unknown", "cuda_driver_mismatch"},
    ),
    (
        "sgl-project/sglang#10408",
        _SGLANG
        + _LOADING
        + '[2026-03-04 10:01:00] The server is fired up and ready to roll!\n[2026-03-04 10:05:00] INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        + scheduler(
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. self.req_to_token_pool.available_size()=1, num_reqs=2,",
            '  File "/s/sglang/srt/managers/scheduler.py", line 900, in event_loop_overlap\n    batch = self.get_next_batch_to_run()\n',
        ).replace("10:01:0", "10:09:0"),
        {"engine_bug", "unknown", "kv_pool_collapsed"},
    ),
    (
        "sgl-project/sglang#7691",
        _SGLANG
        + "[2026-03-04 10:01:58 DP0 TP0] Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=21.73 GB, mem usage=166.59 GB.\n[2026-03-04 10:01:59 DP0 TP0] max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled value instead.\n"
        + scheduler(
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", rank="DP0 TP0"
        ).replace("10:01", "10:02"),
        {"weights_exceed_static"},
    ),
    (
        "sgl-project/sglang#9452",
        _SGLANG
        + scheduler(
            "AttributeError: 'ChunkCache' object has no attribute 'check_hicache_events'",
            '  File "/s/sglang/srt/managers/scheduler.py", line 1400, in get_new_batch_prefill\n    self.tree_cache.check_hicache_events()\n',
        ),
        {"engine_bug", "flag_conflict", "unknown"},
    ),
    (
        "sgl-project/sglang#26258",
        _SGLANG
        + _LOADING
        + '[2026-03-04 10:01:00] The server is fired up and ready to roll!\n[2026-03-04 10:05:00] INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n[2026-03-04 11:05:00 TP3] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n[2026-03-04 11:05:01 TP3] Pyspy dump for PID 300:\nThread 300 (active): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:2810)\n    check_hicache_events (sglang/srt/mem_cache/hiradix_cache.py:500)\n[2026-03-04 11:05:06] Received sigquit from a child process. It usually means the child failed.\n[2026-03-04 11:05:06] kill_process_tree called: parent_pid=1, include_parent=True, pid=1\n',
        {"engine_hung", "health_stall", "unknown"},
    ),
    (
        "sgl-project/sglang#5372",
        _SGLANG
        + "[2026-03-04 10:00:40 TP0] Load weight end. type=X, avail mem=20.10 GB\n[2026-03-04 10:00:44 TP0] Allocating 120.00 GB host memory for hierarchical KV cache.\n"
        + scheduler(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is free. Process 1 has 78.00 GiB memory in use.",
            '  File "/s/sglang/srt/model_executor/cuda_graph_runner.py", line 420, in capture\n    ) = self.capture_one_batch_size(bs, forward)\n',
        ),
        {"cudagraph_oom", "runtime_or_init_oom"},
    ),
    (
        "LMCache#2306",
        _VLLM
        + core(
            "ValueError: vllm model for vllm-instance not found.",
            '  File "/l/lmcache/v1/compute/models/utils.py", line 30, in get_model\n    raise ValueError(f"vllm model for {instance_id} not found.")',
        ),
        {"engine_bug", "unknown", "connector_unsupported", "dependency_missing"},
    ),
    (
        "LMCache#1662",
        _VLLM
        + core(
            "ImportError: cannot import name 'KVConnectorBase_V1' from 'vllm.distributed.kv_transfer.kv_connector.v1.base' (/v/vllm/distributed/kv_transfer/kv_connector/v1/base.py)"
        ),
        {"dependency_missing"},
    ),
    (
        "LMCache#4267",
        _VLLM
        + core(
            "zmq.error.ZMQError: Invalid argument (addr='tcp://tcp://10.0.0.1:5555')",
            '  File "zmq/backend/cython/_zmq.py", line 1030, in connect',
        ),
        {"unknown", "bad_flag", "bind_failed", "engine_bug"},
    ),
    (
        "vllm#39774",
        _VLLM
        + worker(
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            '  File "/v/vllm/distributed/device_communicators/pynccl.py", line 99, in __init__\n    self.comm: ncclComm_t = self.nccl.ncclCommInitRank(',
        ),
        {"nccl_error"},
    ),
    (
        "vllm#32653",
        _VLLM
        + worker(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 31.36 GiB of which 120.00 MiB is free. Including non-PyTorch memory, this process has 30.90 GiB memory in use.",
            '  File "/v/vllm/model_executor/model_loader/gguf_loader.py", line 320, in load_model\n    model = initialize_model(vllm_config=vllm_config)\n  File "/v/vllm/model_executor/layers/fused_moe/layer.py", line 500, in create_weights\n    w = torch.empty(',
        ),
        {"gpu_too_small"},
    ),
    (
        "vllm#43884",
        _VLLM
        + '(APIServer pid=100) INFO:     Application startup complete.\n(APIServer pid=100) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n(EngineCore_DP0 pid=120) ERROR 03-04 11:00:37 [core.py:866] EngineCore encountered a fatal error.\n(EngineCore_DP0 pid=120) ERROR 03-04 11:00:37 [core.py:866] Traceback (most recent call last):\n(EngineCore_DP0 pid=120) ERROR 03-04 11:00:37 [core.py:866]   File "/v/vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py", line 300, in update_state_after_alloc\n(EngineCore_DP0 pid=120) ERROR 03-04 11:00:37 [core.py:866]     assert num_blocks >= num_cached\n(EngineCore_DP0 pid=120) ERROR 03-04 11:00:37 [core.py:866] AssertionError\n(APIServer pid=100) ERROR 03-04 11:00:38 [async_llm.py:500] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n',
        {"engine_bug", "assertion"},
    ),
    (
        "kvcached#267",
        _VLLM
        + core(
            "ValueError: too many values to unpack (expected 2)",
            '  File "/k/kvcached/integration/vllm/patches.py", line 193, in _patched_engine_init\n    return original_init(self, vllm_config, *args, **kwargs)',
        ),
        {"engine_bug", "unknown", "dependency_missing"},
    ),
    (
        "vllm-ascend#5948",
        _VLLM + core("AttributeError: 'NoneType' object has no attribute 'kv_connector_extra_config'"),
        {"engine_bug", "unknown"},
    ),
    (
        "vllm#26206",
        _VLLM
        + core(
            "AssertionError: Cannot re-initialize the input batch when CPU weight offloading is enabled. See https://github.com/vllm-project/vllm/pull/18298 for more details."
        ),
        {"assertion", "flag_conflict", "engine_bug"},
    ),
    (
        "LMCache#1998",
        _VLLM
        + worker(
            "RuntimeError: CUDA error: invalid argument\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
            '  File "/l/lmcache/v1/memory_management.py", line 700, in _allocate_cpu_memory\n    lmc_ops.alloc_pinned_ptr(size, 0)',
        ),
        {"pin_failed"},
    ),
    (
        "production-stack#407",
        _VLLM + core("AssertionError: LMCache is only supported with prefix caching / chunked prefill"),
        {"assertion", "flag_conflict", "engine_bug"},
    ),
    (
        "vllm#10626",
        _VLLM
        + '(VllmWorkerProcess pid=252) ERROR 08-23 08:25:25 multiproc_worker_utils.py:226] Exception in worker VllmWorkerProcess while processing method init_device: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), Traceback (most recent call last):\n(VllmWorkerProcess pid=252) ERROR 08-23 08:25:25 multiproc_worker_utils.py:226]   File "/v/vllm/executor/multiproc_worker_utils.py", line 223, in _run_worker_process\n(VllmWorkerProcess pid=252) ERROR 08-23 08:25:25 multiproc_worker_utils.py:226] RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n',
        {"nccl_error"},
    ),
    (
        "sglang#8102",
        _SGLANG
        + _LOADING
        + scheduler(
            "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free. Please reduce the size of the hierarchical cache."
        ),
        {"host_pool_too_big"},
    ),
    (
        "sglang#28027",
        _SGLANG
        + _LOADING
        + scheduler("ValueError: Not enough host memory for SharedMLA. Need 300.00 GB, have 120.00 GB."),
        {"host_pool_too_big"},
    ),
    (
        "ninfer#25",
        "FATAL server failed during startup | cudaMallocHost failed: cudaErrorMemoryAllocation: out of memory\n",
        {"pin_failed", "unknown", None},
    ),
    (
        "ninfer#45",
        "failed to reserve the host KV cache: cudaMallocHost failed to pin 8192 MiB of host memory (this is system RAM, not VRAM): cudaErrorAlreadyMapped: resource already mapped\n",
        {"pin_failed", "unknown", None},
    ),
    (
        "sglang#7666",
        _SGLANG
        + _LOADING
        + scheduler(
            "RuntimeError: CUDA error: invalid argument",
            '  File "/sgl-workspace/sglang/python/sglang/srt/mem_cache/memory_pool_host.py", line 87, in __init__\n    self.kv_buffer = self.init_kv_buffer()\n  File "/sgl-workspace/sglang/python/sglang/srt/mem_cache/memory_pool_host.py", line 240, in init_kv_buffer\n    return torch.empty(\n',
        ),
        {"pin_failed"},
    ),
    (
        "vllm#10439",
        "".join(
            "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] " + line + "\n"
            for line in [
                '  File "/v/vllm/worker/worker.py", line 493, in raise_if_cache_size_invalid',
                '    raise ValueError("No available memory for the cache blocks. "',
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
            ]
        ),
        {"weights_exceed_static"},
    ),
    (
        "QAnything#302",
        "INFO 04-27 10:11:03 llm_engine.py:70] Initializing an LLM engine with config: model='/m'\nINFO 04-27 10:13:05 llm_engine.py:275] # GPU blocks: 0, # CPU blocks: 256\n2024-04-27 10:13:05 | ERROR | stderr | Traceback (most recent call last):\n2024-04-27 10:13:05 | ERROR | stderr |   File \"/x.py\", line 3, in f\n2024-04-27 10:13:05 | ERROR | stderr | ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n",
        {"weights_exceed_static"},
    ),
    (
        "sglang#14282",
        _SGLANG
        + "[2025-12-02 07:04:51 TP1] Allocating 40.00 GB host memory for hierarchical KV cache.\n[2025-12-02 07:04:51 TP3] Allocating 40.00 GB host memory for hierarchical KV cache.\n"
        + scheduler(
            "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
            '  File "/s/sglang/srt/mem_cache/memory_pool_host.py", line 240, in init_kv_buffer\n    buffer = torch.empty(dims, dtype=self.dtype, device=self.device, pin_memory=True)\n',
            rank="TP1",
        ),
        {"pin_failed"},
    ),
    (
        "sglang: DefaultCPUAllocator",
        _SGLANG
        + _LOADING
        + scheduler(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 322122547200 bytes. Error code 12 (Cannot allocate memory)",
            '  File "/s/sglang/srt/mem_cache/memory_pool_host.py", line 240, in init_kv_buffer\n    buffer = torch.empty(\n',
        ),
        {"host_pool_too_big"},
    ),
    (
        "vllm: free memory",
        _VLLM
        + core(
            "ValueError: Free memory on device cuda:0 (3.04/79.11 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
        ),
        {"gpu_busy"},
    ),
    (
        "vllm v1 fork",
        _VLLM
        + core(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
        ),
        {"engine_bug", "unknown", "assertion", "bad_flag"},
    ),
    (
        "sgl deepgemm",
        "[2026-03-04 10:00:00] server_args={'model_path': '/m'}\n"
        + scheduler("RuntimeError: Failed to find nvcc. Please set CUDA_HOME"),
        {"jit_toolchain_missing"},
    ),
    (
        "sgl libnuma",
        _SGLANG
        + 'Traceback (most recent call last):\n  File "/s/sgl_kernel/__init__.py", line 5, in <module>\n    import common_ops\nImportError: libnuma.so.1: cannot open shared object file: No such file or directory\n',
        {"dependency_missing"},
    ),
    (
        "vllm gated",
        'Traceback (most recent call last):\n  File "/v/vllm/transformers_utils/config.py", line 10, in x\nOSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/meta-llama/Llama-3.1-8B.\n401 Client Error.\n',
        {"license_or_auth"},
    ),
    (
        "vllm: heads",
        _VLLM
        + core("RuntimeError: Total number of attention heads (40) must be divisible by tensor parallel size (3)."),
        {"tp_not_divisible"},
    ),
    (
        "vllm kv offload shm",
        _VLLM + worker("OSError: [Errno 28] No space left on device: '/dev/shm/vllm_offload_5f3e'"),
        {"shm_full"},
    ),
    (
        "disk full",
        _VLLM + core("OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache/ab'"),
        {"unknown", "engine_bug"},
    ),
    (
        "port zmq",
        _SGLANG + scheduler("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:30005')"),
        {"port_in_use"},
    ),
]


@pytest.mark.parametrize(("report", "log", "allowed"), REPORTS, ids=[report for report, _, _ in REPORTS])
def test_a_reported_failure_has_no_wrong_cause(report: str, log: str, allowed: set[str | None]) -> None:
    assert diagnose([read_text(log)]).cause in allowed
