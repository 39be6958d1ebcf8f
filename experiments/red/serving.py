"""Attacks on a running server; all of them from this machine."""

import json
import os
import signal
import socket
import statistics
import struct
import tempfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.red.attack import attack, check, full
from experiments.red.server import (
    MULTIPART,
    Served,
    children,
    cpu_seconds,
    examine,
    get,
    is_running,
    picture,
    seconds_to_end,
    served,
)

SLOW = b"POST /v1/examine HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n-"


@attack("Answers on a connection that stays open don't wait for the client's acknowledgement.", 120)
def delays() -> str:
    with served("--workers", 0) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
        seconds = []
        for _ in range(60):
            started = time.perf_counter()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            seconds.append(time.perf_counter() - started)
    milliseconds = 1000 * statistics.median(seconds)
    check(milliseconds < 20, f"a keep-alive answer takes {milliseconds:.1f} ms")
    return f"median of a keep-alive answer {milliseconds:.1f} ms"


def _replacement(server: Served, old: list[int]) -> int:
    """Wait for a process that replaces others."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        new = [pid for pid in server.workers() if pid not in old]
        if new:
            return new[0]
        time.sleep(0.005)
    raise RuntimeError("no process was started within 20 s")


@attack("Processes killed while they start: an answer within 15 s, SIGTERM ends all within 10 s.", 900)
def kills_at_start() -> str:
    longest = 0.0
    with served("--workers", 1) as server:
        seen = set(server.workers())
        for delay in (0.02, 0.3, 1.0, 2.0) * 5:
            old = server.workers()
            os.kill(old[0], signal.SIGKILL)
            new = _replacement(server, old)
            time.sleep(delay)
            with suppress(ProcessLookupError):
                os.kill(new, signal.SIGKILL)
            started = time.monotonic()
            status, answer = examine(server.port, timeout=15)
            seconds = time.monotonic() - started
            check(status == 200, f"killed after {delay} s: {status} {answer} after {seconds:.1f} s")
            longest = max(longest, seconds)
            seen |= {new, *server.workers()}
        os.kill(server.workers()[0], signal.SIGKILL)
        ended = seconds_to_end(server.process, 10)
        time.sleep(3)
        left = [pid for pid in seen if is_running(pid)]
        check(not left, f"{len(left)} processes are left")
        lines = len(server.log_lines())
    return f"20 kills, longest wait {longest:.1f} s, SIGTERM {ended:.1f} s, no orphans, {lines} lines of log"


@attack("A server that is killed, or told to end while it loads, leaves no process.", 200)
def orphans() -> str:
    with served("--workers", 2) as server:
        started = server.workers()
        os.kill(started[0], signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        time.sleep(1)
        os.kill(started[0], signal.SIGCONT)
        time.sleep(5)
        left = [pid for pid in started if is_running(pid)]
        check(not left, f"{len(left)} processes are left of a server that was killed")
    for delay in (0.5, 2.0, 4.0):
        with ThreadPoolExecutor(1) as pool:
            told: list[int] = []

            def end(delay: float = delay, told: list[int] = told) -> None:
                time.sleep(delay)
                told.extend(each for shell in children(os.getpid()) for each in (shell, *children(shell)))
                for pid in told[:1]:
                    os.kill(pid, signal.SIGTERM)

            ending = pool.submit(end)
            with suppress(Exception), served("--workers", 1):
                pass
            ending.result()
            time.sleep(5)
            left = [pid for pid in told if is_running(pid)]
            check(not left, f"{len(left)} processes are left after SIGTERM {delay} s after the start")
    return "none is left after SIGKILL, nor after SIGTERM 0.5, 2 and 4 s after the start"


@attack("64 descriptors and 80 idle connections: an answer for the 81st client in 20 s, few log lines.", 200)
def descriptors() -> str:
    with served("--workers", 0, before="ulimit -n 64") as server, ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        started = time.monotonic()
        status, _ = get(server.port)
        seconds = time.monotonic() - started
        time.sleep(12)
        lines = len(server.log_lines())
        check(status == 200, f"the 81st client got {status} after {seconds:.1f} s")
        check(lines <= 20, f"{lines} lines of log")
    return f"the 81st client is answered after {seconds:.1f} s, {lines} lines of log"


@attack("500 silent connections and 400 unfinished headers are closed within 30 s.", 200)
def silence() -> str:
    with served("--workers", 0) as server, ExitStack() as stack:
        for i in range(900):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            if i % 9 < 4:
                sock.sendall(b"GET / HTTP/1.1\r\nX-A: b")
        before = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        check(get(server.port)[0] == 200, "another client is not answered")
        time.sleep(30)
        after = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        check(after < 60, f"{after} descriptors are open")
    return f"{before} descriptors are {after} after 30 s"


@attack("64 slow senders keep nobody out, and are cut.", 200)
def slow_senders() -> str:
    with served("--workers", 0) as server, ExitStack() as stack:
        senders = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(64)
        ]
        for sender in senders:
            sender.sendall(SLOW)
        time.sleep(0.5)
        started = time.monotonic()
        status, _ = examine(server.port)
        seconds = time.monotonic() - started
        check(status == 200, f"the 65th client got {status}")
        first = senders[0].recv(100)
        cut = time.monotonic() - started
        check(first.startswith(b"HTTP/1.1 408"), f"a slow sender got {first!r}")
    return f"the 65th client is answered after {seconds:.2f} s, slow senders are cut after {cut:.1f} s"


@attack("64 clients while networks are killed: no answer is lost or another's.", 300)
def load_with_kills() -> str:
    seconds = 60 if full() else 20
    files = [picture(i) for i in range(50)]
    counts: Counter[int] = Counter()
    wrong: list[str] = []
    with served() as server:
        right = [examine(server.port, file)[1]["results"][0]["log_density_nats"] for file in files]
        check(len({round(each, 2) for each in right}) > 45, "the pictures are too much alike")
        until = time.monotonic() + seconds

        def client(number: int) -> None:
            at = number
            while time.monotonic() < until:
                at = (at + 7) % len(files)
                status, answer = examine(server.port, files[at], timeout=60)
                counts[status] += 1
                if status != 200:
                    wrong.append(f"{status} {answer}")
                elif abs(answer["results"][0]["log_density_nats"] - right[at]) > 1:
                    wrong.append("swapped")

        with ThreadPoolExecutor(64) as pool:
            clients = [pool.submit(client, number) for number in range(64)]
            kills = 0
            while time.monotonic() < until - 5:
                time.sleep(6)
                for pid in server.workers()[:1]:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            for each in clients:
                each.result()
        check(not wrong, f"{len(wrong)} of {counts.total()} are wrong: {wrong[:2]}")
        ended = seconds_to_end(server.process, 10)
    return f"{counts.total()} answers with {kills} kills, all right; SIGTERM {ended:.1f} s"


def _flat(side: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (side, side), (10, 200, 30)).save(file, "PNG")
    return file.getvalue()


@attack("A small image waits at most 3 s next to four clients with 16 large PNGs each.", 240)
def fairness() -> str:
    large = _flat(5000)
    with served("--timeout", 60) as server, ThreadPoolExecutor(4) as pool:
        others = [pool.submit(examine, server.port, *[large] * 16, timeout=120.0) for _ in range(4)]
        time.sleep(1)
        waits = []
        for _ in range(4):
            started = time.monotonic()
            status, _ = examine(server.port, picture(1, 32))
            waits.append(time.monotonic() - started)
            check(status == 200, f"the small image got {status}")
            time.sleep(0.5)
        statuses = [each.result()[0] for each in others]
    check(max(waits) <= 3, f"a small image waited {max(waits):.1f} s")
    return f"longest wait {max(waits):.1f} s; the four others got {statuses}"


@attack("Memory after eight PNGs of 25 megapixels is what it was before, up to 50 MB.", 200)
def memory() -> str:
    def resident(pid: int) -> float:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    with served("--timeout", 60) as server:
        examine(server.port)
        before = resident(server.process.pid)
        status, _ = examine(server.port, *[_flat(5000)] * 8, timeout=120)
        time.sleep(2)
        after = resident(server.process.pid)
    check(status == 200 and after < before + 50, f"{status}: {before:.0f} MB became {after:.0f} MB")
    return f"{before:.0f} MB before, {after:.0f} MB after"


def _odd_files() -> dict[str, bytes]:
    """Files whose headers cost much more than their pixels."""
    jpeg, png = BytesIO(), BytesIO()
    Image.new("RGB", (64, 64), (90, 20, 20)).save(jpeg, "JPEG")
    Image.new("RGB", (64, 64), (90, 20, 20)).save(png, "PNG")
    noise = np.random.default_rng(0).integers(0, 200, 2300 * 2300 * 3, dtype=np.uint8).tobytes()
    chunk = struct.pack(">I4sI", 0, b"abCd", zlib.crc32(b"abCd"))
    start, exif = jpeg.getvalue()[:2], b"II*\0\x08\0\0\0\xff\x0f"
    tags = b"".join(struct.pack("<HHII", i + 1, 7, 60_000, 10) for i in range(4095))
    bomb = b"Exif\0\0" + exif + tags
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(bomb)) + bomb
    profile = b"ICC_PROFILE\0" + bytes([1, 255]) + bytes(65_000)
    profiles = (b"\xff\xe2" + struct.pack(">H", 2 + len(profile)) + profile) * 200
    return {
        "PPM of maximum 200": b"P6 2300 2300 200\n" + noise,
        "plain PGM": b"P2 2000 2000 255\n" + b"1 " * 4_000_000,
        "PPM with a long comment": b"P6\n#" + b"a" * 15_000_000 + b"\n4 4 255\n" + bytes(48),
        "PNG of empty chunks": png.getvalue()[:33] + chunk * 1_000_000 + png.getvalue()[33:],
        "JPEG of empty segments": start + b"\xff\xfe\0\2" * 3_500_000 + jpeg.getvalue()[2:],
        "EXIF bomb": start + segment * 200 + jpeg.getvalue()[2:],
        "ICC bomb": start + profiles + jpeg.getvalue()[2:],
        "cut JPEG": jpeg.getvalue()[:-8] + b"\xff\xd9",
    }


@attack("An odd file costs at most 5 s of CPU, fails alone, and a good one next to it is judged.", 300)
def odd_files() -> str:
    dearest = ("", 0.0)
    with served() as server:

        def spent() -> float:
            """CPU time of the server and all its processes but the network, also of those that have ended."""
            workers, processes = server.workers(), [server.process.pid]
            for pid in processes:
                processes += [each for each in children(pid) if each not in workers]
            return sum(cpu_seconds(pid) for pid in processes)

        for name, content in _odd_files().items():
            before = spent()
            status, answer = examine(server.port, picture(), content, timeout=60)
            seconds = spent() - before
            check(status == 200, f"{name}: {status} {answer}")
            good, odd = answer["results"]
            check(good["status"] == "judged", f"{name}: the good image next to it got {good}")
            check("error" not in odd or odd["error"].endswith("."), f"{name}: {odd}")
            check(seconds < 5, f"{name}: {seconds:.1f} s of CPU")
            dearest = max(dearest, (name, seconds), key=lambda each: each[1])
        lines = [line for line in server.log_lines() if not line.startswith("ALARM")]  # odd images are drift
        check(not lines, f"log: {lines[:2]}")
    return f"dearest: {dearest[0]}, {dearest[1]:.1f} s of CPU"


@attack("Decoders, and the process that they are forked from, are killed: every image is judged.", 200)
def decoders_killed() -> str:
    kills, files = 100 if full() else 20, [picture(i) for i in range(8)]
    with served() as server, ThreadPoolExecutor(4) as pool:
        ending, asked = threading.Event(), list[int]()

        def client() -> None:
            while not ending.is_set():
                status, answer = examine(server.port, *files)
                check(status == 200, f"{status} {answer} {server.log_lines()[-2:]}")
                said = {each["status"] for each in answer["results"]}
                check(said == {"judged"}, f"an image was refused: {answer}")
                asked.append(status)

        clients = [pool.submit(client) for _ in range(4)]
        for number in range(kills):
            found = server.decoders() if number % 5 else server.forking()
            for pid in found[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSEGV if number % 2 else signal.SIGKILL)
            before, until = len(asked), time.monotonic() + 20
            while (
                len(asked) < before + 6
                and time.monotonic() < until
                and not any(each.done() for each in clients)
            ):
                time.sleep(0.05)  # until some requests were answered that began after the kill
        ending.set()
        for each in clients:
            each.result()
        check(get(server.port, "/readyz")[0] == 200, "it is not ready")
        ended = seconds_to_end(server.process, 20)
    return f"{kills} kills, {len(asked)} requests of {len(files)} images, all judged; SIGTERM {ended:.1f} s"


def _field(name: str, content: bytes) -> bytes:
    return b'--edge\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), content)


def _odd_bodies() -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Bodies of requests with numbers, names and depths that no client sends."""
    end, huge = b"--edge--\r\n", b"9" * 100_000
    json_type = {"content-type": "application/json"}
    many = b"".join(_field(f"f{i}", b"x") for i in range(5000))
    heads = b"--edge\r\n" + b"".join(b"H%d: y\r\n" % i for i in range(100_000)) + b"\r\n"
    return {
        "a JSON depth bomb": ("/v1/examine", b"[" * 1_000_000, json_type),
        "a JSON depth bomb for a form": ("/v1/corrections", b"[" * 1_000_000, json_type),
        "a huge integer": ("/v1/lessons/use", _field("version", huge) + end, MULTIPART),
        "an infinite number": ("/v1/lessons/use", _field("version", b"1e400") + end, MULTIPART),
        "a huge integer in a list": (
            "/v1/corrections",
            _field("ids", huge) + _field("name", b"x") + end,
            MULTIPART,
        ),
        "a long name": (
            "/v1/corrections",
            _field("ids", b"1") + _field("name", b"x" * 10**6) + end,
            MULTIPART,
        ),
        "a name of control characters": (
            "/v1/corrections",
            _field("ids", b"1") + _field("name", b"\x1b[31m") + end,
            MULTIPART,
        ),
        "many fields": ("/v1/examine", many + end, MULTIPART),
        "many empty parts": ("/v1/examine", b"--edge\r\n" * 100_000 + end, MULTIPART),
        "many headers of a part": ("/v1/examine", heads + end, MULTIPART),
    }


@attack("Bodies with bombs, huge numbers and odd names get 4xx in 5 s, and nothing in the log.", 200)
def odd_fields() -> str:
    longest = 0.0
    with tempfile.TemporaryDirectory() as store, served("--workers", 0, "--store", store) as server:
        for name, (path, body, headers) in _odd_bodies().items():
            started = time.monotonic()
            connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            said = json.load(answer)
            connection.close()
            longest = max(longest, time.monotonic() - started)
            check(400 <= answer.status < 500 and list(said) == ["error"], f"{name}: {answer.status} {said}")
        check(longest < 5, f"{longest:.1f} s")
        check(not server.log_lines(), f"log: {server.log_lines()[:2]}")
    return f"{len(_odd_bodies())} bodies, longest {longest:.1f} s"


@attack("A client that never reads its answers is cut off and keeps nobody out.", 200)
def slow_readers() -> str:
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served("--workers", 0, "--timeout", 3) as server, ExitStack() as stack:
        for _ in range(50):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(1)
            sock.connect(("127.0.0.1", server.port))
            with suppress(OSError):
                sock.sendall(request * 400)
        check(get(server.port)[0] == 200, "another client is not answered")
        time.sleep(25)
        opened = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        check(opened < 50, f"{opened} descriptors are open")
    return f"{opened} descriptors are open afterwards"


@attack("Under limits of memory a server answers, says 503, or ends with a sentence.", 400)
def memory_limits() -> str:
    found = []
    for gigabytes in (2, 3, 5):
        limit = f"ulimit -v {gigabytes * 1_000_000}"
        try:
            with served("--workers", 1, "--timeout", 20, before=limit) as server:
                statuses = [examine(server.port, *[_flat(5000)] * 4, timeout=40)[0] for _ in range(2)]
                after = examine(server.port, timeout=40)[0]
                check(set(statuses) <= {200, 503} and after in (200, 503), f"{statuses}, then {after}")
                check(is_running(server.process.pid), "the server has ended")
                found.append(f"{gigabytes} GB: {statuses}, then {after}")
        except Exception as error:
            text = str(error)
            check("did not start" in text and "Traceback" not in text, f"{gigabytes} GB: {text}")
            found.append(f"{gigabytes} GB: it says why it does not start")
    return "; ".join(found)


@attack("Foreign hosts, origins and odd HTTP are refused with JSON and all headers.", 200)
def odd_http() -> str:
    own, both = b"Host: localhost\r\n", b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    cases = {
        b"GET /openapi.json HTTP/1.1\r\nHost: evil.example\r\n\r\n": 403,
        b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n": 403,
        b"GET /v1/models/ HTTP/1.1\r\nHost: evil.example\r\n\r\n": 403,
        b"GET /v1/models HTTP/1.1\r\n" + own + b"Origin: http://evil.example\r\n\r\n": 403,
        b"GET /v1/models HTTP/1.1\r\n" + own + b"Origin: null\r\n\r\n": 403,
        b"GET /v1/models HTTP/1.1\r\n" + own + b"Origin: http://[\r\n\r\n": 403,
        b"GET /v1/models HTTP/1.1\r\n" + own + 2 * b"Origin: http://localhost\r\n" + b"\r\n": 403,
        b"POST /v1/examine HTTP/1.1\r\n" + own + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n": 415,
        b"GET /v1/models HTTP/1.1\r\n" + own + b"Referer: http://evil.example/\r\n\r\n": 403,
        b"GET /v1/models/ HTTP/1.1\r\n" + own + b"\r\n": 404,
        b"TRACE / HTTP/1.1\r\n" + own + b"\r\n": 405,
        b"GET / HTTQ/1.1\r\n" + own + b"\r\n": 400,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": 400,
        b"POST /v1/examine HTTP/1.1\r\n" + own + both + b"\r\n0\r\n\r\n": 400,
        b"GET / HTTP/1.1\r\n" + own + b"X: " + b"a" * 70_000: 400,
    }
    with served("--workers", 0) as server:
        for sent, expected in cases.items():
            with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
                sock.sendall(sent)
                received = b""
                while not received.endswith(b"}"):
                    more = sock.recv(65536)
                    check(more != b"", f"{sent[:60]!r}: {received!r}")
                    received += more
            head, _, body = received.partition(b"\r\n\r\n")
            check(head.startswith(f"HTTP/1.1 {expected} ".encode()), f"{sent[:60]!r}: {head[:60]!r}")
            check(b"content-security-policy" in head, f"{sent[:60]!r}: no headers")
            check(list(json.loads(body)) == ["error"], f"{sent[:60]!r}: {body[:60]!r}")
        check(not server.log_lines(), f"log: {server.log_lines()[:2]}")
    return f"{len(cases)} odd requests"
