"""Covers the order in which operations are sent, and the outcomes that follow from error numbers. No test needs a kernel."""

import errno

import pytest

from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServer
from tests.kernel.drivers import operations
from tests.kernel.ipvs.examples import real, server

PREPARED, EMPTY, PLAIN = server("192.0.2.1", scheduler="mh"), server("192.0.2.2", scheduler="mh"), server("192.0.2.3")
MARKED = VirtualServer(FirewallMark.of(Family.IPV4, 7), PLAIN.settings)
FIRST, SECOND = real(PREPARED, "10.0.0.1"), real(PREPARED, "10.0.0.2")
PAIR = FIRST._replace(keys=(*FIRST.keys, *SECOND.keys))


def test_a_new_virtual_server_gets_a_costly_scheduler_only_after_all_its_new_real_servers_are_added() -> None:
    last = real(PREPARED, "10.0.0.3")
    sent, firsts = ipvs_operations.as_sent(operations(Verb.ADD, PREPARED, PAIR, PLAIN, real(PLAIN, "10.0.0.1"), EMPTY, last))
    bare = VirtualServer(PREPARED.key, PREPARED.settings._replace(scheduler="none"))
    assert sent == [*operations(Verb.ADD, bare, PAIR, PLAIN, real(PLAIN, "10.0.0.1"), EMPTY, last), Operation(Verb.SET, PREPARED)]
    assert firsts == [0, 1, 3, 4, 5, 6, 0]


@pytest.mark.parametrize("verb", [Verb.SET, Verb.REMOVE])
def test_an_existing_virtual_server_keeps_its_costly_scheduler_while_real_servers_are_added(verb: Verb) -> None:
    given = [Operation(verb, PREPARED), Operation(Verb.ADD, PAIR)]
    assert ipvs_operations.as_sent(given) == (given, [0, 1])


def test_accepted_and_refused_real_servers_of_one_operation_get_separate_outcomes() -> None:
    given = operations(Verb.ADD, PREPARED, PAIR, PLAIN)
    refused = Outcome(Operation(Verb.ADD, SECOND._replace(keys=(*SECOND.keys,))), "no memory", errno.ENOMEM)
    accepted = Outcome(Operation(Verb.ADD, FIRST._replace(keys=(*FIRST.keys,))))
    assert ipvs_operations.outcomes(given, {2: refused}) == [Outcome(given[0]), accepted, refused, Outcome(given[2])]


@pytest.mark.parametrize(
    ("item", "number", "text"),
    [
        (MARKED, errno.EEXIST, "another program has made a virtual server by this mark"),
        (PLAIN, errno.EEXIST, "File exists"),
        (PLAIN, errno.ENOENT, "the kernel has no scheduler 'rr'"),
        (PAIR, errno.ESRCH, "its virtual server is missing"),
        (PAIR, errno.ENOENT, "No such file or directory"),
    ],
)
def test_the_error_text_of_a_refused_addition_depends_on_the_object_and_the_error_number(
    item: Item, number: int, text: str
) -> None:
    assert ipvs_operations.explain(Operation(Verb.ADD, item), ipvs_operations.Failure(number)).startswith(text)
