"""The kernel as the loop and the commands need it: the interface of ``NodeKernel``, a planning kernel and the tests' kernel.

All methods block, and are called in the kernel's thread alone (``KernelThread.call``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ipvsproxy.model.kernel import InterfaceAddress, Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import Connections, VirtualServerKey

SERVERS_AT_ONCE = 50
"""The virtual servers whose real servers are read at once: about 5 ms, for which programming may have to wait."""


class Kernel(Protocol):
    """Reads and programs the kernel."""

    def observe(self, sets: Collection[str], families: Collection[Family], sysctls: Iterable[str]) -> Observation:
        """Read everything: these sets, the rules of these families, these settings (paths), and all other objects.

        A part that cannot be read is None, and has a sentence in ``errors``.
        """

    def poll(
        self, sets: Sequence[str], families: Collection[Family], sysctls: Iterable[str], *, thorough: bool, whole: bool
    ) -> Iterator[Observation]:
        """The same part by part, each read when it is asked for. Unless ``thorough``, only parts that may have changed.

        Unless ``whole``, changes of virtual servers that cannot be seen cheaply are left out.
        """

    def interface_addresses(self) -> tuple[InterfaceAddress, ...]:
        """The addresses on all interfaces but our device.

        Raises:
            KernelError: they could not be read.
        """

    def connections(
        self, keys: Collection[VirtualServerKey]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None]:
        """The connection counts of these virtual servers; None for a virtual server whose counts could not be read."""

    def why_unusable(self, scheduler: str) -> str:
        """The reason why no virtual server can have this scheduler, by an attempt; empty if it can.

        Raises:
            KernelError: the kernel could not answer now.
        """

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in their order, whatever becomes of each; at most one is about an object.

        Returns their outcomes in that order. An operation on several objects may have several outcomes, if not all objects fared
        alike; together these are about each object once.
        """


class ReadableKernel(Protocol):
    """Reads the kernel, for commands that change nothing. The methods are those of ``Kernel``."""

    def observe(self, sets: Collection[str], families: Collection[Family], sysctls: Iterable[str]) -> Observation:
        """As ``Kernel``."""

    def interface_addresses(self) -> tuple[InterfaceAddress, ...]:
        """As ``Kernel``."""

    def connections(
        self, keys: Collection[VirtualServerKey]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None]:
        """As ``Kernel``."""

    def why_missing(self, scheduler: str) -> str:
        """As ``why_unusable`` of ``Kernel``, as far as the files of modules show it, without an attempt."""

    def read_timeouts(self) -> Timeouts:
        """The IPVS connection timeouts.

        Raises:
            KernelError: they could not be read.
        """
