"""Sets and their entries, with the kinds, names and types of sets."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ipvsproxy.model.kind import DriverName, KernelKind
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.virtual_servers import FirewallMark


class SetType(enum.StrEnum):
    """The ipset types of our sets."""

    ADDRESS = "hash:ip"
    ADDRESS_PORT = "hash:ip,port"
    ADDRESS_PORT_ADDRESS = "hash:ip,port,ip"
    ADDRESS_PORT_NETWORK = "hash:ip,port,net"
    PORT = "bitmap:port"


class SetKind(enum.StrEnum):
    """The kinds of sets; the value of each kind is the name of its IPv4 set.

    The kinds are kube-proxy's 17 sets (pkg/proxy/ipvs/ipset.go in kubernetes/kubernetes) and the sets in ``SCOPE_KINDS``. Each
    entry of ``SCOPE`` gives a mark to the packets that are sent to the entry's address and port. ``NO_LOCAL`` holds the addresses
    and ports that have no endpoint on this node. ``MARKS`` holds the marks of our virtual servers, each encoded in the last four
    bytes of an address.

    With direct return, the entries of ``DIRECT`` give marks to packets from clients outside of the cluster. The entries of
    ``TUNNEL`` give marks to packets that another node has sent by tunnel. ``NOT_DIRECT`` holds the endpoints on nodes without
    direct return, and ``NODES`` holds the addresses of nodes with direct return.
    """

    LOOP_BACK = "KUBE-LOOP-BACK"
    CLUSTER_IP = "KUBE-CLUSTER-IP"
    EXTERNAL_IP = "KUBE-EXTERNAL-IP"
    EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
    LOAD_BALANCER = "KUBE-LOAD-BALANCER"
    LOAD_BALANCER_FIREWALL = "KUBE-LOAD-BALANCER-FW"
    LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
    LOAD_BALANCER_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
    LOAD_BALANCER_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
    NODE_PORT_TCP = "KUBE-NODE-PORT-TCP"
    NODE_PORT_LOCAL_TCP = "KUBE-NODE-PORT-LOCAL-TCP"
    NODE_PORT_UDP = "KUBE-NODE-PORT-UDP"
    NODE_PORT_LOCAL_UDP = "KUBE-NODE-PORT-LOCAL-UDP"
    NODE_PORT_SCTP = "KUBE-NODE-PORT-SCTP-HASH"
    NODE_PORT_LOCAL_SCTP = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
    HEALTH_CHECK_NODE_PORT = "KUBE-HEALTH-CHECK-NODE-PORT"
    IPVS_IPS = "KUBE-IPVS-IPS"
    SCOPE = "KUBE-IPVSPROXY-SCOPE"
    NO_LOCAL = "KUBE-IPVSPROXY-NO-LOCAL"
    MARKS = "KUBE-IPVSPROXY-MARKS"
    DIRECT = "KUBE-IPVSPROXY-DIRECT"
    TUNNEL = "KUBE-IPVSPROXY-TUNNEL"
    NOT_DIRECT = "KUBE-IPVSPROXY-NOT-DIRECT"
    NODES = "KUBE-IPVSPROXY-NODES"


DIRECT_KINDS = frozenset({SetKind.DIRECT, SetKind.TUNNEL, SetKind.NOT_DIRECT, SetKind.NODES})
"""The kinds of sets that only direct return uses."""
SCOPE_KINDS = DIRECT_KINDS | {SetKind.SCOPE, SetKind.NO_LOCAL, SetKind.MARKS}
"""The sets that kube-proxy does not have. They exist only while they are needed for the second scope of a Service
(docs/scopes.md) or for direct return (docs/direct-return.md)."""

NODE_PORT_SETS: Mapping[Protocol, tuple[SetKind, SetKind]] = {
    Protocol.TCP: (SetKind.NODE_PORT_TCP, SetKind.NODE_PORT_LOCAL_TCP),
    Protocol.UDP: (SetKind.NODE_PORT_UDP, SetKind.NODE_PORT_LOCAL_UDP),
    Protocol.SCTP: (SetKind.NODE_PORT_SCTP, SetKind.NODE_PORT_LOCAL_SCTP),
}
"""The two sets of each protocol: all node ports, and the node ports of Services with externalTrafficPolicy Local."""
WITNESS_KINDS = SCOPE_KINDS | {kind for kind in SetKind if kind.startswith("KUBE-NODE-PORT-")}
"""Only entries of these sets prove that a virtual server by firewall mark, or one at a node port, belongs to ipvsproxy."""

_SET_TYPES: Mapping[SetKind, SetType] = {
    SetKind.LOOP_BACK: SetType.ADDRESS_PORT_ADDRESS,
    SetKind.LOAD_BALANCER_SOURCE_IP: SetType.ADDRESS_PORT_ADDRESS,
    SetKind.LOAD_BALANCER_SOURCE_CIDR: SetType.ADDRESS_PORT_NETWORK,
    SetKind.NODE_PORT_TCP: SetType.PORT,
    SetKind.NODE_PORT_LOCAL_TCP: SetType.PORT,
    SetKind.NODE_PORT_UDP: SetType.PORT,
    SetKind.NODE_PORT_LOCAL_UDP: SetType.PORT,
    SetKind.HEALTH_CHECK_NODE_PORT: SetType.PORT,
    SetKind.IPVS_IPS: SetType.ADDRESS,
    SetKind.MARKS: SetType.ADDRESS,
    SetKind.NODES: SetType.ADDRESS,
}
SET_NAME_LIMIT = 31
"""The length of the longest set name that the kernel accepts (IPSET_MAXNAMELEN without the NUL). The names of IPv6 sets are cut
to this length."""
SET_CAPACITY = 65536
"""The ``maxelem`` of every hash set, as in kube-proxy. With another value, each sync of a kube-proxy on this node would fail."""


@KernelKind("set", DriverName.IPSET)
class IpSet(NamedTuple):
    """One of our sets, identified by its kind and its IP family."""

    kind: SetKind
    family: Family

    @property
    def name(self) -> str:
        """The set's name in the kernel, such as ``KUBE-CLUSTER-IP`` or ``KUBE-6-CLUSTER-IP``."""
        if self.family is Family.IPV4:
            return self.kind.value
        return self.kind.value.replace("KUBE-", "KUBE-6-", 1)[:SET_NAME_LIMIT]

    @property
    def type(self) -> SetType:
        """The ipset type of the set."""
        return _SET_TYPES.get(self.kind, SetType.ADDRESS_PORT)

    @property
    def gives_marks(self) -> bool:
        """Whether the entries of this set are ``MarkedEntry`` objects, which carry a mark (the extension ``skbinfo``)."""
        return self.kind in (SetKind.SCOPE, SetKind.DIRECT, SetKind.TUNNEL)

    @property
    def key(self) -> "IpSet":
        """The key that identifies this object among the objects of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


IP_SETS: Mapping[str, IpSet] = {ip_set.name: ip_set for family in Family for kind in SetKind for ip_set in (IpSet(kind, family),)}
"""All sets; the key of a set is its name in the kernel."""


@KernelKind("set", DriverName.IPSET)
class SetCopy(NamedTuple):
    """The larger copy of a set, which exists under another name while the set is being enlarged.

    No rule refers to the copy of the set.
    """

    name: str

    @property
    def key(self) -> "SetCopy":
        """The key that identifies this object among the objects of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


SET_COPY = SetCopy("KUBE-IPVSPROXY-LARGER")
"""The only ``SetCopy``. No set of kube-proxy has the same name. If the copy is observed, a killed process has left the copy
behind."""


class SetEntry(msgspec.Struct, frozen=True, order=True, gc=False):
    """One entry of the set whose name is ``set`` (a key of ``IP_SETS``).

    The type of the set determines which fields of the entry are used. A set of type ``hash:ip`` uses ``address``.
    ``hash:ip,port`` uses ``address``, ``protocol`` and ``port``. ``hash:ip,port,ip`` also uses ``other``, and
    ``hash:ip,port,net`` also uses ``other`` and ``prefix_length``. ``bitmap:port`` uses ``port``. Fields that the type does not
    use have their default values.
    """

    set: str
    address: Address | None = None
    protocol: Protocol | None = None
    port: int = 0
    other: Address | None = None
    prefix_length: int = 0

    def __str__(self) -> str:
        """The entry in the form that ``ipset save`` prints, such as ``10.96.0.1,tcp:443``.

        A range that contains only one address is printed without its prefix length.
        """
        if self.address is None:
            return str(self.port)
        text = str(self.address)
        if self.protocol is not None:
            text += f",{self.protocol.label}:{self.port}"
        if self.other is not None:
            text += f",{self.other}"
            if self.prefix_length and self.prefix_length != self.other.family.bits:
                text += f"/{self.prefix_length}"
        return text


class MarkedEntry(SetEntry, frozen=True, gc=False):
    """An entry that gives packets a mark: the bits in ``mask`` get their values from ``mark``, and all other bits are unchanged.

    A set holds at most one ``MarkedEntry`` for each address, protocol and port: an entry with another mark replaces the earlier
    entry.
    """

    mark: int = 0
    mask: int = 0

    @property
    def skbmark(self) -> int:
        """The mark and the mask in one number, as in the attribute of a message to the kernel."""
        return self.mark << 32 | self.mask

    def __str__(self) -> str:
        return f"{super().__str__()} skbmark {self.mark:#x}/{self.mask:#x}"


class ForeignElement(SetEntry, frozen=True, gc=False):
    """A set element of nf_tables that cannot be one of our entries.

    Only another program can have added a ``ForeignElement``. ``raw`` is the element's key in the kernel's encoding. An element
    without a key matches all keys that have no element (since Linux 5.13). An element without a key names no address or port, so
    it does not show that a virtual server belongs to ipvsproxy.
    """

    raw: bytes = b""

    def __str__(self) -> str:
        """The key of the element in hexadecimal; ``*`` for an element without a key, as in the output of ``nft``."""
        return f"element {self.raw.hex()}" if self.raw else "*"


def mark_entry(key: FirewallMark) -> SetEntry:
    """The set entry which shows that the virtual server for a firewall mark belongs to ipvsproxy."""
    return SetEntry(IpSet(SetKind.MARKS, key.family).name, Address(key.mark.to_bytes(key.family.bits // 8, "big")))


def mark_of(entry: SetEntry) -> FirewallMark | None:
    """The virtual server that an entry of a ``MARKS`` set identifies; None for an entry of another set."""
    ip_set = IP_SETS[entry.set]
    if ip_set.kind is not SetKind.MARKS or entry.address is None:
        return None
    return FirewallMark.of(ip_set.family, int.from_bytes(entry.address, "big") & 0xFFFFFFFF)


@KernelKind("set_entry", DriverName.IPSET, one="set entry", several="set entries")
class SetEntries(NamedTuple):
    """One or more entries of one set. Each set has a table, in which an entry is its own key."""

    set: str
    keys: tuple[SetEntry, ...]

    @classmethod
    def of(cls, *entries: SetEntry) -> "SetEntries":
        """Makes one ``SetEntries`` object with these entries, which all belong to one set."""
        return cls(entries[0].set, entries)

    def only(self, key: SetEntry) -> "SetEntries":
        """Makes a ``SetEntries`` object with only this entry."""
        return SetEntries(self.set, (key,))

    @property
    def key(self) -> SetEntry:
        """The key that identifies this object among the objects of its kind.

        Raises:
            ValueError: this object has several entries, which have different keys.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.set} {', '.join(map(str, self.keys))}"
