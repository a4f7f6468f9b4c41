"""The program's HTTP answers in the form of the recordings: health, health-check node ports, metrics."""

import email.message
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

State = dict[str, Any]

SECTIONS = ("health", "health_check_node_ports", "metrics")

_TYPE = re.compile(r"^# TYPE (?P<name>kubeproxy_\S+) (?P<type>\S+)$", re.MULTILINE)
_SAMPLE = re.compile(r"^(?P<name>kubeproxy_[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)


def read_answers(recorded: Mapping[str, Any]) -> State:
    """The sections listed in ``SECTIONS``, requested from this namespace, with the ports and values of the recording."""
    ports = sorted({int(row.rpartition(" ")[2]) for row in recorded["health_check_node_ports"]})
    with_value = {row for row, metric in recorded["metrics"].items() if "value" in metric}
    health = _read_health(ports)  # health is read before the metrics, because the metrics count these requests
    return health | {"metrics": _read_metrics(with_value)}


def _read_metrics(with_value: Iterable[str]) -> State:
    text = _fetch("127.0.0.1:10249/metrics").get("body", "")
    return parse_metrics(text, with_value)


def parse_metrics(text: str, with_value: Iterable[str]) -> State:
    """kube-proxy's metrics in text format, by name and labels.

    Each metric has its type and its buckets; only the metrics in these rows have a value.
    """
    types = {match["name"]: match["type"] for match in _TYPE.finditer(text)}
    metrics: State = {}
    for match in _SAMPLE.finditer(text):
        name, labels = match["name"], sorted(filter(None, (match["labels"] or "").split(",")))
        family = name if name in types else name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        if family not in types:
            continue
        row = f"{family}{{{','.join(label for label in labels if not label.startswith('le='))}}}"
        metric = metrics.setdefault(row, {"type": types[family]})
        bounds = [label.split('"')[1] for label in labels if label.startswith("le=")]
        if bounds:
            metric.setdefault("buckets", []).extend(bounds)
        if row in with_value:
            metric["value"] = float(match["value"])
    return metrics


def _read_health(ports: Iterable[int] = ()) -> State:
    """The sections ``health`` and ``health_check_node_ports``, requested from this namespace."""
    addresses = ("127.0.0.1", "172.18.0.2", "fc00:f853:ccd::2")
    health: State = {}
    for path in ("10249/configz", "10249/healthz", "10249/nothing", "10249/proxyMode", "10256/", "10256/healthz", "10256/livez"):
        answer = _fetch(f"127.0.0.1:{path}")
        if path in {"10249/configz", "10249/nothing", "10256/"}:
            answer.pop("body", None)
        answer.pop("headers", None)
        health[path] = answer
    for address in addresses:
        for name, path in (("healthz", "10256/healthz"), ("metrics", "10249/metrics")):
            health[f"{name} port on {address}"] = _fetch(f"{_host(address)}:{path}")["code"]
    listeners: State = {}
    for address in addresses:
        for port in ports:
            answer = _fetch(f"{_host(address)}:{port}/")
            answer.pop("content_type", None)
            listeners[f"{address} port {port}"] = answer
    return {"health": health, "health_check_node_ports": listeners}


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _fetch(where: str) -> State:
    try:
        with urllib.request.urlopen(f"http://{where}", timeout=60) as response:
            return _answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.headers, error.read())
    except urllib.error.URLError as error:
        return {"code": "refused" if isinstance(error.reason, ConnectionRefusedError) else str(error.reason)}


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
