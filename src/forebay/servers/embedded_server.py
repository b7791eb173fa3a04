"""The embedded server from outside. Its port opens first: /health is 503 with a stage until it is ready, then 200.

It is started as a command line of this environment and never imported: the operator needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from forebay.servers.argv_flags import flag_value
from forebay.servers.base import (
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
from forebay.servers.launch_flags import common_flags, flags_of
from forebay.servers.openai_api import completion_request, read_completion, refused_or_silent
from forebay.servers.process_roles import tree_roles
from forebay.servers.prometheus import parse_metrics
from forebay.sizes import parse_size

__all__ = ["Embedded"]

_TIERS = ("device", "host", "disk")


class Embedded:
    """``forebay serve``."""

    name = "embedded"
    distributions: tuple[str, ...] = ("forebay",)
    health_path = "/health"
    health_generates = False
    shutdown_policy = ShutdownPolicy(drain_s=30.0)
    pause_paths: tuple[str, ...] = ()
    info_paths: tuple[str, ...] = ("/server_info",)
    flush_path: str | None = "/flush_cache?tier=device"
    api_key_variable = "FOREBAY_API_KEY"
    evidence_flag = ""

    def flags(self, request: StartRequest) -> tuple[str, ...]:
        """See ``Server.flags``. The device cache is the plan's here, as the host cache is."""
        flags = common_flags(request)
        if request.write_policy is not None:
            flags += ["--write-policy", request.write_policy]
        return (*flags, *request.extra)

    def finalize_command(
        self, argv: Sequence[str], env: Mapping[str, str], installation: Installation, *, gpus: int
    ) -> Launch:
        """See ``Server.finalize_command``. The head is everything up to ``serve``; the model follows it."""
        words = list(argv)
        rest = words[words.index("serve") + 1 :] if "serve" in words else list(flags_of(argv))
        return Launch((*_head(installation), *rest), dict(env))

    def env_for_planning(self, installation: Installation) -> Mapping[str, str]:
        """None: the planner needs only the flags."""
        return {}

    def roles(self, processes: Sequence[ProcessView], api_server: int) -> dict[int, Role]:
        """See ``Server.roles``. One worker process per rank; rank 0 also runs the scheduler."""
        return tree_roles(
            processes, api_server, {"forebay.engine.worker.process": Role.ENGINE}, every_python=Role.WORKER
        )

    def read_health(self, answer: ServerAnswer) -> HealthReading:
        """200 is up; 503 carries ``stage`` and ``percent`` while it starts."""
        if answer.status is None:
            return refused_or_silent(answer, self.health_path)
        body = answer.json()
        fields = body if isinstance(body, dict) else {}
        evidence = answer.describe(self.health_path)
        if answer.ok:
            return HealthReading(Condition.UP, evidence)
        stage, percent = fields.get("stage"), fields.get("percent")
        starting = answer.status == 503 and isinstance(stage, str)
        return HealthReading(
            Condition.STARTING if starting else Condition.UNHEALTHY,
            f"{evidence}: {answer.text[:200].strip()}",
            stage if isinstance(stage, str) else None,
            float(percent) if isinstance(percent, int | float) else None,
        )

    def read_pause(self, answers: Mapping[str, ServerAnswer]) -> str | None:
        """It cannot be paused."""
        return None

    def build_probe_request(self, model: str | None, prompt: str = "1, 2, 3,", tokens: int = 1) -> ProbeRequest:
        """``POST /v1/completions``."""
        return completion_request(model, prompt, tokens)

    def read_token(self, answer: ServerAnswer) -> TokenReading:
        """See ``Server.read_token``."""
        return read_completion(answer)

    def counters(self, metrics: str) -> Counters:
        """See ``Server.counters``. ``backed_up`` and ``loaded_back`` are bytes here (docs/server.md)."""
        read = parse_metrics(metrics)
        sources = read.by("forebay_prompt_tokens_total", "source")
        generated = read.total("forebay_generated_tokens_total")
        moved = read.total("forebay_transfer_bytes_total", to="device")
        saved = read.total("forebay_transfer_bytes_total", **{"from": "device"})
        tokens = None if not sources and generated is None else sum(sources.values()) + (generated or 0)
        pools = {tier: read.total("forebay_tier_tokens", tier=tier, state="capacity") for tier in _TIERS}
        used = {tier: read.total("forebay_tier_tokens", tier=tier, state="used") for tier in _TIERS}
        return Counters(
            tokens=tokens,
            generated=generated,
            running=read.total("forebay_requests", state="running"),
            waiting=read.total("forebay_requests", state="waiting"),
            hits={tier: count for tier, count in sources.items() if tier in _TIERS},
            backed_up=saved,
            loaded_back=moved,
            moved_unit="bytes",
            pools={tier: count for tier, count in pools.items() if count},
            used={tier: count for tier, count in used.items() if count is not None},
        )

    def info(self, answers: Mapping[str, ServerAnswer], metrics: str) -> Mapping[str, object]:
        """/server_info as it is."""
        body = answers["/server_info"].json() if "/server_info" in answers else None
        return body if isinstance(body, dict) else {}

    def offload_tiers(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What --host-cache and --disk-cache ask for."""
        return tuple(tier for tier in ("host", "disk") if flag_value(argv, f"--{tier}-cache") is not None)

    def settings(self, argv: Sequence[str], info: Mapping[str, object] | None, counters: Counters) -> list[Setting]:
        """See ``Server.settings``. ``info`` is /server_info with ``asked`` and ``effective``."""
        effective = as_mapping((info or {}).get("effective"))
        pools = as_mapping(effective.get("pools"))
        rows = []
        for name, flag, key in _SETTINGS:
            asked = flag_value(argv, flag)
            if asked is not None or key == "context_length":
                rows.append(known_setting(name, asked, effective.get(key), f"/server_info effective.{key}"))
        for tier in ("device", "host"):
            asked = flag_value(argv, f"--{tier}-cache")
            if asked is not None:
                key = f"{tier}_pool_bytes_total"
                wanted = str(parse_size(asked, what=f"--{tier}-cache"))
                evidence = f"/server_info effective.pools.{key}"
                rows.append(Setting(f"{tier} pool bytes in total", wanted, _text(pools.get(key)), evidence, None, 0.02))
        return rows


_SETTINGS = (
    ("context tokens", "--context-length", "context_length"),
    ("page size", "--page-size", "page_size"),
    ("write policy", "--write-policy", "write_policy"),
    ("ranks", "--tp", "tp"),
)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _head(installation: Installation) -> tuple[str, ...]:
    script = installation.python.parent / "forebay"
    if script.is_file():
        return (str(script), "serve")
    python = str(installation.python or sys.executable)
    return (python, "-c", "from forebay.cli.main import main; main()", "serve")
