"""Run one request on the machine of this process. The result is JSON; ``exit_code`` is the command's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from forebay.commands.requests import (
    DoctorRequest,
    DownRequest,
    LogsRequest,
    Request,
    ResolveRequest,
    StatusRequest,
    UpRequest,
    VerifyRequest,
    WaitRequest,
)
from forebay.errors import ExitCode, UsageError
from forebay.json_records import decode_record
from forebay.machine.interface import Machine
from forebay.operation.output import Launching, Output, always

__all__ = ["run_request"]


def run_request(machine: Machine, request: Request, output: Output, *, launching: Launching = always) -> dict[str, Any]:
    """Run ``request``; events and lines go to ``output`` while it runs.

    Args:
        launching: entered by ``up`` around the launch of the server; see ``BringUp``.

    Raises:
        ForebayError: as the command does.
    """
    if isinstance(request, UpRequest):
        return _up(machine, request, output, launching)
    if isinstance(request, StatusRequest):
        return _status(machine, request)
    if isinstance(request, WaitRequest):
        return _wait(machine, request, output)
    if isinstance(request, VerifyRequest):
        return _verify(machine, request, output)
    if isinstance(request, DoctorRequest):
        return _doctor(machine, request)
    if isinstance(request, DownRequest):
        return _down(machine, request, output)
    if isinstance(request, LogsRequest):
        from forebay.commands.log_chunks import send_log

        return send_log(request, output)
    if isinstance(request, ResolveRequest):
        return _resolve(request)
    raise UsageError(f"{type(request).__name__} is not run here")


def _up(machine: Machine, request: UpRequest, output: Output, launching: Launching) -> dict[str, Any]:
    from forebay.commands.planner import plan_for_up
    from forebay.operation.start.bring_up import BringUp

    job = BringUp(machine, request.options, plan_for_up, output, launching=launching)
    try:
        return {"exit_code": int(job.run())}
    except KeyboardInterrupt:
        job.interrupted()
        return {"exit_code": int(ExitCode.INTERRUPTED)}


def _status(machine: Machine, request: StatusRequest) -> dict[str, Any]:
    from forebay.operation.status import overview

    rows = overview(machine, name=request.name, earlier=request.earlier)
    return {"exit_code": 0, "rows": [row.as_json() for row in rows]}


def _wait(machine: Machine, request: WaitRequest, output: Output) -> dict[str, Any]:
    from forebay.operation.wait import WaitOptions, wait_for
    from forebay.operation.watch.health_state import Limits
    from forebay.operation.watch.target import target_of

    options = WaitOptions(request.timeout, Limits(hang_s=request.hang_seconds, stall_s=request.stall_seconds))
    target = target_of(
        machine, request.target, pid=request.pid, log=request.log, server=request.server, api_key=request.api_key
    )
    return {"exit_code": int(wait_for(machine, target, options, output.event))}


def _verify(machine: Machine, request: VerifyRequest, output: Output) -> dict[str, Any]:
    from forebay.operation.verify.verify import VerifyTarget, verify, verify_run
    from forebay.operation.watch.target import guess_server, listener_argv, target_of

    found = target_of(machine, request.target, log=request.log, server=request.server, api_key=request.api_key)
    seconds = request.probe_seconds
    if found.run is not None and request.log is None and not request.force:
        report = verify_run(machine, found.run, probe_s=seconds, api_key=request.api_key, tell=output.say)
    else:
        argv = listener_argv(machine, found.address)
        target = VerifyTarget(guess_server(machine, found), found.address, argv, found.log)
        report = verify(machine, target, probe_s=seconds, force=request.force, tell=output.say)
    code = ExitCode.DONE if report.in_effect else ExitCode.NOT_IN_EFFECT
    return {"exit_code": int(code), "in_effect": report.in_effect, "rows": [row.as_json() for row in report.rows]}


def _doctor(machine: Machine, request: DoctorRequest) -> dict[str, Any]:
    from forebay.commands.sizer import size_launch
    from forebay.operation.doctor import Observations
    from forebay.operation.doctor.facts import HostFacts
    from forebay.operation.doctor.read_log import read_lines
    from forebay.operation.doctor.run_folder import diagnose_named

    lines = read_lines(request.kernel_log) if request.kernel_log else ()
    observed = Observations(exit_code=request.exit_code, kernel_lines=lines, oom_kills=request.oom_kills)
    facts = decode_record(HostFacts, request.facts)
    answer = diagnose_named(machine, request.names, observed, facts, size_launch)
    return {"exit_code": 0, "answer": asdict(answer)}


def _down(machine: Machine, request: DownRequest, output: Output) -> dict[str, Any]:
    from forebay.operation.stop.stop_run import stop_run
    from forebay.runs.run_record import open_run, run_with_id

    run = run_with_id(request.run_id) if request.run_id else open_run(request.name)
    if run is None:
        return {"exit_code": 0, "name": "", "clean": True, "steps": [], "checks": []}
    report = stop_run(machine, run, drain_s=request.drain_seconds, tell=output.say)
    checks = report.cleanup.checks if report.cleanup is not None else ()
    return {
        "exit_code": int(ExitCode.DONE if report.clean else ExitCode.LEFT_BEHIND),
        "name": run.name,
        "clean": report.clean,
        "steps": report.steps,
        "checks": [asdict(check) for check in checks],
    }


def _resolve(request: ResolveRequest) -> dict[str, Any]:
    from forebay.runs.run_record import find_run, open_run
    from forebay.servers.http_client import parse_address

    text = request.target
    if find_run(text) is None and ("/" in text or ":" in text or text.isdecimal()):
        address = parse_address(f":{text}" if text.isdecimal() else text)
        return {"exit_code": 0, "host": address.host, "port": address.port}
    record = open_run(text).read()
    return {"exit_code": 0, "host": record.client_host, "port": record.port}
