"""``ipvsproxy top`` shows what a running ipvsproxy does, live in a terminal, or once as text or JSON."""

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import secrets
import sys
import urllib.parse
from collections.abc import Iterator

from ipvsproxy.commands import inspection, top_data
from ipvsproxy.commands.top_data import Picture, Question
from ipvsproxy.config.settings import Config, ListenAddress
from ipvsproxy.daemon.base.cannot_start import complain
from ipvsproxy.model.net import host_port, parse_address

PAGE_SIZE = 200
"""The number of Services that ``top`` requests per page, which is the largest number that the daemon accepts."""
RATES_AFTER_S = 1.0
RATES_TRIED = 10
"""The largest number of times that ``top`` without a screen asks the daemon for rates, with pauses of ``RATES_AFTER_S`` seconds.
The daemon knows rates only after two readings of the counters."""
NEVER_S = 1e12
"""A time that is later than every point of the node's history, so that a request with this time gets no points."""
NO_TEXTUAL = (
    "the screen needs Textual, which the image has: pip install 'ipvsproxy[top]'; --once and --output=json work without it"
)


_NO_PAGE = "it is kube-proxy, or an ipvsproxy that is older or runs with --ui=false"
PATH = "/ui/api"
TIMEOUT_S = 5.0
"""The longest wait for the next part of an answer."""
MOST_BYTES = 16 << 20
"""The size of the largest accepted answer, in bytes."""


class NoAnswerError(Exception):
    """No ipvsproxy answers at the metrics address; the message of the error is a sentence that says what to do."""


class NotThereError(NoAnswerError):
    """An ipvsproxy answers, but it does not have the document that was requested."""


class Daemon:
    """A running ipvsproxy, from which each document is read over a new connection.

    ``url`` is the URL of the metrics server, without a path.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._viewer = f"top-{secrets.token_hex(4)}"

    async def get(self, what: str, /, **query: str | float) -> inspection.Document:
        """The JSON document with a given name and query parameters.

        Raises:
            NotThereError: the daemon does not have the requested document.
            NoAnswerError: there is no answer.
        """
        path = f"{PATH}/{what}.json" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            status, body = await asyncio.to_thread(self._ask, path)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(f"no ipvsproxy answers on {self.url}: {_reason(error)}") from error
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if status != http.HTTPStatus.OK:
            sentence = document.get("error") if isinstance(document, dict) else _NO_PAGE * (status == http.HTTPStatus.NOT_FOUND)
            kind = NotThereError if status == http.HTTPStatus.NOT_FOUND and isinstance(document, dict) else NoAnswerError
            raise kind(f"{self.url} answers {PATH}/{what}.json with status {status}" + (f": {sentence}" if sentence else ""))
        if not isinstance(document, dict):
            raise NoAnswerError(f"{self.url} answers, but not as an ipvsproxy: {PATH}/{what}.json is not its JSON")
        return document

    def _ask(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=self._timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
            return response.status, body

    async def documents(self, question: Question) -> tuple[inspection.Document, inspection.Document]:
        """``node.json`` and ``services.json``.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        node = await self.get("node", viewer=self._viewer, since=NEVER_S)
        services = await self.get(
            "services",
            viewer=self._viewer,
            **top_data.parameters(question.filter),
            sort=question.sort.value,
            order="desc" if (question.sort.value != "name") is not question.is_reversed else "asc",
            page=question.page,
            size=PAGE_SIZE,
        )
        return node, services

    async def picture(self, question: Question) -> Picture:
        """The document about the node, and one page of Services.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        documents = await self.documents(question)
        with _reading(self.url):
            return top_data.picture(*documents)

    async def details(self, name: str) -> Picture | None:
        """The document about one Service; None if there is no Service of this name.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        try:
            document = await self.get("service", viewer=self._viewer, name=name)
        except NotThereError:
            return None
        with _reading(self.url):
            return top_data.details(document)

    async def with_rates(self, question: Question) -> tuple[inspection.Document, inspection.Document]:
        """Reads the node's document and one page of Services. If rates are missing, waits a short time and reads both again.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        for _ in range(RATES_TRIED):
            node, services = await self.documents(question)
            if node.get("connectionsPerSecond") is not None and services.get("sampleSeconds") is not None:
                break
            await asyncio.sleep(RATES_AFTER_S)
        return node, services


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError | http.client.HTTPException):
        return "no answer in time" if isinstance(error, TimeoutError) else "the answer is not HTTP"
    return (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "") or str(error) or type(error).__name__


def url_of(listen: ListenAddress | None) -> str:
    """The URL at which this host reaches the metrics server; empty if the configuration turns the metrics server off."""
    if listen is None:
        return ""
    address = listen.address
    if address.is_unspecified:
        address = parse_address("127.0.0.1" if len(address) == 4 else "::1")  # noqa: PLR2004 - IPv4
    return f"http://{host_port(address, listen.port)}"


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raises NoAnswerError if a document lacks a field."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise NoAnswerError(f"{url} answers as another version of ipvsproxy would: {error!r}") from error


def render(picture: Picture) -> Iterator[str]:
    """The data of ``top`` as plain text, not limited to any width."""
    yield from picture.lines
    yield ""
    yield from top_data.table_lines(top_data.SERVICE_COLUMNS, picture.rows)
    if len(picture.rows) < picture.matching:
        yield f"and {picture.matching - len(picture.rows)} more; --filter chooses others"


def run(config: Config) -> int:
    """Run ``ipvsproxy top``; returns the exit status."""
    options = config.top
    url = options.server or url_of(config.servers.metrics)
    if not url:
        return _refuse(
            "the configuration turns the metrics server off: name one by --server, such as --server=http://127.0.0.1:10249"
        )
    daemon, question = Daemon(url), Question(sort=options.sort, filter=options.filter)
    try:
        if config.as_json or options.once:
            node, services = asyncio.run(daemon.with_rates(question))
            with _reading(url):
                lines = render(top_data.picture(node, services))
            document = {"version": inspection.JSON_VERSION, "command": "top", "node": node, "services": services}
            inspection.show(document, lines, as_json=config.as_json)
            return inspection.WELL
        asyncio.run(daemon.documents(question))
    except NoAnswerError as error:
        return _refuse(str(error))
    if not is_terminal():
        return _refuse("standard input, output or error is not a terminal for a screen: use --once, or --output=json")
    try:
        screen = importlib.import_module("ipvsproxy.commands.top_screen")
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "ipvsproxy":
            raise
        return _refuse(NO_TEXTUAL)
    screen.TopApp(question, options.interval_s, daemon).run()
    return inspection.WELL


def is_terminal() -> bool:
    """Whether Textual can draw on standard error, and read keys."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and os.environ.get("TERM") != "dumb"


def _refuse(reason: str) -> int:
    complain(reason)
    return inspection.CANNOT_TELL
