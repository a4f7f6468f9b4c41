"""``ipvsproxy top``: what a running ipvsproxy does, seen live in a terminal, or once as text or JSON."""

import asyncio
import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Iterator

from ipvsproxy.commands import inspection, top_client, top_data, top_documents
from ipvsproxy.commands.inspection import Document
from ipvsproxy.commands.top_client import Client, NoAnswerError, NotThereError
from ipvsproxy.commands.top_data import Details, Picture, Question
from ipvsproxy.config.commands import TopOptions
from ipvsproxy.config.settings import Config

SHOWN = 0
PAGE_SIZE = 200
"""The most that the daemon gives."""
RATES_AFTER_S = 1.0
RATES_TRIED = 10
"""How often, and after which pause, a single picture is asked for again until there are rates: they need two readings."""
NEVER_S = 1e12
"""A time that no point of the node's history is after."""
NODE_WIDTH = 120
"""The longest line about the node in plain text."""
NO_TEXTUAL = (
    "the screen needs Textual, which the image has: pip install 'ipvsproxy[top]'; --once and --output=json work without it"
)


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raises NoAnswerError where a document lacks something."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise NoAnswerError(f"{url} answers as another version of ipvsproxy would: {error!r}") from error


class Daemon:
    """A running ipvsproxy, as pictures."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._viewer = f"top-{secrets.token_hex(4)}"

    async def documents(self, question: Question) -> tuple[Document, Document]:
        """``node.json`` and ``services.json``.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        node = await self._client.get("node", viewer=self._viewer, since=NEVER_S)
        services = await self._client.get(
            "services",
            viewer=self._viewer,
            query=question.filter,
            sort=question.sort.value,
            order="desc" if (question.sort.value != "name") is not question.is_reversed else "asc",
            page=question.page,
            size=PAGE_SIZE,
        )
        return node, services

    async def picture(self, question: Question) -> Picture:
        """The node and a page of Services.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        documents = await self.documents(question)
        with _reading(self._client.url):
            return top_documents.picture(*documents)

    async def details(self, name: str) -> Details | None:
        """One Service; None if there is none of this name.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        try:
            document = await self._client.get("service", viewer=self._viewer, name=name)
        except NotThereError:
            return None
        with _reading(self._client.url):
            return top_documents.details(document)

    async def with_rates(self, question: Question) -> tuple[Document, Document]:
        """As ``documents``, after the second reading of the counters, if it comes soon.

        Raises:
            NoAnswerError: the daemon does not answer.
        """
        documents = await self.documents(question)
        for _ in range(RATES_TRIED):
            node, services = documents
            if node.get("connectionsPerSecond") is not None and services.get("sampleSeconds") is not None:
                break
            await asyncio.sleep(RATES_AFTER_S)
            documents = await self.documents(question)
        return documents


def render(picture: Picture) -> Iterator[str]:
    """A picture as plain text, as wide as it has to be."""
    yield from top_data.node_lines(picture.node, NODE_WIDTH)
    yield ""
    yield from top_data.table_lines(top_data.SERVICE_COLUMNS, picture.services)
    if len(picture.services) < picture.matching:
        yield f"and {picture.matching - len(picture.services)} more; --filter chooses others"


def run(config: Config, options: TopOptions, *, as_json: bool) -> int:
    """``ipvsproxy top``; returns the exit status."""
    url = options.server or top_client.url_of(config.servers.metrics)
    if not url:
        return _refuse(
            "the configuration turns the metrics server off: name one by --server, such as --server=http://127.0.0.1:10249"
        )
    daemon, question = Daemon(Client(url)), Question(sort=options.sort, filter=options.filter)
    try:
        if as_json or options.once:
            _print_once(url, *asyncio.run(daemon.with_rates(question)), as_json=as_json)
            return SHOWN
        asyncio.run(daemon.documents(question))
    except NoAnswerError as error:
        return _refuse(str(error))
    if not is_terminal():
        return _refuse("standard input, output or error is no terminal for a screen: use --once, or --output=json")
    try:
        screen = importlib.import_module("ipvsproxy.commands.top_screen")
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "ipvsproxy":
            raise
        return _refuse(NO_TEXTUAL)
    screen.TopApp(question, options.interval_s, daemon.picture, daemon.details).run()
    return SHOWN


def is_terminal() -> bool:
    """Whether a screen can be drawn, which Textual does on standard error, and keys can be read."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and os.environ.get("TERM") != "dumb"


def _print_once(url: str, node: Document, services: Document, *, as_json: bool) -> None:
    document = {"version": inspection.JSON_VERSION, "command": "top", "node": node, "services": services}
    with _reading(url):
        picture = top_documents.picture(node, services)
    inspection.show(document, render(picture), as_json=as_json)


def _refuse(reason: str) -> int:
    sys.stderr.write(f"ipvsproxy: {reason}\n")
    return inspection.CANNOT_TELL
