"""``up`` from the model to the verified server: plan, preflight, launch, follow, verify, stay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forebay.errors import DeadError, ExitCode, RefusedError, UsageError
from forebay.machine.interface import Machine
from forebay.machine.processes import is_running
from forebay.operation.start.inputs import (
    default_host_cache,
    first_free_port,
    free_run_name,
    local_model,
    pool_size_variables,
    saved_plan,
)
from forebay.operation.start.launcher import LaunchRequest, launch_run
from forebay.operation.start.plan_interface import Planner, UpPlanRequest
from forebay.operation.start.preflight import preflight, refuse_if_needed
from forebay.operation.start.question import Question, ask, example_requests
from forebay.operation.stop.stop_run import stop_run
from forebay.operation.watch.health_state import Limits
from forebay.operation.watch.stage_times import stage_lines
from forebay.runs.event_tail import EventTail
from forebay.runs.run_record import Run
from forebay.servers.argv_flags import flag_value
from forebay.servers.base import Launch, StartRequest
from forebay.servers.http_client import parse_address, send
from forebay.servers.install import Installation, find_installation
from forebay.servers.openai_api import first_model
from forebay.servers.registry import server_named

__all__ = ["BringUp", "UpOptions"]

_MODEL_FLAGS = ("--model-path", "--model")
_POLL_S = 0.03
_MIN_DEVICE_BYTES = 48_000_000


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of ``forebay up``, as given; sizes in bytes.

    Attributes:
        last_port: with it the first free port from ``port`` on is taken.
        host_cache: ``auto`` is a modest one, sized to this machine.
        ask: a question to ask once it is ready.
    """

    model: str
    server: str | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    last_port: int | None = None
    served_name: str | None = None
    tp: int | None = None
    context: int | None = None
    host_cache: int | Literal["auto"] | None = None
    device_cache: int | None = None
    write_policy: str | None = None
    python: str | None = None
    detach: bool = False
    ask: str | None = None
    no_verify: bool = False
    no_plan: bool = False
    probe_seconds: float = 60.0
    timeout: float | None = None
    hang_seconds: float = 120.0
    stall_seconds: float = 300.0
    server_flags: tuple[str, ...] = ()


class BringUp:
    """One ``up``.

    Args:
        plan: the planner, handed in by the command line.
        show: takes each event as it happens.
        say: takes lines for a person.
    """

    def __init__(
        self,
        machine: Machine,
        options: UpOptions,
        plan: Planner,
        show: Callable[[Mapping[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._options = options
        self._plan = plan
        self._show = show
        self._say = say
        self._run: Run | None = None
        self._began = time.monotonic()
        self._looked_at = self._began

    def run(self) -> ExitCode:
        """Run all steps.

        Raises:
            UsageError, RefusedError: before anything is launched.
            DeadError: it could not be launched.
        """
        self._start()
        assert self._run is not None
        self._say(f"{self._run.name}: log in {self._run.log_path}")
        tail = EventTail(self._run)
        code = self._until_ready(tail)
        if code is not ExitCode.DONE:
            return code
        code = self._verify()
        self._report()
        code = self._ask() or code
        if self._options.detach:
            return code
        return self._follow_until_end(tail)

    def interrupted(self) -> None:
        """Ctrl-C: end what was started; a second Ctrl-C does not wait for it to drain."""
        if self._run is None:
            return
        self._say(f"ending {self._run.name} (Ctrl-C again: do not wait for it to drain)")
        drain_s = None
        while True:
            try:
                stop_run(self._machine, self._run, drain_s=drain_s, tell=self._say)
                return
            except KeyboardInterrupt:
                drain_s = 0.0

    def _start(self) -> None:
        self._resolve_options()
        options = self._options
        gpus = self._machine.gpus()
        plan = saved_plan(options.model)
        name = options.server or (str(plan["server"]) if plan is not None else "embedded")
        server = server_named(name)
        installation = find_installation(server.name, server.distributions, options.python)
        launch, document = self._planned(plan, name, installation, gpus=len(gpus))
        flags = launch.argv
        host = flag_value(flags, "--host") or options.host
        port = _port_of(flag_value(flags, "--port")) or options.port
        model = flag_value(flags, *_MODEL_FLAGS) or (
            flags[flags.index("serve") + 1] if "serve" in flags else options.model
        )
        findings = preflight(self._machine, host, port, model, gpus=gpus)
        for finding in findings:
            self._show(
                _event(
                    "preflight", refuses=finding.refuses, evidence=[finding.text], fix=finding.fix, cause=finding.code
                )
            )
        refuse_if_needed(findings)
        for added in launch.added:
            self._say(f"added {added.text}: {added.why}")
        start = LaunchRequest(
            name=options.name or free_run_name(self._machine, options.model, name), server=name, model=model,
            version=installation.version,
            host=host, port=port, launch=launch, asked=_asked(options),
        )  # fmt: skip
        self._say(f"{name} {installation.version}: plan and preflight took {time.monotonic() - self._began:.2f} s")
        limits = Limits(hang_s=options.hang_seconds, stall_s=options.stall_seconds)
        launch_run(self._machine, start, gpus=gpus, plan=document, limits=limits, created=self._created, say=self._say)

    def _created(self, run: Run) -> None:
        """From here on Ctrl-C has something to end."""
        self._run = run

    def _resolve_options(self) -> None:
        """Fill in what depends on this machine: the default host cache, the first free port of a range."""
        options = self._options
        if options.host_cache == "auto":
            host = default_host_cache(self._machine)
            device = options.device_cache
            if device is None and options.server in (None, "embedded"):
                device = max(host // 2, _MIN_DEVICE_BYTES)  # a host tier no larger than the device pool is useless
            options = replace(options, host_cache=host, device_cache=device)
        if options.last_port is not None:
            port = first_free_port(self._machine, options.host, options.port, options.last_port)
            options = replace(options, port=port, last_port=None)
        self._options = options

    def _planned(
        self, saved: Mapping[str, Any] | None, name: str, installation: Installation, *, gpus: int
    ) -> tuple[Launch, bytes]:
        """The command, and the plan it comes from.

        Raises:
            RefusedError: it does not fit.
        """
        options, server = self._options, server_named(name)
        if saved is not None:
            decided = [
                key for key in ("tp", "context", "host_cache", "device_cache") if getattr(options, key) is not None
            ]
            if decided:
                words = ", ".join(f"--{key.replace('_', '-')}" for key in decided)
                raise UsageError(f"{options.model} has decided {words} already", fix="plan again, or leave it out")
            self._refuse(bool(saved.get("fits", True)), saved.get("problems", ()))
            argv = [*saved["command"], *server.flags(self._request(saved["command"]))]
            return server.finalize_command(argv, saved.get("env", {}), installation, gpus=gpus), Path(
                options.model
            ).read_bytes()
        assert options.host_cache != "auto"
        request = UpPlanRequest(
            local_model(options.model, name), name, installation.version, options.tp, options.context,
            options.host_cache,
            options.device_cache if name == "embedded" else None, tuple(server.flags(self._request(()))),
            {**pool_size_variables(), **server.env_for_planning(installation)},
        )  # fmt: skip
        plan = self._plan(request, self._machine)
        document = plan.document
        self._show(_event("plan", fits=plan.fits, problems=document["problems"], warnings=document["warnings"]))
        self._refuse(plan.fits, document["problems"])
        launch = server.finalize_command(plan.command, plan.env, installation, gpus=gpus)
        return launch, json.dumps(document, indent=1).encode()

    def _request(self, planned: Sequence[str]) -> StartRequest:
        """Beyond the plan; what a saved plan already says of the address is kept unless the user says otherwise."""
        options = self._options
        return StartRequest(
            host=options.host, port=options.port, served_name=options.served_name,
            device_cache_bytes=None if planned else options.device_cache, write_policy=options.write_policy,
            extra=options.server_flags,
        )  # fmt: skip

    def _refuse(self, fits: bool, problems: Sequence[Mapping[str, Any]]) -> None:
        if fits or self._options.no_plan:
            return
        first = problems[0] if problems else {}
        raise RefusedError(
            str(first.get("message", "the plan does not fit")), fix=first.get("fix"), code=first.get("code")
        )

    def _until_ready(self, tail: EventTail) -> ExitCode:
        """Follow the supervisor's events until ready or lost."""
        assert self._run is not None
        deadline = None if self._options.timeout is None else time.monotonic() + self._options.timeout
        while True:
            for event in tail.new():
                self._show(event)
                kind = event["event"]
                if kind == "ready":
                    return ExitCode.DONE
                if kind in ("dead", "stopped"):
                    return self._lost()
                if kind in ("stalled", "hung"):
                    self._say(
                        f"it is left as it is: see `forebay doctor {self._run.name}`, end it with `forebay down "
                        f"{self._run.name}`"
                    )
                    return ExitCode.STALLED
            if deadline is not None and time.monotonic() > deadline:
                self._say(
                    f"not ready after {self._options.timeout:g} s; it goes on: see `forebay wait {self._run.name}`"
                )
                return ExitCode.TIME_IS_UP
            self._check_supervisor()
            time.sleep(_POLL_S)

    def _check_supervisor(self) -> None:
        """Without it no event will ever come. Looked at once a second.

        Raises:
            DeadError: it is gone and has not told how the run ended.
        """
        now = time.monotonic()
        if self._run is None or now - self._looked_at < 1.0:
            return
        self._looked_at = now
        record = self._run.read()
        if record.ended or record.supervisor is None or is_running(self._machine, record.supervisor):
            return
        raise DeadError(
            f"the supervisor of {record.name!r} is gone; the server itself may still run",
            fix=f"see {self._run.folder}/supervisor.log, and end the run with `forebay down {record.name}`",
        )

    def _lost(self) -> ExitCode:
        """Dead: nothing of it may stay."""
        assert self._run is not None
        stop_run(self._machine, self._run, tell=self._say)
        return ExitCode.DEAD

    def _verify(self) -> ExitCode:
        assert self._run is not None
        if self._options.no_verify:
            return ExitCode.DONE
        from forebay.operation.verify.verify import verify_run

        report = verify_run(self._machine, self._run, probe_s=self._options.probe_seconds, tell=self._say)
        self._show(_event("verified", in_effect=report.in_effect, rows=[row.as_json() for row in report.rows]))
        return ExitCode.DONE if report.in_effect else ExitCode.NOT_IN_EFFECT

    def _report(self) -> None:
        assert self._run is not None
        record = self._run.read()
        self._say(f"ready after {record.ready_after_s:.1f} s; stages, slowest first:")
        for line in stage_lines(record.stages):
            self._say(line)
        self._say(f"serving {record.model} at {record.url}/v1")

    def _ask(self) -> ExitCode:
        """The question, its answer, and how to go on; NOT_IN_EFFECT where it is not answered."""
        assert self._run is not None
        if self._options.ask is None:
            return ExitCode.DONE
        record = self._run.read()
        model = first_model(send(self._machine, parse_address(record.url), "GET", "/v1/models", timeout_s=10.0))
        question = Question(record.url, model or record.model, self._options.ask)
        reply = ask(self._machine, question)
        if reply.text is None:
            self._say(f"the question was not answered: {reply.failure}")
            return ExitCode.NOT_IN_EFFECT
        self._show(_event("answer", question=question.text, answer=reply.text))
        for line in example_requests(question, server_named(record.server)):
            self._say(line)
        return ExitCode.DONE

    def _follow_until_end(self, tail: EventTail) -> ExitCode:
        """In the foreground until it ends; Ctrl-C raises through here."""
        self._say("serving until Ctrl-C")
        while True:
            for event in tail.new():
                self._show(event)
                if event["event"] in ("dead", "stopped"):
                    return self._lost()
            self._check_supervisor()
            time.sleep(0.2)


def _event(kind: str, **fields: object) -> dict[str, Any]:
    return {"schema": 1, "at": round(time.time(), 3), "event": kind, **fields}


def _asked(options: UpOptions) -> dict[str, str]:
    """What verify compares with: only what was really asked for."""
    asked = {}
    for key in ("context", "host_cache", "device_cache", "write_policy", "tp"):
        value = getattr(options, key)
        if value is not None:
            asked[key] = str(value)
    return asked


def _port_of(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal():
        raise UsageError(f"--port {given!r} is not a number", fix="a port from 1 to 65535")
    return int(given)
