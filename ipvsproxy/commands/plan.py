"""``ipvsproxy plan`` runs the reconcile loop once, on a kernel that only records operations.

The operations and their order are exactly the same as in ``run``, because the same code decides both.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ipvsproxy.commands import inspection
from ipvsproxy.commands.inspection import CommandAnswer, Document, Inspected, UnknownStateError
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.daemon.loop.reader import ReadableKernel
from ipvsproxy.daemon.loop.summary import Watcher
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, counted_kinds, kind_of, one_by_one
from ipvsproxy.model.real_servers import NO_THRESHOLDS, TUNNELLED, Thresholds, in_words, without_method
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile.survey import Survey

SHOWN = 20
"""The largest number of operations of one step that are printed as text."""

_SIGNS: Mapping[str, str] = {Verb.ADD.value: "+", Verb.SET.value: "~", Verb.REMOVE.value: "-"}


class PlanningKernel:
    """A ``Kernel`` that reads the real kernel, but only records operations, and reports that they succeeded."""

    def __init__(self, kernel: ReadableKernel) -> None:
        self._real = kernel
        self.interface_addresses = kernel.interface_addresses
        self.connections = kernel.connections
        self.why_missing = self.why_unusable = kernel.why_missing  # without an attempt
        self.read_timeouts = kernel.read_timeouts
        self.operations: list[Operation] = []

    def observe(self, sets: Collection[str], families: Collection[Family], sysctls: Iterable[str]) -> Observation:
        """Reads the kernel as ``Kernel.observe`` does, but raises an error if a part could not be read.

        Raises:
            UnknownStateError: a part of the kernel could not be read.
        """
        observed = self._real.observe(sets, families, sysctls)
        if observed.errors:
            raise UnknownStateError(*observed.errors)
        return observed

    def poll(self, *_: object, **__: object) -> Iterator[Observation]:
        """Read nothing, because a plan ends with the first sync, and the first sync calls ``observe`` instead of ``poll``."""
        return iter(())

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Record the operations, and apply none.

        The event loop sets the IPVS timeouts at each start. The plan contains this operation only if the operation would change a
        timeout.
        """
        self.operations += (
            one for one in one_by_one(operations) if not isinstance(one.item, Timeouts) or self._would_change(one.item)
        )
        return list(map(Outcome, operations))

    def _would_change(self, desired: Timeouts) -> bool:
        observed = self.read_timeouts()
        return any(new not in (0, old) for new, old in zip(desired, observed, strict=True))


async def plan(node: Inspected) -> tuple[Sequence[Operation], Survey]:
    """Run the first sync of the reconcile loop on a kernel that records operations.

    Returns the operations that ``run`` would apply, and the desired and observed state after these operations.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    kernel = await node.kernel.call(PlanningKernel)
    standing_in = node.kernel.standing_in(kernel)
    engine = Engine(choices=node.choices, store=node.store, kernel=standing_in, watcher=Watcher())
    await engine.start()
    return kernel.operations, engine.survey


def describe(node_name: str, operations: Sequence[Operation], survey: Survey) -> Document:
    """The plan as a JSON document."""
    counts = Counter(operation.verb.value for operation in operations)
    return {
        **inspection.head("plan", node_name),
        "operations": [_describe(operation, survey) for operation in operations],
        "summary": {"total": len(operations), **{verb.value: counts[verb.value] for verb in Verb}},
    }


def _describe(operation: Operation, survey: Survey) -> Document:
    owner = survey.owner_of(operation.item)
    verb, kind = operation.verb.value, kind_of(operation.item)
    described = {
        "step": survey.stage_of(operation),
        "verb": verb,
        "kind": kind,
        "object": str(operation).removeprefix(f"{verb} {kind} "),
        "service": str(owner) if owner and owner.service.namespace else None,
    }
    match operation.item:
        case RealServers() as item:
            method = {"forward": "Tunnel"} if item.weight >= TUNNELLED else {}
            weight = without_method(item.weight)
            return {**described, **method, "weight": weight, "drains": item.drains, **item.thresholds.described}
        case VirtualServer(settings=settings) if operation.verb is not Verb.REMOVE:
            return {**described, "settings": str(settings)}
        case _:
            return described


def render(document: Document) -> Iterator[str]:
    """The plan as text: the operations of each step, in their order."""
    summary = document["summary"]
    if not summary["total"]:
        yield f"{document['node']}: nothing to do, the kernel is in its desired state"
        return
    if all(operation["kind"] == "flow" for operation in document["operations"]):
        yield f"{document['node']}: the kernel is in its desired state; only stale tracked flows would be removed"
    counts = ", ".join(f"{summary[verb.value]} to {verb.value}" for verb in Verb if summary[verb.value])
    yield f"{document['node']}: {counted(summary['total'], 'operation')} ({counts}), in this order"
    groups = itertools.groupby(document["operations"], key=lambda operation: operation["step"])
    for number, (_, group) in enumerate(groups, 1):
        operations = list(group)
        kinds = Counter((operation["verb"], operation["kind"]) for operation in operations)
        yield ""
        yield f"{number}. " + ", ".join(f"{verb} {counted_kinds({kind: count})}" for (verb, kind), count in kinds.items())
        above = ""
        for operation in operations[:SHOWN]:
            yield f"     {_line(operation, above)}"
            above = operation["object"].partition(" -> ")[0]
        if len(operations) > SHOWN:
            yield f"     and {len(operations) - SHOWN} more; --output=json shows all"
    yield ""
    yield "Nothing was changed."


def _line(operation: Document, above: str) -> str:
    """One operation as a line of text.

    ``above`` is the virtual server of the previous line; operations on its real servers are indented.
    """
    virtual_server, arrow, real_server = operation["object"].partition(" -> ")
    name = f"  -> {real_server}" if arrow and virtual_server == above else operation["object"]
    if "settings" in operation:
        name += f" {operation['settings']}"
    if operation["verb"] != Verb.REMOVE.value and operation.get("weight") is not None:
        name += _weight(operation)
    service = f"  [{operation['service']}]" if operation["service"] else ""
    return f"{_SIGNS[operation['verb']]} {name}{service}"


def _weight(operation: Document) -> str:
    """The values of a real server that an operation sets; empty if the operation only adds the real server with weight 1."""
    weight, thresholds, by_tunnel = operation["weight"], Thresholds.of(operation), "forward" in operation
    limits = f", {thresholds}" if thresholds != NO_THRESHOLDS else ""
    if operation["verb"] == Verb.ADD.value and weight == 1 and not by_tunnel:
        return limits
    return (
        f" {in_words(weight + by_tunnel * TUNNELLED)}" + ("" if weight else " (keeps its connections, gets no new ones)") + limits
    )


def run(config: Config) -> int:
    """Run ``ipvsproxy plan``; returns the exit status."""
    return inspection.run(config, _answer, render)


async def _answer(node: Inspected) -> CommandAnswer:
    return CommandAnswer(describe(node.config.node_name, *await plan(node)))
