"""Reads the program's HTTP answers in the form in which kube-proxy's answers were recorded.

The answers are those of health, health-check node ports and metrics.
"""

import email.message
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any

from prometheus_client import parser

from tests.support import patience

State = dict[str, Any]

SECTIONS = ("health", "health_check_node_ports", "metrics")
_PORTS = {"healthz": 10256, "metrics": 10249}


def read_answers(recorded: Mapping[str, Any]) -> State:
    """The program's HTTP answers by section (``SECTIONS``), requested from this network namespace.

    ``recorded`` determines which ports are asked, and which metrics have a value in the result.
    """
    with_value = {row for row, metric in recorded["metrics"].items() if "value" in metric}
    return {
        "health": {row: _read_health(row) for row in recorded["health"]},
        "health_check_node_ports": {row: _read_listener(row) for row in recorded["health_check_node_ports"]},
        # The metrics come last, because they count the requests above.
        "metrics": parse_metrics(fetch("127.0.0.1:10249/metrics").get("body", ""), with_value),
    }


def parse_metrics(text: str, with_value: Collection[str]) -> State:
    """The metrics ``kubeproxy_*`` that a page in text format contains, by name and labels.

    Each metric has its type and its buckets; only the metrics in ``with_value`` have a value.
    """
    metrics: State = {}
    for family in parser.text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples if name.startswith("kubeproxy_") else ():
            labels = [f'{label}="{value}"' for label, value in sorted(sample.labels.items()) if label != "le"]
            row = f"{name}{{{','.join(labels)}}}"
            metric = metrics.setdefault(row, {"type": family.type})
            if "le" in sample.labels:
                metric.setdefault("buckets", []).append(sample.labels["le"])
            if row in with_value:
                metric["value"] = sample.value
    return metrics


def _read_health(row: str) -> Any:
    """The value of a row such as ``10256/livez`` or ``healthz port on 172.18.0.2``."""
    page, is_port, address = row.partition(" port on ")
    if is_port:
        return fetch(f"{_host(address)}:{_PORTS[page]}/{page}")["code"]
    left_out = ("headers", "body") if row in {"10249/configz", "10249/nothing", "10256/"} else ("headers",)
    return {name: value for name, value in fetch(f"127.0.0.1:{row}").items() if name not in left_out}


def _read_listener(row: str) -> State:
    """The answer of a listener, without the content type. ``row`` names the listener, for example ``172.18.0.2 port 32314``."""
    address, _, port = row.partition(" port ")
    return {name: value for name, value in fetch(f"{_host(address)}:{port}/").items() if name != "content_type"}


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def fetch(where: str) -> State:
    """The answer to a request from this namespace, such as to ``127.0.0.1:10256/healthz``.

    If there is no answer, the result has only a code.
    """
    try:
        with urllib.request.urlopen(f"http://{where}", timeout=patience.seconds(60)) as response:
            return _answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.headers, error.read())
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return {"code": "refused" if isinstance(reason, ConnectionRefusedError) else str(reason)}


def _answer(code: int, headers: email.message.Message, body: bytes) -> State:
    content_type = headers.get("Content-Type", "")
    answer: State = {"code": code, "content_type": content_type}
    if content_type.startswith("application/json"):
        answer["body"] = _without_times(json.loads(body))
    else:
        answer["body"] = body.decode().strip()
    names = ("Content-Type", "X-Content-Type-Options", "X-Load-Balancing-Endpoint-Weight")
    answer["headers"] = {name: headers[name] for name in names if name in headers}
    return answer


def _without_times(body: Any) -> Any:
    if isinstance(body, dict):
        return {key: "TIME" if key in {"currentTime", "lastUpdated"} else _without_times(value) for key, value in body.items()}
    return body
