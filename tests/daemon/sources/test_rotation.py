"""Covers the replacement of the certificates of server, client and authority at run time, over real TLS.

``test_credentials`` covers tokens.
"""

import pathlib
import shutil
import ssl

from ipvsproxy.daemon.sources.source import Trouble
from tests.support import api_server
from tests.support.api_server import ApiServer
from tests.support.api_store import SERVICES
from tests.support.following import eventually, following, service, wait_for_trouble


class Mutual(api_server.Certificates):
    """A server that requires from each client a certificate that the server's authority has signed.

    Server and client use the same leaf certificate.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.directory = directory
        self.context = super().server_context()
        self.context.verify_mode = ssl.CERT_REQUIRED
        self.context.load_verify_locations(self.authority)

    def server_context(self) -> ssl.SSLContext:
        return self.context

    def rotate(self, to: "Mutual") -> None:
        """Let server and client use certificates of another authority from the next handshake on."""

        def switch(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = to.context

        self.context.sni_callback = switch


async def test_rotated_certificates_of_server_and_client_are_read_again_from_their_files(tmp_path: pathlib.Path) -> None:
    old, new = Mutual(tmp_path / "old"), Mutual(tmp_path / "new")
    ours = tmp_path / "ours"
    shutil.copytree(old.directory, ours)
    async with ApiServer(tls=old) as server:
        user = {"client-certificate": str(ours / "server.crt"), "client-key": str(ours / "server.key")}
        authority = str(ours / "ca.crt")
        async with following(server, tmp_path, authority=authority, user=user) as running:
            server.put(SERVICES, service("web"))
            await running.sink.until(running.sink.has("web"))
            await server.watched(SERVICES)
            old.rotate(new)
            server.put(SERVICES, service("still"))
            await running.sink.until(running.sink.has("web", "still"))  # a connection that is already open stays open
            server.cut_watches(SERVICES)
            server.put(SERVICES, service("late"))
            await wait_for_trouble(running, Trouble.UNREACHABLE)  # our client does not know the authority of the new certificate
            shutil.copy(new.authority, ours)
            before = running.restarts
            await eventually(lambda: running.restarts > before + 3)  # the server no longer knows the authority of our certificate
            assert running.sink.has("web", "still")()
            shutil.copytree(new.directory, ours, dirs_exist_ok=True)
            await running.sink.until(running.sink.has("web", "still", "late"))
