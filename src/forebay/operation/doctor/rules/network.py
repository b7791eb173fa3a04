"""Ports, addresses, and the libraries that talk between ranks and nodes."""

from __future__ import annotations

from forebay.causes import Cause
from forebay.operation.doctor.fixes import say
from forebay.operation.doctor.rule import Found, Need, Priority, Rule, Where, pattern

__all__ = ["RULES"]

SGLANG = ("sglang",)


def _port(found: Found) -> str:
    port = found.text("port") or found.text("port2")
    if not port:
        port = found.transcript.asked.get("port", "")
    return port


def _port_fix(found: Found) -> str:
    port = _port(found)
    if port.isdigit():
        return f"see who holds it: `ss -ltnp 'sport = :{port}'`; end that server (`forebay down`) or start with --port {int(port) + 1}"
    return "see who holds it: `ss -ltnp`; end that server (`forebay down`) or choose another --port"


def _zmq_fix(found: Found) -> str:
    port = _port(found)
    named = f"{port} " if port else ""
    return (
        f"an inner port {named}is taken: by another rank (give every rank its own KV-event publisher port), an orphan of an earlier run, or a "
        "race for a free port; free it, and leave SGLANG_PORT / VLLM_PORT unset or 100 apart between servers"
    )


_BIND_98 = r"address already in use|Address already in use|EADDRINUSE|Only one usage of each socket address"

RULES = (
    Rule(
        "leftover_scheduler",
        Cause.LEFTOVER_SCHEDULER,
        pattern(
            r"(?P<what>\w+) at (?P<port>\d+) is not available in \d+ seconds\..*(?:sglang|scheduler|VLLM::|EngineCore)|(?:port|Port) (?P<port2>\d+).{0,80}\b(?:used|held|in use) by\b.{0,160}(?:sglang::|sglang\.launch_server|VLLM::|EngineCore)"
        ),
        "Port {port} is held by a process of an earlier server.",
        say(
            "end the leftover: `forebay down` of the earlier run, or kill the pid that the message names; then start again"
        ),
        where=Where.ANY,
        check=lambda found: found.line.level not in ("INFO", "DEBUG") and "Waiting for" not in found.line.text,
    ),
    Rule(
        "leftover_on_gpu",
        Cause.LEFTOVER_SCHEDULER,
        pattern(
            r"\b(?P<who>sglang::\w+|VLLM::\w+)\s+(?P<mib>\d+) ?MiB|^\S+\s+(?P<pid>\d+)\s+1\s.*\b(?P<who2>sglang::\w+|VLLM::\w+)"
        ),
        "{who} of an earlier run still holds GPU memory ({mib} MiB).",
        say(
            "end the leftover: `forebay down` of the earlier run, or kill that pid (its parent is gone: ppid 1); then start again"
        ),
        where=Where.ANY,
        needs=(
            Need(
                pattern(
                    r"[Oo]ut of memory|OutOfMemory|is less than desired GPU|Address already in use|address already in use|unbalanced|\s1\s+(?:sglang|VLLM)::"
                )
            ),
        ),
    ),
    Rule(
        "leftover_process",
        Cause.LEFTOVER_SCHEDULER,
        pattern(
            r"(?:orphan|leftover|left[- ]over|stale|zombie)\w*\b.{0,60}(?:scheduler|sglang::|VLLM::|EngineCore)",
            ignore_case=True,
        ),
        "A process of an earlier server is still there and holds its memory or port.",
        say("end the leftover: `forebay down` of the earlier run; a zombie goes when its parent reaps it"),
    ),
    Rule(
        "port_not_available",
        Cause.PORT_IN_USE,
        pattern(
            r"(?P<what>\w+) at (?P<port>\d+) is not available(?: in \d+ seconds)?\.|Port is already in use\.|[Pp]ort (?P<port2>\d+) is (?:already )?(?:in use|occupied)"
        ),
        "Port {port} is taken.",
        _port_fix,
    ),
    Rule(
        "uvicorn_bind",
        Cause.PORT_IN_USE,
        pattern(
            r"\[Errno (?:98|48|10048)\] error while attempting to bind on address \('(?P<host>[^']*)', (?P<port>\d+)[^)]*\)"
        ),
        "Port {port} is taken by another process, so this server never listened; a later ready line is another server's.",
        _port_fix,
        rules_out=((Cause.HOST_OOM_KILLED, "exit 137 after this is the server's own SIGKILL of its processes"),),
        cases=("sglang/fail_port_in_use", "sglang/fail_port_used_by_another_sglang"),
    ),
    Rule(
        "warm_up_met_a_stranger",
        Cause.PORT_IN_USE,
        pattern(r"AssertionError: res=<Response \[(?:404|405|501)\]>"),
        "The server's own warm-up request was answered by another program: that one holds the port.",
        _port_fix,
        servers=SGLANG,
    ),
    Rule(
        "zmq_bind",
        Cause.PORT_IN_USE,
        pattern(rf"ZMQError: (?:{_BIND_98})(?: \(addr='(?:tcp|ipc)://[^:']*:?(?P<port>\w+)?'\))?"),
        "An inner port (ZeroMQ) is taken.",
        _zmq_fix,
        rules_out=((Cause.NCCL_ERROR, "connection resets on the other ranks are fallout"),),
        cases=("ai-dynamo_dynamo_4121", "sgl-project_sglang_29547"),
    ),
    Rule(
        "bind_taken",
        Cause.PORT_IN_USE,
        pattern(rf"(?:\[Errno (?:98|48|10048)\] )?(?:{_BIND_98})(?:.*?:(?P<port>\d{{2,5}})\b)?"),
        "The port is taken by another process.",
        _port_fix,
        cases=("vllm/fail_port_in_use_http", "vllm/fail_port_in_use_http_anyhost", "vllm/fail_port_in_use_vllm"),
    ),
    Rule(
        "bind_address",
        Cause.BIND_FAILED,
        pattern(
            r"(?:\[Errno (?:99|49)\] )?(?:[Cc]annot assign requested address|Can't assign requested address)|(?:\[Errno (?:99|49)\] error while attempting to bind on address)|could not bind|[Ff]ailed to bind|(?:getaddrinfo|Name or service not known|Temporary failure in name resolution|nodename nor servname)"
        ),
        "The address is not one of this machine's, or does not resolve.",
        say(
            "use --host 127.0.0.1, 0.0.0.0, or an address that `ip -brief address` lists; for several nodes check --dist-init-addr too"
        ),
        tier=Priority.SPECIFIC,
        excludes=(Need(pattern(r"huggingface|hf_hub|urlopen|HTTPSConnection|https?://"), "block"),),
        cases=("vllm/fail_bind_address_not_local",),
    ),
    Rule(
        "bind_denied",
        Cause.BIND_FAILED,
        pattern(r"\[Errno 13\] (?:error while attempting to bind on address.*|Permission denied)"),
        "The port may not be bound by this user.",
        say("use a port of 1024 or more, or grant CAP_NET_BIND_SERVICE"),
        needs=(Need(pattern(r"bind|listen|create_server|socket"), "block"),),
    ),
    Rule(
        "rdma_gid",
        Cause.RDMA_GID,
        pattern(
            r"GID is NULL|(?:check|specifying) (?:your )?(?:GID index|MC_GID_INDEX)|[Ff]ailed to (?:open|query) .*\bGID\b|No (?:matching|valid|suitable) GID|NCCL_IB_GID_INDEX.*(?:invalid|not found)"
        ),
        "The RDMA device has no address at the GID index that was asked for.",
        say(
            "list the GIDs on every node (`show_gids`, or /sys/class/infiniband/*/ports/1/gids) and set MC_GID_INDEX / NCCL_IB_GID_INDEX per node to the RoCE v2 one; they differ between nodes"
        ),
        cases=("index_61924320408",),
    ),
    Rule(
        "mooncake_peer",
        Cause.MOONCAKE_PEER_RACE,
        pattern(
            r"(?:SocketHandShakePlugin: )?connect\(\) ?(?P<peer>[\d.]+:\d+): Connection refused|Failed to open segment for endpoint='?(?P<peer2>[^'\s]+)"
        ),
        "Mooncake's warm-up picked a segment of a peer that had registered and did not listen yet ({peer}).",
        say(
            "start again, or start the ranks' stores first; newer versions retry the warm-up. The configuration is not at fault, whatever the next line says"
        ),
        needs=(
            Need(
                pattern(r"Mooncake store (?:setup|warmup) successfully|[Mm]ounting segment|SocketHandShakePlugin"),
                "any",
            ),
        ),
        cases=("sgl-project_sglang_17195",),
    ),
    Rule(
        "mooncake_unreachable",
        Cause.MOONCAKE_UNREACHABLE,
        pattern(
            r"[Ff]ailed to (?:connect to|reach|contact|initialize|setup|set up) (?:the )?(?:[Mm]ooncake|master|metadata|etcd|transfer engine).*|MountSegment: rpc error|failed to connect to all addresses|"
            r"Failed to setup Mooncake store|Launch mooncake store server timeout|Unable to find metadata storage plugin|(?:master|metadata) server .*(?:unreachable|refused|not (?:reachable|available|found))|"
            r"async_resolve failed|Error from etcd client|Failed to mount segment|Cannot connect to .*metadata|\bmetadata not found\b"
        ),
        "Mooncake's master or metadata server could not be reached.",
        say(
            "start mooncake_master (and its metadata server) first, and check MOONCAKE_MASTER, MOONCAKE_TE_META_DATA_SERVER and the firewall from this node: `nc -vz HOST PORT`"
        ),
        tier=Priority.SPECIFIC,
        needs=(
            Need(
                pattern(
                    r"[Mm]ooncake|MOONCAKE|MountSegment|etcd|master_server|transfer_engine|transfer_metadata|client\.cpp|distributed_object_store"
                )
            ),
        ),
        excludes=(Need(pattern(r"GID is NULL|Disable device")),),
    ),
    Rule(
        "nccl",
        Cause.NCCL_ERROR,
        pattern(
            r"NCCL error\b|\bnccl(?:UnhandledCuda|System|Internal|InvalidUsage|InvalidArgument|Remote)Error|DistBackendError|\bNCCL WARN .*(?:failed|error|Error)|RCCL error|HCCL.*error",
            ignore_case=False,
        ),
        "The collective library (NCCL) failed between the ranks.",
        say(
            "start again with NCCL_DEBUG=INFO and read the first WARN of the first rank; usual causes: NCCL_SOCKET_IFNAME names no common network, a firewall between the nodes, different NCCL versions, or two ranks on one GPU"
        ),
        tier=Priority.GENERAL,
        excludes=(Need(pattern(r"[Oo]ut of memory|OutOfMemory"), "block"),),
    ),
    Rule(
        "slow_rank",
        Cause.SLOW_RANK_LOAD,
        pattern(r"could finish the model loading, but there are other ranks that didn't finish loading"),
        "One rank loaded its weights and gave up waiting for the others: a slow node, or a rank that died before (read its log).",
        say(
            "put the weights on fast local storage on every node (or page them in before: `cat model*.safetensors > /dev/null`), and pass --dist-timeout 3600"
        ),
        servers=SGLANG,
        tier=Priority.GENERAL,
        cases=("sgl-project_sglang_5457",),
    ),
    Rule(
        "store_timeout",
        Cause.SLOW_RANK_LOAD,
        pattern(
            r"DistStoreError: Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<all>\d+) clients joined|(?:monitored[Bb]arrier|store->get|wait timeout|TCPStore).*[Tt]imed? ?out|Connected (?P<joined2>\d+)/(?P<all2>\d+) clients"
        ),
        "Not all ranks joined in time ({joined} of {all}): one was slow, or died before.",
        say("read the log of the rank that did not join; if it only was slow, raise --dist-timeout"),
        tier=Priority.FALLOUT,
    ),
    Rule(
        "peer_gone",
        Cause.NCCL_ERROR,
        pattern(
            r"Connection (?:reset|closed) by peer|[Cc]onnection was (?:likely )?closed|remote process exited or there was a network error|recvValue failed|sendBytes failed|Broken pipe"
        ),
        "The connection to another rank broke: that rank is the one to look at.",
        say("read the log of the other rank: it ended first"),
        tier=Priority.FALLOUT,
        needs=(Need(pattern(r"gloo|nccl|NCCL|TCPStore|torch\.distributed|ProcessGroup"), "block"),),
    ),
)
