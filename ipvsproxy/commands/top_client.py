"""Asks a running ipvsproxy for what its page shows: ``/ui/api/*.json`` of the metrics server, by HTTP."""

import asyncio
import http
import json
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

from ipvsproxy.config.settings import ListenAddress
from ipvsproxy.model.net import host_port, parse_address

PATH = "/ui/api"
TIMEOUT_S = 5.0
"""The longest wait for a whole answer."""
MOST_BYTES = 16 << 20
"""The longest answer that is read."""

Document = Mapping[str, Any]


class NoAnswerError(Exception):
    """No ipvsproxy answers there; the message is a sentence that says what to do."""


class NotThereError(NoAnswerError):
    """An ipvsproxy answers, and does not know what it was asked for."""


class Client:
    """Asks one metrics server, with a connection for each question. ``url`` is where it is, without a path."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s

    async def get(self, what: str, /, **query: str | float) -> Document:
        """The document of this name, with these parameters.

        Raises:
            NotThereError: the daemon does not know what it was asked for.
            NoAnswerError: there is no answer.
        """
        path = f"{PATH}/{what}.json" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            async with asyncio.timeout(self._timeout_s):
                status, body = await self._ask(path)
        except (OSError, ValueError) as error:
            raise NoAnswerError(f"no ipvsproxy answers on {self.url}: {_reason(error)}") from error
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if status != http.HTTPStatus.OK:
            sentence = document.get("error") if isinstance(document, dict) else _HINTS.get(status)
            kind = NotThereError if status == http.HTTPStatus.NOT_FOUND and isinstance(document, dict) else NoAnswerError
            raise kind(f"{self.url} answers {PATH}/{what}.json with status {status}" + (f": {sentence}" if sentence else ""))
        if not isinstance(document, dict):
            raise NoAnswerError(f"{self.url} answers, but not as an ipvsproxy: {PATH}/{what}.json is not its JSON")
        return document

    async def _ask(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises ValueError for what is not HTTP.

        In HTTP/1.0 the end of the connection is that of the body, which comes as it is.
        """
        parts = urllib.parse.urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {parts.netloc}\r\nAccept: application/json\r\n\r\n".encode())
            answer = bytearray()
            while piece := await reader.read(1 << 16):
                answer += piece
                if len(answer) > MOST_BYTES:
                    raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
        finally:
            writer.close()
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        version, _, status = head.partition(b" ")
        if not version.startswith(b"HTTP/") or not status[:3].isdigit():
            raise ValueError("the answer is not HTTP")
        return int(status[:3]), body


_HINTS: Mapping[int, str] = {
    http.HTTPStatus.NOT_FOUND: "it is kube-proxy, or an ipvsproxy that is older or runs with --ui=false",
}


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "") or str(error) or type(error).__name__


def url_of(listen: ListenAddress | None) -> str:
    """Where the metrics server is reached on this host; empty if the configuration turns it off."""
    if listen is None:
        return ""
    address = listen.address
    if address.is_unspecified:
        address = parse_address("127.0.0.1" if len(address) == 4 else "::1")  # noqa: PLR2004 - IPv4
    return f"http://{host_port(address, listen.port)}"
