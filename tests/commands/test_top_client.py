"""The questions of ``top`` to a daemon: what it is asked, and one sentence for each way not to answer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from ipvsproxy.commands import top_client
from ipvsproxy.commands.top_client import Client, NoAnswerError
from ipvsproxy.config.settings import ListenAddress
from ipvsproxy.daemon.http import answers, connections, server
from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.daemon.http.server import Request
from ipvsproxy.model.net import parse_address

LOOPBACK = parse_address("127.0.0.1")


@contextlib.asynccontextmanager
async def _answering(answer: Answer, asked: list[Request] | None = None) -> AsyncIterator[str]:
    """The URL of a server of ours that gives this answer."""

    async def handle(request: Request) -> Answer:
        if asked is not None:
            asked.append(request)
        return answer

    listener = await server.listen(LOOPBACK, 0, handler=handle)
    try:
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def _saying(data: bytes | None) -> AsyncIterator[str]:
    """The URL of a server that says these bytes to everybody, or nothing at all."""
    silence = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if data is None:
            await silence.wait()
        else:
            writer.write(data)
        writer.close()

    serving = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with serving:
        try:
            yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
        finally:
            silence.set()


async def test_a_document_is_asked_for_with_its_parameters() -> None:
    asked: list[Request] = []
    document = {"services": ["x" * 100_000]}
    body = json.dumps(document).encode()
    async with _answering(Answer(200, body[:5], answers.JSON, more=(body[5:70_000], body[70_000:])), asked) as url:
        assert await Client(url).get("services", filter="demo/web & co", limit=5) == document
    (request,) = asked
    assert request.path == "/ui/api/services.json"
    assert dict(request.query) == {"filter": "demo/web & co", "limit": "5"}


async def test_nobody_there_is_said() -> None:
    async with _saying(b"") as url:
        pass
    with pytest.raises(NoAnswerError, match=f"no ipvsproxy answers on {url}: Connection refused"):
        await Client(url).get("node")


async def test_a_kube_proxy_is_recognised() -> None:
    async with _answering(answers.NOT_FOUND_PAGE) as url:
        with pytest.raises(NoAnswerError, match="with status 404: it is kube-proxy, or an ipvsproxy that is older or runs with"):
            await Client(url).get("node")


async def test_another_status_is_named() -> None:
    async with _answering(connections.FAILED) as url:
        with pytest.raises(NoAnswerError, match=r"answers /ui/api/node.json with status 500$"):
            await Client(url).get("node")


@pytest.mark.parametrize("body", [b"ok", b"[]", b'{"a": ', b"\xff"])
async def test_an_answer_that_is_not_of_an_ipvsproxy_is_said(body: bytes) -> None:
    async with _answering(Answer(200, body, answers.JSON)) as url:
        with pytest.raises(NoAnswerError, match="but not as an ipvsproxy"):
            await Client(url).get("node")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.0", b"SSH-2.0-OpenSSH_9 200\r\n"])
async def test_what_is_not_http_is_said(said: bytes) -> None:
    async with _saying(said) as url:
        with pytest.raises(NoAnswerError, match="the answer is not HTTP"):
            await Client(url).get("node")


async def test_an_endless_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_client, "MOST_BYTES", 100)
    async with _saying(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 100) as url:
        with pytest.raises(NoAnswerError, match="an answer of more than 100 bytes"):
            await Client(url).get("node")


async def test_a_silent_server_is_given_up() -> None:
    async with _saying(None) as url:
        with pytest.raises(NoAnswerError, match="no answer in time"):
            await Client(url, timeout_s=0.05).get("node")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:10249"),
        ("0.0.0.0", "http://127.0.0.1:10249"),
        ("::", "http://[::1]:10249"),
        ("fd00::1", "http://[fd00::1]:10249"),
    ],
)
def test_the_configured_address_is_reached_from_this_host(address: str, url: str) -> None:
    assert top_client.url_of(ListenAddress(parse_address(address), 10249)) == url


def test_a_metrics_server_that_is_turned_off_has_no_url() -> None:
    assert top_client.url_of(None) == ""
