"""Uses a scripted connection to cover the requests to the API server, their order and the pauses between them.

Time is virtual. ``test_watch`` covers the same requests with an API server over real HTTP.
"""

import asyncio
import contextlib
import itertools
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipvsproxy.daemon.sources import queries, reflector
from ipvsproxy.daemon.sources.source import ApiError, Trouble
from ipvsproxy.model.service import Event, Gone, Listed, ListStarted, ObjectKind, ServiceName
from tests.support.script import (
    GONE,
    GONE_LINE,
    WEB,
    Answer,
    ScriptEndError,
    World,
    bookmark,
    line,
    names,
    page,
    run_script,
    service,
)
from tests.support.virtual_time import in_virtual_time

ADDED = line("ADDED", service("a", 105))
"""A watch line that adds the Service ``a``, with the resource version 105."""

# Requests


async def test_a_watch_requests_a_random_timeout_of_300_to_600_s_and_waits_30_s_longer() -> None:
    world = await run_script(page(), [600.0], [600.0], [600.0])
    timeouts = [int(path.rpartition("timeoutSeconds=")[2]) for path in world.watches]
    assert all(300 <= timeout <= 600 for timeout in timeouts)
    assert len(set(timeouts)) > 1
    assert [round(idle) for idle in world.idle] == [timeout + 30 for timeout in timeouts]


# The list


async def test_each_page_of_a_list_is_delivered_when_it_arrives_and_the_end_of_the_list_is_delivered_last() -> None:
    world = await run_script(page(service("a"), service("b"), more="t1"), page(service("c")))
    assert names(world.delivered) == ["Put a", "Put b", "Put c"]
    assert world.delivered[0] == ListStarted(ObjectKind.SERVICE)
    assert world.batches == [3, 1, 1]
    assert world.delivered[-1] == Listed(ObjectKind.SERVICE, frozenset(ServiceName("default", name) for name in "abc"))
    assert "limit=500" in world.lists[0]
    assert world.lists[1].endswith("&continue=t1")


async def test_a_delivered_list_has_the_key_of_an_object_even_if_the_object_cannot_be_read() -> None:
    broken = {"metadata": {"name": "odd", "namespace": "default"}, "spec": {"ports": "many"}}
    world = await run_script(page(service("web"), broken))
    assert names(world.delivered) == ["Put web", "Rejected odd"]
    assert world.delivered[-1] == Listed(ObjectKind.SERVICE, frozenset({WEB, ServiceName("default", "odd")}))


async def test_all_objects_are_requested_in_one_page_if_the_continue_token_expires_between_pages() -> None:
    world = await run_script(page(service("a"), more="t1"), GONE, page(service("b"), version=120))
    assert "limit" not in world.lists[2]
    assert world.delivered[-1] == Listed(ObjectKind.SERVICE, frozenset({ServiceName("default", "b")}))
    assert world.sleeps == []
    assert "resourceVersion=120" in world.watches[0]


@pytest.mark.parametrize("body", [b"", b"<html>502</html>", b'{"kind": "Status"}', b"[]"])
async def test_a_list_request_whose_answer_is_not_a_list_is_repeated_after_a_pause(body: bytes) -> None:
    world = await run_script(body, body, page())
    assert world.progress[:3] == ["garbled", "garbled", "listed 0"]
    assert len(world.sleeps) == 2
    assert world.sleeps[0] < world.sleeps[1]


# The watch


async def test_watch_lines_that_arrive_together_are_one_batch() -> None:
    together = line("ADDED", service("a", 101)) + line("MODIFIED", service("b", 102)) + line("DELETED", service("c", 103))
    world = await run_script(page(), [together, 400.0])
    assert names(world.delivered) == ["Put a", "Put b", "Gone c"]
    assert world.delivered[-1] == Gone(ObjectKind.SERVICE, ServiceName("default", "c"))
    assert world.batches == [1, 3]


async def test_a_new_watch_starts_at_once_from_the_last_resource_version_after_a_watch_ended_normally() -> None:
    world = await run_script(page(), [ADDED, 400.0])
    assert "resourceVersion=105" in world.watches[1]
    assert world.sleeps == []
    assert world.reflector.status.restarts == {Trouble.ENDED: 1}


async def test_a_bookmark_advances_the_resource_version_and_delivers_nothing() -> None:
    world = await run_script(page(), [bookmark(140), 400.0])
    assert "resourceVersion=140" in world.watches[1]
    assert world.batches == [1]


async def test_a_watch_that_ends_as_soon_as_it_begins_is_repeated_only_after_a_pause() -> None:
    world = await run_script(page(), [], [], [])
    assert world.reflector.status.restarts == {Trouble.DROPPED: 3}
    assert len(world.sleeps) == 3


async def test_a_watch_resumes_after_the_last_complete_line_if_its_stream_ends_inside_a_line() -> None:
    half = line("ADDED", service("b", 106))[:40]
    world = await run_script(page(), [ADDED + half, 400.0], [line("ADDED", service("b", 106)), 400.0])
    assert names(world.delivered) == ["Put a", "Put b"]
    assert "resourceVersion=105" in world.watches[1]
    assert world.progress[2] == "dropped"


@pytest.mark.parametrize("trouble", [Trouble.DROPPED, Trouble.SILENT, Trouble.UNREACHABLE, Trouble.SERVER_ERROR])
async def test_a_broken_watch_continues_from_its_resource_version_after_a_pause(trouble: Trouble) -> None:
    world = await run_script(page(), [ADDED, ApiError(trouble, "broken")])
    assert "resourceVersion=105" in world.watches[1]
    assert len(world.sleeps) == 1
    assert 0.4 <= world.sleeps[0] <= 0.8 + reflector.BROKEN_WATCH_SPREAD_S
    assert len(world.lists) == 1


async def test_pauses_grow_with_each_failure_until_the_watch_receives_a_line() -> None:
    lost = ApiError(Trouble.UNREACHABLE, "no route")
    world = await run_script(page(), *[lost] * 7, [ADDED, 5.0, lost])
    *growing, anew = world.sleeps
    assert growing == sorted(growing)
    assert 15 <= growing[-1] <= 30
    assert anew <= 0.8 + reflector.BROKEN_WATCH_SPREAD_S


def changed(name: str, *versions: object) -> list[bytes]:
    return [line("MODIFIED", {**service(name), "metadata": {"name": name, "resourceVersion": str(one)}}) for one in versions]


@pytest.mark.parametrize(
    ("changes", "delivered"),
    [
        ([*changed("web", 105, 105, 103), *changed("dns", 104)], ["Put web", "Put dns"]),
        ([*changed("web", 105), bookmark(110), *changed("dns", 109, 111)], ["Put web", "Put dns"]),
        ([*changed("web", 99, 100)], []),
        ([*changed("web", "", "abc", "9" * 5000)], ["Put web"] * 3),
    ],
    ids=["of an object", "before a bookmark", "before the list", "without a number"],
)
async def test_repeated_and_outdated_changes_are_not_delivered(changes: list[Any], delivered: list[str]) -> None:
    world = await run_script(page(), [*changes, 400.0])
    assert names(world.delivered) == delivered


async def test_changes_are_delivered_even_if_the_new_list_has_a_lower_version_than_the_former_list() -> None:
    world = await run_script(page(version=5000), [GONE_LINE], page(version=20), [*changed("web", 21), 400.0])
    assert names(world.delivered) == ["Put web"]


async def test_a_watch_line_with_an_invalid_object_affects_only_this_object() -> None:
    odd = {"metadata": {"name": "odd", "namespace": "default", "resourceVersion": "101"}, "spec": {"ports": "many"}}
    world = await run_script(page(), [line("ADDED", odd), line("ADDED", service("web", 102)), 400.0])
    assert names(world.delivered) == ["Rejected odd", "Put web"]
    assert len(world.lists) == 1


async def test_nodes_whose_watches_broke_at_the_same_time_do_not_reconnect_at_the_same_time() -> None:
    pauses: list[float] = []
    for seed in range(20):
        world = World(page(), [ADDED, ApiError(Trouble.DROPPED, "reset")])
        world.reflector._pace.dice.seed(seed)
        await world.run()
        pauses += world.sleeps
    assert min(pauses) >= reflector.FIRST_DELAY_S / 2
    assert max(pauses) <= reflector.FIRST_DELAY_S + reflector.BROKEN_WATCH_SPREAD_S
    assert max(pauses) - min(pauses) > reflector.BROKEN_WATCH_SPREAD_S / 2


# Lists from the watch cache, and lists of the latest state


def versions(world: World) -> list[str]:
    """The resource version that each list request names; ``latest`` if a request names none."""
    return [dict(urllib.parse.parse_qsl(path.partition("?")[2])).get("resourceVersion", "latest") for path in world.lists]


async def test_status_410_in_a_watch_causes_an_immediate_list_that_is_not_older_than_the_last_version() -> None:
    world = await run_script(page(), [ADDED + GONE_LINE], page(service("b"), version=200))
    assert (versions(world), world.sleeps) == (["0", "105"], [])
    assert names(world.delivered) == ["Put a", "Put b"]
    assert "resourceVersion=200" in world.watches[1]
    assert "limit=500" in world.lists[0]
    assert "limit" not in world.lists[1], "with a limit it would be exactly this version"


async def test_the_first_list_request_still_accepts_any_resource_version_when_it_is_repeated() -> None:
    world = await run_script(ApiError(Trouble.UNREACHABLE, "no route"), page(), [400.0])
    assert versions(world) == ["0", "0"]


async def test_the_next_request_names_the_resource_version_of_the_first_page_if_a_paged_list_breaks_off() -> None:
    world = await run_script(
        page(service("a"), more="t1"), ApiError(Trouble.UNREACHABLE, "gone"), page(service("b"), version=200), []
    )
    assert versions(world) == ["0", "latest", "100"], "the second one has the token of a page"
    assert [event.keys for event in world.delivered if isinstance(event, Listed)] == [{ServiceName("default", "b")}]


def long_page(version: int) -> bytes:
    return page(*[service(f"s{number}", version) for number in range(queries.PAGE_ITEMS + 200)], version=version)


@pytest.mark.parametrize(("before", "asked"), [((), ["0"]), ((page(version=100), [GONE_LINE]), ["0", "100"])])
async def test_the_next_request_names_the_resource_version_of_a_list_even_if_the_list_was_incomplete(
    before: Sequence[Answer], asked: list[str]
) -> None:
    world = await run_script(*before, long_page(200)[:-500], page(version=210), [])
    assert "Put s0" in names(world.delivered)
    assert versions(world) == [*asked, "200"]


async def test_the_latest_state_is_requested_again_if_the_list_of_a_restored_server_was_incomplete() -> None:
    behind = ApiError.of_status(504, "Too large resource version: 100, current: 42")
    world = await run_script(page(version=100), [GONE_LINE], behind, long_page(42)[:-500], page(version=43), [])
    assert versions(world) == ["0", "100", "latest", "latest"]


@pytest.mark.parametrize("answer", [ApiError.of_status(504, "Timeout: Too large resource version: 105, current: 42"), GONE])
async def test_the_latest_state_is_listed_at_once_if_the_server_cannot_list_from_our_resource_version(answer: ApiError) -> None:
    world = await run_script(page(), [ADDED + GONE_LINE], answer, page(version=42), GONE, page(version=50))
    assert versions(world) == ["0", "105", "latest", "42"]
    assert len(world.sleeps) == 1, "before the list after the second 410, and never before the latest"


@pytest.mark.parametrize("code", [400, 422])
async def test_a_list_that_follows_a_refused_list_does_not_name_the_refused_resource_version(code: int) -> None:
    world = await run_script(ApiError.of_status(code, "invalid resource version"), page(), GONE, page())
    assert versions(world) == ["0", "latest", "100"]


@pytest.mark.parametrize("all_nodes", [False, True])
async def test_the_resource_version_of_the_server_is_read_by_listing_one_object_from_the_watch_cache(*, all_nodes: bool) -> None:
    resources = queries.watched("node-1", all_nodes=all_nodes)
    assert resources[ObjectKind.SERVICE].probe_query("7") == (
        "/api/v1/namespaces/default/services?fieldSelector=metadata.name%3Dkubernetes&resourceVersion=7"
    )
    assert resources[ObjectKind.ENDPOINT_SLICE].probe_query("7") == (
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?fieldSelector=metadata.name%3Dkubernetes&resourceVersion=7"
    )
    assert resources[ObjectKind.NODE].probe_query("7") == "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-1&resourceVersion=7"


async def test_a_long_list_without_pages_is_delivered_in_parts() -> None:
    world = await run_script(page(*[service(f"s{number}") for number in range(1200)]))
    assert world.batches == [501, 500, 200, 1]


# List again


async def test_the_pauses_between_lists_grow_if_every_watch_ends_with_status_410_gone() -> None:
    world = await run_script(page(), GONE, page(), GONE, page(), GONE, page(), GONE, page(), GONE)
    assert len(world.sleeps) == 4
    assert world.sleeps == sorted(world.sleeps)


async def test_a_second_410_causes_an_immediate_list_if_the_last_watch_was_open_for_a_long_time() -> None:
    world = await run_script(page(), GONE, page(), [3600.0], GONE, page())
    assert world.sleeps == []


async def test_a_malformed_watch_line_causes_a_new_list_after_a_pause_but_earlier_lines_are_used() -> None:
    world = await run_script(page(), [ADDED + b'{"type": "ADD\n' + line("ADDED", service("b", 106))], page())
    assert names(world.delivered) == ["Put a"]
    assert len(world.lists) == 2
    assert len(world.sleeps) == 1


async def test_the_pauses_between_lists_grow_if_every_watch_sends_a_malformed_line() -> None:
    script: list[Answer] = [page(), [b"{]\n"]]
    world = await run_script(*script * 6)
    assert world.sleeps == sorted(world.sleeps)
    assert world.sleeps[-1] >= 12


async def test_the_watch_after_a_refused_watch_starts_at_the_version_of_a_new_list() -> None:
    world = await run_script(page(), ApiError.of_status(400, "invalid resource version"), page(version=200))
    assert "resourceVersion=200" in world.watches[1]
    assert len(world.sleeps) == 1


# A server that was restored from a backup


@pytest.mark.parametrize(
    "answer",
    [
        ApiError.of_status(504, "Timeout: Too large resource version: 100, current: 42"),
        [line("ERROR", {"kind": "Status", "code": 504, "message": "Too large resource version: 100"})],
        [bookmark(42)],
    ],
)
async def test_objects_are_listed_again_without_a_pause_if_the_server_does_not_know_our_resource_version(answer: Answer) -> None:
    world = await run_script(page(version=100), answer, page(version=42))
    assert (world.sleeps, versions(world)) == ([], ["0", "latest"])
    assert "limit=500" in world.lists[1], "all nodes ask at the same time"
    assert world.reflector.status.restarts == {Trouble.EXPIRED: 1}
    assert "resourceVersion=42" in world.watches[1]


async def test_a_gateway_timeout_that_names_no_resource_version_causes_no_new_list() -> None:
    world = await run_script(page(), ApiError.of_status(504, "gateway timeout"), [400.0])
    assert (world.progress[1], len(world.lists)) == ("server_error", 1)


@pytest.mark.parametrize("trouble", [Trouble.DROPPED, Trouble.SILENT, Trouble.UNREACHABLE, Trouble.SERVER_ERROR])
async def test_the_reflector_queries_the_resource_version_of_the_server_after_a_broken_watch(trouble: Trouble) -> None:
    world = await run_script(page(), [ADDED, ApiError(trouble, "broken")], page(version=90), served_versions=[90])
    assert (world.probes, len(world.lists)) == (1, 2)
    assert world.progress[1:4] == ["watching", trouble.value, "expired"]
    assert "resourceVersion=90" in world.watches[1]


async def test_the_resource_version_of_the_server_is_checked_only_after_a_watch_without_lines() -> None:
    world = await run_script(page(), [bookmark(110), 400.0], [400.0], page(version=50), served_versions=[50])
    assert (world.probes, len(world.watches), len(world.lists)) == (1, 3, 2)


async def test_a_watch_continues_if_one_check_shows_that_the_server_has_reached_our_resource_version() -> None:
    world = await run_script(
        page(version=100),
        ApiError(Trouble.UNREACHABLE, "no route"),
        ApiError.of_status(429, "too many"),
        [400.0],
        served_versions=[100],
    )
    assert (world.probes, len(world.lists)) == (2, 1), "once after the lost connection, once after the silent watch"
    assert all("resourceVersion=100" in path for path in world.watches)


# HTTP statuses other than 200


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (401, Trouble.UNAUTHORIZED),
        (403, Trouble.FORBIDDEN),
        (410, Trouble.EXPIRED),
        (422, Trouble.REFUSED),
        (429, Trouble.THROTTLED),
        (500, Trouble.SERVER_ERROR),
        (503, Trouble.SERVER_ERROR),
    ],
)
def test_error_statuses_are_reported_with_their_reasons(code: int, trouble: Trouble) -> None:
    error = ApiError.of_status(code, "words")
    assert (error.trouble, str(error)) == (trouble, f"status {code}: words")


@pytest.mark.parametrize(("asked", "least", "most"), [(7.0, 7.4, 7.8), (86400.0, 300.4, 300.8)])
async def test_the_pause_is_the_retry_after_time_up_to_a_limit_plus_a_short_random_time(
    asked: float, least: float, most: float
) -> None:
    world = await run_script(ApiError.of_status(429, "too many requests", asked), page())
    assert least <= world.sleeps[0] <= most


async def test_each_attempt_uses_a_new_connection_and_therefore_new_credentials() -> None:
    world = await run_script(ApiError.of_status(401, "Unauthorized"), page(), ApiError.of_status(401, "Unauthorized"), [400.0])
    assert (world.connections, len(world.asked), world.probes) == (6, 5, 1)


# Status


async def test_the_watch_status_says_when_the_last_contact_and_change_were_and_why_the_watch_failed() -> None:
    world = await run_script(page(), [10.0, ADDED, 20.0, bookmark(110), ApiError(Trouble.SILENT, "")])
    status = world.reflector.status
    assert (status.listed_s, status.event_s, status.contact_s) == (1000.0, 1010.0, 1030.0)
    assert status.restarts == {Trouble.SILENT: 1}
    assert not status.connected
    assert world.progress[:3] == ["listed 0", "watching", "silent"]


async def test_a_watch_counts_as_connected_while_it_is_open() -> None:
    world = World(page(), [ADDED])
    connected: list[bool] = []

    def deliver(events: Sequence[Event]) -> None:
        connected.append(world.reflector.status.connected)

    with contextlib.suppress(ScriptEndError):
        await world.reflector.list_and_watch(deliver)
    assert connected == [False, True]


async def test_cancelling_a_watch_leaves_no_connection_open() -> None:
    world = World(page())
    opened: list[str] = []

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[World]:
        opened.append("open")
        try:
            yield world
        finally:
            opened.append("closed")

    async def forever(path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        yield b""
        await asyncio.Event().wait()

    world.stream = forever  # type: ignore[method-assign]  # this connection's script never ends
    world.reflector._connect = connect
    task = asyncio.create_task(world.reflector.list_and_watch(world.deliver))
    await world.watched.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert opened == ["open", "closed", "open", "closed"]


# A list that needs confirmation


class SilentWorld(World):
    """A scripted connection; each of its watches sends the chunks of the script, and then is silent."""

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        async for part in super().stream(path, idle_s):
            yield part
        before_s = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(idle_s)
        finally:
            self.clock += asyncio.get_running_loop().time() - before_s
        raise ApiError(Trouble.SILENT, "idle")


@in_virtual_time
async def test_a_list_that_needs_confirmation_is_requested_again_only_when_due() -> None:
    world = SilentWorld(page(), [], page(), [])

    def deliver(events: Sequence[Event]) -> None:
        world.delivered += events
        if len(world.delivered) == 1:
            world.reflector.list_again(world.clock + 60)

    began_s = world.clock
    await world.reflector.list_and_watch(deliver)
    assert versions(world) == ["0"]
    due_s = world.clock - world.sleeps[0] - began_s - 60
    assert 0 <= due_s <= reflector.CONFIRMATION_SPREAD_S
    assert world.progress[-1] == Trouble.DOUBTED
    world.deliver = deliver  # type: ignore[method-assign]  # acts as a store that needs a second list
    await world.run()
    assert (len(world.lists), len(world.watches)) == (2, 3)
    assert versions(world) == ["0", "latest"], "a cache that is behind cannot confirm itself"
    assert Trouble.DOUBTED not in world.progress[world.progress.index(Trouble.DOUBTED) + 1 :], "one request gives one list"


async def test_every_list_request_asks_for_the_latest_state_while_an_earlier_list_is_unconfirmed() -> None:
    world = World(page(), GONE, page())
    deliver = world.deliver

    def doubt(events: Sequence[Event]) -> None:
        deliver(events)
        world.reflector.list_again(world.clock + 60)

    world.deliver = doubt  # type: ignore[method-assign]  # acts as a store that needs a second list
    await world.run()
    assert versions(world) == ["0", "latest"]


@in_virtual_time
async def test_no_third_list_is_requested_if_the_end_of_the_second_list_confirms_the_first_list() -> None:
    item = service("a")
    world = SilentWorld(page(item), [], page(item), [])
    due_s = world.clock + 60

    def deliver(events: Sequence[Event]) -> None:
        world.delivered += events
        confirmed = len([event for event in world.delivered if isinstance(event, Listed)]) > 1
        if not confirmed:  # a store that needs a second list asks for it at each delivery
            world.reflector.list_again(due_s)

    for _ in range(2):
        with contextlib.suppress(ScriptEndError):
            await world.reflector.list_and_watch(deliver)
    assert world.progress.count(Trouble.DOUBTED) == 1
    assert len(world.lists) == 2


@in_virtual_time
async def test_nodes_that_must_confirm_the_same_list_do_not_all_request_it_at_the_same_time() -> None:
    moments: list[float] = []
    for seed in range(20):
        world = SilentWorld(page(), [])
        world.reflector._pace.dice.seed(seed)

        def deliver(events: Sequence[Event], one: SilentWorld = world) -> None:
            one.reflector.list_again(1060)
            one.reflector.list_again(1060)

        await world.reflector.list_and_watch(deliver)
        moments.append(world.clock)
    assert min(moments) >= 1060
    assert max(moments) <= 1060 + reflector.CONFIRMATION_SPREAD_S + reflector.FIRST_DELAY_S
    assert max(moments) - min(moments) > reflector.CONFIRMATION_SPREAD_S / 2


# A connection that becomes silent


@in_virtual_time
async def test_a_watch_with_a_bookmark_fails_after_150_seconds_of_silence() -> None:
    world = SilentWorld(page(), [bookmark(110)], [])
    began_s = world.clock
    await world.run()
    assert world.progress[:5] == ["listed 0", "watching", "silent", "watching", "silent"]
    assert world.probes == 2, "the server is asked how far it is before each watch that follows"
    waited_s = world.clock - began_s - sum(world.sleeps)
    assert waited_s == pytest.approx(2 * reflector.LONGEST_SILENCE_S), "the second watch is bound from its beginning"


@in_virtual_time
async def test_a_watch_without_a_bookmark_may_be_silent_until_its_requested_timeout() -> None:
    world = SilentWorld(page(), [ADDED])
    began_s = world.clock
    await world.run()
    assert world.clock - began_s - sum(world.sleeps) == pytest.approx(world.idle[0])


# Lines that are assembled from chunks


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.lists(st.integers(0, 60), max_size=8))
def test_the_assembled_lines_do_not_depend_on_where_a_chunk_ends(data: bytes, cuts: list[int]) -> None:
    buffer = reflector.LineBuffer()
    bounds = [0, *sorted(cuts), len(data)]
    lines = [line for start, end in itertools.pairwise(bounds) for line in buffer.feed(data[start:end])]
    *whole, rest = data.split(b"\n")
    assert lines == [line for line in whole if line]
    assert buffer.pending == rest


def test_a_line_longer_than_the_limit_is_refused_before_it_is_complete() -> None:
    buffer = reflector.LineBuffer(longest_bytes=8)
    assert buffer.feed(b"12345678\n1234") == [b"12345678"]
    with pytest.raises(ApiError, match="longer than 8 bytes"):
        buffer.feed(b"56789")
