"""Counts and times of the benchmark, tested in a separate process, because the class Meter permanently patches the program."""

import os
import subprocess
import sys

import pytest

PROBE = """
import socket, sys, time
from ipvsproxy.kernel.base import message, netlink, sockets
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.network import notify
from ipvsproxy.kernel.base.errors import KernelError
from scripts.benchmark import meter
from tests.support import fake_netlink

SLOW_S, passed_s = 0.05, []
GENERIC_CONTROL, FAMILY_ID = 16, 1

real_clock, time.perf_counter = time.perf_counter, lambda: sum(passed_s)

class Slow:
    # A kernel that is slow to take a batch, and slower to answer.
    def send(self, data):
        self.sequence = message.HEADER.unpack_from(data, len(data) - 16)[3]
        passed_s.append(SLOW_S)
        return len(data)

    def recv_into(self, buffer, size, flags):
        answer = message.HEADER.pack(20, 2, 0, self.sequence, 0) + bytes(4)
        buffer[:20] = answer
        passed_s.append(SLOW_S)
        return 20

    def getsockopt(self, level, option):
        return 4 << 20

    def close(self):
        pass

understood = message.messages

def slowly(data):
    passed_s.append(20 * SLOW_S)
    return understood(data)

message.messages = slowly
measured = meter.Meter()
measured.times = False
channel = netlink.Channel(0, lambda _: Slow())
header = message.HEADER.pack(16, 20, 1, 0, 0)
failed = channel.run([header, header])
assert not failed, failed
assert round(measured.kernel_s(), 6) == 2 * SLOW_S, measured.kernel_s()
assert sum(passed_s) > 20 * SLOW_S
time.perf_counter = real_clock
assert len(measured.acknowledged_s) == 1
counts = measured.all_counts()
assert (counts["messages"], counts["sends"], counts["receives"], counts["questions"]) == (2, 1, 1, 1), counts
assert counts["calls"] == 3, counts

assert counts["written"] == 2, counts

message.messages = understood

def answer(sent):
    (sequence,) = fake_netlink.sequences(sent)
    is_lookup = fake_netlink.split(sent)[0][1] == GENERIC_CONTROL
    family = bytes(4) + fake_netlink.attribute(FAMILY_ID, (33).to_bytes(2, sys.byteorder))
    return [fake_netlink.message(sequence, family) if is_lookup else fake_netlink.error(sequence)]

driver = ipvs.IpvsDriver(lambda _: fake_netlink.FakeSocket(answer))
measured.reset()
assert driver.refusal_with("rr") == 0
counts = measured.all_counts()
assert (counts["messages"], counts.get("written", 0)) == (1, 0), "asking for a scheduler writes nothing"

measured.reset()
real = netlink.Channel(0)
request = message.HEADER.pack(20, 18, netlink.REQUEST | netlink.DUMP, 0, 0) + bytes(4)  # interfaces
assert real.dump(request, "list interfaces")
counts = measured.all_counts()
assert counts["dumps"] == counts["sends"] == counts["messages"] == 1, counts
assert counts["receives"] >= 2, counts
assert measured.kernel_s() == 0, "a dump is not a change"

measured.reset()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    try:
        sockets.ask(asking, socket.IPPROTO_IP, 0xFFFF, bytes(64), "ask in vain")
    except KernelError as error:
        assert error.errno, "the error number of the call is kept"
assert measured.all_counts()["questions"] == 1

listener = notify.ChangeListener()
heard = measured.all_counts()["heard"]
listener.read()
assert measured.all_counts()["heard"] > heard >= 1

before = measured.all_counts()
after = measured.all_counts()
assert before == after, "the meter does not count its own reads"
if "reads" in before:
    with open("/proc/self/stat", "rb", buffering=0) as file:
        file.read(10)
    assert measured.all_counts()["reads"] == before["reads"] + 1
"""


def test_the_meter_counts_all_calls_and_its_kernel_time_contains_only_system_calls() -> None:
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    command = ["unshare", "--net", sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
