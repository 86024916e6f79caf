"""The range server in a process of its own, as a real one would be: it shares no interpreter lock with the loader.

    ServerProcess(folder, behaviour) --spawn--> RangeServer        asked over a pipe what it has done: ServerLoad

Price: it still shares the cores; `cpu_s` says how much of them it took.
"""

import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import quote

from tools.benchmarks.range_server import Behaviour, RangeServer

_START_S, _END_S = 60.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What a server has done since it started; `max_in_flight` is since the last time it was asked.

    Attributes:
        requests, errors, stalls: as in `range_server.Counts`.
        bytes_sent: of bodies, answers that nobody waited for any more included.
        cpu_s: CPU seconds.
    """

    requests: int
    bytes_sent: int
    errors: int
    stalls: int
    max_in_flight: int
    cpu_s: float

    def since(self, before: "ServerLoad") -> "ServerLoad":
        """The difference to an earlier state."""
        return replace(
            self,
            requests=self.requests - before.requests,
            bytes_sent=self.bytes_sent - before.bytes_sent,
            errors=self.errors - before.errors,
            stalls=self.stalls - before.stalls,
            cpu_s=self.cpu_s - before.cpu_s,
        )


class ServerProcess:
    """A range server over `folder`, from entering the context to leaving it."""

    def __init__(self, folder: str | os.PathLike[str], behaviour: Behaviour) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(Path(folder), behaviour, theirs), daemon=True)
        self._theirs = theirs
        self._port = 0

    def url(self, path: str = "") -> str:
        """Address of a file below the folder."""
        return f"http://127.0.0.1:{self._port}/{quote(path)}"

    def load(self) -> ServerLoad:
        """What it has done so far."""
        self._pipe.send(True)
        load: ServerLoad = self._pipe.recv()
        return load

    def __enter__(self) -> "ServerProcess":
        self._process.start()
        self._theirs.close()
        if not self._pipe.poll(_START_S):
            self._process.kill()
            raise TimeoutError(f"the server did not start within {_START_S:g} s")
        self._port = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(folder: Path, behaviour: Behaviour, pipe: Connection) -> None:
    """Serve until the pipe is closed."""
    with RangeServer(folder, behaviour) as server:
        pipe.send(server.port)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            with server.lock:
                counts = server.counts
                load = ServerLoad(
                    requests=counts.requests,
                    bytes_sent=counts.bytes_sent,
                    errors=counts.errors,
                    stalls=counts.stalls,
                    max_in_flight=counts.max_in_flight,
                    cpu_s=time.process_time(),
                )
                counts.max_in_flight = 0
                counts.ranges.clear()
            pipe.send(load)
