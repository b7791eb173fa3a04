"""``up`` from the model to the verified server: plan, preflight, launch, follow, verify, stay."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from forebay.errors import DeadError, ExitCode, RefusedError, UsageError
from forebay.machine.interface import GpuReading, Machine
from forebay.machine.processes import is_running
from forebay.operation.output import Launching, Output, always, make_event
from forebay.operation.start.inputs import (
    default_host_cache,
    first_free_port,
    free_run_name,
    local_model,
    pool_size_variables,
    saved_plan,
)
from forebay.operation.start.launcher import LaunchRequest, launch_run, start_lock
from forebay.operation.start.plan_interface import Planner, UpPlanRequest
from forebay.operation.start.preflight import preflight, refuse_if_needed
from forebay.operation.start.question import Question, ask
from forebay.operation.start.up_options import UpOptions
from forebay.operation.stop.stop_run import stop_run
from forebay.operation.watch.health_state import Limits
from forebay.operation.watch.stage_times import stage_lines
from forebay.runs.event_tail import EventTail
from forebay.runs.run_record import Run, run_with_id
from forebay.servers.argv_flags import flag_value
from forebay.servers.base import Launch, StartRequest
from forebay.servers.http_client import Address, send
from forebay.servers.install import Installation, find_installation
from forebay.servers.launch_flags import api_key_of, hide_api_key
from forebay.servers.openai_api import first_model
from forebay.servers.registry import server_named

__all__ = ["BringUp"]

_MODEL_FLAGS = ("--model-path", "--model")
_POLL_S = 0.03
_MIN_DEVICE_BYTES = 48_000_000


class BringUp:
    """One ``up``.

    Args:
        plan: the planner, passed in by the caller because this room does not import it.
        output: takes events, and lines for a person.
        launching: entered around the launch; where it gives False, nobody waits for it and nothing is launched.
    """

    def __init__(
        self,
        machine: Machine,
        options: UpOptions,
        plan: Planner,
        output: Output,
        *,
        launching: Launching = always,
    ) -> None:
        self._machine = machine
        self._options = options
        self._plan = plan
        self._output = output
        self._launching = launching
        self._api_key = api_key_of(options.server_flags) or options.api_key
        self._run: Run | None = None
        self._began = time.monotonic()
        self._supervisor_checked_at = self._began

    def run(self) -> ExitCode:
        """Run all steps. With the ``run_id`` of a run that is there already, go on with that run.

        Raises:
            UsageError, RefusedError: before anything is launched.
            DeadError: it could not be launched.
        """
        with start_lock(self._options.run_id):
            self._run = run_with_id(self._options.run_id) if self._options.resume else None
            if self._run is None:
                self._start()
        assert self._run is not None
        if not self._options.resume:
            self._say(f"{self._run.name}: log in {self._run.log_path}")
        tail = EventTail(self._run, offset=self._options.events_offset)
        if self._run.read().ready_after_s is None:
            code = self._until_ready(tail)
            if code is not ExitCode.DONE:
                return code
        if self._run.read().ended:  # while nobody was connected
            return self._follow_until_end(tail)
        code = self._verify()
        self._report()
        code = self._ask() or code
        return code if self._options.detach else self._follow_until_end(tail)

    def interrupted(self) -> None:
        """Ctrl-C: end what was started; a second Ctrl-C does not wait for running requests."""
        if self._run is None:
            return
        self._say(f"ending {self._run.name} (Ctrl-C again: do not wait for running requests)")
        drain_s = None
        while True:
            try:
                stop_run(self._machine, self._run, drain_s=drain_s, tell=self._say)
                return
            except KeyboardInterrupt:
                drain_s = 0.0

    def _start(self) -> None:
        self._resolve_options()
        options, gpus = self._options, self._machine.gpus()
        plan = saved_plan(options.model, options.plan_text)
        name = options.server or (str(plan["server"]) if plan is not None else "embedded")
        server = server_named(name)
        installation = find_installation(server.name, server.distributions, options.python)
        launch, document = self._planned(plan, name, installation, gpus=len(gpus))
        launch = hide_api_key(launch, server.api_key_variable, self._api_key)
        request = self._launch_request(launch, name, installation)
        self._check_machine(request, gpus)
        for added in launch.added:
            self._say(f"added {added.text}: {added.why}")
        self._say(f"{name} {installation.version}: plan and preflight took {time.monotonic() - self._began:.2f} s")
        limits = Limits(hang_s=options.hang_seconds, stall_s=options.stall_seconds)
        with self._launching() as wanted:
            if not wanted:
                raise RefusedError("the connection was lost before the launch: nothing was started")
            launch_run(
                self._machine, request, gpus=gpus, plan=document, limits=limits, created=self._created, say=self._say
            )  # fmt: skip

    def _created(self, run: Run) -> None:
        """From here on Ctrl-C has something to end."""
        self._run = run
        self._output.event(make_event("created", name=run.name, run_id=self._options.run_id))

    def _launch_request(self, launch: Launch, name: str, installation: Installation) -> LaunchRequest:
        options, flags = self._options, launch.argv
        positional = flags[flags.index("serve") + 1] if "serve" in flags else options.model
        return LaunchRequest(
            name=options.name or free_run_name(self._machine, options.model, name),
            server=name,
            model=flag_value(flags, *_MODEL_FLAGS) or positional,
            version=installation.version,
            host=flag_value(flags, "--host") or options.host,
            port=_port_of(flag_value(flags, "--port")) or options.port,
            launch=launch,
            asked=_requested_settings(options),
            started_by=options.started_by,
            run_id=options.run_id,
        )

    def _check_machine(self, request: LaunchRequest, gpus: Sequence[GpuReading]) -> None:
        """The preflight; what refuses is raised, what warns is shown."""
        findings = preflight(self._machine, request.host, request.port, request.model, gpus=gpus)
        for finding in findings:
            self._output.event(
                make_event(
                    "preflight",
                    refuses=finding.refuses,
                    evidence=[finding.text],
                    fix=finding.fix,
                    cause=finding.code,
                )
            )
        refuse_if_needed(findings)

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
            self._refuse_decided()
            self._refuse(bool(saved.get("fits", True)), saved.get("problems", ()))
            argv = [*saved["command"], *server.flags(self._start_request(saved["command"]))]
            launch = server.finalize_command(argv, saved.get("env", {}), installation, gpus=gpus)
            return launch, json.dumps(saved, indent=1).encode()
        assert options.host_cache != "auto"
        request = UpPlanRequest(
            local_model(options.model, name), name, installation.version, options.tp, options.context,
            options.host_cache, options.device_cache if name == "embedded" else None,
            tuple(server.flags(self._start_request(()))),
            {**pool_size_variables(), **server.env_for_planning(installation)},
        )  # fmt: skip
        plan = self._plan(request, self._machine)
        document = plan.document
        self._output.event(
            make_event("plan", fits=plan.fits, problems=document["problems"], warnings=document["warnings"])
        )
        self._refuse(plan.fits, document["problems"])
        launch = server.finalize_command(plan.command, plan.env, installation, gpus=gpus)
        return launch, json.dumps(document, indent=1).encode()

    def _start_request(self, planned: Sequence[str]) -> StartRequest:
        """Beyond the plan; what a saved plan already says of the address is kept unless the user says otherwise."""
        options = self._options
        return StartRequest(
            host=options.host, port=options.port, served_name=options.served_name,
            device_cache_bytes=None if planned else options.device_cache, write_policy=options.write_policy,
            extra=options.server_flags,
        )  # fmt: skip

    def _refuse_decided(self) -> None:
        """Raise UsageError for options that a saved plan has decided already."""
        keys = ("tp", "context", "host_cache", "device_cache")
        decided = [key for key in keys if getattr(self._options, key) is not None]
        if decided:
            words = ", ".join(f"--{key.replace('_', '-')}" for key in decided)
            raise UsageError(f"{self._options.model} has decided {words} already", fix="plan again, or leave it out")

    def _refuse(self, fits: bool, problems: Sequence[Mapping[str, Any]]) -> None:
        if fits or self._options.no_plan:
            return
        first = problems[0] if problems else {}
        message = str(first.get("message", "the plan does not fit"))
        raise RefusedError(message, fix=first.get("fix"), code=first.get("code"))

    def _until_ready(self, tail: EventTail) -> ExitCode:
        """Follow the supervisor's events until ready or dead."""
        assert self._run is not None
        name, timeout = self._run.name, self._options.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            for event in tail.new():
                self._output.event(event, offset=tail.offset)
                kind = event["event"]
                if kind == "ready":
                    return ExitCode.DONE
                if kind in ("dead", "stopped"):
                    return self._end_dead_run()
                if kind in ("stalled", "hung"):
                    self._say(f"it is left as it is: see `forebay doctor {name}`, end it with `forebay down {name}`")
                    return ExitCode.STALLED
            if deadline is not None and time.monotonic() > deadline:
                self._say(f"not ready after {timeout:g} s; it goes on: see `forebay wait {name}`")
                return ExitCode.TIME_IS_UP
            self._check_supervisor()
            time.sleep(_POLL_S)

    def _check_supervisor(self) -> None:
        """Without it no event will ever come. Checked once a second.

        Raises:
            DeadError: it is gone and has not written how the run ended.
        """
        now = time.monotonic()
        if self._run is None or now - self._supervisor_checked_at < 1.0:
            return
        self._supervisor_checked_at = now
        record = self._run.read()
        if record.ended or record.supervisor is None or is_running(self._machine, record.supervisor):
            return
        raise DeadError(
            f"the supervisor of {record.name!r} is gone; the server itself may still run",
            fix=f"see {self._run.folder}/supervisor.log, and end the run with `forebay down {record.name}`",
        )

    def _end_dead_run(self) -> ExitCode:
        """The server is dead: end what is left of it."""
        assert self._run is not None
        stop_run(self._machine, self._run, tell=self._say)
        return ExitCode.DEAD

    def _verify(self) -> ExitCode:
        assert self._run is not None
        if self._options.no_verify:
            return ExitCode.DONE
        from forebay.operation.verify.verify import rows_in_effect, verify_run

        rows = self._run.read().verify  # verified already, before the connection was lost
        if not rows:
            seconds, key = self._options.probe_seconds, self._api_key
            report = verify_run(self._machine, self._run, probe_s=seconds, api_key=key, tell=self._say)
            rows = [row.as_json() for row in report.rows]
        in_effect = rows_in_effect(rows)
        self._output.event(make_event("verified", in_effect=in_effect, rows=rows))
        return ExitCode.DONE if in_effect else ExitCode.NOT_IN_EFFECT

    def _report(self) -> None:
        assert self._run is not None
        record = self._run.read()
        self._say(f"ready after {record.ready_after_s or 0.0:.1f} s; stages, slowest first:")
        for line in stage_lines(record.stages):
            self._say(line)
        self._output.event(
            make_event(
                "serving", name=record.name, model=record.model, url=record.url, host=record.client_host,
                port=record.port, detached=self._options.detach,
            )
        )  # fmt: skip

    def _ask(self) -> ExitCode:
        """Send the question, show the answer; NOT_IN_EFFECT where there is none."""
        assert self._run is not None
        if self._options.ask is None:
            return ExitCode.DONE
        record = self._run.read()
        address = Address(record.client_host, record.port, api_key=self._api_key)
        model = first_model(send(self._machine, address, "GET", "/v1/models", timeout_s=10.0)) or record.model
        question = Question(address, model, self._options.ask)
        answer = ask(self._machine, question)
        if answer.text is None:
            self._say(f"the question was not answered: {answer.failure}")
            return ExitCode.NOT_IN_EFFECT
        flush = server_named(record.server).flush_path
        self._output.event(
            make_event("answer", question=question.text, answer=answer.text, model=model, flush_path=flush)
        )
        return ExitCode.DONE

    def _follow_until_end(self, tail: EventTail) -> ExitCode:
        """In the foreground until the run ends; Ctrl-C raises through here."""
        self._say("serving until Ctrl-C")
        while True:
            for event in tail.new():
                self._output.event(event, offset=tail.offset)
                if event["event"] in ("dead", "stopped"):
                    return self._end_dead_run()
            self._check_supervisor()
            time.sleep(0.2)

    def _say(self, text: str) -> None:
        self._output.say(text)


def _requested_settings(options: UpOptions) -> dict[str, str]:
    """What verify compares with: only what was asked for."""
    keys = ("context", "host_cache", "device_cache", "write_policy", "tp")
    return {key: str(getattr(options, key)) for key in keys if getattr(options, key) is not None}


def _port_of(given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and 1 <= int(given) <= 65535):
        raise UsageError(f"--port {given!r} is not a port", fix="a number from 1 to 65535")
    return int(given)
