"""The golden scenarios as manifests: the effect of phases on objects, and the scenario of a recorded row."""

from pathlib import Path

import pytest
import yaml

from tests.support import golden_fixtures


def _read(directory: Path, scenario: str) -> dict[tuple[str, str], dict[str, object]]:
    manifests = list(yaml.safe_load_all((directory / f"{scenario}.yaml").read_text()))
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests if manifest}


def test_every_scenario_is_a_file_and_the_api_server_adds_its_own_service(tmp_path: Path) -> None:
    golden_fixtures.World(tmp_path).apply("P0")
    scenarios = {path.stem for path in (golden_fixtures.GOLDEN / "fixtures").glob("*.yaml")}
    assert {path.name for path in tmp_path.iterdir()} == {f"{scenario}.yaml" for scenario in scenarios}
    assert ("Service", "kubernetes") in _read(tmp_path, "00-blog")


def test_a_put_without_status_keeps_the_status_and_one_with_status_replaces_it(tmp_path: Path) -> None:
    world = golden_fixtures.World(tmp_path)
    world.apply("P0")
    before = _read(tmp_path, "35-lb-ranges-many")["Service", "lb"]
    world.apply("P1")
    assert _read(tmp_path, "35-lb-ranges-many")["Service", "lb"]["status"] == before["status"]
    assert _read(tmp_path, "62-mut-type")["Service", "lb2cip"]["status"] == {"loadBalancer": {}}


def test_a_deleted_object_is_removed_and_others_stay(tmp_path: Path) -> None:
    world = golden_fixtures.World(tmp_path)
    for phase in ("P0", "P1", "P2"):
        world.apply(phase)
    objects = _read(tmp_path, "62-mut-type")
    assert ("Service", "np2lb") not in objects
    assert {("Service", "cip2np"), ("Service", "lb2cip"), ("EndpointSlice", "np2lb-a")} <= set(objects)


def test_the_node_of_a_machine_without_ipv6_has_no_ipv6_address(tmp_path: Path) -> None:
    golden_fixtures.World(tmp_path, node_has_ipv6=False).apply("P0")
    status = _read(tmp_path, "00-node")["Node", "node-a"]["status"]
    assert status == {"addresses": [{"type": "InternalIP", "address": "172.18.0.2"}, {"type": "Hostname", "address": "node-a"}]}


@pytest.mark.parametrize(
    ("row", "scenario"),
    [
        ("TCP 10.96.6.1:80", "06-lb-ranges"),
        ("TCP 10.244.0.1:31030 -> 10.244.0.11:8080", "03-np-cluster"),
        ("UDP [2001:db8:1::17]:53", "17-v6-lb"),
        ("31110", "11-dual"),
        ("10.96.11.1/32", "11-dual"),
        ("10.244.0.176,tcp:8080,10.244.0.176", "62-mut-type"),
        ("net.ipv4.vs.conntrack", "(node)"),
    ],
)
def test_a_row_is_attributed_to_its_scenario(row: str, scenario: str) -> None:
    assert golden_fixtures.scenario_of(row) == scenario
