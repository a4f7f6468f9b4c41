"""Runs the demo on a kernel with ip_vs: builds a node, runs ipvsproxy on manifests/demo, sends packets, prints a summary.

Every line of the summary is based on the kernel's state, or on answers of backend pods, in this run. The exit status is 0 if all
results are as expected, and 1 otherwise.

With ``--stay DIRECTORY`` the node continues to run, with traffic, until a file ``stop`` appears in that directory; see
``demo_mailbox``.
"""

import argparse
import contextlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.parse
from collections.abc import Collection
from typing import NamedTuple

import yaml

from scripts import demo_mailbox
from tests.support import lab, program

MANIFESTS = pathlib.Path("manifests/demo")
NODE = "demo-node"
FLAGS = (f"--hostname-override={NODE}", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56")
NODE_ADDRESSES = frozenset({"10.244.0.1", "172.18.0.2", "fd00:10:244::1", "fc00:f853:ccd::2"})
REQUESTS = 6
LEAVING = "10.244.1.12"
PROGRAMMED_WITHIN_S = 20.0
STEADY_S = 1.0
LONGEST_STAY_S = 3600.0
BETWEEN_CHANGES_S = 15.0
BETWEEN_LOOKS_S = 0.1
CLIENTS = (
    ("p2", "TCP", "10.96.0.80", 80, 0.05),
    ("host", "TCP", "10.96.0.80", 80, 0.5),
    ("client", "TCP", "172.18.0.2", 30080, 0.2),
    ("p1", "UDP", "10.96.0.53", 53, 0.1),
    ("p2", "TCP", "fd00:10:96::80", 80, 0.3),
)
"""The clients that send requests while the node continues to run (``--stay``). Each client has a source, a protocol, a target, a
port, and the number of seconds between two requests."""

PAGE = """
    outside                     the node                                     its pods
    client 172.18.0.50 ──┐   ┌─ eth0 172.18.0.2        cni0 10.244.0.1 ─┬─ p1 10.244.0.11
                         ├───┤       fc00:f853:ccd::2                   └─ p2 10.244.0.12
    another node ────────┘   └─ ipvsproxy works here
      with pods 10.244.1.11 and 10.244.1.12                 (IPv6 likewise, fd00:10:244::11 …)
"""


class Question(NamedTuple):
    """Requests to send, their explanation, and the expected result.

    ``expected`` has the pods that must answer, and the client addresses that these pods must observe.
    """

    title: str
    why: str
    probe: lab.Probe
    expected: lab.Result


class Line(NamedTuple):
    """One line of the summary."""

    check: str
    expected: str
    observed: str
    good: bool


def _ask(from_: str, protocol: str, to: str, port: int) -> lab.Probe:
    return lab.Probe(from_, protocol, to, port, count=REQUESTS)


def _answered(backends: Collection[str], sources: Collection[str]) -> lab.Result:
    return lab.Result("ok", tuple(sorted(backends)), tuple(sorted(sources)))


QUESTIONS = (
    Question(
        "pod p2 → ClusterIP of web",
        "A pod sends requests to a Service. Its three pods answer in turn, and observe the client pod's own address.",
        _ask("p2", "TCP", "10.96.0.80", 80),
        _answered(["10.244.0.11", "10.244.1.11", "10.244.1.12"], ["10.244.0.12"]),
    ),
    Question(
        "host → ClusterIP of web",
        "The node itself is the client. It has no pod address, so the pods observe its address on their side.",
        _ask("host", "TCP", "10.96.0.80", 80),
        _answered(["10.244.0.11", "10.244.1.11", "10.244.1.12"], ["10.244.0.1", "172.18.0.2"]),
    ),
    Question(
        "outside → NodePort of shop",
        "A client outside uses port 30080 of the node. The pods answer the node, and the node answers the client.",
        _ask("client", "TCP", "172.18.0.2", 30080),
        _answered(["10.244.0.12", "10.244.1.12"], ["10.244.0.1", "172.18.0.2"]),
    ),
    Question(
        "pod p1 → itself, through mirror",
        "The only pod of the Service is the client itself. Its own reply must return through the node.",
        _ask("p1", "TCP", "10.96.0.70", 80),
        _answered(["10.244.0.11"], ["10.244.0.1"]),
    ),
    Question(
        "pod p1 → dns, over UDP",
        "The same for UDP: one pod is on this node, one on the other.",
        _ask("p1", "UDP", "10.96.0.53", 53),
        _answered(["10.244.0.12", "10.244.1.11"], ["10.244.0.11"]),
    ),
    Question(
        "pod p2 → ClusterIP of web, IPv6",
        "web has an address of each family, and pods of each family behind it.",
        _ask("p2", "TCP", "fd00:10:96::80", 80),
        _answered(["fd00:10:244::11", "fd00:10:244:1::11"], ["fd00:10:244::12"]),
    ),
    Question(
        "outside → NodePort of shop, IPv6",
        "The node port is open on the node's IPv6 address too.",
        _ask("client", "TCP", "fc00:f853:ccd::2", 30080),
        _answered(["fd00:10:244::12", "fd00:10:244:1::12"], ["fd00:10:244::1", "fc00:f853:ccd::2"]),
    ),
    Question(
        "outside → ssh on a ClusterIP",
        "The node has the address of web, and an ssh server that listens on all addresses. This address must not lead to it.",
        _ask("client", "TCP", "10.96.0.80", 22),
        lab.Result("refused", (), ()),
    ),
)


class Screen:
    """The printed output. Colours are used only on a terminal."""

    def __init__(self) -> None:
        self._colours = sys.stdout.isatty()
        self._step = 0

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colours else text

    def print(self, text: str = "", indent: str = "   ") -> None:
        """Print lines, unbuffered."""
        print(textwrap.indent(text, indent), flush=True)

    def step(self, title: str, why: str = "") -> None:
        """Print the headline of the next part."""
        self._step += 1
        print(f"\n{self._paint('1;36', f'{self._step}. {title}')}", flush=True)
        if why:
            self.print(why)

    def command(self, command: str, output: str = "") -> None:
        """Print the line ``$ COMMAND``, and below it the output of the command."""
        self.print(self._paint("1", f"$ {command}"))
        if output:
            self.print(output.rstrip())

    def mark(self, good: bool) -> str:  # noqa: FBT001 - the function has no other argument
        """``ok`` or ``NO``, coloured."""
        return self._paint("32", "ok") if good else self._paint("1;31", "NO")

    def question(self, question: Question, observed: lab.Result) -> None:
        """Print a question and its result."""
        good = observed == question.expected
        self.print(f"\n{self._paint('1', question.title)}\n{self._paint('2', question.why)}")
        self.print(
            f"{self.mark(good)}  {_describe(observed)}" + ("" if good else f"\n    expected: {_describe(question.expected)}")
        )

    def summary(self, lines: Collection[Line]) -> None:
        """Print the table at the end."""
        heads = Line("check", "expected", "observed", True)
        widths = [max(map(len, texts)) for texts in zip(*(line[:2] for line in (heads, *lines)), strict=True)]
        print()
        for line in (heads, *lines):
            text = f"{line.check:{widths[0]}}   {line.expected:{widths[1]}}   {line.observed}"
            print(f"    {self._paint('1', text)}" if line is heads else f"{self.mark(line.good)}  {text}", flush=True)


def _describe(seen: lab.Result) -> str:
    """The complete result: outcome, backends, and source addresses."""
    if not seen.backends:
        return seen.outcome
    prefix = "" if seen.outcome == "ok" else f"{seen.outcome}; "
    return f"{prefix}{', '.join(seen.backends)} answered, asked by {', '.join(seen.sources)}"


def _abridge(seen: lab.Result) -> str:
    """The result, short enough for a column."""
    if seen.outcome != "ok":
        return seen.outcome
    pods = f"{len(seen.backends)} pod{'s' if len(seen.backends) > 1 else ''}"
    return f"{pods}, asked by {'the node' if NODE_ADDRESSES.issuperset(seen.sources) else ', '.join(seen.sources)}"


def main(mailbox: pathlib.Path | None = None) -> int:
    """Run the demo, and return the exit status.

    ``mailbox`` is the directory through which the host passes requests for the web page. With a mailbox, the node continues to
    run after the last check until the user ends the demo.
    """
    begin = time.monotonic()
    screen = Screen()
    kernel = "user-mode Linux" if _is_user_mode() else "the host's kernel"
    screen.print(f"ipvsproxy demo, on Linux {platform.release()} ({kernel})", indent="")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        manifests = directory / "manifests"
        shutil.copytree(MANIFESTS, manifests)
        screen.step("A node, its pods and its neighbours", "Each of these machines is a network namespace.")
        with lab.Lab() as node:
            screen.print(PAGE.strip("\n"), indent="")
            lines = _demonstrate(screen, node, manifests, directory / "log", mailbox)
    screen.summary(lines)
    bad = sum(not line.good for line in lines)
    verdict = "all as expected" if not bad else f"{bad} NOT as expected"
    screen.print(f"\n{len(lines)} checks, {verdict}, {time.monotonic() - begin:.0f} s", indent="")
    return 1 if bad else 0


def _is_user_mode() -> bool:
    return "User Mode Linux" in pathlib.Path("/proc/cpuinfo").read_text()


def _demonstrate(
    screen: Screen, node: lab.Lab, manifests: pathlib.Path, log: pathlib.Path, mailbox: pathlib.Path | None
) -> list[Line]:
    screen.step(
        "ipvsproxy programs the kernel",
        f"Its source is the {len(list(manifests.iterdir()))} files of manifests/demo instead of an API server.",
    )
    running = program.Program(manifests, log, *FLAGS, starter=program.STARTER)
    screen.command(f"ipvsproxy --proxy-mode=ipvs --manifests={MANIFESTS} {' '.join(FLAGS)}")
    begin = time.monotonic()
    with running:
        running.wait_until_synced()
        screen.print(f"Everything is programmed after {time.monotonic() - begin:.1f} s. What the kernel holds now:\n")
        screen.command("ipvsadm -Ln", node.run("node", "ipvsadm", "-Ln"))
        screen.step(
            "Requests",
            f"Each is sent {REQUESTS} times. Every pod answers with its own address and the client address that it observes.",
        )
        lines = [_put(screen, node, question) for question in QUESTIONS]
        screen.step(
            f"An endpoint of web leaves while requests run ({LEAVING})",
            "Pod p2 sends some fifty requests a second. The endpoint leaves manifests/demo/web.yaml; no request may fail.",
        )
        lines += _scale_down(screen, node, running, manifests / "web.yaml")
        screen.step("The page of the node", "ipvsproxy shows the node at /ui/ of its metrics server, live.")
        if mailbox:
            _stay(screen, node, manifests / "web.yaml", mailbox)
        else:
            screen.print(f"On this node it is http://127.0.0.1:{demo_mailbox.PORT}/ui/. To open it: scripts/demo --stay")
    screen.step("ipvsproxy is stopped", "ipvsproxy only programs the kernel; packets never pass through it. So they flow on.")
    lines.append(_put(screen, node, QUESTIONS[2], "after the stop: "))
    return lines


def _put(screen: Screen, node: lab.Lab, question: Question, prefix: str = "") -> Line:
    observed = node.probe_all([question.probe])[0]
    screen.question(question, observed)
    return Line(prefix + question.title, _abridge(question.expected), _abridge(observed), observed == question.expected)


def _scale_down(screen: Screen, node: lab.Lab, running: program.Program, path: pathlib.Path) -> list[Line]:
    begin = time.monotonic()
    with node.load("p2", "TCP", "10.96.0.80", 80) as during:
        time.sleep(STEADY_S)
        _remove_endpoint(path)
        removed_at = time.monotonic()
        running.wait_until(lambda: not _is_chosen(node), f"without {LEAVING}", PROGRAMMED_WITHIN_S)
        screen.print(f"\n{LEAVING} gets no new requests {time.monotonic() - removed_at:.1f} s after the file was saved.")
        time.sleep(STEADY_S)
    took_s = time.monotonic() - begin
    with node.load("p2", "TCP", "10.96.0.80", 80) as after:
        time.sleep(STEADY_S)
    screen.command("ipvsadm -Ln -t 10.96.0.80:80", node.run("node", "ipvsadm", "-Ln", "-t", "10.96.0.80:80"))
    total = sum(during[0].outcomes.values())
    screen.print(
        f"{total} requests in {took_s:.1f} s, {during[0].failed} failed; "
        + ", ".join(f"{backend} answered {count}" for backend, count in sorted(during[0].backends.items()))
    )
    remaining = sorted(after[0].backends)
    return [
        Line(
            "requests while an endpoint leaves",
            "0 failed",
            f"{during[0].failed} failed",
            during[0].failed == 0 and during[0].backends.get(LEAVING, 0) > 0,
        ),
        Line(
            "requests after it has left",
            "10.244.0.11, 10.244.1.11",
            ", ".join(remaining),
            after[0].failed == 0 and remaining == ["10.244.0.11", "10.244.1.11"],
        ),
    ]


def _stay(screen: Screen, node: lab.Lab, path: pathlib.Path, mailbox: pathlib.Path) -> None:
    """Change the node's Services from time to time while clients use the node, until the user ends the demo."""
    ends_s = time.monotonic() + LONGEST_STAY_S
    stop = mailbox / "stop"
    answering = threading.Thread(target=demo_mailbox.answer_all, args=(mailbox, stop.exists), daemon=True)
    answering.start()
    with contextlib.ExitStack() as loads:
        for from_, protocol, to, port, interval_s in CLIENTS:
            loads.enter_context(node.load(from_, protocol, to, port, interval_s=interval_s))
        address = (mailbox / "address").read_text()
        place = urllib.parse.urlsplit(address)
        screen.print(f"\nOpen {address} in a browser on this machine. Clients use the node meanwhile, and every")
        screen.print(f"{BETWEEN_CHANGES_S:.0f} s an endpoint of web leaves or returns.")
        screen.print(f"From another machine, first: ssh -L {place.port}:{place.netloc} THIS-MACHINE")
        screen.print(f"In a terminal: .venv/bin/ipvsproxy top --server=http://{place.netloc}")
        (mailbox / "ready").touch()
        without = path.read_text()
        with_it = (MANIFESTS / path.name).read_text()
        changes_s = time.monotonic() + BETWEEN_CHANGES_S
        while not stop.exists() and time.monotonic() < ends_s:
            time.sleep(BETWEEN_LOOKS_S)
            demo_mailbox.run_commands(mailbox, _run)
            if time.monotonic() >= changes_s:
                changes_s += BETWEEN_CHANGES_S
                _replace(path, with_it if path.read_text() == without else without)
        _replace(path, without)
    stop.touch()
    answering.join()


def _run(line: str) -> str:
    """Returns the output of a command line; a command that runs for one minute is stopped.

    The command runs on the demo's node, because this process is in the network namespace of the node.
    """
    environment = {**os.environ, "PATH": f"{pathlib.Path('.venv/bin').absolute()}:{os.environ['PATH']}"}
    command = ["timeout", "60", "bash", "-c", line]
    # The lab's agent does not run the command, because the clients would stop until the command has ended.
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode(errors="replace")


def _replace(path: pathlib.Path, text: str) -> None:
    draft = path.with_name(".web.yaml")
    draft.write_text(text)
    draft.rename(path)


def _remove_endpoint(path: pathlib.Path) -> None:
    manifests = list(yaml.safe_load_all(path.read_text()))
    for manifest in manifests:
        if manifest["kind"] == "EndpointSlice":
            manifest["endpoints"] = [entry for entry in manifest["endpoints"] if LEAVING not in entry["addresses"]]
    _replace(path, yaml.safe_dump_all(manifests))


def _is_chosen(node: lab.Lab) -> bool:
    """Says whether the removed endpoint still gets new connections, that is, whether it is listed with a weight above 0."""
    listing = node.run("node", "ipvsadm", "-Ln", "-t", "10.96.0.80:80")
    rows = [line.split() for line in listing.splitlines() if f"{LEAVING}:" in line]
    return any(row[3] != "0" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stay", type=pathlib.Path, metavar="DIRECTORY")
    try:
        status = main(parser.parse_args().stay)
    except (lab.LabError, program.ProgramError) as error:
        print(f"\nThe demo ended early: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
