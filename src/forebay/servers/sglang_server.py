"""SGLang from outside (facts from 0.5.23: recordings in tests/data/captures/sglang, and the real server on a CPU).

What it answers, and when:

    loading     connection refused on every path
    warm-up     /health 503 at once; /v1/models and /server_info 200 already: never a sign of readiness
    ready       /health 200 after about 1 s (it generates a token), with an empty body
    paused      /health 503 after 20 s
    stopped     /health 503 after 20 s (scheduler in state T), everything else 200

Its ``--hicache-size`` is an integer of decimal GB *per rank*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forebay.errors import UsageError
from forebay.servers.argv_flags import flag_value, has_flag, with_flag
from forebay.servers.base import (
    AddedFlag,
    Condition,
    Counters,
    HealthReading,
    Launch,
    ProbeRequest,
    ProcessView,
    Role,
    Setting,
    ShutdownPolicy,
    StartRequest,
    TokenReading,
    known_setting,
)
from forebay.servers.http_client import ServerAnswer
from forebay.servers.install import Installation
from forebay.servers.launch_flags import common_flags, cpu_bind, environment_path, flags_of, positive_flag
from forebay.servers.openai_api import refused_or_silent
from forebay.servers.process_roles import tree_roles
from forebay.servers.prometheus import MetricSamples, parse_metrics

__all__ = ["SGLang"]

_TP = ("--tp-size", "--tensor-parallel-size", "--tp")
_TITLES = {
    "sglang::scheduler": Role.ENGINE,
    "sglang::data_parallel_controller": Role.ENGINE,
    "sglang::detokenizer": Role.WORKER,
    "sglang::tokenizer_worker": Role.WORKER,
}
# cache_source of sglang:cached_tokens_total and the keys of cached_tokens_details -> tier
_TIERS = {"device": "device", "host": "host", "storage": "disk"}


class SGLang:
    """One SGLang server."""

    name = "sglang"
    distributions: tuple[str, ...] = ("sglang",)
    health_path = "/health"
    health_generates = True
    shutdown_policy = ShutdownPolicy(drain_s=30.0)
    pause_paths: tuple[str, ...] = ("/ready", "/ping")
    info_paths: tuple[str, ...] = ("/server_info",)
    flush_path: str | None = None
    api_key_variable = ""
    evidence_flag = "--enable-metrics"

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """See ``Server.flags``."""
        flags = common_flags(request)
        if request.device_cache_bytes is not None:
            raise UsageError(
                "--device-cache: SGLang sizes its device pool by a share of memory or in tokens, not in bytes",
                fix="give --mem-fraction-static or --max-total-tokens after --",
            )
        if request.write_policy is not None:
            flags += ["--hicache-write-policy", request.write_policy]
        return (*flags, *request.extra)

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """See ``Server.finalize_command``."""
        flags = flags_of(argv)
        launch = self._finish(flags, 0 if flag_value(flags, "--device") == "cpu" else gpus, installation)
        return Launch(launch.argv, {**launch.env, **env}, launch.added)

    def _finish(self, flags: tuple[str, ...], gpus: int, installation: Installation) -> Launch:
        added: list[AddedFlag] = []
        for flag, why in (
            ("--enable-metrics", "its counters are the evidence of cache hits"),
            ("--enable-cache-report", "usage then says which tokens came from the cache"),
        ):
            if not has_flag(flags, flag):
                flags = (*flags, flag)
                added.append(AddedFlag(flag, why))
        if gpus:
            return Launch((str(installation.python), "-m", "sglang.launch_server", *flags), {}, tuple(added))
        return self._on_cpu(flags, installation, added)

    def _on_cpu(self, flags: tuple[str, ...], installation: Installation, added: list[AddedFlag]) -> Launch:
        flags = with_flag(flags, "--device", "cpu")
        if has_flag(flags, "--enable-hierarchical-cache") and not has_flag(flags, "--hicache-io-backend"):
            flags = (*flags, "--hicache-io-backend", "direct")
            added.append(
                AddedFlag("--hicache-io-backend direct", "the kernel back end needs CUDA and dies at its first copy")
            )
        ranks = positive_flag(flags, *_TP, default=1)
        env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_bind(ranks)
        model = flag_value(flags, "--model-path", "--model") or ""
        if model.startswith(("/", ".")):
            env["HF_HUB_OFFLINE"] = "1"
        if installation.recipe is None:
            return Launch((str(installation.python), "-m", "sglang.launch_server", *flags), env, tuple(added))
        env["PYTHONPATH"] = environment_path(str(installation.recipe / "stubs"))
        launcher = str(installation.recipe / "launch.py")
        return Launch((str(installation.python), launcher, *flags), env, tuple(added))

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """None: the planner needs only the flags."""
        return {}

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """See ``Server.roles``. Schedulers hold weights and pools; the detokenizer is essential too."""
        return tree_roles(processes, api_server, _TITLES, every_python=Role.WORKER)

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """200 is up; 503 is warm-up, a pause or a scheduler that does not answer: the health state machine decides."""
        if answer.status is None:
            return refused_or_silent(answer, self.health_path)
        evidence = f"{answer.describe(self.health_path)} after {answer.seconds:.2f} s"
        if answer.ok:
            return HealthReading(Condition.UP, evidence)
        quick = answer.seconds < 5  # warm-up answers at once; a scheduler that does not answer takes 20 s
        return HealthReading(Condition.STARTING if quick else Condition.UNHEALTHY, evidence)

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """Paused: /ping is 200 while /ready is 503. It is the one difference between a pause and a stuck scheduler.

        Both use a whole core. After a /health has failed (20 s) /ping is 503 too, so these paths are requested before.
        """
        ready, ping = answers.get("/ready"), answers.get("/ping")
        if ready is not None and ready.status == 503 and ping is not None and ping.ok:
            return (
                "/ready answered 503 and /ping 200: generation was paused on request "
                "(POST /continue_generation resumes it)"
            )
        return None

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """``POST /generate``: it reports tiers even without ``--enable-cache-report``."""
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        return ProbeRequest("POST", "/generate", {"text": prompt, "sampling_params": sampling})

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """See ``Server.read_token``."""
        body = answer.json() if answer.ok else None
        meta = body.get("meta_info") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(meta, dict):
            return TokenReading(False, answer.describe("POST /generate"))
        generated = meta.get("completion_tokens") or 0
        details = meta.get("cached_tokens_details")
        cached = None
        if isinstance(details, dict):
            cached = {_TIERS[key]: int(count) for key, count in details.items() if key in _TIERS and count is not None}
        elif isinstance(meta.get("cached_tokens"), int):
            cached = {"device": int(meta["cached_tokens"])}
        return TokenReading(
            ok=generated >= 1,
            evidence=f"POST /generate: 200, {generated} token in {answer.seconds:.2f} s",
            text=str(body.get("text", "")),
            prompt_tokens=meta.get("prompt_tokens"),
            cached=cached,
        )

    def counters(self, metrics: str) -> Counters:
        """See ``Server.counters``. Of several ranks rank 0 is read: they count the same tokens."""
        read = parse_metrics(metrics)
        pools = {"device": _rank0(read, "sglang:max_total_num_tokens")}
        pools["host"] = _rank0(read, "sglang:hicache_host_total_tokens")
        used = {
            "device": _rank0(read, "sglang:num_used_tokens"),
            "host": _rank0(read, "sglang:hicache_host_used_tokens"),
        }
        hits = {
            "device": _rank0(read, "sglang:prefill_effective_tokens_total", mode="device_hit"),
            "host": _rank0(read, "sglang:prefill_effective_tokens_total", mode="host_hit"),
            "disk": _rank0(read, "sglang:prefill_effective_tokens_total", mode="storage_hit"),
        }
        return Counters(
            tokens=_rank0(read, "sglang:realtime_tokens_total"),
            generated=_rank0(read, "sglang:realtime_tokens_total", mode="decode"),
            running=_rank0(read, "sglang:num_running_reqs"),
            waiting=_rank0(read, "sglang:num_queue_reqs"),
            paused=_rank0(read, "sglang:num_paused_reqs"),
            hits={tier: value for tier, value in hits.items() if value is not None},
            backed_up=_rank0(read, "sglang:hicache_backup_tokens_total"),
            loaded_back=_rank0(read, "sglang:load_back_tokens_total"),
            pools={tier: value for tier, value in pools.items() if value is not None},
            used={tier: value for tier, value in used.items() if value is not None},
        )

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """/server_info as it is."""
        body = answers["/server_info"].json() if "/server_info" in answers else None
        return body if isinstance(body, dict) else {}

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Host with HiCache, and disk below it with a storage back end."""
        if not has_flag(argv, "--enable-hierarchical-cache"):
            return ()
        return ("host", "disk") if has_flag(argv, "--hicache-storage-backend") else ("host",)

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """See ``Server.settings``. ``info`` is /server_info, whose ``hicache_*`` keys are the resolved values."""
        info = info or {}
        on = has_flag(argv, "--enable-hierarchical-cache")
        rows = [
            known_setting("hierarchical cache", "on" if on else None, _on_off(info.get("enable_hierarchical_cache")),
                    "/server_info enable_hierarchical_cache"),
        ]  # fmt: skip
        for name, flags, key in (
            ("context tokens", ("--context-length",), "context_length"),
            ("page size", ("--page-size",), "page_size"),
            ("device pool tokens", ("--max-total-tokens",), "max_total_num_tokens"),
            ("ranks", _TP, "tp_size"),
            *(_HICACHE if on else ()),
        ):
            asked = flag_value(argv, *flags)
            if asked is not None or key == "max_total_num_tokens":
                rows.append(known_setting(name, asked, info.get(key), f"/server_info {key}"))
        if on:
            rows.append(
                known_setting("host pool tokens per rank", None, _whole(counters.pools.get("host")),
                        "/metrics sglang:hicache_host_total_tokens (rank 0)", "--enable-metrics")
            )  # fmt: skip
        return rows


_HICACHE = (
    ("host pool GB per rank", ("--hicache-size",), "hicache_size"),
    ("host pool ratio", ("--hicache-ratio",), "hicache_ratio"),
    ("write policy", ("--hicache-write-policy",), "hicache_write_policy"),
    ("io backend", ("--hicache-io-backend",), "hicache_io_backend"),
    ("memory layout", ("--hicache-mem-layout",), "hicache_mem_layout"),
    ("disk tier", ("--hicache-storage-backend",), "hicache_storage_backend"),
)


def _rank0(metrics: MetricSamples, name: str, **labels: str) -> float | None:
    ranked = metrics.total(name, tp_rank="0", **labels)
    return ranked if ranked is not None else metrics.total(name, **labels)


def _on_off(value: object) -> str | None:
    return None if value is None else "on" if value else "off"


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
