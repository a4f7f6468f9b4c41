"""Covers local routes.

The tests switch between addresses and routes by a reload under load, and kill the program during a switch. They also check that
missing and surplus routes are repaired.
"""

import functools
import time
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.packets.switching import HELD, clients, configure, losing_nothing
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

OTHER = {Binding.ADDRESSES: Binding.ROUTES, Binding.ROUTES: Binding.ADDRESSES}
MANY = 120
"""One more than the number of Services. With so many Services, a switch of bindings takes long enough that a test can kill the
program during the switch."""
WEB = service("web", 1, "p1", "r1", balancer=True, external=True, node_port=30001)
SERVICES = [WEB, *(service(f"other-{number}", number, "p1", protocols=["TCP"]) for number in range(2, MANY))]
CLIENTS = clients(*HELD, ("p1", "external 1"))
HEALED_WITHIN_S = patience.seconds(90.0)
FOREIGN = ("local", "10.96.200.200", "dev", "lo", "table", "local", "protocol", "252", "metric", "1024")


def bound(running: Cluster) -> dict[Binding, set[str]]:
    """For each binding, the service addresses that this binding has made local."""
    return {binding: running.local_addresses(binding) for binding in Binding}


def served() -> set[str]:
    every = {cluster.address(f"cluster {number}", family) for number in range(1, MANY) for family in Family}
    return every | {cluster.address(f"{kind} 1", family) for kind in ("balancer", "external") for family in Family}


def is_in(running: Cluster, binding: Binding) -> bool:
    """Whether this binding makes all addresses local, and the other binding makes no address local."""
    return bound(running) == {binding: served(), OTHER[binding]: set()}


def test_no_connection_or_request_is_lost_when_a_reload_switches_between_addresses_and_routes(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    configure(path, vipBinding=Binding.ADDRESSES)
    with Cluster(laboratory, tmp_path, f"--config={path}") as running:
        running.have(*SERVICES)
        assert is_in(running, Binding.ADDRESSES)
        process = running.program.process_id
        with losing_nothing(running, CLIENTS) as check_held:
            for binding in (Binding.ROUTES, Binding.ADDRESSES, Binding.ROUTES):
                configure(path, vipBinding=binding)
                running.wait_until(functools.partial(is_in, running, binding), f"switched to {binding}")
                check_held()
        assert running.program.process_id == process


def test_all_services_stay_served_if_the_program_is_killed_during_a_switch_of_bindings(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path, f"--ipvs-vip-binding={Binding.ADDRESSES}") as running:
        running.have(*SERVICES)
        for binding, last, pause_s in (
            (Binding.ROUTES, Binding.ROUTES, 0.3),  # The next process continues the switch to the new binding.
            (Binding.ADDRESSES, Binding.ROUTES, 0.0),  # The next process switches back to the old binding.
        ):
            running.program.kill()
            running.begin(f"--ipvs-vip-binding={binding}")
            running.wait_until(lambda begun=binding: bool(running.local_addresses(begun)), "begun")  # type: ignore[misc]  # the default binds the value
            time.sleep(pause_s)
            running.program.kill()
            ways = bound(running)
            assert ways[Binding.ADDRESSES] | ways[Binding.ROUTES] == served()
            for family in Family:
                assert running.lab.probe("p2", "TCP", cluster.address("cluster 1", family), 80).outcome == "ok"
            running.start(f"--ipvs-vip-binding={last}")
            running.wait_until(functools.partial(is_in, running, last), f"in the way {last}")


DAMAGE = {
    "a route deleted": ["route del local 10.96.0.1 dev lo table local proto 251 metric 1024"],
    "all routes deleted": ["-4 route flush table local proto 251", "-6 route flush table local proto 251"],
    "127.0.0.1 deleted, silently": ["address del 127.0.0.1/8 dev lo", "address add 127.0.0.1/8 dev lo"],
    "lo down and up, silently": ["link set lo down", "link set lo up"],
    "a stray route": ["route add local 10.96.7.7 dev lo table local proto 251 metric 1024"],
    "the device deleted": ["link del kube-ipvs0"],
}


@pytest.mark.distribution
def test_missing_and_surplus_routes_are_found_and_repaired(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--ipvs-vip-binding=routes") as running:
        running.have(WEB)
        laboratory.run("node", "ip", "route", "replace", *FOREIGN)
        before = running.local_addresses(Binding.ROUTES)
        for about, commands in DAMAGE.items():
            for command in commands:
                laboratory.run("node", "ip", *command.split())
            running.wait_until(lambda: running.local_addresses(Binding.ROUTES) == before, f"healed: {about}", HEALED_WITHIN_S)
            for family in Family:
                assert running.lab.probe("p2", "TCP", cluster.address("cluster 1", family), 80).outcome == "ok", about
            if "silently" not in about:
                assert "10.96.200.200" in laboratory.run("node", "ip", "route", "show", "table", "local", "protocol", "252")
                continue
            laboratory.run("node", "ip", "route", "replace", *FOREIGN)
        laboratory.run("node", "ip", "route", "del", *FOREIGN)
