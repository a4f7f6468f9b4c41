"""``ipvsproxy --cleanup`` removes all objects of ipvsproxy from the kernel, and reports the removals.

The cleanup needs neither an API server nor an event loop.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.loop import leftover_removal
from ipvsproxy.daemon.loop.reader import Kernel
from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.ipvs.ipvs_driver import AbsentIpvs
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.model.kernel import TUNNEL_RECORD
from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.plan import Operation, Outcome, Verb, counted_kinds, kind_of, one_by_one
from ipvsproxy.model.rules import Backend, ChainKey, Jump, Skeleton
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, IpSet, SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.removal import own_objects
from ipvsproxy.translate import skeleton, view

CLEAN = 0
NOT_CLEAN = 1
"""The exit status if an object of ipvsproxy remains, or may remain."""

_IP_VS = pathlib.Path("/proc/thread-self/net/ip_vs")


class Extent(NamedTuple):
    """The chains, jumps and sets that a cleanup removes.

    If ``only_own`` is false, the cleanup also removes the objects that kube-proxy knows, such as the device ``kube-ipvs0`` and
    the virtual servers that have an address.
    """

    chains: tuple[ChainKey, ...] = skeleton.CHAINS
    jumps: tuple[Jump, ...] = skeleton.JUMPS
    sets: frozenset[SetKind] = frozenset(SetKind)
    only_own: bool = False

    def plan(
        self, observed: Observation, excluded: Collection[Network], node_port_ranges: Collection[Network]
    ) -> own_objects.Cleanup:
        """The operations that clean a kernel whose state is ``observed``."""
        rules = dict.fromkeys(self.chains, ())
        skeletons = {family: Skeleton(family=family, chains=rules, jumps=self.jumps) for family in Family}
        todo = own_objects.plan(observed, skeletons, excluded, node_port_ranges)
        todo = todo._replace(settings=view.without_direct_return(observed))
        return own_objects.only_own(todo, observed, self.sets) if self.only_own else todo


EVERYTHING = Extent()
ONLY_OWN = EVERYTHING._replace(only_own=True)
ONLY_OWN_OF_IPTABLES = Extent(
    (*skeleton.SCOPE_CHAINS, *skeleton.DIRECT_CHAINS), (*skeleton.SCOPE_JUMPS, *skeleton.DIRECT_JUMPS), SCOPE_KINDS, only_own=True
)
"""The objects that kube-proxy does not know. In iptables and ipset, these are the objects of second scopes and of direct return;
in nftables, these are all rules and sets."""


class NodeToClean(NamedTuple):
    """A node to clean: its kernel, functions that search for rules by their text, and the IP families with readable rules.

    The functions in ``rules_with`` search the rules of ``kernel``, and the rules in each variant of iptables that ``kernel`` does
    not use. For each place that can hold rules, ``left`` has a function that searches the place for rules that a proxy has left
    behind. If this kernel lacks a feature, the cleanup skips the objects of this feature; ``skipped`` has a line for each such
    feature. ``unlike_sets`` returns the sets in ipvsproxy's nftables table that another version of ipvsproxy created with other
    parameters. ``kernel`` must have been created with the chains and jumps of ``extent``.
    """

    kernel: Kernel
    rules_with: Sequence[Callable[[str, Collection[Family]], list[str]]]
    left: Mapping[leftover_removal.AnyPlace, leftover_removal.Remains]
    families: tuple[Family, ...] = tuple(Family)
    skipped: tuple[str, ...] = ()
    unlike_sets: Callable[[], Collection[IpSet]] = tuple
    """Raises KernelError."""
    extent: Extent = EVERYTHING


@dataclasses.dataclass(slots=True)
class Result:
    """The result of a cleanup, or of a dry run.

    ``outcomes`` has the outcome of each operation. If the cleanups of both backends apply the same operation, such as the removal
    of a virtual server, ``outcomes`` has this operation only once. The keys of ``left`` are the places and IP families in which a
    proxy has left rules behind; each value is the reason why some of these rules are not removed. The reason is empty if all
    rules are removed. If objects of ipvsproxy other than the rules in ``left`` may remain, ``problems`` has a line for each
    reason. ``notes`` has a line for each omitted part of the cleanup.
    """

    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add outcomes.

        If both backends have an object of the same name, the object counts as removed only if both removals succeed.
        """
        for outcome in outcomes:
            if outcome.error or str(outcome.operation) not in self.outcomes:
                self.outcomes[str(outcome.operation)] = outcome

    @property
    def is_fine(self) -> bool:
        """Whether nothing failed."""
        return not self.failures and not self.problems

    @property
    def failures(self) -> list[str]:
        """A line for each object or rule that could not be removed."""
        failed = [outcome.error for outcome in self.outcomes.values() if outcome.error]
        return failed + [f"{name}: {error}" for name, error in self.left.items() if error]


def run(config: Config) -> int:
    """Remove the objects of ipvsproxy from this network namespace, and print the result; returns the exit status."""
    result = Result(problems=list(map(str, host.missing_privileges(runs_iptables=bool(shutil.which("iptables"))))))
    if not result.problems:
        _clean_here(config, result)
    sys.stdout.write((render_json if config.as_json else render_text)(result, dry_run=config.dry_run))
    return CLEAN if result.is_fine else NOT_CLEAN


def _clean_here(config: Config, result: Result) -> None:
    node_port_ranges = view.known_node_port_ranges(config.translation)
    try:
        with contextlib.ExitStack() as closing:
            instance = closing.enter_context(contextlib.closing(Instance()))
            if config.dry_run:
                instance.close()  # a proxy must be able to start during a dry run
            for backend in backends.to_clean(skeleton.CHAINS):
                own = ONLY_OWN_OF_IPTABLES if backend is Backend.IPTABLES else ONLY_OWN
                extent = own if config.only else EVERYTHING
                node = closing.enter_context(_this_node(config.drivers.route_protocol, backend, extent))
                clean(node, config.policy.excluded, node_port_ranges, result, dry_run=config.dry_run)
    except KernelError as error:
        result.problems.append(error.detail)


@contextlib.contextmanager
def _this_node(route_protocol: int, backend: Backend, extent: Extent) -> Iterator[NodeToClean]:
    skipped: list[str] = []
    if not _IP_VS.exists():
        skipped.append("virtual servers: this kernel has no IPVS loaded")
    variants = iptables_variant.installed()
    has_choice = backend is Backend.IPTABLES and shutil.which("iptables")  # ``choose`` may load modules of iptables
    commands = iptables_variant.choose(skeleton.CHAINS).commands if has_choice else iptables.COMMANDS
    ipvs = None if _IP_VS.exists() else AbsentIpvs()
    chosen = backends.ChosenBackend(backend, commands)
    made = NodeKernel(extent.chains, extent.jumps, chosen=chosen, ipvs=ipvs, route_protocol=route_protocol)
    with contextlib.closing(made) as kernel:
        programs = {}
        for family in Family:
            try:
                programs[family] = kernel.rules.program(family)
            except KernelError as error:
                skipped.append(f"{family.label} rules: {error.detail}")
        others = [
            iptables.IptablesDriver(chains=skeleton.CHAINS, jumps=skeleton.JUMPS, commands=names)
            for names in map(iptables_variant.commands, variants)
            if names != commands
        ]
        left = leftover_removal.of_iptables(kernel.leftover_rules, kernel.leftover_rules.places(programs))
        yield NodeToClean(
            kernel,
            [kernel.rules.rules_with, *(driver.rules_with for driver in others)],
            {} if extent.only_own else left | leftover_removal.of_nftables(kernel.leftover_tables),
            tuple(programs),
            tuple(skipped),
            _unlike_sets if backend is Backend.NFTABLES else tuple,
            extent,
        )


def _unlike_sets() -> Collection[IpSet]:
    with contextlib.closing(NftSetsDriver()) as driver:
        present = driver.shaped_as_ours(IP_SETS.values())
    return [ip_set for ip_set, is_ours in present.items() if not is_ours]


def clean(
    node: NodeToClean, excluded: Collection[Network], node_port_ranges: Collection[Network], result: Result, *, dry_run: bool
) -> None:
    """Remove the objects of ``node.extent``, except virtual servers in ``excluded`` ranges.

    With ``dry_run``, the function only finds the objects, and removes none.
    """
    observed = _observe(node)
    todo = node.extent.plan(observed, excluded, node_port_ranges)
    kept = len(node.extent.plan(observed, (), node_port_ranges).virtual_servers) - len(todo.virtual_servers)
    result.notes += [*node.skipped, *([f"virtual servers in excluded ranges: {kept} stay"] if kept else [])]
    result.problems += observed.errors
    if dry_run:
        _clear(node, result, may_remove=False)
        result.add(map(Outcome, (*todo.operations, *_removal_of_unlike(node, result))))
    else:
        outcomes = node.kernel.apply((*todo.additions, *todo.virtual_servers))
        may_remove_witnesses = own_objects.may_remove_witnesses(observed) and not any(outcome.error for outcome in outcomes)
        restored = node.kernel.apply(todo.settings)
        outcomes += restored
        may_remove_rules = view.knows_direct_return(observed) and view.are_tunnels_down(restored)
        if may_remove_rules:
            outcomes += node.kernel.apply(todo.rules)
            _clear(node, result, may_remove=True)
        else:
            result.problems.append(
                "rules and sets stay, because a tunnel device of direct return may still be up; run cleanup again"
            )
        if may_remove_witnesses and may_remove_rules:
            witnesses = [*todo.witnesses, *_removal_of_unlike(node, result)]
            outcomes += [_with_users(node, outcome) for outcome in node.kernel.apply(witnesses)]
        elif todo.witnesses and may_remove_rules:
            result.problems.append(
                "sets, device and local routes stay, because only they show which virtual servers are ours; run cleanup again"
            )
        result.add(outcomes)
        if not result.problems and not any(outcome.error for outcome in outcomes):
            again = node.extent.plan(_observe(node), excluded, node_port_ranges).operations
            result.problems += [f"{one.item} is back: is a kube-proxy or ipvsproxy still running here?" for one in again[:1]]
    result.notes, result.problems = list(dict.fromkeys(result.notes)), list(dict.fromkeys(result.problems))


def _removal_of_unlike(node: NodeToClean, result: Result) -> list[Operation]:
    """Operations that remove the sets that another version of ipvsproxy created with other parameters."""
    try:
        return [Operation(Verb.REMOVE, ip_set) for ip_set in node.unlike_sets()]
    except KernelError as error:
        result.problems.append(str(error))
        return []


def _observe(node: NodeToClean) -> Observation:
    return node.kernel.observe(tuple(IP_SETS), node.families, [TUNNEL_RECORD])


def _clear(node: NodeToClean, result: Result, *, may_remove: bool) -> None:
    """Remove the rules that a proxy has left behind; in a dry run, only find the rules."""
    for place, remains in node.left.items():
        try:
            examined = remains(may_remove=may_remove)
        except KernelError as error:
            result.problems.append(str(error))
            continue
        result.problems += filter(None, [examined.hidden])
        result.notes += filter(None, [examined.foreign])
        kept = "; ".join(
            f"{reference.target} stays: the rule {str(reference)!r} leads to it" for reference in examined.removal.staying
        )
        if examined.removal.is_needed or kept:
            name = f"{place.family.label} rules left in {place.where}"
            result.left[name] = result.left.get(name) or ((examined.failure or kept) if may_remove else "")


def _with_users(node: NodeToClean, outcome: Outcome) -> Outcome:
    """The outcome of an operation; if a set could not be removed, the error also names the rules that use the set."""
    item = outcome.operation.item
    if not outcome.error or not isinstance(item, IpSet):
        return outcome
    texts = [text for rules_with in node.rules_with for text in rules_with(f" {item.name} ", node.families)]
    return outcome._replace(error=f"{outcome.error}: {'; '.join(texts)}") if texts else outcome


def render_text(result: Result, *, dry_run: bool) -> str:
    """The result as text: every problem, and then each object (in a dry run) or the number of removed objects of each kind."""
    done = [outcome.operation for outcome in result.outcomes.values() if not outcome.error]
    left = [name for name, error in result.left.items() if not error]
    removed = [operation.item for operation in one_by_one(done) if operation.verb is Verb.REMOVE]
    rules = [*(str(item) for item in removed if isinstance(item, Skeleton)), *left]
    counts = counted_kinds(Counter(kind_of(item) for item in removed if not isinstance(item, Skeleton)))
    number = ", ".join(filter(None, [counts, *rules]))
    if result.problems:  # if there was a problem, some objects may be unknown
        empty = "not known" if dry_run else "nothing"
        number += "; the rest is not known" if dry_run and number else ""
    else:
        empty = f"nothing, there {'is' if dry_run else 'was'} nothing of ours"
    lines = [f"problem: {problem}" for problem in result.problems]
    lines += [f"left out: {note}" for note in result.notes]
    if dry_run:
        lines += [f"would {_in_words(operation)}" for operation in done]
        lines += [f"would remove {name}" for name in left]
        lines.append(f"would remove: {number or empty}")
    else:
        lines.append(f"removed: {number or empty}")
    lines += [f"failed: {failure}" for failure in result.failures]
    return "".join(f"{line}\n" for line in lines)


def render_json(result: Result, *, dry_run: bool) -> str:
    """The result as JSON: one object on one line. ``clean`` is true if no object of ipvsproxy remains."""
    document = {
        "dryRun": dry_run,
        "clean": result.is_fine and not (dry_run and (result.outcomes or result.left)),
        "operations": [
            {"verb": operation.verb.value, "kind": kind_of(operation.item), "name": _name(operation), "error": error}
            for operation, error, *_ in result.outcomes.values()
        ]
        + [{"verb": Verb.REMOVE.value, "kind": "rules", "name": name, "error": error} for name, error in result.left.items()],
        "problems": result.problems,
        "leftOut": result.notes,
    }
    return json.dumps(document) + "\n"


def _in_words(operation: Operation) -> str:
    kind = "" if isinstance(operation.item, Skeleton) else f"{kind_of(operation.item).replace('_', ' ')} "
    return f"{operation.verb} {kind}{_name(operation)}"


def _name(operation: Operation) -> str:
    """The name of an operation's object, without the operation's verb and the kind of object."""
    return str(operation).split(" ", 2)[2]
