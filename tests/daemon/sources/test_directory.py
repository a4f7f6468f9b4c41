"""Covers the directory source on a real directory: first delivery, changes, swapped links, and a directory that vanishes.

``test_manifests`` covers the content of files, and ``test_inotify`` covers the changes that wake the source.
"""

import asyncio
import contextlib
import errno
import os
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest
import structlog.testing

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.sources import directory
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Event, Listed, ObjectKind, Put, ServiceName
from tests.support import following
from tests.support.script import names

SERVICE = """\
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec: {{clusterIP: {address}, ports: [{{port: 80}}]}}
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: demo, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.244.0.1], nodeName: node-a, targetRef: {kind: Pod, name: web-abc}}]
"""


def manifest(name: str, address: str = "10.0.0.1") -> str:
    return SERVICE.format(name=name, address=address)


class Sink(following.Sink):
    """A receiver that also records the delivered batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[Event]] = []

    def deliver(self, events: Sequence[Event]) -> None:
        self.batches.append(list(events))
        super().deliver(events)

    async def batch(self, number: int) -> list[str]:
        """Wait for the batch with this number, counted from 0."""
        await self.until(lambda: len(self.batches) > number)
        return names(self.batches[number])

    @property
    def listed(self) -> list[Listed]:
        return [event for event in self.events if isinstance(event, Listed)]


@contextlib.asynccontextmanager
async def running_source(path: pathlib.Path, settle_s: float = 0.005) -> AsyncIterator[Sink]:
    sink = Sink()
    source = directory.DirectorySource(str(path), settle_s=settle_s, poll_s=0.005)
    async with following.running_task(source.run(sink.deliver)):
        yield sink


async def test_the_first_delivery_contains_all_objects_followed_by_the_end_of_each_list(tmp_path: pathlib.Path) -> None:
    (tmp_path / "b.yaml").write_text(manifest("b"))
    (tmp_path / "a.yml").write_text(manifest("a"))
    (tmp_path / ".hidden.yaml").write_text("a: [")
    (tmp_path / "below.yaml").mkdir()
    (tmp_path / "below.yaml" / "c.yaml").write_text("a: [")
    async with running_source(tmp_path) as sink:
        assert await sink.batch(0) == ["Put a", "Put b"]
        assert [event.kind for event in sink.listed] == list(ObjectKind)


async def test_later_deliveries_contain_only_changed_objects(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "b.yaml").write_text(manifest("b"))
    async with running_source(tmp_path) as sink:
        await sink.batch(0)
        (tmp_path / "a.yaml").write_text(manifest("a", "10.0.0.2"))
        assert await sink.batch(1) == ["Put a"]
        (tmp_path / "b.yaml").unlink()
        assert await sink.batch(2) == ["Gone b"]
        (tmp_path / "new").write_text(manifest("c"))
        (tmp_path / "new").replace(tmp_path / "c.yaml")
        assert await sink.batch(3) == ["Put c"]


async def test_changes_in_quick_succession_are_delivered_together(tmp_path: pathlib.Path) -> None:
    async with running_source(tmp_path, settle_s=2.0) as sink:
        await sink.batch(0)
        for name in "abc":
            (tmp_path / f"{name}.yaml").write_text(manifest(name))
            await asyncio.sleep(0.005)
        assert await sink.batch(1) == ["Put a", "Put b", "Put c"]


async def test_a_directory_that_changes_all_the_time_is_still_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LONGEST_SETTLE_S", 0.02)

    async def disturb() -> None:
        while True:
            (tmp_path / "noise").write_text("")
            await asyncio.sleep(0.001)

    async with running_source(tmp_path, settle_s=0.1) as sink:
        await sink.batch(0)
        noise = asyncio.create_task(disturb())
        (tmp_path / "a.yaml").write_text(manifest("a"))
        assert await sink.batch(1) == ["Put a"]
        noise.cancel()


async def test_the_new_files_are_read_if_the_link_of_a_config_map_volume_is_swapped(tmp_path: pathlib.Path) -> None:
    for version, address in (("..1", "10.0.0.1"), ("..2", "10.0.0.2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(manifest("a", address))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    async with running_source(tmp_path) as sink:
        assert await sink.batch(0) == ["Put a"]
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert await sink.batch(1) == ["Put a"]
        (event,) = sink.batches[1]
        assert isinstance(event, Put)
        assert "10.0.0.2" in str(event.object)


async def test_objects_of_a_directory_that_was_moved_away_stay_until_a_new_directory_is_read(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "manifests"
    place.mkdir()
    (place / "a.yaml").write_text(manifest("a"))
    with structlog.testing.capture_logs() as logs:
        async with running_source(place) as sink:
            await sink.batch(0)
            place.rename(tmp_path / "away")
            await following.eventually(lambda: any(line["event"] == "manifests_unreadable" for line in logs))
            (tmp_path / "next").mkdir()
            (tmp_path / "next" / "b.yaml").write_text(manifest("b"))
            (tmp_path / "next").rename(place)
            assert await sink.batch(1) == ["Put b", "Gone a"]
    assert [line["event"] for line in logs].count("manifests_unreadable") == 1


async def test_an_absent_directory_does_not_count_as_a_complete_list(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "manifests"
    source = directory.DirectorySource(str(place))
    sink = Sink()
    with structlog.testing.capture_logs() as logs:
        await source.read(sink.deliver)
        await source.read(sink.deliver)
    assert len(logs) == 1
    assert sink.batches == []
    assert source.describe() == f"directory {place}: No such file or directory"
    place.mkdir()
    await source.read(sink.deliver)
    assert sink.batches == [[Listed(kind, frozenset()) for kind in ObjectKind]]
    assert source.describe() == f"directory {place}"


async def test_objects_of_an_unreadable_file_stay_while_the_source_tries_to_read_the_file_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes only once, so the source must read the file again without a second notification."""
    real, attempts = directory.read_file, 0
    monkeypatch.setattr(directory, "FIRST_RETRY_S", 0.01)
    (tmp_path / "a.yaml").write_text(manifest("a"))
    source, sink = directory.DirectorySource(str(tmp_path), settle_s=0.005), Sink()
    status = Status(families=[Family.IPV4], sync_period_s=30, clock=time.monotonic, wall_clock=time.time)
    status.source_problem = lambda: source.problem

    def fail_thrice(path: pathlib.Path) -> directory.FileContent:
        nonlocal attempts
        attempts += 1
        if attempts <= 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert status.is_turned_away
        return real(path)

    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(source.run(sink.deliver))
        await sink.batch(0)
        assert not status.is_turned_away
        monkeypatch.setattr(directory, "read_file", fail_thrice)
        (tmp_path / "a.yaml").write_text(manifest("a", "10.0.0.2"))
        assert await sink.batch(1) == ["Put a"]
        task.cancel()
    assert not status.is_turned_away
    assert [line["error"] for line in logs if line["event"] == "manifests_unreadable"] == ["a.yaml: Input/output error"]


UNREADABLE: Mapping[str, Callable[[pathlib.Path], object]] = {
    "half a document": lambda path: path.write_text('{"kind": "Serv'),
    "a readable document before half of one": lambda path: path.write_text(manifest("a") + "---\nspec: ["),
    "an object without a name": lambda path: path.write_text("{apiVersion: v1, kind: Service, metadata: {}}"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("mends", [True, False], ids=["mended", "removed"])
@pytest.mark.parametrize("kind", UNREADABLE)
async def test_no_list_is_complete_until_every_file_has_been_read(tmp_path: pathlib.Path, kind: str, *, mends: bool) -> None:
    """If a list counted as complete too early, the objects that it lacks would be removed from the kernel."""
    source, sink = directory.DirectorySource(str(tmp_path)), Sink()
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "odd.yaml").write_text("{apiVersion: v1, kind: Service, metadata: {name: odd}, spec: none}")
    UNREADABLE[kind](tmp_path / "b.yaml")
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            await source.read(sink.deliver)
    assert "Put a" in names(sink.batches[0])
    assert sink.listed == []
    assert source.problem.startswith("b.yaml")
    assert [line["event"] for line in logs] == ["manifests_unreadable"]
    (tmp_path / "b.yaml").unlink()
    if mends:
        (tmp_path / "b.yaml").write_text(manifest("b"))
    await source.read(sink.deliver)
    complete = {"a", "b", "odd"} if mends else {"a", "odd"}
    assert [{key.name for key in event.keys} for event in sink.listed] == [complete, set(), set()]
    assert source.problem == ""


async def test_the_source_reads_the_directory_again_and_again_until_the_first_list_is_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "FIRST_RETRY_S", 0.001)
    (tmp_path / "a.yaml").write_text(manifest("a"))
    (tmp_path / "b.yaml").symlink_to("elsewhere/b.yaml")
    async with running_source(tmp_path) as sink:
        assert await sink.batch(0) == ["Put a"]
        assert sink.listed == []
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "b.yaml").write_text(manifest("b"))
        await sink.until(lambda: bool(sink.listed))
        assert names(sink.batches[-1]) == ["Put b"]


async def test_unchanged_files_are_not_read_again(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(manifest(name))
    source = directory.DirectorySource(str(tmp_path))
    await source.read(lambda events: None)
    os.utime(tmp_path / "a.yaml")
    read, present, unread = source._read_changed()
    assert (set(read), set(present), unread) == ({"a.yaml"}, {"a.yaml", "b.yaml"}, {})


async def test_the_pods_of_endpoints_are_known_even_if_another_file_is_unreadable(tmp_path: pathlib.Path) -> None:
    assert await directory.DirectorySource(str(tmp_path / "absent")).targets() == {}
    (tmp_path / "web.yaml").write_text(manifest("web") + "---\n" + SLICE)
    (tmp_path / "broken.yaml").write_text("{")
    source = directory.DirectorySource(str(tmp_path))
    found = await source.targets()
    assert (await source.targets(ServiceName("demo", "web")), await source.targets(ServiceName("demo", "dns"))) == (found, {})
    assert [(str(service), str(key), *target) for (service, key), target in found.items()] == [
        ("demo/web", "10.244.0.1:8080", "demo/web-abc", "node-a")
    ]
