"""Ports, addresses, and the libraries that talk between ranks and nodes."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.records import Confidence
from forebay.operation.doctor.rule import Priority, Requirement, Rule

__all__ = ["RULES"]

SGLANG = ("sglang",)


def _port(found: EventMatch) -> str:
    return found.text("port") or found.base.launch.asked.get("port", "")


def _port_fix(found: EventMatch) -> str:
    port = _port(found)
    if port.isdigit():
        return f"see who holds it: `ss -ltnp 'sport = :{port}'`; end that server (`forebay down`) or start with --port {int(port) + 1}"
    return "see who holds it: `ss -ltnp`; end that server (`forebay down`) or choose another --port"


def _zmq_fix(found: EventMatch) -> str:
    port = _port(found)
    named = f"{port} " if port else ""
    return (
        f"an inner port {named}is taken: by another rank (give every rank its own KV-event publisher port), an orphan of an earlier run, or a "
        "race for a free port; free it, and leave SGLANG_PORT / VLLM_PORT unset or 100 apart between servers"
    )


_BIND_98 = r"address already in use|Address already in use|EADDRINUSE|Only one usage of each socket address"

_MOONCAKE_FIX = say(
    "start mooncake_master (and its metadata server) first, and check MOONCAKE_MASTER, MOONCAKE_TE_META_DATA_SERVER, the protocol and the "
    "RDMA device on both sides, and the firewall from this node: `nc -vz HOST PORT`"
)

RULES = (
    Rule(
        "leftover_scheduler",
        Cause.LEFTOVER_SCHEDULER,
        "leftover_scheduler",
        "Port {port} is held by a process of an earlier server.",
        say(
            "end the leftover: `forebay down` of the earlier run, or kill the pid that the message names; then start again"
        ),
        check=lambda found: found.line.level not in ("INFO", "DEBUG") and "Waiting for" not in found.line.text,
    ),
    Rule(
        "leftover_on_gpu",
        Cause.LEFTOVER_SCHEDULER,
        "leftover_on_gpu",
        "{who} of an earlier run still holds GPU memory ({mib} MiB).",
        say(
            "end the leftover: `forebay down` of the earlier run, or kill that pid (its parent is gone: ppid 1); then start again"
        ),
        needs=(Requirement("memory_or_port_refused"),),
    ),
    Rule(
        "leftover_process",
        Cause.LEFTOVER_SCHEDULER,
        "leftover_process",
        "A process of an earlier server is still there and holds its memory or port.",
        say("end the leftover: `forebay down` of the earlier run; a zombie goes when its parent reaps it"),
    ),
    Rule(
        "port_not_available",
        Cause.PORT_IN_USE,
        "port_not_available",
        "Port {port} is taken.",
        _port_fix,
    ),
    Rule(
        "uvicorn_bind",
        Cause.PORT_IN_USE,
        "uvicorn_bind",
        "Port {port} is taken by another process, so this server never listened; a later ready line is another server's.",
        _port_fix,
        rules_out=((Cause.HOST_OOM_KILLED, "exit 137 after this is the server's own SIGKILL of its processes"),),
        cases=("sglang/fail_port_in_use", "sglang/fail_port_used_by_another_sglang"),
    ),
    Rule(
        "warm_up_met_a_stranger",
        Cause.PORT_IN_USE,
        "warm_up_met_a_stranger",
        "The server's own warm-up request was answered by another program: that one holds the port.",
        _port_fix,
        servers=SGLANG,
    ),
    Rule(
        "zmq_bind",
        Cause.PORT_IN_USE,
        "zmq_bind",
        "An inner port (ZeroMQ) is taken.",
        _zmq_fix,
        rules_out=((Cause.NCCL_ERROR, "connection resets on the other ranks are fallout"),),
        cases=("ai-dynamo_dynamo_4121", "sgl-project_sglang_29547"),
    ),
    Rule(
        "bind_taken",
        Cause.PORT_IN_USE,
        "bind_taken",
        "The port is taken by another process.",
        _port_fix,
        cases=("vllm/fail_port_in_use_http", "vllm/fail_port_in_use_http_anyhost", "vllm/fail_port_in_use_vllm"),
    ),
    Rule(
        "bind_address",
        Cause.BIND_FAILED,
        "bind_address",
        "The address is not one of this machine's, or does not resolve.",
        say(
            "use --host 127.0.0.1, 0.0.0.0, or an address that `ip -brief address` lists; for several nodes check --dist-init-addr too"
        ),
        priority=Priority.SPECIFIC,
        excludes=(Requirement("hub_address_named", "block"),),
        cases=("vllm/fail_bind_address_not_local",),
    ),
    Rule(
        "bind_denied",
        Cause.BIND_FAILED,
        "bind_denied",
        "The port may not be bound by this user.",
        say("use a port of 1024 or more, or grant CAP_NET_BIND_SERVICE"),
        needs=(Requirement("bind_call_named", "block"),),
    ),
    Rule(
        "rdma_gid",
        Cause.RDMA_GID,
        "rdma_gid",
        "The RDMA device has no address at the GID index that was asked for.",
        say(
            "list the GIDs on every node (`show_gids`, or /sys/class/infiniband/*/ports/1/gids) and set MC_GID_INDEX / NCCL_IB_GID_INDEX per node to the RoCE v2 one; they differ between nodes"
        ),
        cases=("index_61924320408",),
    ),
    Rule(
        "mooncake_peer",
        Cause.MOONCAKE_PEER_RACE,
        "mooncake_peer",
        "Mooncake's warm-up picked a segment of a peer that had registered and did not listen yet ({peer}).",
        say(
            "start again, or start the ranks' stores first; newer versions retry the warm-up. The configuration is not at fault, whatever the next line says"
        ),
        needs=(
            Requirement(
                "mooncake_setup_seen",
                "any",
            ),
        ),
        cases=("sgl-project_sglang_17195",),
    ),
    Rule(
        "mooncake_unreachable",
        Cause.MOONCAKE_UNREACHABLE,
        "mooncake_unreachable",
        "Mooncake could not reach its master, its metadata server or a peer's segment.",
        _MOONCAKE_FIX,
        needs=(Requirement("mooncake_named"),),
        excludes=(Requirement("rdma_gid_missing_seen"), Requirement("pin_limit")),
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "mooncake_own_line",
        Cause.MOONCAKE_UNREACHABLE,
        "mooncake_unreachable",
        "Mooncake could not reach its master, its metadata server or a peer's segment.",
        _MOONCAKE_FIX,
        needs=(Requirement("mooncake_origin"),),
        excludes=(Requirement("rdma_gid_missing_seen"), Requirement("pin_limit")),
        confidence=Confidence.LIKELY,
    ),
    Rule(
        "nccl",
        Cause.NCCL_ERROR,
        "nccl",
        "The collective library (NCCL) failed between the ranks.",
        say(
            "start again with NCCL_DEBUG=INFO and read the first WARN of the first rank; usual causes: NCCL_SOCKET_IFNAME names no common network, a firewall between the nodes, different NCCL versions, or two ranks on one GPU"
        ),
        priority=Priority.GENERAL,
        excludes=(Requirement("out_of_memory_named", "block"),),
    ),
    Rule(
        "slow_rank",
        Cause.SLOW_RANK_LOAD,
        "slow_rank",
        "One rank loaded its weights and gave up waiting for the others: a slow node, or a rank that died before (read its log).",
        say(
            "put the weights on fast local storage on every node (or page them in before: `cat model*.safetensors > /dev/null`), and pass --dist-timeout 3600"
        ),
        servers=SGLANG,
        priority=Priority.GENERAL,
        cases=("sgl-project_sglang_5457",),
    ),
    Rule(
        "store_timeout",
        Cause.SLOW_RANK_LOAD,
        "store_timeout",
        "Not all ranks arrived in time[ ({joined} of {all} did)]: one was slow, or died before.",
        say(
            "read the log of the rank that is missing; where it only was slow, raise the timeout (SGLang --dist-timeout)"
        ),
        priority=Priority.SECONDARY,
        activities=(ProcessActivity.WEIGHTS, ProcessActivity.CAPTURE, ProcessActivity.DEVICE_POOL),
    ),
    Rule(
        "ranks_cannot_meet",
        Cause.NCCL_ERROR,
        "store_timeout",
        "The ranks could not meet[ ({joined} of {all} joined)]: the store of rank 0 was not reached[ at {peer}], or a rank never started.",
        say(
            "check from every node that the address and port of rank 0 can be reached (--dist-init-addr, MASTER_ADDR; `nc -vz HOST PORT`), "
            "that the firewall lets all ports between the nodes through, that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the network they "
            "share, and that every rank was started; the log of a missing rank says why it ended"
        ),
        priority=Priority.SECONDARY,
        rules_out=((Cause.SLOW_RANK_LOAD, "no weight was being loaded yet"),),
    ),
    Rule(
        "peer_gone",
        Cause.NCCL_ERROR,
        "peer_gone",
        "The connection to another rank broke: that rank is the one to look at.",
        say("read the log of the other rank: it ended first"),
        priority=Priority.SECONDARY,
        needs=(Requirement("collectives_named", "block"),),
    ),
)
