"""``ipvsproxy doctor``: checks all that ipvsproxy needs on this node, and names a remedy for each problem."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from ipvsproxy.commands import checks, inspection
from ipvsproxy.commands.checks import Finding, Level
from ipvsproxy.commands.inspection import Document
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.errors import CannotStartError, complain
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.kernel import backends, facts, host
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.rules import Backend
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import skeleton

FINE = 0
FAILING = 1


async def examine(config: Config) -> Sequence[Finding]:
    """Make all checks.

    Raises:
        KernelError: the version of the kernel cannot be read.
    """
    sysctls = config.sysctls(host.kernel_version(), host.processor_count())
    ports = [address.port for address in (config.servers.health, config.servers.metrics) if address]
    found = await asyncio.to_thread(
        facts.gather,
        modules=(*await asyncio.to_thread(_modules, config.drivers.rules_backend), f"ip_vs_{config.translation.scheduler}"),
        sysctls=(*(item.path for item in sysctls), *checks.ADVISED),
        ports=ports,
        chains=skeleton.CHAINS,
        jumps=skeleton.JUMPS,
        route_protocol=config.drivers.route_protocol,
        backend=config.drivers.rules_backend,
        by_interface=config.translation.detect_local.is_by_interface,
    )
    return [*checks.judge(found, sysctls, config), await _source(config)]


def _modules(asked: Backend) -> Sequence[str]:
    """The modules that the backend of the rules needs. While the kernel does not say which it can be, those of iptables."""
    with contextlib.suppress(KernelError):
        if backends.choose(asked).backend is Backend.NFTABLES:
            return host.NFTABLES_MODULES
    return host.MODULES


async def _source(config: Config) -> Finding:
    """Check the source of Services."""
    store = Store(started_s=0)
    try:
        source = await sources.make(config, inspection.NoListener())
        async with inspection.following(source, store):
            node = store.node(config.node_name)
    except CannotStartError as error:
        return checks.fail("source", str(error), "check address, credentials and permissions (ClusterRole system:node-proxier)")
    if node is None:
        text = f"{source.describe()} answers, but has no Node {config.node_name!r}"
        return checks.fail("source", text, "name this node's Node object by --hostname-override")
    return checks.ok("source", f"{source.describe()} answers: {len(store.services)} Services")


def describe(node_name: str, findings: Sequence[Finding]) -> Document:
    """The result as a document."""
    return {
        **inspection.head("doctor", node_name),
        "findings": [one._asdict() for one in findings],
        "summary": {level.value: sum(one.level is level for one in findings) for level in Level},
    }


def render(document: Document) -> Iterator[str]:
    """The result for people."""
    for one in document["findings"]:
        remedy = f"; {one['remedy']}" if one["remedy"] else ""
        yield f"{one['level']:<4}  {one['topic']}: {one['text']}{remedy}"
    yield f"{document['node']}: " + ", ".join(f"{count} {level}" for level, count in document["summary"].items())


def run(config: Config) -> int:
    """``ipvsproxy doctor``; returns the exit status."""
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity, quiet=True)
    try:
        findings = asyncio.run(examine(config))
    except KernelError as error:
        complain(error)
        return FAILING
    document = describe(config.node_name, findings)
    inspection.show(document, render(document), as_json=config.as_json)
    return FAILING if any(one.level is Level.FAIL for one in findings) else FINE
