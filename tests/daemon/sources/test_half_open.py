"""Covers a connection whose peer has vanished silently: a real kernel drops packets in both directions."""

import asyncio
import pathlib
import subprocess
import urllib.parse

import pytest

from ipvsproxy.daemon.sources import watch
from ipvsproxy.daemon.sources.source import Trouble
from tests.support import patience
from tests.support.api_server import ApiServer
from tests.support.api_store import RESOURCES, SERVICES
from tests.support.following import following, service, wait_for_trouble

WITHIN_S = patience.seconds(60.0)


def drop(verb: str, port: int) -> None:
    for direction in ("--dport", "--sport"):
        subprocess.run(["iptables", verb, "INPUT", "-p", "tcp", direction, str(port), "-j", "DROP"], check=True)


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
async def test_missed_changes_arrive_after_a_half_open_watch_is_abandoned(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("AFTER_S", 1), ("EVERY_S", 1), ("PROBES", 2)):
        monkeypatch.setattr(watch, f"KEEPALIVE_{name}", value)
    async with ApiServer() as server:
        port = urllib.parse.urlsplit(server.url).port
        assert port is not None
        async with following(server, tmp_path) as running:
            await server.watched(SERVICES)
            drop("-I", port)
            server.put(SERVICES, service("web"))
            try:
                await wait_for_trouble(running, Trouble.DROPPED)
            finally:
                drop("-D", port)
            async with asyncio.timeout(WITHIN_S):
                await running.sink.until(running.sink.has("web"))
        for resource in RESOURCES:
            server.end_watches(resource)  # the server considers these connections open, and would wait for them when it stops
