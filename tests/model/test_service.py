"""How Services and reasons are named in log lines."""

import pytest

from ipvsproxy.model.service import EndpointSliceName, ObjectKey, ServiceName, Skipped

NAME = ServiceName("shop", "web")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (NAME, "shop/web"),
        (EndpointSliceName("shop", "web-1"), "shop/web-1"),
        (ObjectKey("shop", "web"), "shop/web"),
        (ObjectKey("", "node-a"), "node-a"),
        (Skipped("spec.ports[0].port", "0 is outside 1..65535"), "spec.ports[0].port: 0 is outside 1..65535"),
        (Skipped("", "is not wanted"), "is not wanted"),
    ],
)
def test_names_and_reasons_are_written_as_log_lines_show_them(item: object, text: str) -> None:
    assert str(item) == text
