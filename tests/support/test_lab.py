"""Tests of the lab itself: reachability, the outcomes of refused and unanswered requests, and complete removal."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import lab as laboratory

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", name="lab")
def _lab() -> Iterator[laboratory.Lab]:
    with laboratory.Lab() as lab:
        yield lab


def test_a_removed_lab_leaves_no_devices_and_no_changed_settings() -> None:
    """Runs first, because the lab of the other tests uses the same names."""
    forwarding = Path("/proc/sys/net/ipv6/conf/all/forwarding")
    devices, before = socket.if_nameindex(), forwarding.read_text()
    with laboratory.Lab():
        assert {"eth0", "cni0", "p1", "p2"} <= {name for _, name in socket.if_nameindex()}
    assert socket.if_nameindex() == devices
    assert forwarding.read_text() == before


def test_connections_of_an_earlier_lab_do_not_disturb_a_new_lab() -> None:
    """Runs before the lab of the other tests exists, as the test above."""
    source, kept = "172.18.0.50#40000", {"net/ipv4/vs/expire_nodest_conn": "0"}
    with laboratory.Lab() as lab:
        # A program of an earlier test has set it to 1, with which IPVS drops the connections of a removed virtual server.
        before = lab.call("sysctl", namespace="node", values=kept)
        lab.run("node", "ipvsadm", "--add-service", "--tcp-service", "172.18.0.2:80")
        lab.run("node", "ipvsadm", "--add-server", "--tcp-service", "172.18.0.2:80", "-r", "10.244.0.12:8080", "--masquerading")
        assert lab.probe("client", "TCP", "172.18.0.2", 80, src=source).backends == ("10.244.0.12",)
    with laboratory.Lab() as lab:
        assert "AC120032 9C40 AC120002 0050" in Path("/proc/net/ip_vs_conn").read_text(), "IPVS has kept the connection"
        assert lab.probe("client", "TCP", "10.244.0.12", 8080, src=source).outcome == "ok"
        lab.call("sysctl", namespace="node", values=before)


@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize(
    ("from_", "to", "source"),
    [
        ("host", "10.244.0.11", "10.244.0.1"),
        ("host", "10.244.1.11", "172.18.0.2"),
        ("p1", "10.244.0.12", "10.244.0.11"),
        ("p1", "10.244.1.12", "10.244.0.11"),
        ("client", "10.244.0.12", "172.18.0.50"),
        ("host", "fd00:10:244::11", "fd00:10:244::1"),
        ("host", "fd00:10:244:1::11", "fc00:f853:ccd::2"),
        ("p2", "fd00:10:244:1::12", "fd00:10:244::12"),
        ("remote", "fd00:10:244::11", "fc00:f853:ccd::3"),
    ],
)
def test_a_backend_answers_with_its_address_and_the_source_address_that_it_sees(
    lab: laboratory.Lab, from_: str, protocol: str, to: str, source: str
) -> None:
    port = dict(laboratory.POD_PORTS)[protocol]
    assert lab.probe(from_, protocol, to, port, count=3) == laboratory.Result("ok", (to,), (source,))


def test_the_client_can_choose_its_source_address(lab: laboratory.Lab) -> None:
    result = lab.probe("client", "TCP", "172.18.0.2", 22, src="172.18.1.51")
    assert result == laboratory.Result("ok", ("0.0.0.0",), ("172.18.1.51",))


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
@pytest.mark.parametrize("to", ["172.18.0.2", "fc00:f853:ccd::2"])
def test_a_closed_port_refuses_every_request(lab: laboratory.Lab, protocol: str, to: str) -> None:
    assert lab.probe("client", protocol, to, 9999, count=20) == laboratory.Result("refused", (), ())


def test_a_dropped_packet_gives_the_outcome_timeout_and_a_prohibited_send_its_errno(lab: laboratory.Lab) -> None:
    lab.run("node", "iptables-legacy", "-A", "FORWARD", "-d", "10.244.1.12", "-j", "DROP")
    lab.run("node", "iptables-legacy", "-A", "OUTPUT", "-d", "10.244.1.12", "-j", "DROP")
    try:
        assert lab.probe("p1", "TCP", "10.244.1.12", 8080, timeout_s=0.2).outcome == "timeout"
        assert lab.probe("host", "UDP", "10.244.1.12", 8053, timeout_s=0.2).outcome == "error-1"
    finally:
        lab.run("node", "iptables-legacy", "-F")


def test_a_destination_without_a_route_gives_the_outcome_unreachable(lab: laboratory.Lab) -> None:
    assert lab.probe("host", "TCP", "203.0.113.9", 80).outcome == "unreachable"


def test_an_open_connection_is_kept_while_new_connections_are_refused(lab: laboratory.Lab) -> None:
    lab.serve("p1", "TCP", "10.244.0.11", 7070)
    connection = lab.open("p2", "TCP", "10.244.0.11", 7070)
    lab.hush("p1", "TCP", "10.244.0.11", 7070)
    assert lab.probe("p2", "TCP", "10.244.0.11", 7070).outcome == "refused"
    assert connection.ask() == "10.244.0.11"
    connection.close()


def test_a_load_counts_its_answers_and_failures(lab: laboratory.Lab) -> None:
    with lab.load("p2", "UDP", "10.244.0.11", 8053, interval_s=0) as results:
        lab.probe("host", "UDP", "10.244.0.11", 8053, count=5)
    (load,) = results
    assert load.backends["10.244.0.11"] == load.outcomes["ok"]
    assert load.failed < load.outcomes["ok"], "a busy machine may answer a datagram too late"


def test_the_error_of_a_failed_command_contains_its_error_text(lab: laboratory.Lab) -> None:
    with pytest.raises(laboratory.LabError, match="Cannot find device"):
        lab.run("p1", "ip", "link", "delete", "no-such-device")
