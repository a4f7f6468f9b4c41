"""``ipvsproxy verify``: whether the kernel holds what the API asks for."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from ipvsproxy.commands import inspection
from ipvsproxy.commands.comparison import Comparison
from ipvsproxy.commands.inspection import Document
from ipvsproxy.config.settings import Config
from ipvsproxy.reconcile.compare import Difference
from ipvsproxy.translate.lingering import GRACE_S

EQUAL = 0
DIFFERENT = 1
SECOND_READING_S = 2.0
"""What differs is looked at again after this time and the minimum interval of syncs: somebody may just be programming it."""


async def lasting_differences(comparison: Comparison, pause_s: float, grace_s: float = GRACE_S) -> Sequence[Difference]:
    """What differs, and still differs after a pause, in the same object.

    Where this may be node ports on an address that the node has just lost, it still has to differ after ``grace_s`` more.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    lasting = await _read(comparison)
    if lasting:
        await asyncio.sleep(pause_s)
        lasting &= await _read(comparison)
    if lasting and comparison.may_linger:
        await asyncio.sleep(grace_s)
        lasting &= await _read(comparison)
    return [one for one in comparison.differences() if (one.kind, one.name) in lasting]


async def _read(comparison: Comparison) -> set[tuple[str, str]]:
    """Kind and name of each object that differs now."""
    await comparison.read()
    return {(one.kind, one.name) for one in comparison.differences()}


def describe(node_name: str, comparison: Comparison, differences: Sequence[Difference]) -> Document:
    """The answer as a document."""
    foreign = [
        {"virtualServer": str(key), "scheduler": seen.settings.scheduler, "realServers": len(seen.real_servers)}
        for key, seen in comparison.survey.foreign()
    ]
    return {
        "version": inspection.JSON_VERSION,
        "command": "verify",
        "node": node_name,
        "equal": not differences,
        "services": len(comparison.store.services),
        "virtualServers": len(comparison.survey.virtual_servers),
        "draining": comparison.survey.draining,
        "differences": [
            {
                "kind": one.kind,
                "object": one.name,
                "service": str(one.owner) if one.owner and one.owner.service.namespace else None,
                "wanted": one.desired,
                "found": one.observed,
            }
            for one in differences
        ],
        "foreign": foreign,
    }


def render(document: Document) -> Iterator[str]:
    """The answer for people: one line for each difference, then what is not ours."""
    differences = document["differences"]
    for one in sorted(differences, key=lambda one: one["service"] or ""):
        yield f"{one['service'] or '-'}  {one['kind']} {one['object']}: wanted {one['wanted']}, found {one['found']}"
    for one in document["foreign"]:
        yield f"foreign, left alone: {one['virtualServer']} {one['scheduler']}, real servers: {one['realServers']}"
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(one["kind"] for one in differences).items())
    verdict = f"{len(differences)} differences ({kinds})" if differences else "equal"
    draining = f", {document['draining']} draining real servers" if document["draining"] else ""
    yield (
        f"{document['node']}: {verdict}; looked at {document['services']} Services, "
        f"{document['virtualServers']} virtual servers{draining}"
    )


def run(config: Config, *, as_json: bool) -> int:
    """``ipvsproxy verify``; returns the exit status."""

    async def read(node: inspection.Inspected) -> int:
        comparison = node.comparison()
        differences = await lasting_differences(comparison, SECOND_READING_S + config.ipvs.min_sync_period_s)
        document = describe(config.node_name, comparison, differences)
        inspection.say(document, render(document), as_json=as_json)
        return DIFFERENT if differences else EQUAL

    return inspection.run(config, read)
