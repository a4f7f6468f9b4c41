"""Declares the kind of kernel object for tracked flows, the entries of connection tracking.

When a Service changes, its flows are cleaned: tracked flows that no desired real server answers are deleted. Desired and observed
flows are never compared, because the absence of a flow in the kernel proves nothing. Rule: a flow is cleaned only after the
kernel has stopped using the real servers that must no longer answer the flow. If flows were cleaned earlier, a flow that begins
after the cleaning could get an undesired real server, and would keep that real server.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import MarkedEntry
from ipvsproxy.model.steps import each
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.reconcile.kinds.declaration import Circumstances, ReconciledKind, Stage
from ipvsproxy.reconcile.tables.table import replacing
from ipvsproxy.reconcile.virtual_servers import ownership


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The real servers that may continue to answer a flow, and the owner of the flow."""

    owner: Owner
    real_servers: frozenset[RealServerKey]


class Flows(ReconciledKind[Flow, Keep, frozenset[RealServerKey]]):
    """The tracked flows of UDP and SCTP frontends.

    The observed value of a frontend is the set of real servers whose flows the last cleaning kept.
    """

    classes: ClassVar[tuple[type, ...]] = (FlowCleaning,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.REMOVE: Stage.FLOWS}

    def owner_of(self, desired: Keep) -> Owner:
        """The owner of a flow."""
        return desired.owner

    def differs(self, desired: Keep, observed: frozenset[RealServerKey]) -> bool:
        """Whether the last cleaning kept the flows of a real server that must not answer any longer."""
        return not observed <= desired.real_servers

    def desiring(
        self, owner: Owner, before: Mapping[Flow, frozenset[RealServerKey]], after: Mapping[Flow, frozenset[RealServerKey]]
    ) -> Iterator[None]:
        """Replaces the flows of a Service; yields after each piece of work.

        Only a flow that has lost a real server, or that has gained its first real servers, needs cleaning.
        """
        yield from replacing(owner, [(self.objects, _keeps(owner, before), _keeps(owner, after))])
        yield from each(self._spare, (*before, *after))

    def _spare(self, flow: Flow) -> None:
        desired, observed = self.objects.desired.get(flow), self.objects.observed.get(flow)
        if desired is None:
            self.objects.confirm(flow, None)
        elif observed is not None and observed <= desired.real_servers:
            self.objects.confirm(flow, desired.real_servers)

    def additions(self, _circumstances: Circumstances) -> Iterator[Operation]:
        """Cleans a pending flow if its virtual servers exist and each of their real servers is desired or may be kept.

        Packets of a flow reach either the virtual server of their destination address, or the virtual server of the mark that
        packets to this address get.
        """
        tables, flows = self.all, self.objects
        virtual_servers = tables.virtual_servers
        marks = {
            (name, ownership.virtual_server_of(entry)): ownership.mark_given_by(entry)
            for name in {flows.desired[flow].owner.service for flow in flows.pending}
            if tables.states[name].rare.scopes
            for entry in tables.states[name].entries
            if isinstance(entry, MarkedEntry)
        }
        for flow in flows.pending:
            keep, key = flows.desired[flow], VirtualServerKey(flow.protocol, flow.address, flow.port)
            if all(
                one in virtual_servers.observed
                and virtual_servers.observed[one].real_servers.keys()
                <= keep.real_servers | virtual_servers.desired[one].real_servers
                for one in (key, marks.get((keep.owner.service, key)))
                if one is not None
            ):
                yield Operation(Verb.REMOVE, FlowCleaning(flow, keep.real_servers))


def _keeps(owner: Owner, flows: Mapping[Flow, frozenset[RealServerKey]]) -> Mapping[Flow, Keep]:
    return {flow: Keep(owner, keep) for flow, keep in flows.items()}
