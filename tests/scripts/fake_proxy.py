"""A fake proxy that writes its table to a file instead of the kernel, for scripts/benchmark/beside.py to measure.

    python fake_proxy.py --table FILE [kube-proxy's flags]

For each change, the fake proxy rewrites the whole file and starts a process, so that the started processes can be counted.
"""

import argparse
import http.server
import json
import pathlib
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import yaml

HEADING = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n"
COLUMNS = "  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n"
SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
Object = dict[str, Any]


class Table:
    """The Services and EndpointSlices, and the file to which the resulting table is written."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._objects: dict[str, dict[str, Object]] = {SERVICES: {}, SLICES: {}}
        self._lock = threading.Lock()
        self.synced_s = 0.0

    def put(self, kind: str, items: list[Object]) -> None:
        with self._lock:
            self._objects[kind] |= {item["metadata"]["namespace"] + "/" + item["metadata"]["name"]: item for item in items}

    def write(self) -> None:
        with self._lock:
            text = HEADING + COLUMNS
            for name, service in self._objects[SERVICES].items():
                text += f"TCP  {digits(service['spec']['clusterIP'])}:0050 rr\n"
                for one in self._objects[SLICES].values():
                    labels = one["metadata"]["labels"]
                    if f"{one['metadata']['namespace']}/{labels['kubernetes.io/service-name']}" == name:
                        for endpoint in one["endpoints"]:
                            text += f"  -> {digits(endpoint['addresses'][0])}:1F90      Masq    1      0          0\n"
            new = self._path.with_name("new")
            new.write_text(text)
            new.replace(self._path)
            subprocess.run(["true"], check=True)
            self.synced_s = time.time()


def digits(address: str) -> str:
    return "".join(f"{int(octet):02X}" for octet in address.split("."))


def follow(server: str, kind: str, version: str, table: Table) -> None:
    with urllib.request.urlopen(f"{server}{kind}?watch=1&resourceVersion={version}") as lines:  # noqa: S310 - the tests' API server
        for line in lines:
            table.put(kind, [json.loads(line)["object"]])
            table.write()


def serve(address: str, answer: Callable[[], str]) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    host, _, port = address.partition(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version="fake 1")
    parser.add_argument("--table", type=pathlib.Path)
    parser.add_argument("--kubeconfig", type=pathlib.Path)
    parser.add_argument("--metrics-bind-address")
    parser.add_argument("--healthz-bind-address")
    given, _ = parser.parse_known_args()
    table = Table(given.table)
    name = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
    serve(given.metrics_bind_address, lambda: f'# TYPE {name} gauge\n{name}{{ip_family="IPv4"}} {table.synced_s}\n')
    serve(given.healthz_bind_address, lambda: "ok")
    server = yaml.safe_load(given.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    following = []
    for kind in (SERVICES, SLICES):
        with urllib.request.urlopen(server + kind) as answer:  # noqa: S310 - the tests' API server
            listed = json.load(answer)
        table.put(kind, listed["items"])
        given_on = (server, kind, listed["metadata"]["resourceVersion"], table)
        following.append(threading.Thread(target=follow, args=given_on, daemon=True))
    table.write()
    for thread in following:
        thread.start()
    for thread in following:
        thread.join()


if __name__ == "__main__":
    main()
