"""The planner as ``up`` calls it: operation does not import planning."""

from __future__ import annotations

from forebay.machine.interface import Machine
from forebay.operation.start.plan_interface import UpPlan, UpPlanRequest
from forebay.planning.make_plan import PlanOptions, make_plan

__all__ = ["plan_for_up"]


def plan_for_up(request: UpPlanRequest, machine: Machine) -> UpPlan:
    """Plan ``request`` on ``machine``.

    Raises:
        UsageError: the model or a flag cannot be read.
    """
    options = PlanOptions(
        request.model,
        request.server,
        request.version,
        tp=request.tp,
        context=request.context,
        host_cache_bytes=request.host_cache_bytes,
        device_cache_bytes=request.device_cache_bytes,
        server_flags=request.server_flags,
        env=dict(request.env),
    )
    plan = make_plan(options, machine)
    return UpPlan(plan.fits, tuple(plan.command), plan.env, plan.to_json())
