"""The program's source of objects: a directory of manifests, or an API server in this process."""

import asyncio
import collections
import copy
import enum
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tests.chaos.silent_proxy import SilentProxy
from tests.chaos.world import Key, Object, key_of
from tests.support import api_server, api_store, patience

T = TypeVar("T")

WITHIN_S = patience.seconds(60.0)
"""The longest wait, in seconds, for a call that runs in the server's thread. Some calls end only after the program has acted."""
BACKUPS = 4
"""A restored backup lacks at most this many of the latest changes."""
REFUSALS = 2
"""The number of successive requests that the API server refuses."""
UNREADABLE_S = 1.0
"""The pause, in seconds, before a broken manifest is deleted or the missing targets of links are written. In this pause, the
program finds the broken manifest or the links."""
GARBAGE = "garbage.yaml"
GARBAGE_LINE = b"{]\n"

RESOURCES = {"Service": api_store.SERVICES, "EndpointSlice": api_store.ENDPOINT_SLICES, "Node": api_store.NODES}


class Trouble(enum.Enum):
    """Kinds of faults between the cluster and the program.

    The last two kinds of faults concern a directory of manifests; all other kinds concern an API server.
    """

    CUT = "watch cut"
    CUT_IN_LINE = "watch cut in a line"
    ENDED = "watch ended"
    EXPIRED = "watch expired (410)"
    GARBLED = "garbled line"
    THROTTLED = "requests refused with 429"
    SERVER_ERROR = "requests refused with 500"
    UNAUTHORIZED = "requests refused with 401"
    RESTORED = "older revision"
    GARBAGE_FILE = "garbage in the directory"
    UNREADABLE_FILES = "files that cannot be read for a moment"


class Directory:
    """A directory with one file per object. ``flag`` is the program's flag that names this source."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path = path
        self._targets: Path | None = None
        self._numbers = itertools.count()
        self.flag = f"--manifests={path}"

    def apply(self, put: Iterable[Object], gone: Iterable[Key]) -> None:
        """Add or change some objects, then delete other objects."""
        targets: dict[Path, str] = {}
        for item in put:
            path = self._file(key_of(item))
            draft = path.with_name(f".{path.name}")
            if self._targets:
                target = self._targets / f"{next(self._numbers)}.yaml"
                draft.symlink_to(target)
                targets[target] = json.dumps(item)
            else:
                draft.write_text(json.dumps(item))
            draft.rename(path)
        garbage = self._path / GARBAGE
        if targets or garbage.exists():
            time.sleep(UNREADABLE_S)
        for target, text in targets.items():  # when the target of a link appears, nothing changes in the directory itself
            target.write_text(text)
        garbage.unlink(missing_ok=True)  # while the broken manifest exists, a restarted program writes nothing to the kernel
        for key in gone:
            self._file(key).unlink()

    def trouble(self, kind: Trouble, dice: random.Random) -> None:
        """Write a broken manifest, which the next change deletes; or let later changes write links before their targets."""
        if kind is Trouble.GARBAGE_FILE:
            (self._path / GARBAGE).write_bytes(dice.randbytes(200))
        else:
            assert kind is Trouble.UNREADABLE_FILES
            self._targets = self._path.with_name("targets")
            self._targets.mkdir(exist_ok=True)

    def close(self) -> None:
        """Stop."""

    def _file(self, key: Key) -> Path:
        return self._path / f"{key.kind}-{key.name}.yaml"


class Server:
    """An API server behind a proxy; one separate thread runs both.

    ``flag`` is the flag that makes the program use this API server.
    """

    def __init__(self, directory: Path) -> None:
        self._proxy = SilentProxy()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api server")
        self._thread.start()
        self._server = api_server.ApiServer()
        self._backups: collections.deque[api_store.Store] = collections.deque(maxlen=BACKUPS)
        self._wait(self._server.__aenter__())
        self._wait(self._proxy.open(int(self._server.url.rpartition(":")[2])))
        url = f"http://127.0.0.1:{self._proxy.port}"
        self.flag = f"--kubeconfig={api_server.write_kubeconfig(directory / 'kubeconfig', url)}"

    def apply(self, put: Iterable[Object], gone: Iterable[Key]) -> None:
        """Add or change some objects, then delete other objects."""
        items, keys = list(put), list(gone)

        def tell() -> None:
            self._backups.append(copy.deepcopy(self._server.store))
            for item in items:
                self._server.put(RESOURCES[item["kind"]], item)
            for key in keys:
                self._server.delete(RESOURCES[key.kind], key.name)

        self._call(tell)

    def trouble(self, kind: Trouble, dice: random.Random) -> None:
        """Cause this kind of fault: watches end, requests are refused, or the API server returns to an older state."""
        resource = dice.choice([api_store.SERVICES, api_store.ENDPOINT_SLICES])
        server = self._server
        match kind:
            case Trouble.CUT:
                self._call(lambda: server.cut_watches(resource))
            case Trouble.CUT_IN_LINE:
                self._call(lambda: server.cut_watches(resource, b'{"type": "ADDED", "obj'))
            case Trouble.ENDED:
                self._call(lambda: server.end_watches(resource))
            case Trouble.EXPIRED:
                self._call(lambda: server.expire_watches(resource))
            case Trouble.GARBLED:
                self._call(lambda: server.send(resource, GARBAGE_LINE))
            case Trouble.THROTTLED:
                self._call(lambda: self._refuse(resource, 429))
            case Trouble.SERVER_ERROR:
                self._call(lambda: self._refuse(resource, 500))
            case Trouble.UNAUTHORIZED:
                self._call(lambda: self._refuse(resource, 401))
            case Trouble.RESTORED:
                self._wait(self._restore())
            case _:
                raise ValueError(kind)

    async def _restore(self) -> None:
        """Restore a backup; as soon as the program watches the restored state, undo the restore by changes of objects."""
        server = self._server
        lost = {resource: {_name(item): item for item in server.store.objects(resource)} for resource in RESOURCES.values()}
        server.restore(self._backups[0])
        self._backups.clear()
        for resource in RESOURCES.values():
            await server.watched(resource, from_present=True)
        for resource, items in lost.items():
            present = {_name(item): item for item in server.store.objects(resource)}
            for name, item in items.items():
                if name not in present or _content(item) != _content(present[name]):
                    server.put(resource, item)
            for name in present.keys() - items.keys():
                server.delete(resource, name)

    def cut_and_forget(self, resource: api_store.Resource) -> None:
        """Cut the watch and forget the history of changes; a program that has missed a change must then list all objects."""

        def cut() -> None:
            self._server.cut_watches(resource)
            self._server.store.forget_history()

        self._call(cut)

    def _refuse(self, resource: api_store.Resource, code: int) -> None:
        self._server.refuse(*[api_server.Refusal(code, resource=resource)] * REFUSALS)
        self._server.cut_watches(resource)

    def bookmark(self) -> None:
        """Send a bookmark to each watch."""
        self._call(self._server.bookmark)

    def hush(self) -> int:
        """Stop forwarding through the proxy's present connections; return their number."""

        async def hush() -> int:
            return self._proxy.hush()

        return self._wait(hush())

    def close(self) -> None:
        """Stop."""
        self._wait(self._proxy.close())
        self._wait(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self._wait(call())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WITHIN_S)


Cluster = Directory | Server


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _content(item: Object) -> Object:
    """The object without the fields that the server sets."""
    return item | {"metadata": {name: value for name, value in item["metadata"].items() if name in ("name", "labels")}}
