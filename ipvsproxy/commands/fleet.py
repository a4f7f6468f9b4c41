"""``ipvsproxy fleet`` compares the health status of the ipvsproxy on each node, and reports the nodes that differ.

The command reads the health status through the pod proxy of the API server.

Rule 1: the caller needs only two permissions in one namespace: to get pods/proxy, and to list pods. With ``--pods``, the
permission to list pods is not needed.
Rule 2: the server that answers a request may be broken or hostile. The command limits the time and the size of an answer, and
checks the types in the answer. The command follows no redirect, because the target of a redirect would get the caller's
credentials.
Rule 3: every node appears in the result. If a node does not answer, the reason is reported.
"""

import asyncio
import datetime as dt
import enum
import os
import pathlib
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from ipvsproxy.commands import inspection
from ipvsproxy.commands.inspection import CommandAnswer, Document
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.sources import queries
from ipvsproxy.daemon.sources.credentials import SourceError, one_line
from ipvsproxy.daemon.sources.source import ApiError
from ipvsproxy.daemon.sources.watch import HttpConnection, KubernetesSource, status_message
from ipvsproxy.model.kind import counted

PARALLEL = 64
"""The largest number of requests that run at the same time. More requests would take too many of the seats that the API server's
priority and fairness gives to clients."""
TIMEOUT_S = 5.0
"""The longest wait for the whole answer of a node, in seconds."""
MOST_BYTES = 64 << 10
"""The largest size of a node's answer in bytes; a longer answer is an error."""
RECENT = dt.timedelta(minutes=10)
"""The time for which a node counts as drifting after ipvsproxy has found changes by another program."""
ROLE = "the right to get pods/proxy in the namespace is needed, and to list pods without --pods; docs/commands.md has a Role"
_GONE = ("Succeeded", "Failed")


class Fault(enum.StrEnum):
    """A fault that a node can have; the value is the fault's name in the output."""

    NO_ANSWER = "no answer"
    NOT_IN_FORCE = "not in force"
    LATE = "late"
    STALE = "stale watch"
    NO_TRAFFIC = "no traffic"
    DRIFTING = "drifting"
    LEFTOVERS = "leftovers"
    VERSION = "other version"
    CONFIGURATION = "other configuration"


_Time = Annotated[dt.datetime, msgspec.Meta(tz=True)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]


class _Family(msgspec.Struct, rename="camel"):
    last_updated: _Word
    healthy: bool


class _Program(msgspec.Struct, rename="camel"):
    version: _Word
    configuration: _Word
    pending: int
    last_drift: _Time


class HealthAnswer(msgspec.Struct, rename="camel"):
    """The response of ``/healthz?verbose``. An ipvsproxy that is older than this command sends no ``ipvsproxy`` field."""

    current_time: _Time
    healthy: bool
    node_eligible: bool
    status: dict[str, _Family] = {}
    stale_watches: list[str] = []
    waiting_for_first_lists: list[str] = []
    unreadable: list[str] = []
    unmet_settings: dict[str, str] = {}
    leftovers: list[str] = []
    ipvsproxy: _Program | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    deletion_timestamp: str = ""


class _PodPart(msgspec.Struct, rename="camel"):
    node_name: str = ""
    phase: str = ""


class Pod(msgspec.Struct):
    """The fields of a pod that this command uses. ``spec`` names the pod's node, and ``status`` has the pod's phase."""

    metadata: _Metadata
    spec: _PodPart
    status: _PodPart

    @property
    def is_gone(self) -> bool:
        """Whether the pod is being deleted or has finished, so that another pod may have replaced it."""
        return bool(self.metadata.deletion_timestamp) or self.status.phase in _GONE


class _PodList(msgspec.Struct):
    items: list[Pod]


class FleetNode(NamedTuple):
    """A node, and the problems that this node has independently of the other nodes.

    An empty version or configuration means that the value is unknown.
    """

    name: str
    pod: str
    version: str = ""
    configuration: str = ""
    troubles: tuple[tuple[Fault, str], ...] = ()

    @property
    def is_silent(self) -> bool:
        """Whether the node gave no answer, or an answer that does not come from ipvsproxy."""
        return any(trouble is Fault.NO_ANSWER for trouble, _ in self.troubles)


def run(config: Config) -> int:
    """Run ``ipvsproxy fleet``; returns the exit status."""
    return inspection.execute(config, _answer(config), render, "the state of the nodes is unknown")


async def _answer(config: Config) -> CommandAnswer:
    options = config.fleet
    if config.source.manifests or config.servers.health is None:
        raise CannotStartError("fleet needs an API server, and the port of the health servers in --healthz-bind-address")
    source = KubernetesSource(node_name="", kubeconfig=_kubeconfig(config), master=config.source.api_server)
    try:
        await source.check()
        async with source.connect() as connection:
            # without the permission to list pods, the state of a pod is unknown, so the pod counts as running
            named = [Pod(_Metadata(name), _PodPart(), _PodPart(phase="Running")) for name in dict.fromkeys(options.pods)]
            pods = named or await list_pods(connection, options.namespace, options.selector)
            nodes = await ask(connection, options.namespace, pods, config.servers.health.port)
    except (SourceError, ApiError, msgspec.MsgspecError) as error:
        raise _refusal(one_line(str(error))) from error
    if not nodes:
        raise CannotStartError(f"no pod in namespace {options.namespace} has the labels {options.selector}")
    if all(node.is_silent for node in nodes):
        raise _refusal(nodes[0].troubles[0][1], f"none of {counted(len(nodes), 'pod')} answers; {nodes[0].pod}: ")
    document = describe(options.namespace, nodes)
    return CommandAnswer(document, inspection.NOT_WELL if document["differing"] else inspection.WELL)


def _refusal(reason: str, before: str = "") -> CannotStartError:
    return CannotStartError(f"{before}{reason}", *([ROLE] if reason.startswith("status 403") else []))


def _kubeconfig(config: Config) -> str:
    """The path of the caller's kubeconfig: from the flag or configuration file, or else the path that kubectl uses.

    An empty path means that there is no kubeconfig, and the pod's service account is used.
    """
    if config.source.kubeconfig or config.source.api_server:
        return config.source.kubeconfig
    paths = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    usual = pathlib.Path("~/.kube/config").expanduser()
    return next(filter(None, paths), str(usual) if usual.exists() else "")


async def list_pods(connection: HttpConnection, namespace: str, selector: str) -> Sequence[Pod]:
    """The pods with the given labels. A pod that is being deleted or has finished is left out if its node has another pod.

    Raises:
        ApiError: the list could not be read.
    """
    resource = queries.Resource(f"/api/v1/namespaces/{urllib.parse.quote(namespace, safe='')}/pods", selector)
    pieces = connection.body(resource.list_query(queries.LATEST, limit=0))
    pods = msgspec.json.decode(b"".join([piece async for piece in pieces]), type=_PodList).items
    staying = {pod.spec.node_name for pod in pods if not pod.is_gone}
    return [pod for pod in pods if not pod.is_gone or pod.spec.node_name not in staying]


async def ask(
    connection: HttpConnection, namespace: str, pods: Iterable[Pod], port: int, timeout_s: float = TIMEOUT_S
) -> Sequence[FleetNode]:
    """The health status that the ipvsproxy in each pod reports about the pod's node, sorted by the name of the node."""
    slots = asyncio.Semaphore(PARALLEL)

    async def one(pod: Pod) -> FleetNode:
        async with slots:
            return await _ask(connection, namespace, pod, port, timeout_s)

    return sorted(await asyncio.gather(*map(one, pods)))


async def _ask(connection: HttpConnection, namespace: str, pod: Pod, port: int, timeout_s: float) -> FleetNode:
    name = pod.metadata.name
    node = FleetNode(pod.spec.node_name or f"(pod {name})", name)
    place = f"{urllib.parse.quote(namespace, safe='')}/pods/{urllib.parse.quote(name, safe='')}:{port}"
    if pod.is_gone or pod.status.phase != "Running":
        state = "being deleted" if pod.metadata.deletion_timestamp else pod.status.phase or "in an unknown phase"
        return _silent(node, f"its pod is {state}")
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await connection.answer(f"/api/v1/namespaces/{place}/proxy/healthz?verbose", MOST_BYTES)
        health = msgspec.json.decode(body, type=HealthAnswer)
    except TimeoutError:
        return _silent(node, f"no complete answer within {timeout_s:g} s")
    except ApiError as error:
        return _silent(node, str(error))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _silent(node, f"status {status}: {status_message(body) or 'not the answer of an ipvsproxy'}")
    mine = health.ipvsproxy
    return node._replace(
        version=mine.version if mine else "",
        configuration=mine.configuration if mine else "",
        troubles=tuple((trouble, one_line("; ".join(texts))) for trouble, texts in _troubles(health) if texts),
    )


def _silent(node: FleetNode, why: str) -> FleetNode:
    return node._replace(troubles=((Fault.NO_ANSWER, one_line(why)),))


def _troubles(health: HealthAnswer) -> Iterator[tuple[Fault, Sequence[str]]]:
    """Yields kinds of fault, each with the sentences that describe the fault.

    If there are no sentences, the node does not have the fault.
    """
    mine = health.ipvsproxy
    waits = [f"the first list of {kind} is not complete" for kind in health.waiting_for_first_lists]
    unmet = [f"the kernel setting {path} is {value}" for path, value in health.unmet_settings.items()]
    differing = [f"{counted(mine.pending, 'kernel object')} not as desired"] if mine and mine.pending else []
    yield Fault.NOT_IN_FORCE, [*waits, *health.unreadable, *unmet, *differing]
    if not health.healthy:
        late = [f"{family} was last in force at {one.last_updated}" for family, one in health.status.items() if not one.healthy]
        yield Fault.LATE, late or ["it is stopping, or its first sync is late"]
    elif not health.node_eligible and not waits:
        yield Fault.NO_TRAFFIC, ["load balancers are turned away"]
    yield Fault.STALE, [f"no news of {kind} from the API server" for kind in health.stale_watches]
    yield Fault.LEFTOVERS, health.leftovers
    if mine and health.current_time - mine.last_drift < RECENT:
        yield Fault.DRIFTING, [f"another program changed kernel objects, last found at {mine.last_drift:%Y-%m-%dT%H:%M:%SZ}"]


def describe(namespace: str, nodes: Sequence[FleetNode]) -> Document:
    """The result as a JSON document.

    Configurations are compared only among nodes of the same version, because another version may have other fields.
    """
    version = _usual(node.version for node in nodes)
    usual = {one: _usual(node.configuration for node in nodes if node.version == one) for one in {node.version for node in nodes}}
    described = [_described(node, version, usual[node.version]) for node in nodes]
    return {
        "version": inspection.JSON_VERSION,
        "command": "fleet",
        "namespace": namespace,
        "usual": {"version": version, "configuration": usual.get(version, "")},
        "differing": sum(bool(one["problems"]) for one in described),
        "nodes": described,
    }


def _usual(values: Iterable[str]) -> str:
    counts = Counter(filter(None, values))
    return max(counts, key=lambda value: (counts[value], value), default="")


def _described(node: FleetNode, version: str, configuration: str) -> Document:
    troubles = list(node.troubles)
    if not node.version and not node.is_silent:
        troubles.append((Fault.VERSION, "unknown, because it is older than this command"))
    elif node.version and node.version != version:
        troubles.append((Fault.VERSION, f"{node.version}, while most nodes have {version}"))
    if node.configuration != configuration and not node.is_silent:
        troubles.append((Fault.CONFIGURATION, f"{node.configuration}, while most nodes of its version have {configuration}"))
    return {
        "node": node.name,
        "pod": node.pod,
        "version": node.version,
        "configuration": node.configuration,
        "problems": [{"problem": trouble.value, "detail": text} for trouble, text in troubles],
    }


def render(document: Document) -> Iterator[str]:
    """The result as text: one line for each problem, then the verdict."""
    rows = [(one["node"], row["problem"], row["detail"]) for one in document["nodes"] for row in one["problems"]]
    if rows:
        rows.insert(0, ("NODE", "PROBLEM", "DETAIL"))
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for node, problem, detail in rows:
        yield f"{node:<{widths[0]}}  {problem:<{widths[1]}}  {detail}"
    usual, differing = document["usual"], document["differing"]
    verdict = f"{differing} with a problem" if differing else "all in force and alike"
    facts = f"version {usual['version'] or 'unknown'}, configuration {usual['configuration'] or 'unknown'}"
    yield f"{counted(len(document['nodes']), 'node')}: {verdict}; {facts}"
