"""The fixture ``network_namespace`` isolates tests from each other: IPVS tables, settings and devices are not shared."""

import pathlib
import socket
import subprocess
import threading

import pytest

from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("network_namespace")]

TABLE = pathlib.Path("/proc/thread-self/net/ip_vs")
SETTING = pathlib.Path("/proc/sys/net/ipv4/vs/conntrack")


# The same test twice: the second run would find objects that the first run had left.
@pytest.mark.parametrize("_run", ["first", "second"])
def test_objects_that_one_test_creates_do_not_exist_for_the_next_test(_run: str) -> None:
    assert "TCP" not in TABLE.read_text()
    assert SETTING.read_text().strip() == "0"
    subprocess.run(["ipvsadm", "-A", "-t", "10.96.0.1:80", "-s", "rr"], check=True)
    SETTING.write_text("1")
    assert "TCP  0A600001:0050 rr" in TABLE.read_text()


def test_the_network_namespace_of_a_test_has_no_interface_of_another_test_and_its_loopback_works() -> None:
    # In each namespace, the kernel makes the tunnel devices once their modules are loaded, which tests of direct return do.
    assert {name for _, name in socket.if_nameindex()} - {*TUNNEL_DEVICES.values()} == {"lo"}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=60):
        pass


def test_threads_of_a_test_are_in_its_namespace() -> None:
    namespaces = []
    thread = threading.Thread(target=lambda: namespaces.append(pathlib.Path("/proc/thread-self/ns/net").readlink()))
    thread.start()
    thread.join()
    assert namespaces == [pathlib.Path("/proc/thread-self/ns/net").readlink()]
