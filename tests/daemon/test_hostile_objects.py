"""Covers objects of a hostile author, from the bytes of a watch to log lines, metrics and pages.

``tests/fuzz/rules.py`` covers how hostile objects affect rules, sets and virtual servers.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import prometheus_client.parser
import pytest
import structlog

from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.http import health_check_node_ports
from ipvsproxy.daemon.loop import journal
from ipvsproxy.daemon.metrics import traffic
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api import decode
from tests.fuzz.chooser import HOSTILE

TEXT_LINE = re.compile(r"timestamp=\S+ level=warning event=part_not_used kind=Service name=.* field=\S* reason=.*")


def _shortly(text: str) -> str:
    return ascii(text)[:24]


def decoded(document: dict[str, Any]) -> list[Any]:
    line = json.dumps({"type": "ADDED", "object": document}).encode()
    return [decode.decode_watch_line(ObjectKind.SERVICE, line).event]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("text", [text for text in HOSTILE if text], ids=_shortly)
def test_a_hostile_text_does_not_add_log_lines(
    read: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, text: str, *, as_json: bool
) -> None:
    log.set_up(json=as_json, verbosity=0)
    monkeypatch.setattr(journal, "log", structlog.get_logger())  # a logger that uses the configuration of this test
    store = Store(0)
    port = {"name": text, "protocol": text, "port": 80}
    spec = {"clusterIP": "10.96.0.10", "type": text, "externalIPs": [text], "ports": [port]}
    store.deliver(decoded({"metadata": {"name": text, "namespace": text, "uid": text}, "spec": spec}), 0)
    store.deliver(decoded({"metadata": {"name": text, "namespace": text}, "spec": {"ports": text}}), 0)
    complaints = store.take().complaints
    journal.Journal().log_complaints(complaints)
    lines = [line.removesuffix("\n") for line in read()]
    assert len(lines) == sum(len(complaint.skipped) for complaint in complaints) >= 3
    for line in lines:
        assert line.isprintable()
        assert len(line) < 1500
        if as_json:
            assert json.loads(line)["event"] == "part_not_used"
        else:
            assert TEXT_LINE.fullmatch(line)


def test_labels_and_annotations_that_ipvsproxy_does_not_use_are_not_kept_in_memory() -> None:
    many = {f"example.com/{number}": "x" * 100 for number in range(10_000)}
    (plain,) = decoded({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.10"}})
    (laden,) = decoded({"metadata": {"name": "web", "labels": many, "annotations": many}, "spec": {"clusterIP": "10.96.0.10"}})
    assert laden == plain


@pytest.mark.parametrize("text", HOSTILE, ids=_shortly)
def test_a_hostile_name_stays_within_its_string_in_a_health_check_answer(text: str) -> None:
    answer = health_check_node_ports.service_health(ServiceName(text, text), 1, is_healthy=True)
    assert json.loads(answer.body)["service"] == {"namespace": text, "name": text}
    assert all(value.isprintable() for value in answer.headers.values())


@pytest.mark.parametrize("text", HOSTILE, ids=_shortly)
def test_the_metrics_escape_a_hostile_name_in_a_label_value(text: str) -> None:
    labels = traffic._labels(text, text, text, Protocol.TCP.name)
    (family,) = prometheus_client.parser.text_string_to_metric_families(f"# TYPE m gauge\nm{{{labels}}} 1\n")
    (sample,) = family.samples
    assert sample.labels == {"namespace": text, "service": text, "port": text, "protocol": "TCP"}
