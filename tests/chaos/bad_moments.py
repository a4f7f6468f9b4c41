"""How the program must react to each temporary condition that the module ``moments`` causes on the node."""

import contextlib
import functools
import resource
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ipvsproxy.model.rules import Backend
from tests.chaos import cluster, kernel_state, moments, world
from tests.chaos.configuration import SCHEDULERS
from tests.chaos.faults import Kind, Order
from tests.chaos.moments import Moment
from tests.chaos.world import CLOSED, Question
from tests.support import golden_http, lab, patience
from tests.support.cluster import ipvs_table

if TYPE_CHECKING:  # ``history`` imports this module, so an import at run time would be circular
    from tests.chaos.history import History

REACHED_WITHIN_S = patience.seconds(150.0)
"""The longest wait until everything except the rules is in force. The program may have to start again during this time."""
SILENCE_NOTICED_WITHIN_S = patience.seconds(60.0)
"""The longest wait until a change is in force if a silent proxy does not forward the change. The wait is six times the silence
that the program tolerates in these tests."""
RELOADED_WITHIN_S = patience.seconds(60.0)
"""The longest wait until a reload fails, and then the longest wait until a later attempt succeeds. The program tries the
configuration again after growing pauses."""
SHOWN_WITHIN_S = patience.seconds(60.0)
"""The longest wait until ``/healthz`` reports that a part of the kernel cannot be read."""
ANSWERED_WITHIN_S = patience.seconds(5.0)
ACKNOWLEDGED_S = 0.5
"""The time in seconds after which a client has certainly acknowledged an answer. Linux delays an acknowledgement by 40 ms
(TCP_DELACK_MIN) to 200 ms."""
PROGRAMMED_WITHIN_S = patience.seconds(60.0)
"""The longest wait until a change is in force while the program lacks an optional resource."""
OPENED_WITHIN_S = patience.seconds(30.0)
"""The longest wait until a widened source range is in force while another program holds the xtables lock."""
LIMIT = 1024
"""The usual limit of file descriptors of a container or a system service."""
CHECKED, IDLE = 18, 64
"""The number of Services with health-check node ports, and the number of connections that an outside client holds to each of
these ports. Together, these connections exceed ``LIMIT``."""
LOOK_S = 0.02
BOOKMARK_S = 1.0
"""The number of seconds that the test waits, so that the program receives a bookmark."""
POLL_S = 0.2
RELOAD_FAILED = b"event=reload_failed"
BUT_RULES = ("virtual_servers", "ipsets", "addresses")
BLINKING = Question("client", "TCP", moments.ADDRESS, 30080)
BLINKING_CLIENT = "172.18.1.51"
"""A source address that no other client has, because IPVS confuses two connections from the same address and port."""


def _restart_under_lock(life: "History") -> None:
    """Another program holds the xtables lock for longer than iptables waits, and meanwhile ipvsproxy restarts."""
    with moments.held_lock():
        life.restart()
        time.sleep(moments.HELD_S)
    life.note("the xtables lock is free")


def _live_beside_native_rule(life: "History") -> None:
    """While a table of iptables cannot be listed, API objects change, and then the program restarts.

    Changes must be applied to all kernel objects except the rules, and ``/healthz`` must report the fault.
    """
    with life.native_rules.added():
        for act in (life.change, life.restart):
            act()
            desired = life.desired()
            life.wait_until(functools.partial(_is_right_but_for_rules, desired), "all but rules", REACHED_WITHIN_S)
        life.wait_until(lambda: "unreadable" in _body("healthz"), "/healthz tells of the table", SHOWN_WITHIN_S)
    life.note("the native rule is gone")


def _lose_address(life: "History") -> None:
    """An address of the node is missing for a moment, while a connection through a node port on this address is open.

    The connection is masqueraded. The kernel deletes a masqueraded connection if the route of its packets changes, whatever the
    proxy does (``nf_nat_oif_changed``). While the address is missing, the client sends nothing, because a packet would take
    another route.
    """
    with moments.second_address(), contextlib.ExitStack() as cleaning:
        life.wait_until_quiet(REACHED_WITHIN_S)
        connection = life.clients.open_one(BLINKING, BLINKING_CLIENT)
        cleaning.callback(connection.abort)
        time.sleep(ACKNOWLEDGED_S)
        was_there = True
        with moments.without_address():
            ends_s = time.monotonic() + moments.AWAY_S
            while time.monotonic() < ends_s:
                was_there &= (BLINKING.protocol, BLINKING.to, BLINKING.port) in ipvs_table()
                time.sleep(LOOK_S)
        life.figures.asked += 1
        answer = _answer(connection) if was_there else "its virtual server was gone while the address was away"
        if answer != connection.backend:
            life.figures.broken += 1
            raise life.violation("an open connection", [f"{BLINKING}: {answer}"])
        life.note(f"the address is back; {answer} answers, as before")
        life.wait_until_quiet(REACHED_WITHIN_S)


def _hear_nothing(life: "History") -> None:
    """A proxy in front of the API server keeps its connections open, but forwards no change."""
    assert isinstance(life.cluster, cluster.Server)
    life.cluster.bookmark()
    time.sleep(BOOKMARK_S)
    life.note(f"connections that are silent from now on: {life.cluster.hush()}")
    life.change()
    life.wait_until_quiet(SILENCE_NOTICED_WITHIN_S)


def _reload_without_room(life: "History") -> None:
    """The configuration file names another scheduler while the kernel has no memory to answer a query.

    After some time, the kernel can allocate memory again.
    """
    logged = life.log.stat().st_size
    before = life.faults.injected()
    life.faults.order(Order(Kind.ENOBUFS, 1.0, once=False))
    life.configuration.write(SCHEDULERS[1])
    life.wait_until(lambda: RELOAD_FAILED in life.log.read_bytes()[logged:], "a reload fails", RELOADED_WITHIN_S)
    life.faults.end()
    injected = life.faults.injected() - before
    life.figures.injected += injected
    life.note(f"the reload has failed, with {injected.total()} refusals")
    life.change()
    life.wait_until_quiet(RELOADED_WITHIN_S)
    life.note("the other scheduler is in force")
    life.configuration.write(SCHEDULERS[0])


def _stall_log(life: "History") -> None:
    """Even if no process reads the program's log, the program must apply changes, answer requests, and stop on a signal."""
    life.stall_log()
    _expect_service(life)
    life.stop_and_start()


def _take_descriptors(life: "History") -> None:
    """An outside client holds more connections to health-check node ports than the process may have file descriptors."""
    checked = world.checked_services(CHECKED)
    life.put(checked)
    life.restart(descriptors=LIMIT)
    life.wait_until_quiet(REACHED_WITHIN_S)
    with contextlib.ExitStack() as cleaning:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        cleaning.callback(resource.setrlimit, resource.RLIMIT_NOFILE, usual)
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
        for number in range(CHECKED):
            for _ in range(IDLE):
                with contextlib.suppress(OSError):  # a refused connection is the right result
                    port = world.FIRST_CHECKED_PORT + number
                    cleaning.enter_context(socket.create_connection(("172.18.0.2", port), ANSWERED_WITHIN_S))
        life.note("the connections are open")
        _expect_service(life)
    life.delete(checked)
    life.restart()


def _expect_service(life: "History") -> None:
    """Make a change; wait until it is programmed and the process answers a request to ``/livez``."""
    life.change()
    desired = life.desired()
    life.wait_until(lambda: not kernel_state.differences(desired, _observed(life)), "a change in force", PROGRAMMED_WITHIN_S)
    life.wait_until(lambda: bool(_body("livez")), "an answer of /livez", PROGRAMMED_WITHIN_S)


def _observed(life: "History") -> kernel_state.State:
    return kernel_state.observed(backend=life.configuration.backend)


def _move_under_lock(life: "History") -> None:
    """A start with the nftables backend cannot remove the iptables rules, because another program holds the iptables lock.

    The remaining iptables rules must not affect any packet.
    """
    life.put(world.closed_service())
    if life.configuration.backend is not Backend.IPTABLES:
        life.restart(Backend.IPTABLES)
    life.wait_until_quiet(REACHED_WITHIN_S)
    with moments.held_lock():
        life.restart(Backend.NFTABLES)
        life.put(world.closed_service(is_open=True))
        desired = life.desired()
        served = ("virtual_servers", "addresses")
        life.wait_until(
            lambda: not kernel_state.differences(desired, kernel_state.observed(served, Backend.NFTABLES)),
            "virtual servers and addresses",
            REACHED_WITHIN_S,
        )
        life.note("a wider source range is asked for")
        life.wait_until(lambda: life.clients.is_answered(CLOSED), "an answer through a wider source range", OPENED_WITHIN_S)
    life.note("the xtables lock is free")
    life.wait_until_quiet(REACHED_WITHIN_S)
    life.delete(world.closed_service())


def _is_right_but_for_rules(desired: kernel_state.State) -> bool:
    return not kernel_state.differences(desired, kernel_state.observed(BUT_RULES))


def _answer(connection: lab.Connection) -> str:
    """The endpoint that answers a request, or the text of the error."""
    try:
        return connection.ask(ANSWERED_WITHIN_S)
    except lab.LabError as error:
        return str(error)


def _body(page: str) -> str:
    """The body of the program's answer to a request for this page, whatever the HTTP status; empty if there is no answer."""
    return str(golden_http.fetch(f"127.0.0.1:10256/{page}").get("body", ""))


ACTS: Mapping[Moment, Callable[["History"], None]] = {
    Moment.LOCKED_RESTART: _restart_under_lock,
    Moment.NATIVE_RULE: _live_beside_native_rule,
    Moment.BLINKING_ADDRESS: _lose_address,
    Moment.SILENT_PROXY: _hear_nothing,
    Moment.FULL_RELOAD: _reload_without_room,
    Moment.STALLED_LOG: _stall_log,
    Moment.FULL_DESCRIPTORS: _take_descriptors,
    Moment.LOCKED_MOVE: _move_under_lock,
}
