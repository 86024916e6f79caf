"""A local HTTP server of byte ranges that is as slow, unreliable or wrong as one asks: for tests and measurements.

    python -m tools.benchmarks.range_server FOLDER --port 0 --latency-s 0.05 --error-share 0.02 --stall-share 0.005

prints the port and serves until it is ended. In Python:

    with RangeServer(folder, Behaviour(latency_s=0.05)) as server:
        storage.read_many([(server.url("a.tar"), 0, 512)])
        server.counts.requests

Which requests fail follows from the seed and their number, so runs repeat. Price: one thread per connection; Python
serves perhaps 1,000 answers a second. It listens on 127.0.0.1 alone.
"""

import argparse
import dataclasses
import html
import os
import random
import re
import socket
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """How answers go wrong; may be changed while the server runs.

    Attributes:
        latency_s: before every answer.
        error_share: of requests, answered with `error_status`.
        stall_share: of requests, answered only after `stall_s`.
        truncate_share: of answers, cut in the middle.
        ignore_range: answers with the whole file.
        shift_bytes: answers with a range that begins this much later than the one asked for.
        etag: instead of the one from time and size; "" sends none.
        redirect: where every request is sent, instead of an answer.
        first: sent before all others: statuses of the first answers, such as (503, 503); 0 stalls, -1 truncates.
        seed: of the choice of requests.
    """

    latency_s: float = 0.0
    error_share: float = 0.0
    error_status: int = 503
    stall_share: float = 0.0
    stall_s: float = 10.0
    truncate_share: float = 0.0
    ignore_range: bool = False
    shift_bytes: int = 0
    etag: str | None = None
    redirect: str | None = None
    first: tuple[int, ...] = ()
    seed: int = 0


@dataclass(slots=True)
class Counts:
    """What the server has done; `ranges` are (path, start, end) of good answers."""

    requests: int = 0
    bytes_sent: int = 0
    errors: int = 0
    stalls: int = 0
    truncated: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    ranges: list[tuple[str, int, int]] = field(default_factory=list)


class RangeServer:
    """The files below `folder` on a free port of 127.0.0.1, from entering the context to leaving it."""

    def __init__(self, folder: str | os.PathLike[str], behaviour: Behaviour | None = None, *, port: int = 0) -> None:
        self.folder, self.behaviour = Path(folder).resolve(), behaviour or Behaviour()
        self.counts, self.lock, self.closing = Counts(), threading.Lock(), threading.Event()
        self._server = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._server.server_address[1])

    def url(self, path: str = "") -> str:
        """Address of a file below the folder."""
        return f"http://127.0.0.1:{self.port}/{quote(path)}"

    def __enter__(self) -> "RangeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join()

    def wait(self) -> None:
        """Serve until interrupted."""
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], owner: RangeServer) -> None:
        self.owner, self._open = owner, set[socket.socket]()
        super().__init__(address, _Handler)

    def process_request(self, request, client_address):  # type: ignore[no-untyped-def]
        with self.owner.lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):  # type: ignore[no-untyped-def]
        with self.owner.lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):  # type: ignore[no-untyped-def]
        """Clients that leave early are no error here."""

    def end_connections(self) -> None:
        """Wake the threads that wait for a next request."""
        with self.owner.lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """No log."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        owner = self.server.owner
        counts, behaviour = owner.counts, owner.behaviour
        with owner.lock:
            number = counts.requests
            counts.requests += 1
            counts.in_flight += 1
            counts.max_in_flight = max(counts.max_in_flight, counts.in_flight)
        try:
            self._behave(number, behaviour, body)
        except OSError:  # the client has left
            self.close_connection = True
        finally:
            with owner.lock:
                counts.in_flight -= 1

    def _behave(self, number: int, behaviour: Behaviour, body: bool) -> None:
        owner, draw = self.server.owner, random.Random(f"{behaviour.seed} {number}").random()
        counts, first = owner.counts, behaviour.first[number] if number < len(behaviour.first) else None
        stalls = first == 0 or (first is None and draw < behaviour.stall_share)
        draw -= behaviour.stall_share
        fails = (first or 0) > 0 or (first is None and 0 <= draw < behaviour.error_share)
        draw -= behaviour.error_share
        cut = first == -1 or (first is None and 0 <= draw < behaviour.truncate_share)
        with owner.lock:
            counts.stalls += stalls
            counts.errors += fails
            counts.truncated += cut
        if owner.closing.wait(behaviour.latency_s + (behaviour.stall_s if stalls else 0.0)):
            self.close_connection = True
        elif fails:
            self._empty(first or behaviour.error_status)
        elif behaviour.redirect is not None:
            self._empty(302, Location=behaviour.redirect)
        else:
            self._file(behaviour, body, cut)

    def _empty(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _file(self, behaviour: Behaviour, body: bool, cut: bool) -> None:
        owner = self.server.owner
        path = (owner.folder / unquote(self.path.partition("?")[0]).lstrip("/")).resolve()
        if not path.is_relative_to(owner.folder) or not path.exists():
            return self._empty(404)
        if path.is_dir():
            return self._folder(path, body)
        status = path.stat()
        size = status.st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, size
        if asked and not behaviour.ignore_range:
            start, end = int(asked[1]) + behaviour.shift_bytes, min(int(asked[2] or size) + 1, size)
            if start >= size:
                return self._empty(416, Content_Range=f"bytes */{size}")
        partial = bool(asked) and not behaviour.ignore_range
        self.send_response(HTTPStatus.PARTIAL_CONTENT if partial else HTTPStatus.OK)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        etag = f'"{status.st_mtime_ns:x}-{size:x}"' if behaviour.etag is None else behaviour.etag
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if body:
            self._body(path, start, (start + end) // 2 if cut else end)
        if cut:
            self.close_connection = True
        else:
            with owner.lock:
                owner.counts.ranges.append((path.name, start, end))

    def _body(self, path: Path, start: int, end: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            while start < end and (data := file.read(min(_CHUNK_BYTES, end - start))):
                self.wfile.write(data)
                start += len(data)
                with self.server.owner.lock:
                    self.server.owner.counts.bytes_sent += len(data)

    def _folder(self, path: Path, body: bool) -> None:
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
        page = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if body:
            self.wfile.write(page)


def main() -> None:
    """Serve a folder until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=0)
    for option in dataclasses.fields(Behaviour):
        if option.name in ("first", "redirect", "etag"):
            continue
        name, default = f"--{option.name.replace('_', '-')}", option.default
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(default), default=default)
    options = vars(parser.parse_args())
    folder, port = options.pop("folder"), options.pop("port")
    with RangeServer(folder, Behaviour(**options), port=port) as server:
        print(server.port, flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("interrupted")


if __name__ == "__main__":
    main()
