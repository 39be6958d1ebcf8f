"""A server that is left alone with everybody."""

import asyncio
import errno
import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from candid._support.errors import CandidError
from candid.serve import Limits, ServeOptions
from candid.serve.app import DECODERS, NO_TELEMETRY, PUBLIC
from candid.serve.guard import HEADERS, Guard
from candid.serve.schemas import ImageRequest
from candid.serve.sensor import Sensor
from candid.serve.service import Service
from tests.serve.helpers import Running, huge_png, multipart, picture, running, until
from tests.serve.helpers import guarded as guarded_api


@contextmanager
def held_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The network answers nothing before the event is set."""
    may, examine = threading.Event(), service.examine

    def slow(requests: Sequence[Sequence[ImageRequest]]) -> list[Any]:
        may.wait(60)
        return examine(requests)

    with monkeypatch.context() as patch:
        patch.setattr(service, "examine", slow)
        yield may
        may.set()


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), 60)


def check_headers(answer: httpx.Response) -> None:
    for name, value in HEADERS.items():
        if name != "cache-control":
            assert answer.headers[name] == value
    assert "server" not in answer.headers and answer.headers["cache-control"] in ("no-store", "no-cache")


def test_every_answer_has_the_headers(server: Running) -> None:
    paths = (
        "/",
        "/app.js",
        "/style.css",
        "/api",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/models",
        "/openapi.json",
        "/nothing",
    )
    answers = [server.client.get(path) for path in paths]
    answers += [
        server.examine(picture()),
        server.client.post("/v1/examine"),
        server.client.get("/v1/examine"),
    ]
    assert [each.status_code for each in answers] == [200] * 9 + [404, 200, 422, 405]
    for answer in answers:
        check_headers(answer)
    policy = answers[0].headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path", ["/../cli.py", "/%2e%2e/cli.py", "/page/index.html", "//etc/passwd", "/app.py"]
)
def test_only_the_page_itself_is_handed_out(server: Running, path: str) -> None:
    with connected(server) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")


SECRET = (
    *("/v1/examine", "/v1/counterfactual", "/v1/models", "/v1/drift", "/v1/verdicts", "/v1/verdicts/image"),
    *("/v1/picture", "/v1/example", "/v1/corrections", "/v1/groups", "/v1/lessons", "/v1/lessons/use"),
    "/metrics",
)
PAGES = ("/", "/api", "/verdicts")
SCRIPTS = (
    *("api", "app", "change", "client", "correct", "dom", "drift", "lessons", "maps", "photos", "plots"),
    *("queue", "report", "single", "table", "verdicts", "why"),
)


@pytest.mark.parametrize("path", SECRET)
@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%00", "%E2%80%A8"])
def test_no_other_spelling_of_an_address_avoids_its_guard(guarded: Running, path: str, end: str) -> None:
    with stranger(guarded) as client:
        method = "POST" if path in guarded.guard.addresses.work else "GET"
        answer = client.request(method, httpx.URL(path=path, raw_path=f"{path}{end}".encode()))
        assert answer.status_code == 404, answer.text
        check_headers(answer)


@pytest.mark.parametrize(
    "spelling", ["/v1/models/", "//v1/models", "/V1/models", "/v1/nothing", "/v1/%6dodels", "/page/app.js"]
)
def test_an_address_that_is_not_public_needs_the_token(guarded: Running, spelling: str) -> None:
    with stranger(guarded) as client:
        answer = client.get(client.base_url.copy_with(raw_path=spelling.encode()))
        assert answer.status_code == 401, answer.text


def addresses(server: Running) -> list[tuple[str, str]]:
    """Every route of the application, with each of its methods."""
    routes: Any = server.guard.app.routes  # type: ignore[attr-defined]
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


def test_the_public_addresses_are_known_and_every_other_route_needs_the_token(guarded: Running) -> None:
    others = {"/style.css", "/icon.svg", "/healthz", "/readyz", "/openapi.json"}
    assert {*PAGES, *others, *(f"/{name}.js" for name in SCRIPTS)} == PUBLIC
    assert {path for _, path in addresses(guarded)} == {*PUBLIC, *SECRET}
    with stranger(guarded) as client:
        for method, path in addresses(guarded):
            status = client.request(method, path).status_code
            assert status == (200 if path in PUBLIC else 401), (method, path)


def test_a_new_route_needs_the_token(service: Service) -> None:
    with running(service, token="sesame") as server:
        server.guard.app.get("/v1/history")(lambda: {})  # type: ignore[attr-defined]
        assert server.client.get("/v1/history").status_code == 200
        with stranger(server) as client:
            assert client.get("/v1/history").status_code == 401


def stranger(server: Running) -> httpx.Client:
    """A client without the token."""
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def guarded(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    sensor = Sensor.of(ServeOptions(store=tmp_path_factory.mktemp("store")))
    with running(service, token="sesame", sensor=sensor) as server:
        yield server


def test_a_large_request_is_refused_by_its_header(service: Service) -> None:
    with running(service, max_megabytes=0.1) as server:
        answer = server.examine(bytes(300_000))
        assert answer.status_code == 413 and "0.1 MB" in answer.json()["error"]
        check_headers(answer)
        assert server.examine(picture()).status_code == 200


def test_a_large_request_without_a_length_is_refused_while_it_comes(service: Service) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while sent < 30_000_000:
            sent += 10_000
            yield bytes(10_000)

    with running(service, max_megabytes=0.1) as server:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        try:
            answer = server.client.post("/v1/examine", content=endless(), headers=headers)
        except httpx.TransportError:  # the server hung up while it was still sent to
            answer = None
        assert sent < 20_000_000
        if answer is not None:
            assert answer.status_code == 413
        assert server.metric('candid_refusals_total{reason="size"}') == 1
        assert server.metric("candid_queue_length") == 0


def test_a_small_file_of_many_pixels_is_refused(server: Running) -> None:
    (found,) = server.examine(huge_png()).json()["results"]
    assert found["status"] == "unusable" and "pixels" in found["error"]


def test_past_a_full_queue_comes_later(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        held_up(service, monkeypatch) as may,
        running(service, max_queue=2) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(server.examine, picture(i)) for i in range(2)]
        until(lambda: server.metric("candid_queue_length") == 2)
        refused = server.examine(picture(3))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"].endswith(".")
        check_headers(refused)
        assert server.client.get("/healthz").status_code == 200
        may.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
        assert server.examine(picture(3)).status_code == 200
        assert server.metric('candid_refusals_total{reason="queue"}') == 1


def test_a_slow_answer_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_up(service, monkeypatch) as may, running(service, timeout=1.5) as server:
        answer = server.examine(picture())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        check_headers(answer)
        may.set()


def test_a_slow_sender_is_given_up(service: Service) -> None:
    with running(service, timeout=0.3) as server, connected(server) as sock:
        head = "POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data"
        sock.sendall(f"{head}; boundary=x\r\nContent-Length: 1000\r\n\r\n--x".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408") and b"too slowly" in answer
        assert server.metric("candid_queue_length") == 0


def test_a_sender_that_goes_away_leaves_nothing(service: Service) -> None:
    with running(service) as server:
        with connected(server) as sock:
            sock.sendall(b"POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
            until(lambda: server.guard._held == 3)
        until(lambda: server.metric('candid_refusals_total{reason="gone"}') == 1)
        assert server.guard._held == 0
        assert server.examine(picture()).status_code == 200


def test_a_failure_tells_nothing_of_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(2, "secret", str(Path(__file__)))

    with running(service) as server, monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL + 1):
        patch.setattr(service, "_answer", fail)
        answer = server.examine(picture())
        assert answer.status_code == 500 and list(answer.json()) == ["error"]
        assert "secret" not in answer.text and "py" not in answer.text and "Traceback" not in answer.text
        check_headers(answer)


def test_the_token_is_needed_and_never_shown(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with running(service, token="open sesame") as server, caplog.at_level(logging.DEBUG):
        assert server.examine(picture()).status_code == 200
        assert server.client.get("/v1/models").status_code == 200
        for wrong in ("", "Bearer", "Bearer open", "Basic open sesame", "Bearer öpen sesame"):
            headers = {b"authorization": wrong.encode("latin-1")}
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as other:
                answer = other.post("/v1/examine", files={"file": picture()}, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                check_headers(answer)
                assert other.get("/metrics", headers=headers).status_code == 401
                assert other.get("/v1/models", headers=headers).status_code == 401
                assert other.get("/healthz").json() == {"status": "ok", "needs_token": True}
                assert other.get("/").status_code == 200
        description = server.client.get("/openapi.json")
        assert "fish" not in description.text  # the classes are secret, too
        schema = description.json()
        assert "401" in schema["paths"]["/v1/examine"]["post"]["responses"]
        assert "sesame" not in server.client.get("/metrics").text
    assert "sesame" not in caplog.text


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/healthz", "/openapi.json", "/v1/models", "/metrics", "/no"]
)
def test_every_address_knows_its_own_name_and_site(server: Running, path: str) -> None:
    assert server.client.get(path, headers={"host": "evil.example"}).status_code == 403
    assert server.client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert server.client.get(path, headers=link).status_code == (200 if path == "/" else 403)


def test_without_fetch_metadata_origin_and_referer_count(server: Running) -> None:
    own = server.url
    cases: list[tuple[dict[str, str], int]] = [
        ({"origin": own}, 200),
        ({"origin": own, "referer": f"{own}/"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": own.rpartition(":")[0]}, 403),  # another port is another site
        ({"referer": "http://evil.example/page"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "localhost.", "origin": "http://localhost."}, 200),
    ]
    for headers, status in cases:
        answer = server.client.post("/v1/examine", files={"file": picture()}, headers=headers)
        assert answer.status_code == status, headers
    twice = [("sec-fetch-site", "cross-site"), ("sec-fetch-site", "none")]
    assert server.client.get("/v1/models", headers=twice).status_code == 403


def test_nothing_redirects_and_head_is_answered(server: Running) -> None:
    answer = server.client.get("/v1/models/")
    assert answer.status_code == 404 and "location" not in answer.headers
    for path in ("/", "/healthz", "/v1/models"):
        head, get = server.client.head(path), server.client.get(path)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == str(len(get.content))
        check_headers(head)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (
            b"POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 413),
    ],
)
def test_odd_http_is_answered_as_everything_else(server: Running, sent: bytes, status: int) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        if status == 413:
            sock.shutdown(socket.SHUT_WR)
        head, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and list(json.loads(body)) == ["error"]
    lines = head.decode().lower().splitlines()
    assert {f"{name}: {value.lower()}" for name, value in HEADERS.items()} <= set(lines)


def test_a_get_with_an_endless_body_is_cut(server: Running) -> None:
    sent = 0
    with connected(server) as sock, suppress(ConnectionError):
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        while sent < 50_000_000:
            sock.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
            sent += 65536
    assert sent < 50_000_000


def test_what_the_machine_lacks_is_said_as_503(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(service) as server:
        monkeypatch.setattr("tempfile.TemporaryFile", full)
        assert server.examine(bytes(3_000_000)).status_code == 200  # nothing is written to a file
        for place in ("starlette.formparsers.SpooledTemporaryFile", "candid.serve.worker.Remote.call"):
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setattr(place, full)
                answer = server.examine(picture())
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_the_framework_reports_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    app: Any = guarded_api(service).app
    assert not any(app._telemetry[each] for each in NO_TELEMETRY)


def test_pages_of_other_sites_cant_ask(server: Running) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        answer = server.client.get("/v1/models", headers={"sec-fetch-site": site})
        assert answer.status_code == status and "access-control-allow-origin" not in answer.headers


def test_a_name_that_leads_here_cant_ask(server: Running, service: Service) -> None:
    names = {"evil.example": 403, "evil.example:80": 403, "localhost:9": 200, "[::1]": 200, "127.0.0.1": 200}
    for host, status in names.items():
        assert server.client.get("/v1/models", headers={"host": host}).status_code == status, host
    with running(service, token="sesame") as other:
        assert other.client.get("/v1/models", headers={"host": "behind.a.proxy"}).status_code == 200


@pytest.mark.parametrize("own", ["127.0.0.2", "::1"])
def test_any_loopback_address_is_guarded_against_such_names(service: Service, own: str) -> None:
    with running(service, host=own) as server:
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_a_server_in_which_nothing_is_answered_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(service, monkeypatch) as may, running(service, timeout=0.5) as server:
        assert server.client.get("/healthz").status_code == 200
        assert server.examine(picture()).status_code == 503
        until(lambda: server.client.get("/healthz").status_code == 503)
        may.set()
        until(lambda: server.client.get("/healthz").status_code == 200)
    may = threading.Event()
    with running(service, timeout=0.5) as server, monkeypatch.context() as patch:
        assert server.client.get("/healthz").status_code == 200  # it has decoded its first image
        patch.setattr("candid.serve.worker.Decoder.__call__", lambda *_: may.wait(60))
        assert [server.examine(picture()).status_code for _ in range(DECODERS)] == [503] * DECODERS
        until(lambda: server.client.get("/healthz").status_code == 503)
        may.set()
        until(lambda: server.client.get("/healthz").status_code == 200)


async def status_of(guard: Guard, own: str, *headers: tuple[str, str]) -> int:
    """What a request to the address ``own`` of this machine gets."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/style.css",
        "query_string": b"",
        "server": (own, 8000),
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    await guard({**scope, "headers": encoded}, receive, send)
    return int(sent[0]["status"])


def test_names_that_lead_here_cant_ask_on_any_address(service: Service) -> None:
    """As a browser asks after its resolver was told another address."""
    own = {"192.0.2.2": "192.0.2.2:8000", "fe80::1%eth0": "[fe80::1]:8000"}
    guard = guarded_api(service, allow_host=("Photos.example",))
    for address, host in own.items():
        names = {host: 200, "photos.example": 200, "localhost:8000": 200, socket.gethostname(): 200}
        names |= {"evil.example": 403, "192.0.2.3": 403, "": 403, "192.0.2.2.evil.example": 403}
        for name, status in names.items():
            headers = ("host", name), ("origin", f"http://{name}"), ("sec-fetch-site", "same-origin")
            assert asyncio.run(status_of(guard, address, *headers)) == status, (address, name)


def test_an_allowed_host_is_a_name() -> None:
    for wrong in ("http://photos.example", "photos.example:80", "a b", ""):
        with pytest.raises(CandidError, match="no host name"):
            Limits(allow_host=(wrong,))


@pytest.mark.parametrize("name", ["origin", "referer"])
def test_malformed_and_repeated_origins_are_refused(
    server: Running, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for given in ("http://[", "http://[::1", "http://[x]/"):
        assert server.client.get("/v1/models", headers={name: given}).status_code == 403, given
    own = server.url + "/"
    assert server.client.get("/v1/models", headers=[(name, own), (name, own)]).status_code == 403
    assert server.client.get("/v1/models", headers={name: own}).status_code == 200
    assert not caplog.records


def test_compressed_requests_are_refused(server: Running) -> None:
    body, headers = multipart(picture())
    for encoding, status in (("gzip", 415), ("br, gzip", 415), ("identity", 200)):
        given = {**headers, "content-encoding": encoding}
        assert server.client.post("/v1/examine", content=body, headers=given).status_code == status


def test_extended_file_names_are_read(server: Running) -> None:
    body, headers = multipart(picture())
    for given, name in (
        (b"filename*=UTF-8''a%20caf%C3%A9.png", "a café.png"),
        (b"filename*=a%22.png", "a.png"),
        (b"filename=\"b.png\"; filename*=UTF-8''c.png", "b.png"),
    ):
        sent = body.replace(b'filename="0.png"', given)
        answer = server.client.post("/v1/examine", content=sent, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["results"][0]["path"] == name


def test_a_server_that_stops_answers_what_it_accepted_and_refuses_the_rest(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        held_up(service, monkeypatch) as may,
        running(service) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        accepted = [pool.submit(server.examine, picture(i)) for i in range(3)]
        until(lambda: server.metric("candid_queue_length") == 3)
        server.guard.stopping = True
        refused = server.examine(picture(3))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert server.client.get("/healthz").status_code == 503
        may.set()
        assert [each.result().status_code for each in accepted] == [200, 200, 200]
