"""The order of owners."""

from ipvsproxy.model.owner import NODE_OWNER, Owner
from ipvsproxy.model.service import ServiceName


def test_the_older_service_comes_first_then_the_name_and_the_node_before_all() -> None:
    older, younger, namesake = (Owner(age, ServiceName(*name)) for age, name in ((1, "bb"), (2, "aa"), (2, "ab")))
    assert sorted([namesake, younger, older, NODE_OWNER]) == [NODE_OWNER, older, younger, namesake]
    assert older.service == ServiceName("b", "b")
