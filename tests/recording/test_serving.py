"""A program that answers HTTP: recordings that a request starts and stops, memory as it is now, and who may ask."""

from __future__ import annotations

import http.client
import json
import os
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from forked import status_of

import cudatool as ct
from cudatool.errors import OutputError, UsageError
from cudatool.recording.serving import Server
from cudatool.trace import hooks, reader
from cudatool.trace.events import Kind

TOKEN = "a token of sufficient length"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ct.serve(token=TOKEN, directory=str(tmp_path)) as made:
        yield made
    assert not hooks.active


def ask(server: Server, method: str, path: str, token: str = TOKEN) -> tuple[int, Any]:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
    connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
    answer = connection.getresponse()
    content = answer.read().decode()
    return answer.status, json.loads(content) if "json" in str(answer.headers["Content-Type"]) else content


def test_request_starts_a_recording_and_another_ends_it(server: Server, tmp_path: Path) -> None:
    before = ct.ones(1 << 20)
    status, started = ask(server, "POST", "/start")
    assert 200 == status
    status, refused = ask(server, "POST", "/start")
    assert (409, "this process is being recorded already") == (status, refused["error"])
    during = ct.ones(1 << 19)
    assert started["recording"] == ask(server, "GET", "/")[1]["recording"]
    status, stopped = ask(server, "POST", "/stop")
    assert (200, started["recording"]) == (status, stopped["trace"])
    assert (409, None) == (ask(server, "POST", "/stop")[0], ask(server, "GET", "/")[1]["recording"])
    (path,) = tmp_path.glob("*.ctrace")
    assert str(path) == stopped["trace"]
    trace = reader.read(path)
    assert {before.data_ptr(), during.data_ptr()} <= set(trace.of_kind(Kind.BLOCK_ALLOC)["address"].tolist())
    assert trace.ending.is_complete


def test_snapshot_imports_nothing_from_the_directory_of_the_program(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rich.py").write_text("1 / 0  # a program of the user's own")
    monkeypatch.chdir(tmp_path)
    assert 200 == ask(server, "GET", "/snapshot?format=text")[0]


def test_snapshot_shows_what_lives_now_and_during_a_recording(server: Server, tmp_path: Path) -> None:
    kept = ct.ones(3 << 20)
    status, now = ask(server, "GET", "/snapshot")
    assert (200, "cudatool.snapshot/1") == (status, now["schema"])
    assert kept.nbytes <= now["devices"][0]["peak_active"]
    assert [] == list(tmp_path.iterdir())
    ask(server, "POST", "/start")
    more = ct.ones(2 << 20)
    during = ask(server, "GET", "/snapshot")[1]
    assert now["devices"][0]["peak_active"] + more.nbytes == during["devices"][0]["peak_active"]
    status, text = ask(server, "GET", "/snapshot?format=text")
    assert (200, True) == (status, "test_serving.py" in text)
    status, page = ask(server, "GET", "/snapshot?format=html")
    assert (200, True) == (status, page.lower().startswith("<!doctype html>"))


def test_memory_is_told_without_a_recording(server: Server) -> None:
    kept = ct.ones(1 << 20)
    answer = ask(server, "GET", "/")[1]
    assert (os.getpid(), None) == (answer["pid"], answer["recording"])
    (device,) = [row for row in answer["memory"] if row["device"] == 0]
    assert "cudatool" == device["allocator"]
    assert kept.nbytes <= device["allocated"] <= device["active"] <= device["reserved"]
    assert ct.memory_reserved(0) == device["reserved"]


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "ä" * 20])
def test_nothing_is_answered_without_the_token(server: Server, token: str, tmp_path: Path) -> None:
    for method, path in (("GET", "/"), ("POST", "/start"), ("GET", "/snapshot"), ("GET", "/nonsense")):
        status, answer = ask(server, method, path, token)
        assert (401, {"schema", "error"}) == (status, set(answer))
    assert not hooks.active
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/start", 405),
        ("POST", "/", 405),
        ("POST", "/snapshot", 405),
        ("PUT", "/start", 405),
        ("DELETE", "/", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/snapshot?format=pickle", 400),
    ],
)
def test_request_that_makes_no_sense_is_refused(server: Server, method: str, path: str, status: int) -> None:
    assert status == ask(server, method, path)[0]
    assert not hooks.active


@pytest.mark.parametrize(("path", "takes"), [("/start", "POST"), ("/", "GET")])
def test_a_method_that_a_path_does_not_take_is_answered_with_the_one_that_it_takes(
    server: Server, path: str, takes: str
) -> None:
    connection = http.client.HTTPConnection(str(urlsplit(server.url).hostname), urlsplit(server.url).port, timeout=60)
    connection.request("PUT", path, headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    assert (405, takes) == (answer.status, answer.headers["Allow"])
    assert f"{path} takes {takes}" == json.loads(answer.read())["error"]
    connection.request("HEAD", path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert 405 == connection.getresponse().status


@pytest.mark.parametrize(
    ("request_line", "said"),
    [
        ("GET / or else HTTP/1.1", "Bad request syntax ('GET / or else HTTP/1.1')"),
        ("GET http://[/ HTTP/1.1", "no target of a request: Invalid IPv6 URL"),
    ],
)
def test_what_is_no_request_of_http_is_answered_in_one_line(server: Server, request_line: str, said: str) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=60) as connection:
        connection.sendall(f"{request_line}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        head, _, content = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert said == json.loads(content)["error"]


def test_program_that_is_recorded_by_something_else_says_so(server: Server, tmp_path: Path) -> None:
    with ct.record(tmp_path / "own.ctrace"):
        assert 409 == ask(server, "POST", "/start")[0]
        assert 409 == ask(server, "GET", "/snapshot")[0]


def test_trace_that_cannot_be_written_is_answered_with_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with ct.serve(token=TOKEN, directory=str(missing)) as server:
        status, answer = ask(server, "POST", "/start")
        assert (500, True) == (status, str(missing) in answer["error"])
        missing.mkdir()
        assert 200 == ask(server, "POST", "/start")[0]
        assert 200 == ask(server, "POST", "/stop")[0]


def test_snapshot_that_cannot_be_made_is_answered_with_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from cudatool import recording

    def full(*_: object, **__: object) -> None:
        raise OutputError("now.ctrace: No space left on device")

    monkeypatch.setattr(recording, "record", full)
    assert (500, "now.ctrace: No space left on device") == (
        (answer := ask(server, "GET", "/snapshot"))[0],
        answer[1]["error"],
    )


def test_level_that_there_is_not_is_refused_before_anything_is_served() -> None:
    with pytest.raises(UsageError, match="there is no level of recording 'kernel'; did you mean 'kernels'"):
        ct.serve(level="kernel")


def test_closing_ends_the_recording_and_frees_the_port(tmp_path: Path) -> None:
    server = ct.serve(token=TOKEN, directory=str(tmp_path))
    ask(server, "POST", "/start")
    server.close()
    server.close()
    (path,) = tmp_path.glob("*.ctrace")
    assert reader.read(path).ending.is_complete
    with ct.serve(urlsplit(server.url).port or 0, token=TOKEN):
        pass


def test_a_server_waits_for_requests_and_for_its_end_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that looks every half second whether it is to end keeps its program for as long."""
    waits: list[float | None] = []

    class Selector(socketserver._ServerSelector):  # type: ignore[name-defined, misc]
        def select(self, timeout: float | None = None) -> Any:
            waits.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(socketserver, "_ServerSelector", Selector)
    with ct.serve(token=TOKEN) as server:
        assert 200 == ask(server, "GET", "/")[0]
    assert {None} == set(waits)


def test_port_that_is_taken_and_tokens_that_are_too_short_are_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot serve on 127"):
            ct.serve(taken.getsockname()[1])
    with pytest.raises(UsageError, match="at least 16 characters"):
        ct.serve(token="short")
    with pytest.raises(UsageError, match="give a token"):
        ct.serve(host="0.0.0.0")
    with pytest.raises(UsageError, match="cannot serve on"):
        ct.serve(1 << 20)


def test_random_token_is_printed_and_another_each_time(capfd: pytest.CaptureFixture[str]) -> None:
    with ct.serve() as one, ct.serve() as other:
        assert one.token != other.token
        assert len(one.token) > 40
    said = capfd.readouterr().err
    assert f"cudatool: serving on {one.url}, token {one.token}" in said


def test_own_token_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with ct.serve(token=TOKEN):
        pass
    assert TOKEN not in capfd.readouterr().err


def test_forked_child_lets_go_of_the_port(server: Server) -> None:
    def released() -> int:
        server.close()  # changes nothing
        return int(server._http.socket.fileno() != -1)

    assert 0 == status_of(released)
    assert 200 == ask(server, "GET", "/")[0]
