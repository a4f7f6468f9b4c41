"""Numbers, columns and lines that ``top`` prints."""

import copy
from typing import Any

import pytest

from ipvsproxy.commands import top_data
from ipvsproxy.commands.top_data import Picture
from ipvsproxy.model.service import ApiObject, ServiceType
from tests.support import builders, top_pictures
from tests.support.builders import OTHER_NODE, endpoint
from tests.support.page_node import PageNode
from tests.support.top_pictures import service


def test_a_number_is_printed_with_few_digits() -> None:
    values = (None, 0, 0.04, 9.44, 9.0, 12.3, 9999, 10_000, 999_960, 1_250_000, 5e9, 5e12, 5e15)
    assert " ".join(map(top_data.count, values)) == "- 0 0.0 9.4 9 12 9999 10.0k 1.0M 1.2M 5.0G 5.0T 5000T"


def test_a_time_span_is_printed_in_readable_units() -> None:
    values = (None, 0.0123, 3.24, 42.4, 119, 7199, 7200, 864_000)
    assert "|".join(map(top_data.seconds, values)) == "-|12 ms|3.2 s|42 s|2 min|120 min|2 h|10 d"


def test_the_endpoints_column_counts_ready_draining_and_unused_endpoints_separately() -> None:
    column = next(one for one in top_data.SERVICE_COLUMNS if one.title == "Ends")
    counts = ((3, 1, 2), (3, 0, 2), (3, 0, 0))
    rows = [{"endpoints": dict(zip(("ready", "draining", "unused"), one, strict=True))} for one in counts]
    assert list(map(column.text, rows)) == ["3+1d-2", "3-2", "3"]


def test_the_first_line_of_top_says_whether_the_desired_state_is_in_force() -> None:
    traffic = "31 active, 64 inactive  812 conn/s  12.3k pkt/s  9.9M B/s"
    facts = f"pending 0  failed 0  drifted 0  draining 1  {traffic}  synced 2.5 s ago in 12 ms"
    assert top_pictures.picture().lines == ("demo-node: in force", facts)
    not_in_force = {**top_pictures.NODE, "inForce": False, "reasons": ["2 operations failed", "no API server"], "syncs": []}
    first, second = top_pictures.picture(node=not_in_force).lines
    assert first == "demo-node: NOT IN FORCE: 2 operations failed; no API server"
    assert second.endswith("synced - ago in -")


def test_a_plain_text_table_is_as_wide_as_its_contents() -> None:
    rows = [
        service("demo/web", problems=["a", "b"]),
        {**service("demo/much-longer", connections_s=None), "addresses": [], "addressCount": 0},
    ]
    assert list(top_data.table_lines(top_data.SERVICE_COLUMNS, top_pictures.picture(*rows).rows)) == [
        "Service           Problem  Type       Address        Ports   Ends    Active  Conn/s  Pkt/s    B/s",
        "demo/web          a +1     ClusterIP  10.96.0.80 +1  80/TCP  3+1d-2       7     1.5    100  12.3k",
        "demo/much-longer           ClusterIP                 80/TCP  3+1d-2       7       -    100  12.3k",
    ]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (40, ["Service", "Problem", "Conn/s"]),
        (80, ["Service", "Problem", "Address", "Ends", "Conn/s", "B/s"]),
        (120, [one.title for one in top_data.SERVICE_COLUMNS]),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns(width: int, titles: list[str]) -> None:
    columns, _ = top_data.fitting(top_data.SERVICE_COLUMNS, (), width)
    assert [one.title for one in columns] == titles


def _cells(width: int, *names: str) -> list[list[str]]:
    return _texts(width, *map(service, names))


def _texts(width: int, *rows: dict[str, Any]) -> list[list[str]]:
    return top_data.fitting(top_data.SERVICE_COLUMNS, top_pictures.picture(*rows).rows, width)[1]


def test_a_name_is_shortened_if_the_columns_after_it_would_not_fit() -> None:
    assert _cells(40, "demo/web", "demo/" + "x" * 40) == [["demo/web", "", "1.5"], ["demo/" + "x" * 13 + "…", "", "1.5"]]
    assert _cells(40, "demo/" + "x" * 10)[0][0] == "demo/" + "x" * 10
    assert _cells(20, "demo/" + "x" * 40)[0][0] == "demo/" + "x" * 10 + "…", "not less than this"


@pytest.mark.parametrize(("width", "name", "problem"), [(40, 18, 8), (80, 25, 11), (140, 25, 37)])
def test_the_problem_column_is_shortened_first_but_stays_visible_at_every_width(width: int, name: int, problem: int) -> None:
    row = service("demo/" + "x" * 20, problems=["why " * 40, "more"])
    (texts,) = _texts(width, row)
    assert (len(texts[0]), len(texts[1])) == (name, problem)
    assert sum(map(len, texts)) + top_data.PADDING * len(texts) + top_data.SCROLL_BAR <= width


def test_the_last_column_may_be_wider_than_the_screen() -> None:
    row = top_pictures.endpoint("10.244.0.1:8080", reason="why " * 40)
    _, ((*_, state),) = top_data.fitting(top_data.ENDPOINT_COLUMNS, (row,), 80)
    assert state == "OUT: " + "why " * 40


def test_control_characters_are_escaped_before_a_text_is_shortened() -> None:
    assert _cells(200, "demo/\x1b[31m\n")[0][0] == "demo/\\x1b[31m\\n"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", {"query": ""}),
        ("demo/web", {"query": "demo/web"}),
        ("fd00:10:96:: node:Node-B", {"query": "fd00:10:96::", "node": "node-b"}),
        ("problems:only web", {"query": "web", "problems": "only"}),
        ("type:nodeport namespace:demo", {"query": "", "type": "NodePort", "namespace": "demo"}),
        ("type:x problems:no node:", {"query": "type:x problems:no node:"}),
    ],
)
def test_words_of_a_filter_become_parameters_of_the_request(text: str, asked: dict[str, str]) -> None:
    assert top_data.parameters(text) == asked


CLUSTER = builders.frontend(builders.CLUSTER_IP, 80)
HERE, THERE, GONE = (builders.backend(address) for address in ("10.244.0.1", "10.244.1.1", "10.244.9.9"))
WEB = (
    builders.node(),
    builders.service("web", builders.service_port(80, name="http", node_port=30080), kind=ServiceType.NODE_PORT),
    builders.endpoint_slice(
        endpoint("10.244.0.1"),
        endpoint("10.244.1.1", OTHER_NODE),
        endpoint("10.244.0.9", ready=False),
        ports=[builders.endpoint_port(8080, name="http")],
    ),
)


def _states(details: Picture) -> dict[str, str]:
    return {one.texts[2]: one.texts[-1] for one in details.rows}


async def test_top_counts_the_addresses_and_ports_that_the_document_leaves_out() -> None:
    document = await _document(*WEB)
    document["row"] |= {"addressCount": 20, "portCount": 3}
    assert top_data.details(document).lines[0] == ("default/web (NodePort): 10.96.0.10, and 19 more, 80:30080/TCP, and 2 more")


async def test_the_figures_of_an_endpoint_are_sums_over_all_its_virtual_servers() -> None:
    document = await _document(*WEB)
    (port,) = document["service"]["ports"]
    port["endpoints"][0]["target"] = "default/web-a"
    for server, (active, inactive) in zip(port["virtualServers"], ((7, 3), (1, 2)), strict=True):
        (held,) = (one for one in server["kernel"]["realServers"] if one["realServer"] == str(HERE))
        held |= {"active": active, "inactive": inactive}
    details = top_data.details(document)
    assert details.lines[0].startswith("default/web ")
    assert "|".join(details.rows[0].texts) == "80:30080/TCP http|web-a|10.244.0.1:8080|node-a||1|8|5|-|in"
    assert _states(details) == {"10.244.0.1:8080": "in", "10.244.1.1:8080": "in", "10.244.0.9:8080": "OUT: it is not ready"}


async def test_top_shows_draining_and_missing_real_servers() -> None:
    document = await _document(*WEB)
    kernel = document["service"]["ports"][0]["virtualServers"][0]["kernel"]
    kernel["realServers"] = [one for one in kernel["realServers"] if one["realServer"] != str(THERE)]
    kernel["realServers"].append(
        {"realServer": str(GONE), "weight": 0, "active": 2, "inactive": 0, "state": "draining", "target": "default/web-z"}
    )
    kernel["missing"] = [str(THERE)]
    details = top_data.details(document)
    assert _states(details) == {
        "10.244.0.1:8080": "in",
        "10.244.1.1:8080": "MISSING: not in the kernel",
        "10.244.0.9:8080": "OUT: it is not ready",
        "10.244.9.9:8080": "draining",
    }
    assert details.rows[-1].texts[1] == "web-z"
    assert details.rows[-1].texts[5:7] == ["0", "2"]


async def _document(*objects: ApiObject, name: str = "default/web") -> dict[str, Any]:
    one = PageNode()
    one.begin_with(*objects)
    async with one.running():
        await one.watcher.until(lambda: bool(one.watcher.summaries))
        return copy.deepcopy(await one.ask("service", name=name))


async def test_an_endpoint_that_serves_only_internal_or_only_external_traffic_is_marked() -> None:
    local = builders.service("web", builders.service_port(80, name="http", node_port=30080), external_local=True)
    details = top_data.details(await _document(WEB[0], local, WEB[2]))
    assert _states(details)["10.244.1.1:8080"].startswith("in for traffic to the cluster IP; OUT: it is on another node")
    assert "external traffic Local" in details.lines


async def test_top_explains_the_properties_of_a_service() -> None:
    service = builders.service(
        "web",
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=["192.0.2.80"],
        source_ranges=["203.0.113.0/24"],
        affinity_timeout_s=60,
    )
    stray = builders.endpoint_slice(endpoint("fd00::1"), suffix="v6")
    document = await _document(builders.node(), service, stray)
    document["service"]["notUsed"] = [
        {"object": "Service default/web", "field": "spec.externalIPs[0]", "reason": "bad", "invalid": True}
    ]
    document["service"]["ports"][0]["virtualServers"][1]["kernel"] = None
    assert top_data.details(document).lines[-5:] == (
        "session affinity 60 s",
        "only from 203.0.113.0/24",
        "not used: Service default/web spec.externalIPs[0]: bad",
        "not used: EndpointSlice default/web-v6: the Service has no cluster IP of IPv6",
        "TCP 192.0.2.80:80: not in the kernel",
    )


async def test_top_explains_that_another_service_has_the_address() -> None:
    younger = builders.service("younger", created_s=builders.CREATED_S + 1)
    document = await _document(*WEB, younger, name="default/younger")
    assert "TCP 10.96.0.10:80: not served, default/web has it" in top_data.details(document).lines


async def test_an_ipv6_address_is_printed_in_brackets() -> None:
    objects = (builders.node(), builders.service("web", cluster=["fd00::10"]), builders.endpoint_slice(endpoint("fd00:10::1")))
    assert _states(top_data.details(await _document(*objects))) == {"[fd00:10::1]:8080": "in"}
