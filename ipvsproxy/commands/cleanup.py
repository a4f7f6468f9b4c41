"""``--cleanup``: removes all of our objects from the kernel, and reports that. Needs no API server and no event loop."""

import contextlib
import json
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.loop import leftovers
from ipvsproxy.daemon.loop.kernel import Kernel
from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.backends import ChosenBackend
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import driver as iptables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.driver import IptablesDriver
from ipvsproxy.kernel.ipvs.driver import AbsentIpvs
from ipvsproxy.kernel.nftables.sets import NftSetsDriver
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.plan import Operation, Outcome, Verb, kind_of
from ipvsproxy.model.rules import Backend, Skeleton
from ipvsproxy.model.sets import IP_SETS, IpSet
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.removal import cleanup
from ipvsproxy.translate import skeleton, view

CLEAN = 0
NOT_CLEAN = 1
"""Exit status if an object of ours is left, or may be."""

_IP_VS = pathlib.Path("/proc/thread-self/net/ip_vs")
_OURS: Mapping[Family, Skeleton] = {
    family: Skeleton(family=family, chains=dict.fromkeys(skeleton.CHAINS, ()), jumps=skeleton.JUMPS) for family in Family
}


class Node(NamedTuple):
    """A node to clean: the kernel, questions for all rules that contain a text, and the readable families.

    ``rules_with`` asks the rules of the kernel, and those of each variant of iptables that is not in use. ``left`` looks in each
    place for rules that a proxy has left behind. ``skipped`` has a line for each part that this kernel does not have.
    ``unlike_sets`` are ours by name, but of another shape: those of our table of nftables, of another version.
    """

    kernel: Kernel
    rules_with: Sequence[Callable[[str, Collection[Family]], list[str]]]
    left: Mapping[leftovers.AnyPlace, leftovers.Remains]
    families: tuple[Family, ...] = tuple(Family)
    skipped: tuple[str, ...] = ()
    unlike_sets: Callable[[], Collection[IpSet]] = tuple
    """Raises KernelError."""


class Left(NamedTuple):
    """Rules that a proxy has left behind, of one family in one place, and why they are not all removed."""

    name: str
    error: str = ""


class Result(NamedTuple):
    """The result of a cleanup, or of its dry run: an outcome for each operation, and the ``left`` rules.

    ``problems`` has a line for each other reason why objects of ours may be left, ``notes`` one for each omitted part.
    """

    outcomes: tuple[Outcome, ...] = ()
    left: tuple[Left, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The operations that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.error)

    @property
    def is_fine(self) -> bool:
        """Whether nothing failed."""
        return not self.failures and not self.problems

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for each object or rule that could not be removed."""
        return (*(outcome.error for outcome in self.failed), *(f"{one.name}: {one.error}" for one in self.left if one.error))


def run(config: Config) -> int:
    """Clean this network namespace, and print the result; returns the exit status."""
    result = _clean_here(config, dry_run=config.dry_run)
    sys.stdout.write((render_json if config.as_json else render_text)(result, dry_run=config.dry_run))
    return CLEAN if result.is_fine else NOT_CLEAN


def _clean_here(config: Config, *, dry_run: bool) -> Result:
    node_port_ranges = view.known_node_port_ranges(config.translation)
    missing = host.missing_privileges(runs_iptables=bool(shutil.which("iptables")))
    if missing:
        return Result(problems=tuple(map(str, missing)))
    try:
        with contextlib.ExitStack() as closing:
            if not dry_run:
                closing.enter_context(contextlib.closing(Instance()))
            results = []
            for backend in backends.to_clean(skeleton.CHAINS):
                node = closing.enter_context(_this_node(config.drivers.route_protocol, backend))
                results.append(clean(node, config.policy.excluded, node_port_ranges, dry_run=dry_run))
            return _joined(results)
    except KernelError as error:
        return Result(problems=(error.detail,))


def _joined(results: Sequence[Result]) -> Result:
    """The results for each backend as one. In a dry run, both have found what belongs to neither."""
    outcomes = {str(one.operation): one for result in reversed(results) for one in result.outcomes}
    return Result(
        tuple(outcomes[name] for name in dict.fromkeys(str(one.operation) for result in results for one in result.outcomes)),
        tuple(dict.fromkeys(one for result in results for one in result.left)),
        _once(*(result.problems for result in results)),
        _once(*(result.notes for result in results)),
    )


@contextlib.contextmanager
def _this_node(route_protocol: int, backend: Backend) -> Iterator[Node]:
    skipped: list[str] = []
    if not _IP_VS.exists():
        skipped.append("virtual servers: this kernel has no IPVS loaded")
    variants = iptables_variant.installed()
    has_choice = backend is Backend.IPTABLES and shutil.which("iptables")  # a choice may make the kernel load its modules
    commands = iptables_variant.choose(skeleton.CHAINS).commands if has_choice else iptables.COMMANDS
    ipvs = None if _IP_VS.exists() else AbsentIpvs()
    chosen = ChosenBackend(backend, commands)
    made = NodeKernel(skeleton.CHAINS, skeleton.JUMPS, chosen=chosen, ipvs=ipvs, route_protocol=route_protocol)
    with contextlib.closing(made) as kernel:
        programs = {}
        for family in Family:
            try:
                programs[family] = kernel.rules.program(family)
            except KernelError as error:
                skipped.append(f"{family.label} rules: {error.detail}")
        others = [
            IptablesDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS, commands=names)
            for names in map(iptables_variant.commands, variants)
            if names != commands
        ]
        yield Node(
            kernel,
            [kernel.rules.rules_with, *(driver.rules_with for driver in others)],
            leftovers.of_iptables(kernel.leftover_rules, kernel.leftover_rules.places(programs))
            | leftovers.of_nftables(kernel.leftover_tables),
            tuple(programs),
            tuple(skipped),
            _unlike_sets if backend is Backend.NFTABLES else tuple,
        )


def _unlike_sets() -> Collection[IpSet]:
    with contextlib.closing(NftSetsDriver()) as driver:
        present = driver.shaped_as_ours(IP_SETS.values())
    return [ip_set for ip_set, is_ours in present.items() if not is_ours]


def clean(node: Node, excluded: Collection[Network], node_port_ranges: Collection[Network], *, dry_run: bool) -> Result:
    """Remove our objects, except for virtual servers in ``excluded`` ranges; ``dry_run`` only finds them."""
    observed = _observe(node)
    todo = cleanup.plan(observed, _OURS, excluded, node_port_ranges)
    kept = len(cleanup.plan(observed, _OURS, (), node_port_ranges).virtual_servers) - len(todo.virtual_servers)
    notes = (*node.skipped, *((f"virtual servers in excluded ranges: {kept} stay",) if kept else ()))
    if dry_run:
        left, hidden, foreign = _clear(node, may_remove=False)
        unlike, unread = _removal_of_unlike(node)
        operations = (*todo.operations, *unlike)
        return Result(tuple(map(Outcome, operations)), left, _once(observed.errors, hidden, unread), (*notes, *foreign))
    outcomes = node.kernel.apply(todo.virtual_servers)
    may_remove_witnesses = cleanup.may_remove_witnesses(observed) and not any(outcome.error for outcome in outcomes)
    outcomes += node.kernel.apply(todo.rules)
    left, hidden, foreign = _clear(node, may_remove=True)
    problems = list(_once(observed.errors, hidden))
    if may_remove_witnesses:
        unlike, unread = _removal_of_unlike(node)
        problems += unread
        outcomes += [_with_users(node, outcome) for outcome in node.kernel.apply([*todo.witnesses, *unlike])]
    elif todo.witnesses:
        problems.append(
            "sets, device and local routes stay, because only they show which virtual servers are ours; run cleanup again"
        )
    if not problems and not any(outcome.error for outcome in outcomes):
        again = cleanup.plan(_observe(node), _OURS, excluded, node_port_ranges).operations
        problems += [f"{operation.item} is back: is a kube-proxy or ipvsproxy still running here?" for operation in again[:1]]
    return Result(tuple(outcomes), left, tuple(problems), (*notes, *foreign))


def _removal_of_unlike(node: Node) -> tuple[list[Operation], tuple[str, ...]]:
    """The removals of sets that have our names and another shape, and why they are not known."""
    try:
        return [Operation(Verb.REMOVE, ip_set) for ip_set in node.unlike_sets()], ()
    except KernelError as error:
        return [], (str(error),)


def _observe(node: Node) -> Observation:
    return node.kernel.observe(tuple(IP_SETS), node.families, ())


def _clear(node: Node, *, may_remove: bool) -> tuple[tuple[Left, ...], tuple[str, ...], tuple[str, ...]]:
    """Remove the rules that a proxy has left behind, or only find them.

    Returns these, a line for each hidden place, and one for each table that only has the name of a leftover.
    """
    found, hidden, foreign = [], [], []
    for place, remains in node.left.items():
        try:
            examined = remains(may_remove=may_remove)
        except KernelError as error:
            hidden.append(str(error))
            continue
        hidden += [examined.hidden] if examined.hidden else []
        foreign += [examined.foreign] if examined.foreign else []
        kept = "; ".join(
            f"{reference.target} stays: the rule {str(reference)!r} leads to it" for reference in examined.removal.staying
        )
        if examined.removal.is_needed or kept:
            found.append(
                Left(f"{place.family.label} rules left in {place.where}", (examined.failure or kept) if may_remove else "")
            )
    return tuple(found), tuple(hidden), tuple(foreign)


def _once(*problems: Collection[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one for some in problems for one in some))


def _with_users(node: Node, outcome: Outcome) -> Outcome:
    """The outcome; if it is the failed removal of a set, with the rules that use the set."""
    item = outcome.operation.item
    if not outcome.error or not isinstance(item, IpSet):
        return outcome
    texts = [text for rules_with in node.rules_with for text in rules_with(f" {item.name} ", node.families)]
    return outcome._replace(error=f"{outcome.error}: {'; '.join(texts)}") if texts else outcome


def render_text(result: Result, *, dry_run: bool) -> str:
    """For people: in a dry run every object, else the number of each kind; and every problem."""
    done = [outcome.operation for outcome in result.outcomes if not outcome.error]
    left = [one.name for one in result.left if not one.error]
    counts = Counter([*(kind_of(operation.item) for operation in done), *(["rules"] * len(left))])
    number = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    # With a problem, perhaps nothing was read.
    empty = "nothing" if result.problems else f"nothing, there {'is' if dry_run else 'was'} nothing of ours"
    lines = [f"left out: {note}" for note in result.notes]
    if dry_run:
        lines += [f"would {operation}" for operation in done]
        lines += [f"would remove rules {name}" for name in left]
        lines.append(f"would remove: {number or empty}")
    else:
        lines.append(f"removed: {number or empty}")
    lines += [f"failed: {failure}" for failure in result.failures]
    lines += [f"problem: {problem}" for problem in result.problems]
    return "".join(f"{line}\n" for line in lines)


def render_json(result: Result, *, dry_run: bool) -> str:
    """For programs: one object on one line. ``clean``: nothing of ours is there now."""
    document = {
        "dryRun": dry_run,
        "clean": result.is_fine and not (dry_run and (result.outcomes or result.left)),
        "operations": [
            {"verb": operation.verb.value, "kind": kind_of(operation.item), "name": _name(operation), "error": error}
            for operation, error, *_ in result.outcomes
        ]
        + [{"verb": Verb.REMOVE.value, "kind": "rules", "name": name, "error": error} for name, error in result.left],
        "problems": list(result.problems),
        "leftOut": list(result.notes),
    }
    return json.dumps(document) + "\n"


def _name(operation: Operation) -> str:
    """The name of the object, without verb and kind."""
    return str(operation).split(" ", 2)[2]
