"""The rows of ``ipvsadm -Ln``: on a fake socket what no kernel here has, and on a real kernel the same as ipvsadm itself."""

import struct
import subprocess
from collections.abc import Iterator

import pytest

from ipvsproxy.commands import list as listing
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from tests.support import fake_netlink

TABLE = """
-A -t 10.0.0.1:80 -s rr -p 300
-a -t 10.0.0.1:80 -r 10.1.1.1:8080 -m
-a -t 10.0.0.1:80 -r 10.1.1.2:80 -g -w 5
-a -t 10.0.0.1:80 -r 10.1.1.3:80 -i -w 0
-A -t 10.0.0.1:443 -s wlc
-A -t 9.0.0.1:443 -s wlc
-A -u 10.0.0.1:53 -s sh -b sh-fallback,sh-port -o -p 100 -M 255.255.255.0
-A --sctp-service 10.0.0.1:9999 -s rr
-A -t [fd00::2]:80 -s wrr -b flag-1,flag-3 -p 20 -M 64
-A -t [fd00::1]:80 -s mh -b mh-port
-a -t [fd00::1]:80 -r [fd00::9]:8080 -m -w 65535
-a -t [fd00::1]:80 -r [fd00:1111:2222:3333:4444:5555:6666:7777]:65535 -m
-A -f 8 -6 -s wlc
-a -f 8 -6 -r [fd00::9]:0 -m
-A -f 7 -s wlc
-a -f 7 -r 10.1.1.3 -m
"""


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
def test_without_names_the_table_is_what_ipvsadm_prints() -> None:
    for command in TABLE.strip().splitlines():
        subprocess.run(("ipvsadm", *command.split()), check=True, timeout=60)
    shown = subprocess.run(("ipvsadm", "-Ln"), capture_output=True, text=True, check=True, timeout=60).stdout
    assert list(listing.render(listing.table("node", ipvs_rows.read()))) == shown.splitlines()


def _service(*attributes: tuple[int, bytes]) -> bytes:
    usual = {1: struct.pack("=H", 2), 6: b"rr\0", 7: struct.pack("=I", 3), 8: struct.pack("=I", 300), 9: b"\xff\xff\xff\xff"}
    by_kind = usual | dict(attributes)
    return fake_netlink.attribute(1, b"".join(fake_netlink.attribute(kind, value) for kind, value in sorted(by_kind.items())))


ADDRESS = ((2, struct.pack("=H", 6)), (3, bytes((10, 0, 0, 1)).ljust(16, b"\0")), (4, struct.pack("!H", 5060)))
DUMP = (
    _service(*ADDRESS, (11, b"sip\0")),
    _service(*ADDRESS, (2, struct.pack("=H", 51))),
    _service((2, struct.pack("=H", 6))),
    _service((5, struct.pack("=I", 7))),
)
"""One with a persistence engine, one of another protocol, one without a name, one by mark."""
INFORMATION = fake_netlink.attribute(1, struct.pack("=I", 0x10201)) + fake_netlink.attribute(2, struct.pack("=I", 4096))


class Kernel:
    """Answers as the kernel does; no virtual server has real servers."""

    def __init__(self, information: bytes = INFORMATION) -> None:
        self._information = information
        self.sockets: list[fake_netlink.FakeSocket] = []

    def connect(self, _protocol: int) -> fake_netlink.FakeSocket:
        self.sockets.append(fake_netlink.FakeSocket(self._answer))
        return self.sockets[-1]

    def _answer(self, data: bytes) -> Iterator[fake_netlink.Answer]:
        _, kind, _, sequence, payload = fake_netlink.split(data)[-1]
        if kind == 16:
            yield fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", 33)))
        elif payload[0] == 15:
            yield fake_netlink.message(sequence, bytes(4) + self._information)
        else:
            for one in DUMP if payload[0] == 4 else ():
                yield fake_netlink.message(sequence, bytes(4) + one)
            yield fake_netlink.done(sequence)


def test_a_persistence_engine_is_shown_and_other_protocols_are_left_out() -> None:
    kernel = Kernel()
    rows = ipvs_rows.read(kernel.connect)
    assert (rows.version, rows.size) == ("1.2.1", 4096)
    lines = list(listing.render(listing.table("node", rows)))
    assert lines[3:] == ["TCP  10.0.0.1:5060 rr persistent 300 pe sip", "FWM  7 rr persistent 300"]
    assert [one.closed for one in kernel.sockets] == [True]


def test_an_incomplete_answer_is_an_error() -> None:
    kernel = Kernel(fake_netlink.attribute(1, struct.pack("=I", 0x10201)))
    with pytest.raises(KernelError, match="incomplete"):
        ipvs_rows.read(kernel.connect)
    assert [one.closed for one in kernel.sockets] == [True]
