"""Drift of an in-memory node: changes that other programs make to kernel objects, and that the loop repairs."""

from collections.abc import Callable, Collection

from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.rules import Rule, Verdict
from ipvsproxy.model.sets import ForeignElement, SetEntry
from ipvsproxy.model.virtual_servers import VirtualServer, VirtualServerSettings
from tests.daemon.loop.test_engine import WEB_KEY
from tests.support import builders
from tests.support.fake_kernel import FakeKernel, KernelVirtualServer

OTHER = builders.service("other", cluster=("10.96.0.20",))
OTHER_KEY = builders.frontend("10.96.0.20", 80)
BACKEND = builders.backend("10.244.0.5")


def remove_virtual_server(kernel: FakeKernel) -> None:
    del kernel.virtual_servers[WEB_KEY]


def change_settings(kernel: FakeKernel) -> None:
    held = kernel.virtual_servers[WEB_KEY]
    held.settings = held.settings._replace(scheduler="lc")


def change_weight(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers[BACKEND] = 7


def remove_real_server(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers.clear()


def add_real_server(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers[builders.backend("10.244.0.6")] = 1


def flush_set(kernel: FakeKernel) -> None:
    kernel.sets["KUBE-CLUSTER-IP"].entries.clear()


def add_entry(kernel: FakeKernel) -> None:
    held = kernel.sets["KUBE-6-CLUSTER-IP"]
    held.entries.add(SetEntry("KUBE-6-CLUSTER-IP", parse_address("fd00::1"), WEB_KEY.protocol, 80))


def destroy_set(kernel: FakeKernel) -> None:
    del kernel.sets["KUBE-LOAD-BALANCER"]


def flush_rules(kernel: FakeKernel) -> None:
    kernel.chains[Family.IPV4].clear()
    kernel.jumps[Family.IPV4].clear()


def change_a_rule(kernel: FakeKernel) -> None:
    key = next(iter(kernel.chains[Family.IPV6]))
    kernel.chains[Family.IPV6][key] = (Rule(target=Verdict.ACCEPT),)


def remove_address(kernel: FakeKernel) -> None:
    kernel.addresses.discard(WEB_KEY.address)


def add_address(kernel: FakeKernel) -> None:
    kernel.addresses.update(builders.addresses("192.0.2.99"))


def remove_device(kernel: FakeKernel) -> None:
    kernel.device = False
    kernel.addresses.clear()


def change_sysctl(kernel: FakeKernel) -> None:
    kernel.sysctls["net/ipv4/ip_forward"] = "0"


def add_catch_all(kernel: FakeKernel) -> None:
    for name, held in kernel.sets.items():
        held.entries.add(ForeignElement(name))


DRIFTS: Collection[Callable[[FakeKernel], None]] = (
    remove_virtual_server,
    change_settings,
    change_weight,
    remove_real_server,
    flush_set,
    add_entry,
    add_catch_all,
    destroy_set,
    flush_rules,
    change_a_rule,
    remove_address,
    add_address,
    remove_device,
    change_sysctl,
)


STRAY_PORT = SetEntry("KUBE-NODE-PORT-TCP", port=30080)


def add_stray_on_our_device(kernel: FakeKernel) -> None:
    key = builders.frontend("10.96.0.77", 80)
    kernel.addresses.add(key.address)
    kernel.virtual_servers[key] = KernelVirtualServer(VirtualServerSettings("rr"), {BACKEND: 1})


def add_stray_node_port(kernel: FakeKernel) -> None:
    kernel.sets[STRAY_PORT.set].entries.add(STRAY_PORT)
    kernel.virtual_servers[builders.frontend(builders.NODE_ADDRESS, 30080)] = KernelVirtualServer(
        VirtualServerSettings("rr"), {BACKEND: 1}
    )


def adds_web(operation: Operation) -> bool:
    return isinstance(operation.item, VirtualServer) and operation.item.key == WEB_KEY
