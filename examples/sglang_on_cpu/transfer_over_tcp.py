"""A stand-in for the engine of Mooncake's package, which writes memory of one process into that of another.

It has the functions that SGLang's disaggregation calls, over a socket, and refuses what a real one refuses: memory that
was not registered, on either side. For trying disaggregation out on a processor; it is not fast.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib.machinery
import socket
import struct
import sys
import threading
from types import ModuleType
from typing import Any, Final

BLOCK: Final = struct.Struct("<QQ")
"""The address and length of what is written, before its bytes."""
COUNT: Final = struct.Struct("<Q")
DONE: Final = b"\0"


class TransferEngine:
    """The memory that this process has registered, and a socket by which others write there."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._listener: socket.socket | None = None

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Listen on a free port."""
        self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        """The port that others write to."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def register_memory(self, address: int, length: int) -> int:
        """Let memory be read and written by transfers."""
        self._regions[address] = length
        return 0

    def unregister_memory(self, address: int) -> int:
        """Let it be so no longer."""
        return 0 if self._regions.pop(address, None) is not None else -1

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Register several regions."""
        return min((self.register_memory(*each) for each in zip(addresses, lengths, strict=True)), default=0)

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        """Unregister several regions."""
        return min((self.unregister_memory(address) for address in addresses), default=0)

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        """Write to the memory of another process; 0 once it is there, -1 if it is not."""
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        """Write several blocks to the memory of another process; 0 once they are there, -1 if they are not."""
        blocks = list(zip(sources, targets, lengths, strict=True))
        if not all(self._is_registered(source, length) for source, _, length in blocks):
            return -1
        host, _, port = session.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as connection:
                connection.sendall(COUNT.pack(len(blocks)))
                for source, target, length in blocks:
                    connection.sendall(BLOCK.pack(target, length))
                    connection.sendall(ctypes.string_at(source, length))
                return 0 if connection.recv(1) == DONE else -1
        except OSError:
            return -1

    def send_probe(self, session: str) -> int:
        """Whether another process can be reached: 0 if so."""
        return self.batch_transfer_sync_write(session, [], [], [])

    def _is_registered(self, address: int, length: int) -> bool:
        starts = sorted(self._regions)
        index = bisect.bisect_right(starts, address) - 1
        return index >= 0 and address + length <= starts[index] + self._regions[starts[index]]

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            (count,) = COUNT.unpack(stream.read(COUNT.size))
            for _ in range(count):
                address, length = BLOCK.unpack(stream.read(BLOCK.size))
                if not self._is_registered(address, length):
                    return
                content = stream.read(length)
                ctypes.memmove(address, content, len(content))
            connection.sendall(DONE)


def install() -> None:
    """Be Mooncake's engine, in a process that has not imported the real one."""
    engine: Any = ModuleType("mooncake.engine")
    engine.TransferEngine = TransferEngine
    package: Any = ModuleType("mooncake")
    package.engine = engine
    package.__spec__ = importlib.machinery.ModuleSpec("mooncake", None)  # for who asks whether it is there
    sys.modules["mooncake"], sys.modules["mooncake.engine"] = package, engine
