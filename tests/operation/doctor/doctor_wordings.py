"""How the same failures read in other versions, on other machines, in other hands.

Short logs in the servers' own formats, with numbers, models and prefixes that the recorded cases do not have. Sources: the
raise sites in SGLang 0.5.23 and vLLM 0.32.0, and public issue threads where older wordings stand.
"""

from __future__ import annotations

S = "[2026-03-04 10:20:30 TP0] "
HIT = S + "Scheduler hit an exception: Traceback (most recent call last):\n"
QUIT = "\n[2026-03-04 10:20:31] Received sigquit from a child process. It usually means the child failed.\n"
CORE = "(EngineCore_DP0 pid=812) ERROR 03-04 10:20:30 [core.py:843] "
WORKER = "(Worker_TP1 pid=913) ERROR 03-04 10:20:29 [multiproc_executor.py:750] "
TAIL = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}\n"


def sglang(message: str, *frames: str) -> str:
    """A scheduler's last words."""
    return HIT + "".join(f"  {frame}\n" for frame in frames) + message + "\n" + QUIT


def vllm(message: str, *frames: str, worker: bool = False) -> str:
    """An engine's last words, the worker's before them where it is the worker that failed."""
    text = ""
    if worker:
        text += WORKER + "WorkerProc failed to start.\n" + WORKER + "Traceback (most recent call last):\n"
        text += "".join(f"{WORKER}  {frame}\n" for frame in frames) + f"{WORKER}{message}\n"
        message = "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
        frames = ()
    text += CORE + "EngineCore failed to start.\n" + CORE + "Traceback (most recent call last):\n"
    text += "".join(f"{CORE}  {frame}\n" for frame in frames) + f"{CORE}{message}\n"
    return text + TAIL


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 270.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which "
    "{free} MiB is free. Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory 22.9 GiB is "
    "allocated by PyTorch, and 11.00 MiB is reserved by PyTorch but unallocated."
)

FAILURES: dict[str, tuple[str, str]] = {
    # host memory
    "hicache_too_big": (
        "host_pool_too_big",
        sglang(
            "ValueError: Not enough host memory available. Requesting 640.00 GB but only have 311.27 GB free. Please reduce the size of the hierarchical cache."
        ),
    ),
    "cpu_kv_space": (
        "host_pool_too_big",
        vllm(
            "ValueError: Available memory on node 1 (50.2/125.0 GiB) on kv cache allocation is less than requested memory for kv (100.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.",
            worker=True,
        ),
    ),
    "kernel_record": (
        "host_oom_killed",
        S
        + "Load weight begin. avail mem=78.90 GB\n[88123.4] Out of memory: Killed process 4242 (sglang::schedul) total-vm:912345678kB, anon-rss:123456789kB, file-rss:0kB\n",
    ),
    "memcg_record": (
        "host_oom_killed",
        "(EngineCore pid=7) INFO 03-04 10:20:30 [core.py:133] Initializing a V1 LLM engine (v0.30.0) with config: model='/m'\n[ 5123.100] Memory cgroup out of memory: Killed process 977 (VLLM::Worker) total-vm:1kB, anon-rss:52428800kB\n",
    ),
    "k8s_describe": (
        "host_oom_killed",
        S
        + "Capture cuda graph end. Time elapsed: 21.01 s. mem usage=1.10 GB. avail mem=9.80 GB.\n    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
    ),
    "scheduler_dead_old": (
        "host_oom_killed",
        "[2026-03-04 10:20:30] Rank 3 scheduler is dead. Please check if there are relevant logs.\n[2026-03-04 10:20:32] Exit code: -9\n",
    ),
    "core_proc_minus_nine": (
        "host_oom_killed",
        "(EngineCore_DP1 pid=7) INFO 03-04 10:20:30 [core.py:76] Initializing a V1 LLM engine (v0.11.0) with config: model='/m'\nRuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP1': -9}\n",
    ),
    "register_chunk": (
        "pin_failed",
        sglang(
            "RuntimeError: cudaHostRegister failed (rc=2, out of memory) at offset=8589934592 size=8589934592 (total=68719476736, chunk_limit=8589934592); host buffer is not pinned and device transfers may silently return stale data."
        ),
    ),
    "register_vllm": (
        "pin_failed",
        vllm(
            "RuntimeError: cudaHostRegister failed: 1",
            'File "/v/simple_kv_offload/cuda_mem_ops.py", line 33, in pin_tensor',
            worker=True,
        ),
    ),
    "pin_invalid": (
        "pin_failed",
        sglang(
            "RuntimeError: CUDA error: invalid argument",
            'File "/s/srt/mem_cache/memory_pool_host.py", line 77, in init_kv_buffer',
            "  return torch.empty(",
        ),
    ),
    "shm_errno": (
        "shm_full",
        vllm("OSError: [Errno 28] No space left on device: '/dev/shm/vllm_offload_1b2c.mmap'", worker=True),
    ),
    "shm_shared_memory": (
        "shm_full",
        sglang(
            "OSError: [Errno 28] No space left on device: '/psm_1a2b3c4d'",
            'File "/usr/lib/python3.12/multiprocessing/shared_memory.py", line 121, in __init__',
        ),
    ),
    "bus_error": (
        "shm_full",
        'Fatal Python error: Bus error\n\nThread 0x00007f12 (most recent call first):\n  File "/s/srt/managers/mm_utils.py", line 80 in _write\n[2026-03-04 10:20:31] Received sigquit from a child process. It usually means the child failed.\n',
    ),
    "madvise": (
        "shm_full",
        "(Worker_TP0 pid=1) INFO 03-04 10:20:30 [shared_offload_region.py:143] Created mmap file /dev/shm/vllm_offload_aa.mmap (214.75 GB)\n"
        + vllm(
            "OSError: [Errno 14] Bad address",
            'File "/v/kv_offload/cpu/shared_offload_region.py", line 44, in _madvise_populate_write',
            "  mmap_obj.madvise(_MADV_POPULATE_WRITE, offset, length)",
            worker=True,
        ),
    ),
    "nccl_segment": (
        "shm_too_small",
        "worker-0:211:900 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Xk1a2B to 33030532 bytes\nworker-0:211:900 [0] misc/shmutils.cc:113 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Xk1a2B (size 33030528)\n"
        + sglang("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ),
    "nccl_posix": (
        "shm_too_small",
        "host:9:9 [1] include/shm.h:48 NCCL WARN Call to posix_fallocate failed : No space left on device\n"
        + vllm("RuntimeError: NCCL error: unhandled system error", worker=True),
    ),
    "lmcache_align": (
        "lmcache_align",
        vllm(
            "AssertionError: Buffer size 42949672960 must be a multiple of align bytes 20447232 in paged memory allocator.",
            worker=True,
        ),
    ),
    # device memory
    "weights_fraction": (
        "weights_exceed_static",
        S
        + "Load weight end. elapsed=88.11 s, type=LlamaForCausalLM, avail mem=9.81 GB, mem usage=69.12 GB.\n"
        + sglang(
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.85. Raise --mem-fraction-static above 0.877 (minimum viable = 1 - available/pre = 0.8764). If using speculative decoding, draft weights are now counted."
        ),
    ),
    "no_window_current": (
        "no_window",
        sglang(
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.9"
        ),
    ),
    "weights_old_with_numbers": (
        "weights_exceed_static",
        S
        + "Load weight begin. avail mem=78.60 GB\n"
        + S
        + "Load weight end. type=MixtralForCausalLM, dtype=torch.bfloat16, avail mem=18.20 GB, mem usage=60.40 GB.\n"
        + sglang("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    ),
    "no_cache_blocks": (
        "weights_exceed_static",
        vllm(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
        ),
    ),
    "kv_length": (
        "ctx_too_long_for_kv",
        vllm(
            "ValueError: To serve at least one request with the model's max seq len (262144), (24.0 GiB KV cache is needed, which is larger than the available KV cache memory (7.91 GiB). Based on the available memory, the estimated maximum model length is 86384. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        ),
    ),
    "kv_length_v0": (
        "ctx_too_long_for_kv",
        "INFO 03-04 10:20:29 executor_base.py:111] # cuda blocks: 1478, # CPU blocks: 2048\nINFO 03-04 10:20:29 executor_base.py:116] Maximum concurrency for 29000 tokens per request: 0.82x\nERROR 03-04 10:20:30 engine.py:366] The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\nValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648).\n",
    ),
    "hma_off": (
        "hma_disabled",
        "(APIServer pid=1) WARNING 03-04 10:20:29 [vllm.py:2180] Turning off hybrid kv cache manager because `--kv-transfer-config` selects a KV connector that does not support it.\n"
        + vllm(
            "ValueError: To serve at least one request with the model's max seq len (131072), (20.4 GiB KV cache is needed, which is larger than the available KV cache memory (11.2 GiB). Based on the available memory, the estimated maximum model length is 71968."
        ),
    ),
    "gpu_busy": (
        "gpu_busy",
        vllm(
            "ValueError: Free memory on device cuda:3 (12.01/79.25 GiB) on startup is less than desired GPU memory utilization (0.92, 72.91 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            worker=True,
        ),
    ),
    "gpu_busy_oom": (
        "gpu_busy",
        sglang(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 920.00 MiB is free. Process 51 has 70.10 GiB memory in use. Including non-PyTorch memory, this process has 8.01 GiB memory in use.",
            'File "/s/srt/model_loader/loader.py", line 600, in load_model',
        ),
    ),
    "unbalanced": (
        "gpu_unbalanced",
        sglang(
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=41.2, local_gpu_memory=78.8, local_gpu_memory * 0.9=70.92"
        ),
    ),
    "profiling": (
        "profiling_race",
        vllm(
            "AssertionError: Error in memory profiling. Initial free memory 60.21 GiB, current free memory 71.02 GiB. This happens when other processes sharing the same container release GPU memory while vLLM is profiling during initialization.",
            worker=True,
        ),
    ),
    "mamba": (
        "mamba_blocks",
        vllm(
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (614). Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed.",
            worker=True,
        ),
    ),
    "mamba_wrapped": (
        "mamba_blocks",
        CORE
        + "RuntimeError: Worker failed with error 'max_num_seqs (1024) exceeds available Mamba cache blocks (600). Each decode sequence requires one Mamba cache block', please check the stack trace above for the root cause\n",
    ),
    "mamba_sglang": (
        "mamba_blocks",
        sglang(
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=0, mamba_ratio=3, resulting max_num_reqs=0."
        ),
    ),
    "graph_oom": (
        "cudagraph_oom",
        S
        + "Capture cuda graph begin. This can take up to several minutes. avail mem=1.02 GB\n"
        + sglang(
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 61.00 MiB is free."
        ),
    ),
    "graph_oom_vllm": (
        "cudagraph_oom",
        "(Worker_TP1 pid=913) Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  37%|###7      | 19/51 [00:03<00:05,  6.10it/s]\n"
        + vllm(
            OOM.format(free="31.2", own="23.2"),
            'File "/v/v1/worker/gpu_model_runner.py", line 4200, in capture_model',
            worker=True,
        ),
    ),
    "weights_oom": (
        "gpu_too_small",
        S
        + "Load weight begin. avail mem=23.30 GB\n"
        + sglang(OOM.format(free="90.6", own="23.4"), 'File "/s/srt/model_loader/loader.py", line 599, in load_model'),
    ),
    "weights_oom_vllm": (
        "gpu_too_small",
        vllm(
            OOM.format(free="12.9", own="23.5"),
            'File "/v/model_executor/model_loader/base_loader.py", line 55, in load_model',
            worker=True,
        ),
    ),
    "pool_oom": (
        "kv_undercounted",
        S
        + "Load weight end. type=X, avail mem=40.11 GB, mem usage=38.2 GB.\n"
        + sglang(
            OOM.format(free="4.1", own="23.6"), 'File "/s/srt/mem_cache/memory_pool.py", line 900, in _create_buffers'
        ),
    ),
    "pool_oom_vllm": (
        "kv_undercounted",
        vllm(
            OOM.format(free="4.1", own="23.6"),
            'File "/v/v1/worker/gpu_model_runner.py", line 5810, in _allocate_kv_cache_tensors',
            worker=True,
        ),
    ),
    "sampler_oom": (
        "runtime_or_init_oom",
        vllm(
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
            worker=True,
        ),
    ),
    "serving_oom": (
        "runtime_or_init_oom",
        '[2026-03-04 10:00:30] The server is fired up and ready to roll!\n[2026-03-04 10:01:30] INFO:     10.0.0.2:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        + sglang(OOM.format(free="100.0", own="23.1"), 'File "/s/srt/models/qwen2.py", line 88, in forward'),
    ),
    "workspace_oom": (
        "budget_overrun",
        'INFO:     Application startup complete.\nINFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK\n'
        + CORE.replace("core.py:843", "core.py:900")
        + "EngineCore encountered a fatal error.\n"
        + CORE.replace("core.py:843", "core.py:900")
        + "Traceback (most recent call last):\n"
        + CORE.replace("core.py:843", "core.py:900")
        + '  File "/v/v1/attention/backends/flashinfer.py", line 753, in _get_workspace_buffer\n'
        + CORE.replace("core.py:843", "core.py:900")
        + OOM.format(free="286.3", own="21.0")
        + "\n",
    ),
    # settings
    "flag_typo": (
        "bad_flag",
        "usage: vllm serve [-h]\n                [--max-model-len MAX_MODEL_LEN]\n                [--max-num-seqs N]\nvllm: error: unrecognized arguments: --max-model-length 8192\n",
    ),
    "flag_choice": (
        "bad_flag",
        "usage: launch_server.py [-h] --model-path MODEL_PATH\nlaunch_server.py: error: argument --hicache-io-backend: invalid choice: 'cuda' (choose from 'direct', 'kernel', 'kernel_ascend')\n",
    ),
    "flag_required": (
        "bad_flag",
        "usage: launch_server.py [-h] --model-path MODEL_PATH\nlaunch_server.py: error: the following arguments are required: --model-path/--model\n",
    ),
    "flag_old": (
        "flag_renamed",
        "usage: vllm serve [-h]\nvllm: error: unrecognized arguments: --disable-log-requests --swap-space 16\n",
    ),
    "connector_key": (
        "flag_renamed",
        vllm("Exception: cpu_bytes_to_use must be specified in kv_connector_extra_config", worker=True),
    ),
    "utilization_range": (
        "bad_flag",
        'Traceback (most recent call last):\n  File "/v/x.py", line 1, in <module>\npydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig\ngpu_memory_utilization\n  Input should be greater than 0 [type=greater_than, input_value=-0.2, input_type=float]\n    For further information visit https://errors.pydantic.dev/2.12/v/greater_than\n',
    ),
    "conflict": (
        "flag_conflict",
        'Traceback (most recent call last):\n  File "/s/srt/server_args.py", line 1, in check\nValueError: The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be used at the same time. Please use only one of them.\n'
        + S.replace(" TP0", "")
        + "kill_process_tree called: parent_pid=1, include_parent=False, pid=1\n",
    ),
    "conflict_vllm": (
        "flag_conflict",
        "(APIServer pid=1) INFO 03-04 10:20:30 [api_utils.py:286] non-default args: {'model': '/m'}\nTraceback (most recent call last):\nValueError: --kv-offloading-size cannot be used together with --kv-transfer-config.\n",
    ),
    "model_length": (
        "ctx_too_long_for_model",
        "Traceback (most recent call last):\nValueError: Warning: User-specified context_length (65536) is greater than the derived context_length (32768). This may lead to incorrect model outputs or CUDA errors. Note that the derived context_length may differ from max_position_embeddings in the model's config. To allow overriding this maximum, set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1\n",
    ),
    "connector": (
        "connector_unsupported",
        vllm("Exception: CPU Offloading is currently only supported on CUDA-alike GPUs", worker=True),
    ),
    "connector_unknown": (
        "connector_unsupported",
        "(APIServer pid=1) INFO 03-04 10:20:30 [api_utils.py:286] non-default args: {'model': '/m'}\nTraceback (most recent call last):\nValueError: Unsupported connector type: MyConnector\n",
    ),
    "no_module": ("dependency_missing", sglang("ModuleNotFoundError: No module named 'deep_ep'")),
    "no_module_vllm": ("dependency_missing", vllm("ModuleNotFoundError: No module named 'mooncake'", worker=True)),
    "mooncake_import": (
        "dependency_missing",
        sglang(
            "ImportError: Please install mooncake by following the instructions at https://kvcache-ai.github.io/Mooncake/getting_started/build.html to run SGLang with MooncakeConnector."
        ),
    ),
    "undefined_symbol": (
        "dependency_missing",
        'Traceback (most recent call last):\n  File "/v/vllm/__init__.py", line 1, in <module>\nImportError: /v/vllm/_C.abi3.so: undefined symbol: _ZN3c106ivalue14ConstantString6createENSt7__cxx1112basic_stringE\n',
    ),
    "heads": (
        "tp_not_divisible",
        "(APIServer pid=1) INFO 03-04 10:20:30 [api_utils.py:286] non-default args: {'model': '/m', 'tensor_parallel_size': 6}\nTraceback (most recent call last):\npydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, Total number of attention heads (32) must be divisible by tensor parallel size (6). [type=value_error]\n",
    ),
    "heads_sglang": (
        "tp_not_divisible",
        sglang(
            "AssertionError",
            'File "/s/srt/models/llama.py", line 120, in __init__',
            "  assert self.total_num_heads % tp_size == 0",
        ),
    ),
    "not_divisible": ("tp_not_divisible", sglang("AssertionError: 151936 is not divisible by 7")),
    "numa": (
        "numa_binding",
        vllm(
            "AssertionError: Not enough allowed NUMA nodes to bind threads of 4 local CPUWorkers. Allowed NUMA nodes are [0, 1]. Please try to bind threads manually or decrease DP/TP/PP."
        ),
    ),
    "decode_hicache": (
        "hicache_not_on_decode",
        "[2026-03-04 10:20:29] server_args=ServerArgs(model_path='/m', disaggregation_mode='decode', enable_hierarchical_cache=True)\nTraceback (most recent call last):\nValueError: The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be used at the same time. Please use only one of them.\n",
    ),
    "hicache_kernel": (
        "hicache_kernel_unsupported",
        sglang("AttributeError: module 'sgl_kernel' has no attribute 'transfer_kv_per_layer_mla'"),
    ),
    # files
    "shard_missing": (
        "checkpoint_missing",
        sglang("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/w/model-00041-of-00163.safetensors'"),
    ),
    "not_local": (
        "checkpoint_missing",
        "Traceback (most recent call last):\nOSError: /data/llama is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token having permission to this repo either by logging in with `hf auth login` or by passing `token=<your_token>`\n",
    ),
    "repo_id": (
        "checkpoint_missing",
        "Traceback (most recent call last):\nhuggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/qwen/'. Use `repo_type` argument if needed.\n",
    ),
    "repo_404": (
        "checkpoint_missing",
        "Traceback (most recent call last):\nhuggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1)\n\nRepository Not Found for url: https://huggingface.co/api/models/me/typo.\nPlease make sure you specified the correct `repo_id` and `repo_type`.\nIf you are trying to access a private or gated repo, make sure you are authenticated.\n",
    ),
    "no_weights": (
        "checkpoint_missing",
        vllm("RuntimeError: Cannot find any model weights with `/models/empty`", worker=True),
    ),
    "truncated": (
        "checkpoint_corrupt",
        sglang("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ),
    "invalid_header": (
        "checkpoint_corrupt",
        vllm(
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
            worker=True,
        ),
    ),
    "bad_config": (
        "checkpoint_corrupt",
        "(APIServer pid=1) INFO 03-04 10:20:30 [api_utils.py:286] non-default args: {'model': '/m'}\nTraceback (most recent call last):\nOSError: It looks like the config file at '/srv/models/x/config.json' is not a valid JSON file.\n",
    ),
    "pickle": (
        "checkpoint_corrupt",
        sglang("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ),
    "tokenizer": (
        "tokenizer_missing",
        "Traceback (most recent call last):\nOSError: Can't load tokenizer for '/models/x'. If you were trying to load it from 'https://huggingface.co/models', make sure you don't have a local directory with the same name.\n",
    ),
    "tokenizer_sp": (
        "tokenizer_missing",
        "[2026-03-04 10:20:29] server_args={'model_path': '/m'}\nTraceback (most recent call last):\nValueError: Couldn't instantiate the backend tokenizer from one of: \n(1) a `tokenizers` library serialization file, \n(2) a slow tokenizer instance to convert or \n",
    ),
    "architecture": (
        "unsupported_architecture",
        "Traceback (most recent call last):\nValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys(['LlamaForCausalLM'])\n",
    ),
    "model_type": (
        "unsupported_architecture",
        "(APIServer pid=1) INFO 03-04 10:20:30 [api_utils.py:286] non-default args: {'model': '/m'}\nTraceback (most recent call last):\nKeyError: 'newmodel'\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\npydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, The checkpoint you are trying to load has model type `newmodel` but Transformers does not recognize this architecture. [type=value_error]\n",
    ),
    "gated": (
        "license_or_auth",
        "Traceback (most recent call last):\nhuggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-68)\n\nCannot access gated repo for url https://huggingface.co/meta-llama/X/resolve/main/config.json.\nAccess to model meta-llama/X is restricted and you are not in the authorized list.\n",
    ),
    "gated_os": (
        "license_or_auth",
        "[2026-03-04 10:20:29] server_args={'model_path': 'meta-llama/X'}\nTraceback (most recent call last):\nOSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/meta-llama/X.\n401 Client Error. (Request ID: Root=1)\n",
    ),
    # network
    "uvicorn": (
        "port_in_use",
        "[2026-03-04 10:20:29] INFO:     Application startup complete.\n[2026-03-04 10:20:29] ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use\n[2026-03-04 10:20:30] The server is fired up and ready to roll!\n",
    ),
    "uvicorn_v6": (
        "port_in_use",
        "INFO:     Started server process [7]\nERROR:    [Errno 98] error while attempting to bind on address ('::', 8000, 0, 0): address already in use\n",
    ),
    "vllm_bind": (
        "port_in_use",
        '(APIServer pid=9) INFO 03-04 10:20:29 [api_server.py:1839] vLLM API server version 0.11.0\nTraceback (most recent call last):\n  File "/v/api_server.py", line 1, in create_server_socket\n    sock.bind(addr)\nOSError: [Errno 98] Address already in use\n',
    ),
    "nccl_port": (
        "port_in_use",
        sglang(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
        ),
    ),
    "leftover": (
        "leftover_scheduler",
        "Traceback (most recent call last):\nValueError: NCCL port at 28123 is not available in 30 seconds. NCCL port is used by a process already. process.name()='sglang::scheduler_TP0' process.cmdline()=['sglang::scheduler_TP0'] process.status()='sleeping' pid=4711\n",
    ),
    "leftover_gpu": (
        "leftover_scheduler",
        "|    0   N/A  N/A   2505781      C   sglang::scheduler_DP0_TP0_EP0            100998MiB |\n"
        + sglang(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.10 GiB is free.",
            'File "/s/srt/model_loader/loader.py", line 599, in load_model',
        ),
    ),
    "bind_address": (
        "bind_failed",
        "(APIServer pid=9) INFO 03-04 10:20:29 [api_utils.py:286] non-default args: {'host': '10.9.8.7'}\nTraceback (most recent call last):\nOSError: [Errno 99] Cannot assign requested address\n",
    ),
    "bind_sglang": (
        "bind_failed",
        "[2026-03-04 10:20:29] ERROR:    [Errno 99] error while attempting to bind on address ('10.9.8.7', 30000): cannot assign requested address\n",
    ),
    "gid": (
        "rdma_gid",
        "E0304 10:20:30.123456 77 rdma_context.cpp:1001] GID is NULL, please check your GID index by specifying MC_GID_INDEX\n"
        + sglang("RuntimeError: Mooncake Transfer Engine initialization failed."),
    ),
    "peer_race": (
        "mooncake_peer_race",
        S
        + "Mooncake store setup successfully.\nE0304 10:20:30.1 9 transfer_metadata_plugin.cpp:909] SocketHandShakePlugin: connect()192.168.3.4:16001: Connection refused [111]\n"
        + sglang("AssertionError"),
    ),
    "mooncake_down": (
        "mooncake_unreachable",
        "E0304 10:20:30.1 9 client.cpp:29] MountSegment: rpc error, code: 14, message: failed to connect to all addresses\n"
        + sglang("RuntimeError: Failed to setup Mooncake store, error code: -1"),
    ),
    "mooncake_metadata": (
        "mooncake_unreachable",
        S
        + "Mooncake Configuration loaded from env successfully.\nE0304 10:20:30.1 9 transfer_metadata_plugin.cpp:200] Failed to connect to metadata server http://10.0.0.9:8080/metadata\n"
        + sglang("RuntimeError: Failed to setup Mooncake store, error code: -2"),
    ),
    "nccl": (
        "nccl_error",
        sglang("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    ),
    "nccl_dist": (
        "nccl_error",
        vllm(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.5",
            worker=True,
        ),
    ),
    "slow_rank": (
        "slow_rank_load",
        sglang(
            "ValueError: TP rank 5 could finish the model loading, but there are other ranks that didn't finish loading. It is likely due to unexpected failures (e.g., OOM) or a slow node."
        ),
    ),
    # engine
    "ready_timeout": (
        "engine_ready_timeout",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for large models. Waited 1200s (configured by VLLM_ENGINE_READY_TIMEOUT_S). To increase the timeout, set the environment variable: VLLM_ENGINE_READY_TIMEOUT_S=<seconds>\n",
    ),
    "execute_timeout": (
        "engine_hung",
        "INFO:     Application startup complete.\n"
        + CORE.replace("843", "912")
        + "EngineCore encountered a fatal error.\n"
        + CORE.replace("843", "912")
        + "TimeoutError: RPC call to sample_tokens timed out.\n",
    ),
    "watchdog": (
        "engine_hung",
        "[2026-03-04 10:00:30] The server is fired up and ready to roll!\n"
        + S
        + "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n[2026-03-04 10:20:31] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n",
    ),
    "worker_killed": (
        "worker_killed",
        "INFO:     Application startup complete.\n(EngineCore pid=7) ERROR 03-04 10:20:30 [multiproc_executor.py:230] Worker proc VllmWorker-3 died unexpectedly, shutting down executor.\n"
        + CORE.replace("843", "912")
        + "EngineCore encountered a fatal error.\n"
        + CORE.replace("843", "912")
        + "RuntimeError: Executor failed.\n",
    ),
    "scheduler_crash": (
        "worker_killed",
        "[2026-03-04 10:00:30] The server is fired up and ready to roll!\n[2026-03-04 10:20:30] Subprocess scheduler_0 (pid=88) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n[2026-03-04 10:20:31] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n",
    ),
    "jit": ("jit_toolchain_missing", vllm("RuntimeError: Ninja build failed. Ninja output:", worker=True)),
    "no_nvcc": (
        "jit_toolchain_missing",
        sglang("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
    ),
    "triton_cc": (
        "jit_toolchain_missing",
        vllm(
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
            worker=True,
        ),
    ),
    "inductor_cxx": (
        "jit_toolchain_missing",
        vllm(
            "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
            worker=True,
        ),
    ),
    "attention": (
        "attention_backend_unsupported",
        vllm(
            "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=80, dtype=torch.float16)",
            worker=True,
        ),
    ),
    "attention_selected": (
        "attention_backend_unsupported",
        vllm(
            "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['head_size not supported']",
            worker=True,
        ),
    ),
    "attention_fa3": (
        "attention_backend_unsupported",
        sglang(
            "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`."
        ),
    ),
    "driver": (
        "cuda_driver_mismatch",
        sglang(
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
        ),
    ),
    "kernel_image": (
        "cuda_driver_mismatch",
        vllm(
            "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", worker=True
        ),
    ),
    "no_gpu": (
        "cuda_driver_mismatch",
        'Traceback (most recent call last):\n  File "/v/vllm/config.py", line 1, in <module>\nRuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose logging to help debug the issue.\n',
    ),
    "illegal": (
        "engine_bug",
        "INFO:     Application startup complete.\n"
        + CORE.replace("843", "912")
        + "EngineCore encountered a fatal error.\n"
        + CORE.replace("843", "912")
        + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n",
    ),
    "type_error": ("engine_bug", sglang("TypeError: forward() got an unexpected keyword argument 'spec_info'")),
    "segv": (
        "engine_bug",
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "/s/srt/model_executor/model_runner.py", line 5 in forward\n[2026-03-04 10:20:31] Received sigquit from a child process. It usually means the child failed.\n',
    ),
    "assertion": ("assertion", sglang("AssertionError: page_size must be 64 for this backend")),
    "stopped_loading": (
        "stopped_on_request",
        S
        + "Load weight begin. avail mem=78.90 GB\n[2026-03-04 10:20:31] SIGTERM received. signum=15 frame=None. Draining requests and shutting down...\n",
    ),
    "ctrl_c_loading": (
        "stopped_on_request",
        "(APIServer pid=9) INFO 03-04 10:20:29 [api_utils.py:286] non-default args: {'model': '/m'}\n^CTraceback (most recent call last):\n  File \"/v/x.py\", line 1, in <module>\nKeyboardInterrupt\n",
    ),
    "unexplained": ("unknown", sglang("ValueError: something nobody has seen before")),
}

DEGRADED: dict[str, tuple[str, str]] = {
    "starved": (
        "engine_hung",
        "INFO:     Application startup complete.\n"
        + "".join(
            f"(APIServer pid=1) INFO 03-04 10:2{i}:30 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 12 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%\n"
            for i in range(4)
        ),
    ),
    "health": (
        "health_stall",
        "[2026-03-04 10:00:30] The server is fired up and ready to roll!\n[2026-03-04 10:20:30] Health check failed. Server couldn't get a response from detokenizer for last 60 seconds. tic start time: 10:19:30. last_heartbeat time: 10:19:29\n",
    ),
    "decode": (
        "hicache_not_on_decode",
        S
        + "KV cache is forced as chunk cache for decode server\n"
        + S
        + "Allocating kv hierarchical KV host pool: 500000 tokens, 64.00 GB host memory.\n",
    ),
    "host_smaller": (
        "host_pool_smaller_than_device",
        S
        + "HiCache kv host pool (120000 tokens) is smaller than the device pool (480000 tokens);L2 cache effectiveness is reduced.Consider increasing --hicache-ratio (or --hicache-size) for higher L2 cache hit rate.\n"
        + S
        + "Allocating kv hierarchical KV host pool: 120000 tokens, 20.00 GB host memory.\n",
    ),
    "host_smaller_numbers": (
        "host_pool_smaller_than_device",
        S
        + "max_total_num_tokens=900000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=512, context_len=32768, available_gpu_mem=9.10 GB\n"
        + S
        + "Allocating kv hierarchical KV host pool: 300032 tokens, 30.00 GB host memory.\n",
    ),
    "collapsed": (
        "kv_pool_collapsed",
        S
        + "max_total_num_tokens=1741, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=16, context_len=65536, available_gpu_mem=46.90 GB\n[2026-03-04 10:20:31] The server is fired up and ready to roll!\n",
    ),
    "overallocates": (
        "offload_overallocates",
        "(APIServer pid=1) INFO 03-04 10:20:29 [api_utils.py:286] non-default args: {'model': '/m', 'kv_offloading_size': 400.0}\nINFO:     Application startup complete.\nmemory.current 821.1 GiB\nshmem 769.0 GiB\nanon 36.0 GiB\n",
    ),
    "write_only": (
        "hicache_write_only",
        'sglang:hicache_backup_tokens_total{model_name="m",pool="kv"} 52604.0\nsglang:evicted_tokens_total{model_name="m"} 353357.0\nsglang:load_back_tokens_total{model_name="m"} 0.0\n',
    ),
}

E_ = "2026-12-01T00:00:0{}.123Z "
FAILURES |= {
    "embedded_refused": (
        "weights_exceed_static",
        E_.format(1)
        + "INFO listening host=127.0.0.1 port=8000 model=m\n"
        + E_.format(2)
        + 'ERROR died rank=0 code=weights_exceed_static reason="the weights take 9.1 GiB per rank, 4.2 GiB is there" fix="--tp 4" exit=3\n',
    ),
    "embedded_killed": (
        "worker_killed",
        E_.format(1)
        + "INFO stage rank=0 name=loading progress=0.4\n"
        + E_.format(2)
        + 'ERROR died rank=0 code=worker_killed reason="the process of rank 0 was killed by SIGKILL" exit=4\n',
    ),
    "embedded_json": (
        "port_in_use",
        '{"time": "2026-12-01T00:00:01.000Z", "level": "ERROR", "event": "refused", "code": "port_in_use", "reason": "127.0.0.1:8000 is taken"}\n',
    ),
    "embedded_flag": (
        "bad_flag",
        "Usage: forebay serve [OPTIONS] MODEL\nTry 'forebay serve -h' for help.\n\nError: No such option: --contxt-length\n",
    ),
    "embedded_stopped": (
        "stopped_on_request",
        E_.format(1)
        + "INFO stage rank=0 name=loading progress=0.4\n"
        + E_.format(2)
        + "INFO stopping signal=SIGTERM live=0\n"
        + E_.format(3)
        + "INFO ended exit=0\n",
    ),
}
