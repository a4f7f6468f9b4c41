"""``ipvsproxy verify``: checks whether the observed state of the kernel is the desired state."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from ipvsproxy.commands import inspection
from ipvsproxy.commands.inspection import CommandAnswer, Comparison, Document, Inspected
from ipvsproxy.config.settings import Config
from ipvsproxy.model.kind import counted
from ipvsproxy.model.plan import counted_kinds
from ipvsproxy.reconcile.kinds.declaration import Difference
from ipvsproxy.translate.view import GRACE_S

RULES = "rules"
SECOND_READING_S = 2.0
"""If there are differences, the kernel is read again after this time plus the minimum interval of syncs, because a proxy may have
been programming a change."""


async def lasting_differences(comparison: Comparison, pause_s: float, grace_s: float = GRACE_S) -> Sequence[Difference]:
    """Finds the objects that differ from their desired state both now and after a pause.

    If the node has just lost an address, a difference at a node port of this address is reported only if the difference still
    exists ``grace_s`` seconds after the pause.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    lasting = await _read(comparison)
    if lasting:
        await asyncio.sleep(pause_s)
        lasting &= await _read(comparison)
    if lasting and not comparison.carried.issuperset(key.address for key in comparison.survey.stale()):
        await asyncio.sleep(grace_s)
        lasting &= await _read(comparison)
    return [one for one in comparison.differences() if (one.kind, one.name) in lasting]


async def _read(comparison: Comparison) -> set[tuple[str, str]]:
    """Read the kernel; returns the kind and name of each object that differs from its desired state."""
    await comparison.read()
    return {(one.kind, one.name) for one in comparison.differences()}


def describe(node_name: str, comparison: Comparison, differences: Sequence[Difference]) -> Document:
    """The result as a JSON document."""
    foreign = [
        {"virtualServer": str(key), "scheduler": observed.settings.scheduler, "realServers": len(observed.real_servers)}
        for key, observed in comparison.survey.foreign()
    ]
    return {
        **inspection.head("verify", node_name),
        "equal": not differences,
        "services": len(comparison.store.services),
        "virtualServers": len(comparison.survey.virtual_servers),
        "draining": comparison.survey.draining,
        "differences": [
            {
                "kind": one.kind,
                "object": one.name,
                "service": str(one.owner) if one.owner and one.owner.service.namespace else None,
                "desired": one.desired,
                "observed": one.observed,
            }
            for one in differences
        ],
        "foreign": foreign,
    }


def render(document: Document) -> Iterator[str]:
    """The result as text: one line for each difference, followed by the virtual servers of other programs."""
    differences = document["differences"]
    for one in sorted(differences, key=lambda one: one["service"] or ""):
        name = f"{one['kind'].replace('_', ' ')} {one['object']}"
        yield f"{one['service'] or '-'}  {name}: desired {one['desired']}, observed {one['observed']}"
    for one in document["foreign"]:
        number = counted(one["realServers"], "real server")
        yield f"of another program, left alone: {one['virtualServer']} {one['scheduler']}, {number}"
    kinds = Counter(one["kind"] for one in differences)
    rules = kinds.pop(RULES, 0)  # the text counts rules separately, after all other objects
    parts = ", ".join(filter(None, [counted_kinds(kinds), counted(rules, "rule") if rules else ""]))
    verdict = f"{counted(len(differences), 'difference')} ({parts})" if differences else "equal"
    compared = [counted(document["services"], "Service"), counted(document["virtualServers"], "virtual server")]
    if document["draining"]:
        compared.append(counted(document["draining"], "draining real server"))
    yield f"{document['node']}: {verdict}; compared {', '.join(compared)}"


def run(config: Config) -> int:
    """Run ``ipvsproxy verify``; returns the exit status."""
    return inspection.run(config, _answer, render)


async def _answer(node: Inspected) -> CommandAnswer:
    comparison = Comparison(node)
    differences = await lasting_differences(comparison, SECOND_READING_S + node.config.engine.min_interval_s)
    document = describe(node.config.node_name, comparison, differences)
    return CommandAnswer(document, inspection.NOT_WELL if differences else inspection.WELL)
