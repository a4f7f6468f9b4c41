"""Covers the whole program on an in-memory kernel: its start, the reasons for which it refuses to start, and its end.

``tests/test_program.py`` covers the program as a separate process on a real kernel.
"""

import asyncio
import contextlib
import dataclasses
import errno
import importlib.metadata
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import structlog

from ipvsproxy.config import load
from ipvsproxy.config.settings import Config, Drivers, Servers
from ipvsproxy.daemon import app
from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.http import health, server
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.process import lifecycle, reload, requirements
from ipvsproxy.daemon.sources import directory
from ipvsproxy.kernel import host
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.host import Lack
from ipvsproxy.kernel.iptables import iptables_tables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_driver import COMMANDS, Program, Refusal
from ipvsproxy.kernel.iptables.variant import Variant, VariantChoice
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import Backend, InterfaceMatch, Rule, Verdict
from ipvsproxy.translate.skeleton import SCOPE_CHAINS
from ipvsproxy.translate.translation_settings import LocalMode
from tests.config import loading
from tests.support import memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.left_rules import Tables
from tests.support.left_tables import MemoryTables

MANIFEST = """
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
"""
Refused = Callable[..., list[str]]
PROGRAM = Program((1, 8, 9), "nf_tables")
CHOICE = VariantChoice(COMMANDS, Variant.NF_TABLES, "it is the variant in PATH")


class Kernel(FakeKernel):
    """An in-memory kernel that has all attributes of ``NodeKernel`` that the program uses.

    ``on_apply`` is called before each call of ``apply``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host_addresses = memory_node.new_kernel().host_addresses
        self.sysctls = dict.fromkeys(("net/ipv4/vs/conntrack", "net/ipv4/ip_forward"), "0")
        self.ports: set[int] = set()
        self.on_apply: Callable[[], None] = lambda: None
        self.ipvs = self
        self.schedulers = frozenset({"rr", "wlc"})
        self.leftover_rules = Tables()
        self.leftover_tables = MemoryTables()
        self.traffic = self
        self.backend = Backend.IPTABLES
        self.rules_changes = None
        self.on_other_removed: Callable[[], None] = lambda: None

    def remove_other_backend(self) -> Collection[str]:
        assert all(self.chains.values()), "only once the rules are in force"
        self.on_other_removed()
        return ()

    def former_entries(self, families: Collection[Family]) -> list[Any]:
        return []

    def inherit_sets(self, families: Iterable[Family]) -> int:
        assert not self.audits, "before the first reading"
        return 0

    def has_ipv6(self) -> bool:
        return True

    def why_unusable(self, scheduler: str) -> str:
        return "" if scheduler in self.schedulers else f"no scheduler {scheduler}"

    def lacking(self, *, by_interface: bool) -> tuple[Lack, ...]:
        return ()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        self.on_apply()
        return super().apply(operations)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel that all programs of this test use.

    The programs do not configure the log again, because the loggers of the test use the present configuration.
    """
    kernel = Kernel()

    @contextlib.asynccontextmanager
    async def running_kernel(*_: object, **_named: object) -> AsyncIterator[KernelThread[Kernel]]:
        thread = await KernelThread.start(lambda: kernel)
        yield thread
        thread.stop()

    monkeypatch.setattr(requirements, "running_kernel", running_kernel)
    monkeypatch.setattr(host, "missing_settings", tuple)
    monkeypatch.setattr(requirements, "usable_programs", lambda *_: dict.fromkeys(Family, PROGRAM))
    monkeypatch.setattr(requirements, "only_instance", contextlib.nullcontext)
    monkeypatch.setattr(lifecycle, "set_oom_score", lambda _: None)
    monkeypatch.setattr(log, "set_up", lambda **_: None)
    monkeypatch.setattr(iptables_tables, "host_ports_before_services", lambda _: ())
    return kernel


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[health.Status]:
    """The health status of each program that the test has started."""
    made: list[health.Status] = []

    def make(**arguments: Any) -> health.Status:
        made.append(health.Status(**arguments))
        return made[-1]

    monkeypatch.setattr(app, "Status", make)
    return made


def configured(*flags: str) -> Config:
    """A configuration made of these flags and of defaults for tests; it has no HTTP servers."""
    config = loading.from_flags("--hostname-override=node-a", *flags)
    return dataclasses.replace(config, servers=Servers(health=None, metrics=None))


def run(config: Config) -> int:
    """Serve with a configuration that never changes."""
    return app.run(config, lambda: config)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def serve_once(kernel: Kernel, directory: pathlib.Path, *flags: str) -> list[MutableMapping[str, Any]]:
    """Serve one Service until its objects are about to be programmed, and return what was logged."""
    (directory / "web.yaml").write_text(MANIFEST)
    kernel.on_apply = stop
    with structlog.testing.capture_logs() as logged:
        assert run(configured(f"--manifests={directory}", *flags)) == 0
    return logged


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_program_and_leaves_the_kernel_unchanged(
    kernel: Kernel, tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    (tmp_path / "web.yaml").write_text(MANIFEST)
    kernel.on_apply = lambda: os.kill(os.getpid(), number)
    assert run(configured(f"--manifests={tmp_path}")) == 0
    assert kernel.device, "running operations end"
    assert not [operation for operation in kernel.applied if operation.verb.value == "remove"]


@pytest.mark.parametrize(("node_name", "expected"), [("node-a", []), ("node-b", ["node-b"])])
def test_a_missing_node_object_is_logged_once(
    kernel: Kernel, tmp_path: pathlib.Path, node_name: str, expected: list[str]
) -> None:
    (tmp_path / "node.yaml").write_text("{apiVersion: v1, kind: Node, metadata: {name: node-a}}")
    logged = serve_once(kernel, tmp_path, f"--hostname-override={node_name}")
    assert [line["node"] for line in logged if line["event"] == "load_balancers_turned_away"] == expected


def test_a_notice_is_logged_if_nodeport_addresses_has_no_range_of_a_served_family(kernel: Kernel, tmp_path: pathlib.Path) -> None:
    logged = serve_once(kernel, tmp_path, "--nodeport-addresses=192.0.2.0/24")
    notices = [line["notice"] for line in logged if line["event"] == "configuration_notice"]
    assert notices == ["nodePortAddresses has no range of IPv6, which this node serves"]


def test_a_program_that_is_stopped_while_it_waits_for_its_first_lists_ends_with_success(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve_nothing(*_: object) -> None:
        stop()
        await asyncio.Event().wait()

    monkeypatch.setattr(directory.DirectorySource, "run", serve_nothing)
    assert run(configured(f"--manifests={pathlib.Path.cwd()}")) == 0
    assert kernel.applied == []


@pytest.mark.parametrize("configured_scheduler", ["wlc", "nosuch"])
def test_a_scheduler_that_is_missing_from_the_kernel_is_logged_and_replaced(
    kernel: Kernel, tmp_path: pathlib.Path, made: list[health.Status], configured_scheduler: str
) -> None:
    logged = serve_once(kernel, tmp_path, f"--ipvs-scheduler={configured_scheduler}")
    is_replaced = configured_scheduler == "nosuch"
    used = "rr" if is_replaced else configured_scheduler
    (starting,) = (entry for entry in logged if entry["event"] == "starting")
    assert (starting["scheduler"], starting["version"]) == (used, importlib.metadata.version("ipvsproxy"))
    replaced = [(entry["reason"], entry["used"]) for entry in logged if entry["event"] == "scheduler_not_used"]
    assert replaced == ([("no scheduler nosuch", "rr")] if is_replaced else [])
    message = "no scheduler nosuch; rr is used instead"
    assert made[0].notices == ({"SchedulerMissing": message} if is_replaced else {})


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_rule_drops_packets_from_the_tunnel_device_if_the_device_may_still_be_up(
    kernel: Kernel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, is_restored: bool
) -> None:
    monkeypatch.setattr(requirements, "end_direct_return", lambda _: is_restored)
    serve_once(kernel, tmp_path)
    drop = Rule(interface=InterfaceMatch("tunl0"), target=Verdict.DROP)
    assert kernel.chains[Family.IPV4].get(SCOPE_CHAINS[0]) == (None if is_restored else (drop,))


@pytest.mark.usefixtures("kernel")
def test_host_ports_are_logged_once_if_they_get_precedence_over_services_and_once_if_they_lose_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, made: list[health.Status]
) -> None:
    place = ("legacy IPv4",)
    told: list[list[str]] = []
    answers: list[tuple[str, ...] | KernelError] = [place, place, KernelError(action="read"), place, ()]

    def host_ports(variants: Mapping[Family, str]) -> tuple[str, ...]:
        assert variants == dict.fromkeys(Family, "nf_tables")
        told.append([*made[0].notices])
        if not answers:
            stop()
            return ()
        answer = answers.pop(0)
        if isinstance(answer, KernelError):
            raise answer
        return answer

    monkeypatch.setattr(iptables_tables, "host_ports_before_services", host_ports)
    (tmp_path / "web.yaml").write_text(MANIFEST)
    with structlog.testing.capture_logs() as logged:
        assert run(configured(f"--manifests={tmp_path}", "--ipvs-sync-period=100ms", "--ipvs-min-sync-period=0s")) == 0
    assert told == [[], *[["HostPortsFirst"]] * 4, []]
    lines = [line for line in logged if "host_ports" in line["event"]]
    assert [(line["event"], line.get("rules")) for line in lines] == [
        ("host_ports_before_services", "legacy IPv4"),
        ("host_ports_no_longer_before_services", None),
    ]
    assert "--rules-backend=nftables" in lines[0]["hint"]


FILE = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\nhostnameOverride: node-a\n"


@pytest.mark.parametrize("trouble", ["ENOBUFS", "no scheduler"])
def test_a_failed_reload_of_the_configuration_changes_nothing_and_is_retried(
    kernel: Kernel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    calls: list[object] = []
    failures = 2

    def why_unusable(_: object, name: str) -> str:
        if name == "wlc":
            calls.append("asked for wlc")
        fails = 0 < calls.count("asked for wlc") <= failures
        if fails and trouble == "ENOBUFS":
            raise KernelError(action="ask for the scheduler", errno=errno.ENOBUFS)
        return f"no scheduler {name}" if fails else ""

    def apply(operations: Sequence[Operation]) -> list[Outcome]:
        outcomes = FakeKernel.apply(kernel, operations)
        if fresh.exists():
            fresh.rename(path)
        if any(server.settings.scheduler == "wlc" for server in kernel.virtual_servers.values()):
            stop()
        return outcomes

    def read() -> Config:
        arguments = [f"--config={path}", f"--manifests={tmp_path}"]
        config = load.load(arguments, hostname="node-a", read_file=lambda _: path.read_bytes())
        return dataclasses.replace(config, servers=Servers(health=None, metrics=None))

    monkeypatch.setattr(reload, "FIRST_RETRY_S", 0.01, raising=False)
    monkeypatch.setattr(Kernel, "why_unusable", why_unusable)
    monkeypatch.setattr(lifecycle, "set_oom_score", lambda score: calls.append(("OOM score", score)))
    monkeypatch.setattr(log, "set_up", lambda **choices: calls.append(("verbosity", choices["verbosity"])))
    monkeypatch.setattr(kernel, "apply", apply)
    (tmp_path / "web.yaml").write_text(MANIFEST)
    path = tmp_path / "config.conf"
    path.write_text(FILE)
    fresh = tmp_path / "fresh"
    fresh.write_text(f"{FILE}oomScoreAdj: -5\nlogging: {{verbosity: 3}}\nipvs: {{scheduler: wlc}}\n")
    with structlog.testing.capture_logs() as logged:
        assert app.run(read(), read) == 0
    attempts = ["asked for wlc"] * (failures + 1)
    assert calls == [("verbosity", 0), ("OOM score", -999), *attempts, ("verbosity", 3), ("OOM score", -5)]
    (failed,) = [line for line in logged if line["event"] == "reload_failed"]
    expected = "ask for the scheduler: No buffer space available" if trouble == "ENOBUFS" else "no scheduler wlc; no scheduler rr"
    settings = ["ipvs.scheduler", "logging.verbosity", "oomScoreAdj"]
    assert (failed["log_level"], failed["error"], failed["settings"]) == ("error", expected, settings)
    assert [line["applied"] for line in logged if line["event"] == "configuration_changed"] == [settings]


@pytest.fixture
def refusal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """A function that starts the program with the given flags, and returns the reasons why it cannot start."""

    def start(*flags: str) -> list[str]:
        assert run(configured(f"--manifests={tmp_path}", *flags)) == lifecycle.CANNOT_START
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("ipvsproxy: ") for line in lines)
        assert lines[-1] == "ipvsproxy: nothing was programmed"
        return [line.removeprefix("ipvsproxy: ") for line in lines[:-1]]

    return start


def test_the_program_does_not_start_on_a_kernel_without_any_usable_scheduler(kernel: Kernel, refusal: Refused) -> None:
    kernel.schedulers = frozenset()
    assert refusal("--ipvs-scheduler=nosuch") == ["no scheduler nosuch", "no scheduler rr"]
    assert refusal() == ["no scheduler rr"]


def test_an_unexpected_exception_ends_the_process(kernel: Kernel, tmp_path: pathlib.Path) -> None:
    kernel.on_apply = Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        run(configured(f"--manifests={tmp_path}"))


def test_the_program_ends_if_an_address_is_in_use_and_the_flag_bind_address_hard_fail_is_set(
    kernel: Kernel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "serve", AsyncMock(side_effect=server.BindError("127.0.0.1:10256 is taken")))
    config = loading.from_flags("--hostname-override=node-a", f"--manifests={tmp_path}", "--bind-address-hard-fail")
    assert run(config) == lifecycle.FAILED
    assert "ipvsproxy: 127.0.0.1:10256 is taken\n" in capsys.readouterr().err


# Requirements.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host that meets all requirements of the program, without a real kernel. Each test takes one requirement away."""
    monkeypatch.setattr(log, "set_up", lambda **_: None)
    monkeypatch.setattr(host, "missing_privileges", lambda **_: ())
    monkeypatch.setattr(host, "load_modules", lambda *_: "")
    for check in ("missing_features", "missing_set_types", "missing_settings"):
        monkeypatch.setattr(host, check, tuple)
    monkeypatch.setattr(requirements, "DELAYS_S", (0.001,))
    monkeypatch.setattr(requirements, "NodeKernel", lambda *_, **__: Kernel())
    monkeypatch.setattr(requirements, "only_instance", contextlib.nullcontext)
    monkeypatch.setattr(iptables_variant, "choose", lambda _: CHOICE)
    return monkeypatch


MISSING = (host.Missing("it is not there", "get it"),)


@pytest.mark.parametrize("what", ["missing_privileges", "missing_features", "missing_set_types", "missing_settings"])
def test_a_missing_requirement_is_reported_with_its_remedy_and_any_message_of_modprobe(
    bare: pytest.MonkeyPatch, what: str, refusal: Refused
) -> None:
    modprobe = "modprobe says: it finds no module ip_vs"
    bare.setattr(host, what, lambda **_: MISSING)
    bare.setattr(host, "load_modules", lambda *_: modprobe)
    assert refusal() == ["it is not there: get it", *[modprobe] * (what == "missing_features")]


NO_SOCKET = KernelError(action="open a netlink socket", errno=errno.EPERM)
NO_DUMMY = KernelError(action="find kube-ipvs0", errno=errno.EEXIST, detail="kube-ipvs0 is a bridge device: remove it")
NO_SERVERS = KernelError(action="list the virtual servers", errno=errno.EPERM)


@pytest.mark.parametrize(
    ("step", "error", "sentence"),
    [
        pytest.param(f"{requirements.__name__}.NodeKernel", NO_SOCKET, "open a netlink socket: Operation not permitted"),
        pytest.param(f"{__name__}.Kernel.interface_addresses", NO_DUMMY, "kube-ipvs0 is a bridge device: remove it"),
        pytest.param(
            f"{__name__}.Kernel.why_unusable",
            NO_SERVERS,
            "list the virtual servers: Operation not permitted",
            marks=pytest.mark.checklist(95),
        ),
    ],
    ids=["socket", "device", "virtual servers"],
)
def test_the_program_does_not_start_if_the_kernel_refuses_an_operation_that_every_node_needs(
    bare: pytest.MonkeyPatch, refusal: Refused, step: str, error: KernelError, sentence: str
) -> None:
    bare.setattr(requirements, "usable_programs", lambda _: dict.fromkeys(Family, PROGRAM))
    bare.setattr(step, Mock(side_effect=error))
    assert refusal() == [sentence]


NO_TABLE, NOT_INSTALLED = (Refusal(reason, is_certain=True) for reason in ("refuses rules", "is not installed"))


def kernel_with(refusals: Mapping[Family, Refusal]) -> Any:
    """A kernel whose iptables driver cannot write rules of these families."""
    kernel: Any = Kernel()
    kernel.rules = Mock(try_writing=refusals.get, program=lambda _: PROGRAM)
    return kernel


@pytest.mark.parametrize("unserved", [None, *Family])
def test_the_program_starts_if_iptables_works_for_at_least_one_family(unserved: Family | None) -> None:
    kernel = kernel_with({unserved: NO_TABLE} if unserved else {})
    served = [family for family in Family if family is not unserved]
    assert requirements.usable_programs(kernel) == dict.fromkeys(served, PROGRAM)


def test_a_log_line_has_the_reason_if_ipv6_is_not_served_because_ipvs_lacks_ipv6() -> None:
    kernel = kernel_with({})
    kernel.has_ipv6 = lambda: False
    with structlog.testing.capture_logs() as logs:
        assert requirements.usable_programs(kernel) == {Family.IPV4: PROGRAM}
    assert [(line["event"], line["family"], line["reason"]) for line in logs] == [
        ("family_not_served", "IPv6", "IPVS in this kernel has no IPv6: use a kernel with CONFIG_IP_VS_IPV6")
    ]


def lacking_behind_ipvs(_: Kernel, *, by_interface: bool) -> tuple[Lack, ...]:
    return Lack("filtered-routes", ""), *[Lack("arrival-behind-ipvs", "")] * by_interface


@pytest.mark.parametrize(
    ("mode", "lacking"),
    [
        (LocalMode.CLUSTER_CIDR, ["filtered-routes"]),
        (LocalMode.NODE_CIDR, ["filtered-routes"]),
        (LocalMode.BRIDGE_INTERFACE, ["filtered-routes", "arrival-behind-ipvs"]),
        (LocalMode.INTERFACE_NAME_PREFIX, ["filtered-routes", "arrival-behind-ipvs"]),
    ],
)
async def test_missing_kernel_features_are_logged_once_at_the_start(
    bare: pytest.MonkeyPatch, mode: LocalMode, lacking: list[str]
) -> None:
    bare.setattr(Kernel, "lacking", lacking_behind_ipvs)
    bare.setattr(requirements, "usable_programs", lambda _: {})
    with structlog.testing.capture_logs() as logs:
        async with requirements.running_kernel(Drivers()) as kernel:
            await requirements.demand_usable_node(kernel, mode)
    assert [line["features"] for line in logs if line["event"] == "kernel_lacks"] == [lacking]


def test_the_reason_for_each_family_is_reported_if_no_family_can_be_served() -> None:
    with pytest.raises(CannotStartError) as raised:
        requirements.usable_programs(kernel_with({Family.IPV4: NOT_INSTALLED, Family.IPV6: NO_TABLE}))
    assert raised.value.reasons == ("IPv4 cannot be served: is not installed", "IPv6 cannot be served: refuses rules")


def test_a_family_whose_rules_cannot_be_written_at_the_start_is_still_served() -> None:
    held = Refusal("Another app is currently holding the xtables lock", is_certain=False)
    with structlog.testing.capture_logs() as logs:
        served = requirements.usable_programs(kernel_with(dict.fromkeys(Family, held)))
    assert served == dict.fromkeys(Family, PROGRAM)
    assert [(line["event"], line["family"], line["reason"]) for line in logs] == [
        ("rules_not_writable_yet", family.label, held.reason) for family in Family
    ]


async def test_a_failed_step_of_the_start_is_tried_again_and_each_failure_is_logged(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(requirements, "DELAYS_S", (0.001, 0.001))
    error = KernelError(action="list addresses", errno=errno.ENOBUFS)
    ask = AsyncMock(side_effect=[error, error, "answered"])
    with structlog.testing.capture_logs() as logs:
        assert await requirements.until_answered(ask) == "answered"
    assert [line["event"] for line in logs] == ["start_step_failed"] * 2


async def test_the_program_ends_with_the_reason_if_a_step_of_the_start_keeps_failing(bare: pytest.MonkeyPatch) -> None:
    ask = AsyncMock(side_effect=KernelError(action="list addresses", errno=errno.ENOMEM))
    with pytest.raises(CannotStartError, match="list addresses: Cannot allocate memory"):
        await requirements.until_answered(ask)


@pytest.mark.parametrize(("number", "is_given_up"), [(0, True), (errno.ETIMEDOUT, False)])
def test_a_failing_iptables_excludes_its_family_but_a_hanging_iptables_raises_an_error(number: int, *, is_given_up: bool) -> None:
    def program(family: Family) -> Program:
        if family is Family.IPV6:
            raise KernelError(action="ip6tables", errno=number, detail="not on this machine")
        return PROGRAM

    kernel = kernel_with({})
    kernel.rules.program = program
    if is_given_up:
        assert requirements.usable_programs(kernel) == {Family.IPV4: PROGRAM}
    else:
        with pytest.raises(KernelError, match="not on this machine"):
            requirements.usable_programs(kernel)


def test_health_shows_that_objects_of_the_unused_backend_cannot_be_removed(
    kernel: Kernel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    class Status(health.Status):
        def synced(self, summary: SyncSummary) -> None:
            super().synced(summary)
            told.append(list(self.leftovers()))
            if told[-1]:
                stop()

    kernel.on_other_removed = Mock(side_effect=KernelError(action="remove the table", detail="busy"))
    monkeypatch.setattr(app, "Status", Status)
    (tmp_path / "web.yaml").write_text(MANIFEST)
    assert run(configured(f"--manifests={tmp_path}")) == 0
    assert told[-1] == ["our objects in the other backend stay: remove the table: busy"]
    assert told[0] == []
