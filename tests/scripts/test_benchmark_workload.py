"""The benchmark's workload has the same shape at every size, so that the figures of two sizes can be compared."""

import collections
import ipaddress
import json
import pathlib

import pytest

from scripts.benchmark import program, workload


@pytest.mark.parametrize(("services", "endpoints"), [(100, 10), (10_000, 10), (5_000, 50), (1_000, 200), (100_000, 1)])
def test_in_each_size_of_cluster_replaced_and_new_endpoints_are_not_on_our_node(services: int, endpoints: int) -> None:
    replacements = workload.Replacements(services, endpoints)
    names: dict[str, set[tuple[str, bool]]] = {}
    for change in range(500):
        modified = json.loads(replacements.line(change * 7919 % services))["object"]
        name = modified["metadata"]["name"]
        number = int(name.split("-")[1])
        (first, *_) = workload.slices(number, endpoints, workload.nodes_for(services * endpoints))
        before = names.get(name, _endpoints(first))
        names[name] = after = _endpoints(modified)
        (gone,), (come,) = before - after, after - before
        assert not gone[1]
        assert not come[1]
        assert len(after) == len(before)


def test_replacing_an_endpoint_is_an_error_if_all_endpoints_are_on_this_node() -> None:
    with pytest.raises(ValueError, match="on another node"):
        workload.Replacements(1, 1).line(0)


@pytest.mark.parametrize(
    ("arguments", "nodes", "ours"), [((20, 50), 10, 100), ((110, 20), 20, 110), ((110, 20, 5), 5, 440), ((1, 3), 3, 1)]
)
def test_by_default_the_pods_are_spread_over_as_many_nodes_as_they_need(
    tmp_path: pathlib.Path, arguments: tuple[int, ...], nodes: int, ours: int
) -> None:
    workload.write(tmp_path, *arguments)
    slices = [item for page in tmp_path.glob("endpointslices-*") for item in json.loads(page.read_text())["items"]]
    names = collections.Counter(endpoint["nodeName"] for item in slices for endpoint in item["endpoints"])
    assert len(names) == nodes
    assert names[workload.NODE] == ours
    assert names.total() == arguments[0] * arguments[1]


def test_all_services_and_endpoints_of_an_ipv6_cluster_have_ipv6_addresses(tmp_path: pathlib.Path) -> None:
    workload.write(tmp_path, 3, 150, 0, 3)
    items = {
        kind: [item for page in tmp_path.glob(f"{kind}-*") for item in json.loads(page.read_text())["items"]]
        for kind in workload.KINDS
    }
    assert [one["spec"]["clusterIPs"] for one in items["services"]] == [[f"fd00:96::0:{number:x}"] for number in (10, 11, 12)]
    assert len(items["endpointslices"]) == 6
    addresses = {address for one in items["endpointslices"] for each in one["endpoints"] for address in each["addresses"]}
    pods = ipaddress.ip_network(program.CLUSTER_CIDR.partition(",")[2])
    assert len({ipaddress.ip_address(address) for address in addresses}) == 450
    assert all(ipaddress.ip_address(address) in pods for address in addresses)
    assert {one["addressType"] for one in items["endpointslices"]} == {"IPv6"}


def _endpoints(of_slice: dict[str, list[dict[str, object]]]) -> set[tuple[str, bool]]:
    return {(str(endpoint["addresses"]), endpoint["nodeName"] == workload.NODE) for endpoint in of_slice["endpoints"]}
