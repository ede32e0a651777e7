"""An HTTP endpoint inside a program that runs for days: start a recording, stop it, look at the memory now.

::

    GET  /           what is going on, as JSON
    POST /start      begin a recording: NAME.PID.1.ctrace, NAME.PID.2.ctrace ... in the server's directory
    POST /stop       end it
    GET  /snapshot   the analysis of the recording in progress, else of what lives now; ?format=json, text or html

Each request needs the header ``Authorization: Bearer TOKEN`` (RFC 6750): who may ask can see source lines and paths of
the program, so a page in a browser of the same machine must not. No request names a file. The analysis is done by a
process of its own.
"""

from __future__ import annotations

import atexit
import hmac
import ipaddress
import json
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import SplitResult, parse_qs, urlsplit

from cudatool import recording
from cudatool.collect.levels import Level
from cudatool.config import QUIET
from cudatool.errors import CudatoolError, UsageError
from cudatool.progress import announce
from cudatool.recording.armed import program_name
from cudatool.text import printable
from cudatool.trace.recorder import Recorder

__all__ = ["Server", "serve"]

_SCHEMA: Final = "cudatool.serve/1"
_SHORTEST_TOKEN: Final = 16
_IDLE_S: Final = 10.0  # of a connection that sends nothing
_ANALYSIS_S: Final = 600.0
_MOST_FILES: Final = 10_000
_LEVELS: Final = ("allocated", "active", "reserved")
_FORMATS: Final = {"json": "application/json", "text": "text/plain", "html": "text/html"}


class _Refused(Exception):
    """A request that is answered with an error; `header`, name and value, goes with it."""

    def __init__(self, status: HTTPStatus, reason: str, header: tuple[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.header = status, header


class Server:
    """What :func:`serve` returns; also a context manager that closes it.

    Attributes
    ----------
    url
        Such as ``http://127.0.0.1:40123``.
    token
        What requests have to bring.
    """

    def __init__(self, host: str, port: int, token: str, directory: str, level: str) -> None:
        self._folder, self._level = os.path.abspath(directory or os.curdir), Level(level)
        self._process, self._number = os.getpid(), 0
        self._busy = threading.Lock()  # one request changes or looks at a time
        self._open = ExitStack()
        self._recorder: Recorder | None = None
        self.token = token
        try:
            self._http = _Listener((host, port), self)
        except (OSError, OverflowError) as error:
            raise UsageError(f"cannot serve on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
        place, number = self._http.server_address[:2]
        shown = place if isinstance(place, str) else place.decode()
        self.url = f"http://[{shown}]:{number}" if ":" in shown else f"http://{shown}:{number}"
        self._thread = threading.Thread(target=self._http.serve, name="cudatool server", daemon=True)
        self._thread.start()
        _servers.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more, and end the recording in progress. Closing again changes nothing."""
        if os.getpid() != self._process:
            return
        if self._thread.is_alive():
            self._http.end()
            self._thread.join()
            self._http.server_close()
        with self._busy:
            if self._recorder is not None:
                self._stop()

    def answer(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[str, bytes]:
        """Return the content type and the content of the answer to a request.

        Raises
        ------
        _Refused
            It makes no sense, or not now.
        """
        known = {"/": ("GET", self._status), "/start": ("POST", self._start), "/stop": ("POST", self._stop)}
        if path not in known and path != "/snapshot":
            raise _Refused(HTTPStatus.NOT_FOUND, "there is /, /start, /stop and /snapshot")
        expected, act = known.get(path, ("GET", self._status))
        if method != expected:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {expected}", ("Allow", expected))
        if path == "/":
            return _FORMATS["json"], json.dumps(self._status()).encode()
        with self._busy:
            if path == "/snapshot":
                return self._snapshot(query.get("format", ["json"])[-1])
            return _FORMATS["json"], json.dumps(act()).encode()

    def abandon(self) -> None:
        """In a forked child: the port is the parent's."""
        self._http.socket.close()

    def _status(self) -> dict[str, Any]:
        recorder = self._recorder
        facts = recording.present_header()
        return {
            "schema": _SCHEMA,
            "pid": os.getpid(),
            "argv": sys.argv,
            "device": facts.get("device", ""),
            "recording": None if recorder is None else os.path.abspath(recorder.path),
            "memory": _memory(),
        }

    def _start(self) -> dict[str, Any]:
        if self._recorder is not None or recording.is_observing():
            raise _Refused(HTTPStatus.CONFLICT, "this process is being recorded already")
        recorder = self._recorder = self._open.enter_context(
            recording.record(self._free_name(), level=self._level, children=None, on_oom=True)
        )
        return {"schema": _SCHEMA, "recording": os.path.abspath(recorder.path)}

    def _stop(self) -> dict[str, Any]:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise _Refused(HTTPStatus.CONFLICT, "nothing is being recorded")
        self._open.close()
        return {"schema": _SCHEMA, "trace": os.path.abspath(recorder.path)}

    def _snapshot(self, wanted: str) -> tuple[str, bytes]:
        if wanted not in _FORMATS:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"format is one of {', '.join(_FORMATS)}")
        with tempfile.TemporaryDirectory(prefix="cudatool-") as folder:
            if self._recorder is not None:
                source = recording.up_to_date(lambda: self._recorder) or self._recorder.path
            elif recording.is_observing():
                raise _Refused(HTTPStatus.CONFLICT, "this process is recorded by something else: read its trace")
            else:
                source = os.path.join(folder, "now.ctrace")
                with recording.record(source):
                    pass  # it begins with what lives
            return _FORMATS[wanted], _analyzed(source, wanted, os.path.join(folder, "page.html"))

    def _free_name(self) -> str:
        stem = os.path.join(self._folder, f"{program_name()}.{os.getpid()}")
        while self._number < _MOST_FILES:
            self._number += 1
            path = f"{stem}.{self._number}.ctrace"
            if not os.path.lexists(path):
                return path
        raise _Refused(HTTPStatus.CONFLICT, f"{self._folder} has {_MOST_FILES:,} files of this process; remove some")


class _Listener(ThreadingHTTPServer):
    """Listens for a :class:`Server`, and answers each connection on a thread of its own."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)
        self.owner = owner
        self._is_ending = False

    def serve(self) -> None:
        """Answer until :meth:`end`. The base class's loop looks every half second whether it is to end."""
        while not self._is_ending:
            self.handle_request()

    def end(self) -> None:
        """Let :meth:`serve` return, from another thread."""
        self._is_ending = True
        self.socket.shutdown(socket.SHUT_RDWR)  # a thread that waits for a connection goes on

    def server_bind(self) -> None:
        """Bind without asking a name server for the host's name, as the base class does."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_S
    server: _Listener

    def __getattr__(self, name: str) -> Any:
        # The base class asks for the method do_GET, do_PUT ... of a request. The server says which of them it takes.
        if name.startswith("do_"):
            return self._do
        raise AttributeError(name)

    def _do(self) -> None:
        """Answer a request. Its content is not read."""
        try:
            scheme, _, given = self.headers.get("Authorization", "").partition(" ")
            if scheme != "Bearer" or not hmac.compare_digest(given.encode(), self.server.owner.token.encode()):
                reason = "send the header: Authorization: Bearer TOKEN"
                raise _Refused(HTTPStatus.UNAUTHORIZED, reason, ("WWW-Authenticate", "Bearer"))
            parts = _parts_of(self.path)
            self._send(HTTPStatus.OK, *self.server.owner.answer(self.command, parts.path, parse_qs(parts.query)))
        except _Refused as refused:
            self._send(refused.status, *_error(str(refused)), refused.header)
        except CudatoolError as error:  # a trace that cannot be written, say
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, *_error(str(error)))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request of HTTP as other errors are; the base class would send a page."""
        self._send(HTTPStatus(code), *_error(message or HTTPStatus(code).phrase))

    def _send(self, status: HTTPStatus, kind: str, content: bytes, header: tuple[str, str] | None = None) -> None:
        self.send_response_only(status)
        if header is not None:
            self.send_header(*header)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Leave the program's stderr alone."""


def _parts_of(target: str) -> SplitResult:
    try:
        return urlsplit(target)
    except ValueError as error:  # a host in brackets that are not closed, say
        raise _Refused(HTTPStatus.BAD_REQUEST, f"no target of a request: {error}") from None


def _error(reason: str) -> tuple[str, bytes]:
    return _FORMATS["json"], json.dumps({"schema": _SCHEMA, "error": reason}).encode()


def serve(
    port: int = 0, *, host: str = "127.0.0.1", token: str = "", directory: str = "", level: str = "kernels"
) -> Server:
    """Answer HTTP requests of this machine that start a recording, stop it, or show the memory now.

    ::

        server = cudatool.serve(8321)      # cudatool: serving on http://127.0.0.1:8321, token ...

        curl -H "Authorization: Bearer TOKEN" -X POST http://127.0.0.1:8321/start
        curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:8321/snapshot?format=text

    Parameters
    ----------
    port
        0 for one that is free; ``server.url`` has it.
    host
        The address to listen on. There is no encryption: any but a loopback address shows token and answers to the
        network, and needs a token of your own.
    token
        At least 16 characters; by default a random one, which is printed.
    directory
        Where traces go; default: the working directory.
    level
        How much of a GPU's own work is recorded, see :class:`~cudatool.collect.levels.Level`.

    Raises
    ------
    UsageError
        The port is taken, the token is too short, or there is no such level.
    """
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii()):
        raise UsageError(f"a token has at least {_SHORTEST_TOKEN} characters of ASCII; leave it out for a random one")
    if not token and not _is_loopback(host):
        raise UsageError(f"{host} can be reached from other machines: give a token")
    server = Server(host, port, token or secrets.token_urlsafe(32), directory, level)
    announce(f"cudatool: serving on {server.url}" + ("" if token else f", token {server.token}"))
    return server


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _memory() -> list[dict[str, Any]]:
    """Return the bytes that this process's caching allocators hold; a module that it does not use is not loaded."""
    ours, torch = sys.modules.get("cudatool.runtime.allocator"), sys.modules.get("torch")
    stats = [("cudatool", index, found.stats()) for index, found in ours.used_allocators()] if ours is not None else []
    if torch is not None and torch.cuda.is_initialized():
        stats += [("PyTorch", index, torch.cuda.memory_stats(index)) for index in range(torch.cuda.device_count())]
    return [
        {"allocator": name, "device": index}
        | {level: int(of_device.get(f"{level}_bytes.all.current", 0)) for level in _LEVELS}
        for name, index, of_device in stats
    ]


def _analyzed(source: str, wanted: str, page: str) -> bytes:
    # -P: modules that lie in the program's directory are not ours.
    command = [sys.executable, "-P", "-m", "cudatool", "snapshot", source]
    command += {"json": ["--json"], "text": [], "html": ["--html", page]}[wanted]
    environment = os.environ | {QUIET: "1"}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_ANALYSIS_S, check=False)
    except subprocess.TimeoutExpired:
        raise _Refused(HTTPStatus.GATEWAY_TIMEOUT, f"the analysis took over {_ANALYSIS_S:.0f} s") from None
    if done.returncode:
        raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, printable(done.stderr.decode(errors="replace").strip()))
    if wanted != "html":
        return done.stdout
    with open(page, "rb") as file:
        return file.read()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _forked() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
