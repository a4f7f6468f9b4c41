"""Figures, columns and lines of ``top``."""

import pytest

from ipvsproxy.commands import top_data
from ipvsproxy.commands.top_data import Details
from tests.support import top_pictures
from tests.support.top_pictures import endpoint, service


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.04, "0.0"),
        (9.44, "9.4"),
        (9.0, "9"),
        (12.3, "12"),
        (9999, "9999"),
        (10_000, "10.0k"),
        (999_960, "1.0M"),
        (1_250_000, "1.2M"),
        (5e9, "5.0G"),
        (5e12, "5.0T"),
        (5e15, "5000T"),
    ],
)
def test_a_figure_is_short(value: float | None, text: str) -> None:
    assert top_data.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0123, "12 ms"),
        (3.24, "3.2 s"),
        (42.4, "42 s"),
        (119, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (864_000, "10 d"),
    ],
)
def test_a_time_span_is_for_people(value: float | None, text: str) -> None:
    assert top_data.seconds(value) == text


def test_endpoints_are_counted_by_what_becomes_of_them() -> None:
    one = service()
    assert top_data.endpoints(one) == "3+1d-2"
    assert top_data.endpoints(one._replace(draining=0)) == "3-2"
    assert top_data.endpoints(one._replace(draining=0, unused=0)) == "3"


def test_the_node_takes_as_many_lines_as_its_width_needs() -> None:
    parts = (
        "pending 0  failed 0  drifted 0",
        "draining 1",
        "812 conn/s  12.3k pkt/s  9.9M B/s",
        "synced 2.5 s ago in 12 ms",
    )
    assert list(top_data.node_lines(top_pictures.NODE, 120)) == ["demo-node: in force", "  ".join(parts)]
    assert list(top_data.node_lines(top_pictures.NODE, 40)) == ["demo-node: in force", *parts]
    not_in_force = top_pictures.NODE._replace(in_force=False, reasons=("2 operations failed", "no API server"))
    assert next(top_data.node_lines(not_in_force, 80)) == "demo-node: NOT IN FORCE: 2 operations failed; no API server"


def test_a_table_in_plain_text_is_as_wide_as_it_has_to_be() -> None:
    rows = [service("demo/web", problems=["a", "b"]), service("demo/much-longer", connections_s=None)._replace(addresses=())]
    assert list(top_data.table_lines(top_data.SERVICE_COLUMNS, rows)) == [
        "!  Service           Type       Address        Ports   Ends    Active  Conn/s  Pkt/s    B/s  Wrong",
        "!  demo/web          ClusterIP  10.96.0.80 +1  80/TCP  3+1d-2       7     1.5    100  12.3k  a; b",
        "   demo/much-longer  ClusterIP                 80/TCP  3+1d-2       7       -    100  12.3k",
    ]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (40, ["!", "Service", "Conn/s"]),
        (80, ["!", "Service", "Address", "Ends", "Conn/s", "B/s", "Wrong"]),
        (120, [one.title for one in top_data.SERVICE_COLUMNS]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns(width: int, titles: list[str]) -> None:
    assert [one.title for one in top_data.columns(top_data.SERVICE_COLUMNS, width)] == titles


def test_a_service_is_told_with_what_is_wrong_and_its_notes() -> None:
    details = Details(service(problems=["an endpoint is missing"]), (endpoint("10.244.0.1:8080"),), ("session affinity 60 s",))
    assert list(top_data.service_lines(details)) == [
        "demo/web (ClusterIP): 10.96.0.80, fd00:10:96::80, 80/TCP",
        "3 endpoints get connections, 1 drain, 2 are not used; 1.5 conn/s, 12.3k B/s",
        "wrong: an endpoint is missing",
        "session affinity 60 s",
    ]


def _cells(width: int, *names: str) -> list[list[str]]:
    return top_data.cells(top_data.columns(top_data.SERVICE_COLUMNS, width), [service(name) for name in names], width)


def test_a_name_is_cut_where_the_columns_behind_it_would_not_be_seen() -> None:
    assert _cells(40, "demo/web", "demo/" + "x" * 40) == [["", "demo/web", "1.5"], ["", "demo/" + "x" * 19 + "…", "1.5"]]
    assert _cells(40, "demo/" + "x" * 10)[0][1] == "demo/" + "x" * 10
    assert _cells(20, "demo/" + "x" * 40)[0][1] == "demo/" + "x" * 10 + "…", "not less than this"


def test_the_last_column_needs_not_be_seen_whole() -> None:
    row = service("demo/" + "x" * 20, problems=["why " * 40])
    (texts,) = top_data.cells(top_data.columns(top_data.SERVICE_COLUMNS, 80), [row], 80)
    assert texts[1] == "demo/" + "x" * 15 + "…"
    assert texts[-1] == "why " * 40


def test_control_characters_are_escaped_before_a_text_is_cut() -> None:
    assert _cells(200, "demo/\x1b[31m\n")[0][1] == "demo/\\x1b[31m\\n"


def test_a_table_without_rows_has_no_texts() -> None:
    assert _cells(40) == []
