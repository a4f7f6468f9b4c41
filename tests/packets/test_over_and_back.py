"""The migration from kube-proxy to ipvsproxy and back, step by step on one kernel, while clients send requests all the time.

Each step runs commands exactly as docs/migration.md prints them. The first step checks the configuration. Then the test migrates
by a change of the node's label, and migrates back. After that, it migrates in place, by a change of kube-proxy's own DaemonSet,
and returns. ``tests.support.one_node`` replaces the cluster. kube-proxy does not run. Instead, the test writes kube-proxy's
recorded state to the kernel before ipvsproxy starts. After a return from nftables, the test writes kube-proxy's recorded rules
and sets. The configuration file is that of kube-proxy, without additional fields. Additional flags turn on features of
ipvsproxy: second scopes, and local routes or nftables. After each take-over, the test compares the virtual and real servers,
except those of second scopes, with the recording. At the end, the test also compares sets and addresses. It compares rules too,
unless ipvsproxy used iptables with local routes.

The test does not cover kube-proxy itself, the update of a DaemonSet by a cluster, and commands that need a registry.
"""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding
from tests import test_runbook
from tests.chaos import take_overs
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.switching import iptables_is_empty
from tests.support import cluster, golden_fixtures, golden_state, lab, patience, program
from tests.support.one_node import OneNode, Pod
from tests.support.own_pages import health_status

pytestmark = [pytest.mark.kernel]

WITHIN_S = patience.seconds(600.0)
RECORDED: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
LONG_LIVED = (("p1", "TCP", "10.96.16.1", 80), ("host", "TCP", "fd00:10:96::b01", 80))
SERVERS = ("virtual_servers", "real_servers")
SECTIONS = (*SERVERS, "ipsets", "iptables", "addresses")
HOSTNAME = "--hostname-override=node-a"
WAYS = [
    (Backend.IPTABLES, Binding.ROUTES),
    pytest.param(Backend.IPTABLES, Binding.ADDRESSES, marks=patience.THOROUGH),
    pytest.param(Backend.NFTABLES, Binding.ROUTES, marks=NEEDS_NF_TABLES),
]


@pytest.fixture(name="node", scope="module")
def _node(laboratory: lab.Lab) -> Iterator[lab.Lab]:
    take_overs.add_second_address(laboratory)
    yield laboratory
    cluster.clear()


def differing(state: Mapping[str, Any], sections: tuple[str, ...] = SECTIONS) -> list[tuple[Any, ...]]:
    """The differences between a state and the recorded state of kube-proxy, except intended differences."""
    return golden_fixtures.unaccepted(golden_state.differences(RECORDED, state, sections))


def own_objects() -> dict[str, bool]:
    """For each kind of object that only ipvsproxy creates, whether the kernel has such objects."""
    marked = [row for row in golden_state.read_state(("virtual_servers",))["virtual_servers"] if row.startswith("FWM")]
    sets = subprocess.run(("ipset", "list", "-name"), check=True, capture_output=True, text=True).stdout
    chains = subprocess.run(("iptables-save",), check=True, capture_output=True, text=True).stdout
    return {
        "marks": bool(marked),
        "sets": "-IPVSPROXY-" in sets,
        "chains": "-IPVSPROXY-" in chains,
        "routes": bool(golden_state.read_routes()),
        "table": nft_tables.has_own_table(),
    }


NOTHING = dict.fromkeys(("marks", "sets", "chains", "routes", "table"), False)


class Proxies:
    """kube-proxy and ipvsproxy on the node. A fake pod starts and ends a proxy, and the kernel is checked after each step."""

    def __init__(self, folder: Path, backend: Backend, binding: Binding, check_held: Callable[[], None]) -> None:
        self._folder, self._check_held = folder, check_held
        self._by_nftables = backend is Backend.NFTABLES
        self._flags = (f"--rules-backend={backend}", f"--ipvs-vip-binding={binding}", "--ipvs-traffic-scopes=api")
        self.own = {
            "marks": True,
            "sets": not self._by_nftables,
            "chains": not self._by_nftables,
            "routes": binding is Binding.ROUTES,
            "table": self._by_nftables,
        }
        self.log = folder / "log"
        self.config_map = folder / "config.conf"
        self._has: Mapping[str, bool] = NOTHING
        self.served_by: list[str] = []
        self.cleaned: list[str] = []

    def start(self, pod: Pod) -> Callable[[], None]:
        """Start the program of a pod, and wait until it is ready."""
        if not pod.is_ours:
            if self._by_nftables and self.served_by:  # kube-proxy would now write its rules and sets
                golden_state.restore_rules(RECORDED)
            assert own_objects() == self._has
            self._check("kube-proxy")
            return lambda: None
        flags = ("--dry-run",) if pod.is_shadow else self._flags
        ours = program.Program(self._folder / "manifests", self.log, f"--config={self.config_map}", HOSTNAME, *flags)
        running = ours.__enter__()
        with contextlib.ExitStack() as failing:
            failing.push(running)
            if pod.is_shadow:
                running.wait_until(lambda: "event=dry_run_looked" in self.log.read_text(), "compared", WITHIN_S)
                assert own_objects() == self._has, "a shadow changes nothing"
            else:
                # first wait for the status, because each call of own_objects starts six programs
                running.wait_until(lambda: health_status() == 200, "healthy", WITHIN_S)
                running.wait_until(lambda: own_objects() == self.own and self._has_moved(), f"own: {self.own}", WITHIN_S)
                self._has = self.own
                self._check(pod.daemon_set)
            failing.pop_all()

        def end() -> None:
            running.__exit__(None, None, None)
            assert own_objects() == self._has, "a proxy that ends changes nothing"
            self._check_held()

        return end

    def clean_up(self, manifest: str) -> None:
        """Run the cleanup command from a manifest. A Job has the command in its container, a DaemonSet in its init container."""
        pod = yaml.safe_load(manifest)["spec"]["template"]["spec"]
        (container,) = (one for one in (*pod.get("initContainers", ()), *pod["containers"]) if "args" in one)
        arguments = [one.replace("/var/lib/kube-proxy", str(self._folder)) for one in container["args"]]
        assert f"--config={self.config_map}" in arguments
        name, *command = container["command"]
        assert name == "ipvsproxy"
        (done,) = program.run_in_turn((*command, *arguments), within_s=600)
        assert done.status == 0, done.output + done.error
        self.cleaned.append(done.output)
        self._has = NOTHING
        self._check_held()

    def _has_moved(self) -> bool:
        """Whether kube-proxy's rules and sets are gone from iptables; always true if ipvsproxy uses iptables."""
        return not self._by_nftables or iptables_is_empty()

    def _check(self, served_by: str) -> None:
        """Check that kube-proxy's objects are unchanged and that no open connection is lost."""
        self.served_by.append(served_by)
        state = golden_state.read_state(SERVERS)
        of_kube_proxy = {part: {row: state[part][row] for row in state[part] if not row.startswith("FWM")} for part in SERVERS}
        assert differing(of_kube_proxy, SERVERS) == [], served_by
        self._check_held()


@pytest.mark.timeout(3600)  # the test starts ipvsproxy seven times
@pytest.mark.parametrize(("backend", "binding"), WAYS)
def test_each_proxy_takes_over_the_objects_of_the_other_proxy(
    node: lab.Lab, tmp_path: Path, backend: Backend, binding: Binding
) -> None:
    (tmp_path / "manifests").mkdir()
    golden_fixtures.World(tmp_path / "manifests").apply("P0")
    golden_state.restore_state(RECORDED)
    assert differing(golden_state.read_state(SECTIONS)) == []
    assert own_objects() == NOTHING
    held = [node.open(*one, timeout_s=take_overs.ANSWER_WITHIN_S) for one in LONG_LIVED]
    with take_overs.undisturbed(node, held, interval_s=patience.seconds(0.25)) as check_held:
        proxies = Proxies(tmp_path, backend, binding, check_held)
        written = ("--proxy-mode=ipvs", *golden_fixtures.profiles()["default"]["flags"].split())
        (done,) = program.run_in_turn((*written, f"--write-config-to={proxies.config_map}"), within_s=300)
        assert done.status == 0, done.error
        assert "ipvsproxy:" not in proxies.config_map.read_text()
        proxies.log.touch()
        one = OneNode(tmp_path / "page", proxies.config_map, proxies.log, proxies.start, proxies.clean_up)
        with contextlib.closing(one):
            _migrate(one, proxies)
        # If ipvsproxy used local routes, two iptables rules differ from the recording until kube-proxy rewrites them.
        is_same = backend is Backend.NFTABLES or binding is Binding.ADDRESSES
        sections = SECTIONS if is_same else tuple(section for section in SECTIONS if section != "iptables")
        assert differing(golden_state.read_state(SECTIONS), sections) == []


def _migrate(one: OneNode, proxies: Proxies) -> None:
    """Run each command of docs/migration.md.

    The node moves to ipvsproxy and back twice: the first time by its label, the second time by replacing the proxy in place.
    """
    fetch, check = _printed("2. ")
    beside, no_shadow = _printed("3. ")
    prepare, label, look, unlabel = _printed("4. ")
    definitions = label[: label.index("kubectl label")]
    by_label, in_place, remove_labels = (definitions + block for block in _printed("5. "))
    back_by_label, back_in_place = (definitions + block for block in _printed("6. "))

    assert "mode: ipvs" in one.type_in(fetch)
    assert "kind: KubeProxyConfiguration" in one.type_in(check)
    assert re.search(r"event=dry_run_looked .*\bdifferences=", one.type_in(beside))
    one.type_in(no_shadow)

    one.type_in(prepare)
    assert "pod/replace-kube-proxy" in one.type_in(label)
    _check_shown_log(proxies.log.read_text())
    assert "200" in one.type_in(look).splitlines()
    for refused in program.run_in_turn(("cleanup", "--only=own"), ("cleanup", "--dry-run", "--only=own"), within_s=300):
        assert (refused.status, refused.output.splitlines()[0][:26]) == (1, "problem: another ipvsproxy")
    one.type_in(definitions + unlabel)
    one.type_in(by_label)
    assert proxies.cleaned == []
    one.type_in(back_by_label)
    assert own_objects() == NOTHING

    one.type_in(in_place)
    one.type_in(remove_labels)
    one.type_in(back_in_place)
    assert own_objects() == NOTHING
    assert one.pods == {Pod("kube-proxy", is_ours=False)}
    assert all(re.search(r"^removed: (?!nothing)", said, re.MULTILINE) for said in proxies.cleaned), proxies.cleaned
    assert len(proxies.cleaned) == 2
    by_turns = ["kube-proxy", "replace-kube-proxy"] * 2
    assert proxies.served_by == [*by_turns, "kube-proxy", "kube-proxy", "kube-proxy"]


def _check_shown_log(log: str) -> None:
    """Check that the log lines in docs/migration.md have the keys of real log lines.

    Lines with ``event=listed`` are not compared, because the page shows lists from an API server.
    """
    page = (test_runbook.ROOT / "docs/migration.md").read_text()
    shown = re.findall(r"^… (level=info event=(\w+) .+)$", page, re.MULTILINE)
    assert [event for _, event in shown] == ["starting", "listed", "synced"]
    for line, event in shown:
        keys = re.findall(r"(\w+)=", line)
        real = [re.findall(r"(\w+)=", one)[1:] for one in log.splitlines() if f" event={event} " in one]
        assert event == "listed" or any(one[: len(keys)] == keys for one in real), (line, real)


def _printed(step: str) -> list[str]:
    """The blocks of commands in one step of docs/migration.md."""
    return test_runbook.blocks_of("migration.md", step)
