"""Where the program learns of the cluster: a directory of manifests, or an API server in this process."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests import api_server, api_store
from tests.chaos.world import Key, Object, key_of

T = TypeVar("T")

RESOURCES = {"Service": api_store.SERVICES, "EndpointSlice": api_store.ENDPOINT_SLICES, "Node": api_store.NODES}


class Cluster(Protocol):
    """What tells the program of objects. ``flag`` leads the program there."""

    flag: str

    def apply(self, put: Iterable[Object], gone: Iterable[Key]) -> None:
        """Objects appear, change and go, in this order."""

    def trouble(self, dice: random.Random) -> str:
        """Something goes wrong on the way to the program; what, or nothing if nothing can."""

    def close(self) -> None:
        """The end."""


class Directory:
    """A directory with one file per object."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path = path
        self.flag = f"--manifests={path}"

    def apply(self, put: Iterable[Object], gone: Iterable[Key]) -> None:
        """As ``Cluster`` says."""
        for item in put:
            path = self._file(key_of(item))
            draft = path.with_name(f".{path.name}")
            draft.write_text(json.dumps(item))
            draft.rename(path)
        for key in gone:
            self._file(key).unlink()

    def trouble(self, dice: random.Random) -> str:
        """A file that is no manifest, for a while or for ever."""
        path = self._path / "garbage.yaml"
        if path.exists():
            path.unlink()
            return "garbage is gone from the directory"
        path.write_bytes(dice.randbytes(200))
        return "garbage in the directory"

    def close(self) -> None:
        """As ``Cluster`` says."""

    def _file(self, key: Key) -> Path:
        return self._path / f"{key.kind}-{key.name}.yaml"


class Server:
    """An API server that runs in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api server")
        self._thread.start()
        self._server = api_server.ApiServer()
        self._wait(self._server.__aenter__())
        self.flag = f"--kubeconfig={api_server.write_kubeconfig(directory / 'kubeconfig', self._server.url)}"

    def apply(self, put: Iterable[Object], gone: Iterable[Key]) -> None:
        """As ``Cluster`` says."""
        items, keys = list(put), list(gone)

        def tell() -> None:
            for item in items:
                self._server.put(RESOURCES[item["kind"]], item)
            for key in keys:
                self._server.delete(RESOURCES[key.kind], key.name)

        self._call(tell)

    def trouble(self, dice: random.Random) -> str:
        """Watches end in various ways, or requests are refused."""
        resource = dice.choice([api_store.SERVICES, api_store.ENDPOINT_SLICES])
        server = self._server
        troubles: dict[str, Callable[[], None]] = {
            "the watch is cut": lambda: server.cut_watches(resource),
            "the watch is cut in a line": lambda: server.cut_watches(resource, b'{"type": "ADDED", "obj'),
            "the watch ends": lambda: server.end_watches(resource),
            "the watch has expired": lambda: server.expire_watches(resource),
            "a line is garbled": lambda: server.send(resource, b"{]\n"),
            "requests fail with 500": lambda: self._refuse(resource, 500),
            "requests fail with 429": lambda: self._refuse(resource, 429),
            "requests fail with 401": lambda: self._refuse(resource, 401),
        }
        name = dice.choice(sorted(troubles))
        self._call(troubles[name])
        return f"{resource.kind}: {name}"

    def cut_and_forget(self, resource: api_store.Resource) -> None:
        """The watch is cut, and history ends now, so that a watch may not always go on where it was."""

        def cut() -> None:
            self._server.cut_watches(resource)
            self._server.store.forget_history()

        self._call(cut)

    def _refuse(self, resource: api_store.Resource, code: int) -> None:
        self._server.refuse(*[api_server.Refusal(code, resource=resource)] * 2)
        self._server.cut_watches(resource)

    def close(self) -> None:
        """As ``Cluster`` says."""
        self._wait(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self._wait(call())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)
