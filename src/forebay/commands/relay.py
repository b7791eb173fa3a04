"""The host's end of relayed connections: stdin and stdout of the helper carry the frames."""

from __future__ import annotations

import asyncio
import os
import threading
from queue import SimpleQueue
from typing import BinaryIO

from forebay.commands.requests import RelayRequest
from forebay.machine.tcp_relay import Relay, feed_from

__all__ = ["serve_relay"]


def serve_relay(request: RelayRequest, stdin: BinaryIO, stdout: int) -> None:
    """Carry connections to ``request.host``:``request.port`` until stdin ends."""
    asyncio.run(_serve(request, stdin, stdout))


async def _serve(request: RelayRequest, stdin: BinaryIO, stdout: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    writer = threading.Thread(target=_write_all, args=(outgoing, stdout), daemon=True)
    writer.start()
    feed_from(stdin.read1, reader, loop)  # type: ignore[attr-defined]

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(request.host, request.port)

    await Relay(reader, outgoing.put, connect).run()
    outgoing.put(None)


def _write_all(outgoing: SimpleQueue[bytes | None], stdout: int) -> None:
    while (data := outgoing.get()) is not None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stdout, view) :]
            except OSError:
                return
