"""Passes requests for the page into the demo's node, and the answers back, through files.

The node may run on user-mode Linux, a separate kernel that shares only a directory with the host. With ``scripts/demo --stay``,
this program runs on the host, and its argument is the shared directory. The program listens on 127.0.0.1. It writes the page's
address to the file ``address``, and writes each request to a file of its own. ``scripts.demo_node`` runs ``answer_all``. Each
file is first written under another name and then renamed, so that no incomplete file is read. The commands of ``scripts/demo
--shell`` and their outputs are also passed through files.
"""

import contextlib
import http.client
import http.server
import itertools
import json
import pathlib
import sys
import threading
import time
from collections.abc import Callable

PORT = 10249
LONGEST_S = 10.0
BETWEEN_S = 0.03
MOST_BYTES = 16384
"""The largest length of a request's path, in bytes. The rest of a longer path is cut off."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    numbers = itertools.count()
    directory = pathlib.Path()

    def do_GET(self) -> None:
        """Write the request to a file, and wait for the file with its answer."""
        name = f"{next(self.numbers):09}"
        headers = {"Host": self.headers.get("Host", "")}
        _write(self.directory / f"{name}.request", json.dumps([self.path[:MOST_BYTES], headers]).encode())
        answer = self.directory / f"{name}.answer"
        ends_s = time.monotonic() + LONGEST_S
        while not answer.exists():
            if time.monotonic() > ends_s:
                self.send_error(504, "the demo's node does not answer")
                return
            time.sleep(BETWEEN_S)
        head, _, body = answer.read_bytes().partition(b"\n")
        answer.unlink()
        status, kept = json.loads(head)
        self.send_response_only(status)
        for key, value in {**kept, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log no requests, because the demo prints its own lines."""


def serve(directory: pathlib.Path, port: int = PORT) -> None:
    """Serve the page on this port of 127.0.0.1, or on another port if this port is in use; never returns."""
    _Handler.directory = directory
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    _write(directory / "address", f"http://127.0.0.1:{server.server_address[1]}/ui/".encode())
    server.serve_forever()


def answer_all(directory: pathlib.Path, is_over: Callable[[], bool]) -> None:
    """Send the requests in the files to this node's metrics server, and write the answers to files, until the demo ends."""
    while not is_over():
        for path in sorted(directory.glob("*.request")):
            threading.Thread(target=_answer, args=(path, path.read_bytes()), daemon=True).start()
            path.unlink()
        time.sleep(BETWEEN_S)


def run_commands(directory: pathlib.Path, run: Callable[[str], str]) -> None:
    """Run the command in each file ``*.command`` of the directory, and write its output to a file ``*.output``."""
    for path in sorted(directory.glob("*.command")):
        line = path.read_text()
        path.unlink()
        _write(path.with_suffix(".output"), run(line).encode())


def _answer(path: pathlib.Path, request: bytes) -> None:
    where, headers = json.loads(request)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", PORT, timeout=LONGEST_S)) as connection:
        try:
            connection.request("GET", where, headers=headers)
            response = connection.getresponse()
            body, status = response.read(), response.status
            kept = {key: value for key, value in response.getheaders() if key.lower() not in ("content-length", "connection")}
        except OSError as error:
            body, status, kept = json.dumps({"error": str(error)}).encode(), 502, {"Content-Type": "application/json"}
    _write(path.with_suffix(".answer"), json.dumps([status, kept]).encode() + b"\n" + body)


def _write(path: pathlib.Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.rename(path)


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
