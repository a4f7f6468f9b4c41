"""``ipvsproxy explain``: the reasons for all that is programmed for a Service, or at an address."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ipvsproxy.commands import explain_text, inspection
from ipvsproxy.commands.comparison import Comparison
from ipvsproxy.commands.inspection import Document, Inspected
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.ui.explanation import Explainer
from ipvsproxy.model.net import Address, host_port, parse_address
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey

FOUND = 0
UNKNOWN = 1
"""Exit status if there is no such Service, and no virtual server at the address."""

_NAME = re.compile(r"[^/\s]+/[^/\s]+")


class Place(NamedTuple):
    """An address and a port, or all of its ports if ``port`` is 0."""

    address: Address
    port: int

    def matches(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server has this address and port."""
        return key.address == self.address and self.port in (0, key.port)

    def __str__(self) -> str:
        return host_port(self.address, self.port) if self.port else str(self.address)


Subject = ServiceName | Place


def parse_subject(text: str) -> Subject:
    """Read ``namespace/name``, ``address``, ``address:port`` or ``[v6]:port``.

    Raises:
        ValueError: it is none of these.
    """
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?", text)
    plain = re.fullmatch(r"([\d.]+)(?::(\d{1,5}))?", text)
    match = bracketed or plain
    if match:
        return Place(parse_address(match[1]), int(match[2] or 0))
    if text.count(":") > 1:
        return Place(parse_address(text), 0)
    if _NAME.fullmatch(text):
        return ServiceName(*text.split("/"))
    raise ValueError(f"{text[:80]!r} is none of namespace/name, address:port, [IPv6 address]:port")


async def describe(node: Inspected, subject: Subject) -> Document:
    """The explanation as a document.

    Raises:
        UnknownStateError: the kernel could not be read.
    """
    comparison = node.comparison()
    await comparison.read()
    survey = comparison.survey
    if isinstance(subject, ServiceName):
        keys = list(_keys_of(comparison, subject))
        names = [subject] if subject in node.store.services else []
    else:
        keys = [key for key in survey.virtual_server_keys() if subject.matches(key)]
        names = sorted({desired.owner.service for key in keys if (desired := survey.sides(key).desired)})
    scopes = [key for name in names for key in _keys_of(comparison, name) if isinstance(key, FirewallMark)]
    observed = [key for key in dict.fromkeys((*keys, *scopes)) if survey.sides(key).observed]
    counts = await node.kernel.call(lambda kernel: kernel.connections(observed))
    explainer = Explainer(
        survey=survey,
        store=node.store,
        translation=comparison.translation,
        view=comparison.view,
        counts=counts,
        is_carried=comparison.is_carried,
    )
    return {
        "version": inspection.JSON_VERSION,
        "command": "explain",
        "node": node.config.node_name,
        "zone": comparison.view.zone,
        "services": [explainer.service(name, set(keys)) for name in names],
        "unclaimed": [explainer.unclaimed(key) for key in keys if not survey.sides(key).desired],
    }


def _keys_of(comparison: Comparison, name: ServiceName) -> Iterable[VirtualServerKey]:
    state = comparison.survey.states.get(name)
    return state.virtual_servers if state else ()


def run(config: Config, subject: Subject, *, as_json: bool) -> int:
    """``ipvsproxy explain``; returns the exit status."""

    async def read(node: Inspected) -> int:
        document = await describe(node, subject)
        inspection.show(document, explain_text.render(document, str(subject)), as_json=as_json)
        return FOUND if document["services"] or document["unclaimed"] else UNKNOWN

    return inspection.run(config, read)
