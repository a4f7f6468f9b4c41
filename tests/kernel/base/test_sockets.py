"""These tests run on the real kernel, and check the sockets that receive the kernel's notifications."""

import gc
import socket
import subprocess
import warnings

import pytest

from ipvsproxy.kernel.base.sockets import open_event_socket

LINK_GROUP = 1


@pytest.mark.usefixtures("network_namespace")
def test_a_socket_receives_the_events_of_its_group_without_blocking() -> None:
    with open_event_socket(socket.NETLINK_ROUTE, (LINK_GROUP,), 1 << 20) as opened:
        with pytest.raises(BlockingIOError):
            opened.recv(4096)
        subprocess.run(("ip", "link", "add", "probe", "type", "bridge"), check=True)
        assert b"probe" in opened.recv(1 << 16)


def test_no_socket_stays_open_if_the_kernel_refuses_the_notification_group() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(OSError, match="Invalid argument"):
            open_event_socket(socket.NETLINK_ROUTE, (1 << 20,), 1 << 20)
        gc.collect()
