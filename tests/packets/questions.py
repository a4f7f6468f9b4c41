"""Tables of requests: a client, an address, and the expected result, for every protocol and both families."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.support import cluster, lab

ANSWERED = "ok"
ATTEMPTS = 4
"""The number of requests for each ``Question``. This number suffices to reach both of two endpoints, because the scheduler
chooses the endpoints in turn."""
MASQUERADED = "bridge node"
"""The names of the source addresses that backends see if the client is masqueraded. Backends on this node see ``bridge``, and
backends on the other node see ``node``."""


class Row(NamedTuple):
    """A client, an address, and the expected result.

    ``port`` 0 means the port of the Service. ``sources`` are the source addresses that the backends see.
    """

    about: str
    from_: str
    to: str
    port: int
    outcome: str
    backends: str = ""
    sources: str = ""
    protocols: tuple[str, ...] = ("TCP", "UDP", "SCTP")
    is_of_every_kind: bool = False
    """Whether the request is also sent in two other environments: with local routes instead of addresses on the device, and on
    Debian's kernel."""


class Question(NamedTuple):
    """The request that one row of a table describes, for one protocol and one IP family."""

    row: Row
    protocol: str
    family: Family

    def __str__(self) -> str:
        return f"{self.row.about}: {self.protocol} {self.family.label}"

    def is_of(self, binding: Binding) -> bool:
        """Whether the tests send this request when Service addresses become local by the given method.

        With local routes, the tests send only requests over TCP whose row has ``is_of_every_kind``. TCP suffices because an
        address becomes local for all protocols alike.
        """
        return binding is not Binding.ROUTES or (self.protocol == "TCP" and self.row.is_of_every_kind)

    @property
    def probe(self) -> lab.Probe:
        """The probe that sends this request.

        All pods of the other node share one namespace, and all addresses of the client share another namespace.
        """
        row, inside, source = self.row, self.row.from_, None
        if inside.startswith(("client", "r1", "r2")):
            inside, source = "client" if inside.startswith("client") else "remote", cluster.address(inside, self.family)
        port = row.port or cluster.PORTS[self.protocol][0]
        address = cluster.address(row.to, self.family)
        return lab.Probe(inside, self.protocol, address, port, src=source, count=ATTEMPTS, timeout_s=4.0)

    @property
    def expected(self) -> lab.Result:
        """The expected result."""
        row = self.row
        backends, sources = (
            tuple(sorted(cluster.address(one, self.family) for one in names.split())) for names in (row.backends, row.sources)
        )
        # An ICMP error refuses clients of TCP and UDP, but Linux ignores this error for SCTP.
        outcome = "timeout" if row.outcome == "refused" and self.protocol == "SCTP" else row.outcome
        return lab.Result(outcome, backends, sources)


def questions(rows: Iterable[Row]) -> list[Question]:
    """The requests of all rows, for each protocol of a row and for both families."""
    return [Question(row, protocol, family) for row, family in itertools.product(rows, Family) for protocol in row.protocols]


def ask(laboratory: lab.Lab, asked: Sequence[Question]) -> Mapping[Question, lab.Result]:
    """Run all probes.

    Requests that get no answer run at the same time. All other probes run one after the other, because the scheduler chooses the
    endpoints in turn.
    """
    silent = [one for one in asked if one.row.outcome != ANSWERED]
    results = dict(zip(silent, laboratory.probe_all(one.probe for one in silent), strict=True))
    return results | {one: laboratory.probe_all([one.probe])[0] for one in asked if one not in results}
