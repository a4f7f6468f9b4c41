"""Covers HTTP over real sockets on loopback: answers, addresses, and clients that are slow or numerous or do not send HTTP."""

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import pytest
import structlog.testing

from ipvsproxy.daemon.http import paths, server
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.model.net import Address, parse_address
from tests.support import http_client
from tests.support.following import running_task

WITHIN_S = 60.0

LOOPBACK = parse_address("127.0.0.1")
ANY_IPV4, ANY_IPV6 = Address(bytes(4)), Address(bytes(16))


async def _hello(request: server.Request) -> Answer:
    return Answer(200, f"hello {request.path}".encode(), server.TEXT)


@contextlib.asynccontextmanager
async def listening(
    handler: server.Handler = _hello, address: Address = LOOPBACK, *, one_family: bool = False
) -> AsyncIterator[int]:
    listener = await server.listen(address, 0, handler, one_family=one_family)
    try:
        yield listener.port
    finally:
        await listener.close()


@pytest.fixture(name="ipv6")
def _ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 on loopback: {error}")


async def test_an_answer_has_the_headers_of_its_handler_and_no_header_that_describes_the_server() -> None:
    async with listening() as port:
        response = await http_client.ask(port, "/there?a=b")
    assert (response.status, response.body) == (200, b"hello /there")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers.keys() <= {"Content-Type", "X-Content-Type-Options", "Content-Length", "Date", "Connection"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_a_request_with_any_http_method_is_answered_like_get(method: str) -> None:
    async with listening() as port:
        response = await http_client.ask(port, "/x", method=method)
    assert (response.status, response.body) == (200, b"hello /x")


@pytest.mark.parametrize("body", [b"", b"begin\n"])
async def test_an_answer_in_parts_arrives_complete_and_a_head_request_gets_its_length_but_no_body(
    body: bytes,
) -> None:
    answer = Answer(server.OK, body, server.TEXT, [b"x" * 100_000, b"end\n"])
    whole = body + b"x" * 100_000 + b"end\n"
    async with listening(AsyncMock(return_value=answer)) as port:
        response = await http_client.ask(port, "/")
        assert (response.body, response.headers["Content-Length"]) == (whole, str(len(body) + 100_004))
        async with http_client.connection(port) as (reader, writer):
            writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            response = await http_client.read_answer(reader, has_body=False)
            assert response.headers["Content-Length"] == str(len(whole))
            assert await reader.read() == b""


async def test_a_handler_receives_the_query_and_the_headers() -> None:
    handler = AsyncMock(return_value=paths.OK_PAGE)
    async with listening(handler) as port:
        await http_client.ask(port, "/healthz?verbose", headers="ACCEPT: text/plain\r\n")
    (asked,) = handler.call_args.args
    assert (asked.path, asked.query, asked.headers["accept"]) == ("/healthz", {"verbose": ""}, "text/plain")


async def test_a_failure_of_a_handler_is_answered_with_an_error_and_does_not_stop_the_server() -> None:
    async def fail(request: server.Request) -> Answer:
        if request.path == "/bad":
            raise ZeroDivisionError
        return paths.OK_PAGE

    async with listening(fail) as port:
        response = await http_client.ask(port, "/bad")
        assert (response.status, response.body) == (500, b"internal error\n")
        assert (await http_client.ask(port, "/good")).status == 200


@pytest.mark.usefixtures("ipv6")
@pytest.mark.parametrize(("address", "host", "other"), [(ANY_IPV4, "127.0.0.1", "::1"), (ANY_IPV6, "::1", "127.0.0.1")])
async def test_a_server_on_the_unspecified_address_listens_on_both_families_unless_it_is_limited_to_one_family(
    address: Address, host: str, other: str
) -> None:
    for one_family in (False, True):
        async with listening(address=address, one_family=one_family) as port:
            assert (await http_client.ask(port, "/x", host=host)).status == 200
            with pytest.raises(ConnectionRefusedError) if one_family else contextlib.nullcontext():
                assert (await http_client.ask(port, "/x", host=other)).status == 200


async def test_a_server_on_the_unspecified_address_listens_on_ipv4_if_the_host_has_no_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *arguments: int, **keywords: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr("ipvsproxy.daemon.http.server.socket.socket", without_ipv6)
        listener = await server.listen(ANY_IPV4, 0, _hello)
    assert (await http_client.ask(listener.port, "/x")).status == 200
    await listener.close()


async def test_a_server_waits_until_its_port_is_free_and_then_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    port = int(other.getsockname()[1])
    waits: list[float] = []
    is_free = asyncio.Event()

    async def pass_time(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            other.close()
            is_free.set()

    monkeypatch.setattr("ipvsproxy.daemon.http.server.asyncio.sleep", pass_time)
    serving = asyncio.create_task(server.serve("health", LOOPBACK, port, _hello))
    await is_free.wait()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            assert (await http_client.ask(port, "/x")).status == 200
            break
    assert waits[:3] == [5.0, 5.0, 5.0]
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    with pytest.raises(ConnectionRefusedError):
        await http_client.ask(port, "/x")


async def test_a_closing_server_completes_answers_in_progress_and_closes_idle_connections() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(_request: server.Request) -> Answer:
        asked.set()
        await may_answer.wait()
        return paths.OK_PAGE

    listener = await server.listen(LOOPBACK, 0, slow)
    async with (
        http_client.connection(listener.port) as (idle, _),
        http_client.connection(listener.port) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asked.wait()
        closing = asyncio.create_task(listener.close())
        may_answer.set()
        assert (await http_client.read_answer(reader)).body == b"ok"
        await closing
        assert await idle.read() == b""
        assert await reader.read() == b""


# Hostile clients.


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_client_that_never_finishes_a_request_is_disconnected(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    async with listening() as port, http_client.connection(port) as (reader, writer):
        writer.write(begun)
        assert await reader.read() == b""


async def test_a_client_that_does_not_read_its_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    dropped = asyncio.Event()

    async def huge(_request: server.Request) -> Answer:
        asyncio.current_task().add_done_callback(lambda _: dropped.set())  # type: ignore[union-attr]  # the server exists
        return Answer(200, bytes(64 << 20), server.TEXT)

    async with listening(huge) as port, http_client.connection(port) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await dropped.wait()


async def test_a_client_that_holds_all_connections_cannot_keep_other_clients_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    async with contextlib.AsyncExitStack() as held, listening() as port:
        readers = []
        for _ in range(12):
            reader, writer = await held.enter_async_context(http_client.connection(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            readers.append(reader)
        assert (await http_client.ask(port, "/x")).status == 200
        for reader in readers[:8]:
            assert await reader.read() == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # the client tries TLS on a plain HTTP port
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(10_000)) + b"\r\n",
    ],
)
async def test_a_request_is_refused_and_not_logged_if_it_is_too_large_or_is_not_http(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as port:
        async with http_client.connection(port) as (reader, writer):
            writer.write(request_bytes)
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.0 400 Bad Request\r\n")
                assert b"Server" not in answer
        assert (await http_client.ask(port, "/x")).status == 200
    assert caplog.records == []


async def test_the_server_answers_without_waiting_for_the_request_body() -> None:
    async with listening() as port, http_client.connection(port) as (reader, writer):
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nbegin")
        assert (await http_client.read_answer(reader)).body == b"hello /x"
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_a_connection_stays_open_after_a_request_with_a_small_body() -> None:
    async with listening() as port, http_client.connection(port) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
            assert (await http_client.read_answer(reader)).body == b"hello /x"


async def test_a_client_that_sends_its_request_byte_by_byte_is_disconnected_after_the_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    async with listening() as port, http_client.connection(port) as (reader, writer):

        async def drip() -> None:
            writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.01)

        async with running_task(drip()):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""


async def test_a_client_that_sends_an_endless_body_is_disconnected() -> None:
    async with listening() as port, http_client.connection(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)


async def test_a_client_that_does_not_read_its_answers_does_not_delay_other_clients() -> None:
    async with listening() as port, http_client.connection(port) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50_000)
        for _ in range(3):
            async with asyncio.timeout(WITHIN_S):
                assert (await http_client.ask(port, "/x")).status == 200


_PUT = b"PUT /x HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _PUT + b"Transfer-Encoding: chunked\r\n\r\n"
_GET = b"GET /x HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(_PUT + b"Content-Length: 10\r\n\r\n", id="no body"),
        pytest.param(_PUT + b"Content-Length: 10\r\n\r\nab", id="a body that breaks off"),
        pytest.param(_PUT + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", id="a body that waits"),
        pytest.param(_PUT + b"Expect: x\r\nContent-Length: 3\r\n\r\nabc", id="another expectation"),
        pytest.param(_PUT + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", id="a false encoding"),
        pytest.param(_PUT + b"Content-Length: -3\r\n\r\nabc", id="a false length"),
        pytest.param(_PUT + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", id="two lengths"),
        pytest.param(_CHUNKED + b"5\r\nab", id="a chunk that breaks off"),
        pytest.param(_CHUNKED + b"zz\r\nab\r\n", id="a false chunk"),
        pytest.param(_CHUNKED + b"f" * 20 + b"\r\nab\r\n", id="a huge chunk"),
        pytest.param(_CHUNKED + b"2;" + b"a" * 9000 + b"\r\nab\r\n", id="a long extension"),
        pytest.param(_CHUNKED + b"0\r\n\x00bad\r\n\r\n", id="a false trailer"),
        pytest.param(_CHUNKED + b"0\r\n" + b"A: b\r\n" * 100 + b"\r\n", id="many trailers"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30), id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), id="TLS"),
        pytest.param(_GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05hello", id="WebSocket"),
        pytest.param(_GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0", id="an upgrade to HTTP/2"),
        pytest.param(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n\x16\x03", id="a tunnel"),
        pytest.param(b"GET http://[::1/x HTTP/1.1\r\nHost: x\r\n\r\n", id="a false URL"),
        pytest.param(b"GET /%zz%00\xff?\xff=%fe HTTP/1.1\r\nHost: \xff\r\nX: \xff\r\n\r\n", id="no text"),
        pytest.param(b"GET /\r\n", id="HTTP/0.9"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="HTTP/9.9"),
        pytest.param((_GET + b"\r\n") * 100 + _PUT + b"Content-Length: 9\r\n\r\n", id="many requests at once"),
        pytest.param(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n", id="a long answer"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\r\n" * 1000, id="empty lines"),
    ],
)
async def test_no_client_behaviour_causes_an_error_in_the_server(request_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def handle(request: server.Request) -> Answer:
        return paths.OK_PAGE._replace(more=[bytes(1 << 18)] * 8) if request.path == "/long" else await _hello(request)

    gc.freeze()  # collecting the garbage of previous tests takes longer than all requests of this test
    try:
        with structlog.testing.capture_logs() as logs, caplog.at_level("DEBUG"):
            async with listening(handle) as port:
                for end in ("half-closed", "reset", "byte by byte"):
                    await _send(port, request_bytes, end)
                    assert (await http_client.ask(port, "/x")).status == 200, end
            gc.collect()
    finally:
        gc.unfreeze()
    assert logs == []
    assert caplog.records == []


async def _send(port: int, request_bytes: bytes, end: str) -> None:
    """Send a request, byte by byte or at once, and close the connection without reading the answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        with contextlib.suppress(OSError):
            at_once = 1 if end == "byte by byte" and len(request_bytes) < 500 else len(request_bytes) or 1
            for start in range(0, len(request_bytes), at_once):
                await loop.sock_sendall(client, request_bytes[start : start + at_once])
                await asyncio.sleep(0)
            if end == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                client.shutdown(socket.SHUT_WR)
