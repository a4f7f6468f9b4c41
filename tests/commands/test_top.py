"""Covers ``top`` without a screen.

The command prints a single picture as text or as JSON, or one sentence that says why it shows nothing.
"""

import asyncio
import contextlib
import importlib
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from ipvsproxy import cli
from ipvsproxy.commands import top
from ipvsproxy.commands.inspection import CANNOT_TELL
from ipvsproxy.commands.top import Daemon, NoAnswerError, NotThereError
from ipvsproxy.commands.top_data import Question
from ipvsproxy.config.settings import ListenAddress, Sort
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer, Request
from ipvsproxy.model.net import parse_address
from tests.config import loading
from tests.support import builders
from tests.support.builders import endpoint
from tests.support.page_node import PageNode

NOWHERE = "--metrics-bind-address=127.0.0.1:9"
WEB = (
    builders.node(),
    builders.service("web", builders.service_port(80, name="http")),
    builders.service("dns", cluster=["10.96.0.53"]),
    builders.endpoint_slice(endpoint("10.244.0.1"), ports=[builders.endpoint_port(8080, name="http")]),
)
CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)


def _node() -> PageNode:
    node = PageNode()
    node.begin_with(*WEB)
    node.traffic.per_second[CLUSTER] = 100
    return node


async def _main(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ["top", *arguments])


async def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    async with _node().showing() as port:
        capsys.readouterr()
        assert await _main(*arguments, f"--server=http://127.0.0.1:{port}") == 0
    return capsys.readouterr().out


async def test_top_with_the_flag_once_prints_the_node_and_its_services_with_rates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, _, titles, web, dns = (await _shown(capsys, "--once")).splitlines()[-6:]
    assert first == "node-a: in force"
    assert second.startswith("pending 0  failed 0  drifted 0  draining 0  0 active, 0 inactive  ")
    assert "  synced " in second
    assert titles.split() == ["Service", "Problem", "Type", "Address", "Ports", "Ends", "Active", "Conn/s", "Pkt/s", "B/s"]
    assert web.split()[:5] == ["default/web", "ClusterIP", "10.96.0.10", "80/TCP", "1"]
    assert float(web.split()[6]) > 0, "its rate, for which a second reading was awaited"
    assert dns.startswith("default/dns  it has no endpoints  ClusterIP ")


async def test_top_with_the_flag_once_filters_and_sorts_services(capsys: pytest.CaptureFixture[str]) -> None:
    shown = await _shown(capsys, "--once", "--filter=10.244.0.", "--sort=name")
    assert [line.split()[0] for line in shown.splitlines()[-1:]] == ["default/web"]


async def test_top_prints_the_data_of_the_running_ipvsproxy_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    output = await _shown(capsys, "-o", "json")
    document = json.loads(output[output.index("{\n") :])
    assert (document["version"], document["command"], document["node"]["node"]) == (1, "top", "node-a")
    assert document["services"]["names"] == ["default/web", "default/dns"]


def test_top_without_a_running_ipvsproxy_prints_one_sentence_and_returns_a_failure_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["top", "--once", NOWHERE]) == CANNOT_TELL
    output, error = capsys.readouterr()
    assert (output, error) == ("", "ipvsproxy: no ipvsproxy answers on http://127.0.0.1:9: Connection refused\n")


def test_the_command_top_says_that_the_metrics_server_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(loading.from_flags("--metrics-port=0")) == CANNOT_TELL
    assert "turns the metrics server off: name one by --server" in capsys.readouterr().err


async def test_top_refuses_to_draw_a_screen_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    async with _node().showing() as port:
        assert await _main(f"--server=http://127.0.0.1:{port}") == CANNOT_TELL
    assert "error is not a terminal for a screen: use --once, or --output=json" in capsys.readouterr().err


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "is_terminal", lambda: True)


@pytest.mark.usefixtures("_terminal")
async def test_top_without_the_textual_package_says_in_one_sentence_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "ipvsproxy.commands.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    async with _node().showing() as port:
        assert await _main(f"--server=http://127.0.0.1:{port}") == CANNOT_TELL
        assert await _main("--once", f"--server=http://127.0.0.1:{port}") == 0
    assert "ipvsproxy: the screen needs Textual, which the image has: pip install 'ipvsproxy[top]'" in capsys.readouterr().err


@pytest.mark.usefixtures("_terminal")
async def test_top_does_not_report_textual_as_missing_if_another_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    async with _node().showing() as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ModuleNotFoundError):
            await asyncio.to_thread(top.run, loading.load_with(["--proxy-mode=ipvs", f"--server={url}"], command="top"))


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("sort", "order"), [(Sort.NAME, "asc"), (Sort.BYTES, "desc")])
async def test_top_sorts_services_by_traffic_in_descending_order_and_by_name_in_ascending_order(
    sort: Sort, order: str, *, is_reversed: bool
) -> None:
    async def get(what: str, **query: str | float) -> Mapping[str, Any]:
        return {what: query.get("order")}

    _, services = await _daemon(get).documents(Question(sort=sort, is_reversed=is_reversed))
    assert (services["services"] == order) is not is_reversed


def _daemon(get: Callable[..., object]) -> Daemon:
    daemon = Daemon("http://127.0.0.1:9")
    daemon.get = get  # type: ignore[method-assign, assignment]  # the test replaces the request to the daemon
    return daemon


async def test_top_gets_no_details_of_a_service_with_an_unknown_name() -> None:
    async def get(what: str, **query: str | float) -> Mapping[str, Any]:
        raise NotThereError(what)

    assert await _daemon(get).details("default/none") is None


async def test_top_prints_an_error_if_the_daemon_answers_in_the_format_of_another_version() -> None:
    async def get(what: str, **query: str | float) -> Mapping[str, Any]:
        return {"names": [], "services": []}

    daemon = _daemon(get)
    with pytest.raises(NoAnswerError, match=r"http://127\.0\.0\.1:9 answers as another version of ipvsproxy would: KeyError"):
        await daemon.picture(Question())
    with pytest.raises(NoAnswerError, match="another version"):
        await daemon.details("default/web")


async def test_top_prints_an_escape_sequence_for_a_character_that_the_locale_cannot_encode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    node = _node()
    node.put(builders.service("w\N{LATIN SMALL LETTER E WITH ACUTE}b", cluster=["10.96.0.67"]))
    async with node.showing() as port:
        assert await _main("--once", f"--server=http://127.0.0.1:{port}") == 0
    output.seek(0)
    assert "default/w\\xe9b" in output.read()


LOOPBACK = parse_address("127.0.0.1")


@contextlib.asynccontextmanager
async def _answering(answer: Answer, asked: list[Request] | None = None) -> AsyncIterator[str]:
    """The URL of a test server that sends this answer."""

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
    """The URL of a server that sends these bytes, or nothing, to every client."""
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


async def test_top_sends_the_parameters_of_a_document_in_the_query() -> None:
    asked: list[Request] = []
    document = {"services": ["x" * 100_000]}
    body = json.dumps(document).encode()
    async with _answering(Answer(200, body[:5], server.JSON, more=(body[5:70_000], body[70_000:])), asked) as url:
        assert await Daemon(url).get("services", filter="demo/web & co", limit=5) == document
    (request,) = asked
    assert request.path == "/ui/api/services.json"
    assert dict(request.query) == {"filter": "demo/web & co", "limit": "5"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (server.NOT_FOUND_PAGE, "with status 404: it is kube-proxy, or an ipvsproxy that is older or runs with"),
        (server.FAILED, "answers /ui/api/node.json with status 500$"),
        *((Answer(200, body, server.JSON), "but not as an ipvsproxy") for body in (b"ok", b"[]", b'{"a": ', b"\xff")),
    ],
)
async def test_top_reports_an_answer_that_is_not_a_document_of_ipvsproxy(answer: Answer, reason: str) -> None:
    async with _answering(answer) as url:
        with pytest.raises(NoAnswerError, match=reason):
            await Daemon(url).get("node")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        *((said, "the answer is not HTTP") for said in (b"", b"HTTP/1.0", b"SSH-2.0-OpenSSH_9 200\r\n")),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 101, "an answer of more than 100 bytes"),
        (None, "no answer in time"),
    ],
    ids=["nothing", "half", "ssh", "endless", "silent"],
)
async def test_top_reports_an_error_if_a_server_does_not_speak_http_or_its_answer_never_ends(
    said: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "MOST_BYTES", 100)
    async with _saying(said) as url:
        with pytest.raises(NoAnswerError, match=reason):
            await Daemon(url, timeout_s=0.05 if said is None else top.TIMEOUT_S).get("node")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:10249"),
        ("0.0.0.0", "http://127.0.0.1:10249"),
        ("::", "http://[::1]:10249"),
        ("fd00::1", "http://[fd00::1]:10249"),
    ],
)
def test_top_connects_to_the_metrics_server_at_an_address_that_this_host_can_reach(address: str, url: str) -> None:
    assert top.url_of(ListenAddress(parse_address(address), 10249)) == url
