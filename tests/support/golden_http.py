"""The program's HTTP answers in the form of the recordings: health, health-check node ports, metrics."""

import email.message
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from prometheus_client import parser

from tests.support import patience

State = dict[str, Any]

SECTIONS = ("health", "health_check_node_ports", "metrics")


def read_answers(recorded: Mapping[str, Any]) -> State:
    """The sections listed in ``SECTIONS``, requested from this namespace, with the ports and values of the recording."""
    ports = sorted({int(row.rpartition(" ")[2]) for row in recorded["health_check_node_ports"]})
    with_value = {row for row, metric in recorded["metrics"].items() if "value" in metric}
    health = _read_health(ports)  # health is read before the metrics, because the metrics count these requests
    return health | {"metrics": parse_metrics(fetch("127.0.0.1:10249/metrics").get("body", ""), with_value)}


def parse_metrics(text: str, with_value: Collection[str]) -> State:
    """kube-proxy's metrics in text format, by name and labels.

    Each metric has its type and its buckets; only the metrics in these rows have a value.
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


def _read_health(ports: Iterable[int]) -> State:
    """The sections ``health`` and ``health_check_node_ports``, requested from this namespace."""
    addresses = ("127.0.0.1", "172.18.0.2", "fc00:f853:ccd::2")
    health: State = {}
    for path in ("10249/configz", "10249/healthz", "10249/nothing", "10249/proxyMode", "10256/", "10256/healthz", "10256/livez"):
        answer = fetch(f"127.0.0.1:{path}")
        if path in {"10249/configz", "10249/nothing", "10256/"}:
            answer.pop("body", None)
        answer.pop("headers", None)
        health[path] = answer
    for address in addresses:
        for name, path in (("healthz", "10256/healthz"), ("metrics", "10249/metrics")):
            health[f"{name} port on {address}"] = fetch(f"{_host(address)}:{path}")["code"]
    listeners: State = {}
    for address in addresses:
        for port in ports:
            answer = fetch(f"{_host(address)}:{port}/")
            answer.pop("content_type", None)
            listeners[f"{address} port {port}"] = answer
    return {"health": health, "health_check_node_ports": listeners}


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def fetch(where: str) -> State:
    """The answer to a request from this namespace, such as to ``127.0.0.1:10256/healthz``; only a code if there is no answer."""
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
