"""Tables of kube-proxy's nftables mode, with the real nf_tables of this machine in a separate network namespace."""

import errno
import pathlib
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base import nft_message
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.nftables.nft_tables import LeftoverTables, TablePlace
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import BaseChain, NftTable
from ipvsproxy.reconcile.removal import leftovers
from tests.kernel.nftables.examples import REAL, load, nft
from tests.support.left_tables import IPV4, IPV6, nftables_mode

pytestmark = REAL
PLACES = pytest.mark.parametrize("place", [IPV4, IPV6], ids=str)


def listed() -> set[str]:
    return {line.removeprefix("table ") for line in nft("list", "tables").splitlines()}


def kube_proxys(place: TablePlace) -> str:
    served, pod = ("10.96.0.10", "10.244.0.5") if place is IPV4 else ("fd00:10:96::10", "fd00:10:244::5")
    return nftables_mode(place.family, served={(served, 80): (pod, 8080)}, refused={served: 81})


def is_left(table: NftTable) -> bool:
    return not leftovers.why_foreign(table)


@PLACES
def test_kube_proxys_table_is_recognised_and_removed_and_all_other_tables_stay(place: TablePlace) -> None:
    load("table ip nat { chain services { }\n }\ntable inet kube-proxy { }\n" + kube_proxys(IPV4) + kube_proxys(IPV6))
    subject = LeftoverTables()
    table = subject.read(place)
    assert table is not None
    assert (str(table), table.comment) == (place.table, "rules for kube-proxy")
    assert table.chains["nat-prerouting"] == BaseChain("nat", "prerouting", -100)
    assert table.chains["filter-input"] == BaseChain("filter", "input", -110)
    assert table.chains["services"] is None
    assert "service-ips" in table.maps
    assert "cluster-ips" not in table.maps
    assert leftovers.why_foreign(table) == ""
    before = listed()
    subject.remove(place, is_left)
    assert before - listed() == {place.table}
    assert subject.read(place) is None
    subject.remove(place, is_left)


@PLACES
def test_a_table_that_kube_proxy_has_not_created_is_not_removed(place: TablePlace) -> None:
    load(f"table {place.table} {{ chain services {{ }}\n }}\n")
    subject = LeftoverTables()
    table = subject.read(place)
    assert table is not None
    assert leftovers.why_foreign(table)
    subject.remove(place, is_left)
    assert place.table in listed()


def test_a_table_that_has_changed_is_read_again_before_its_removal() -> None:
    load(kube_proxys(IPV4))
    asked: list[str] = []

    def replace_first(table: NftTable) -> bool:
        asked.append(table.comment)
        if len(asked) == 1:
            load('delete table ip kube-proxy\ntable ip kube-proxy { comment "somebody else"; }\n')
            return True
        return is_left(table)

    LeftoverTables().remove(IPV4, replace_first)
    assert asked == ["rules for kube-proxy", "somebody else"]
    assert listed() == {"ip kube-proxy"}


def test_the_removal_of_a_table_fails_if_other_programs_keep_changing_tables() -> None:
    load(kube_proxys(IPV4))

    def disturb(_: NftTable) -> bool:
        load("add table ip disturbing\ndelete table ip disturbing\n")
        return True

    with pytest.raises(KernelError, match="other programs keep changing"):
        LeftoverTables().remove(IPV4, disturb)
    assert "ip kube-proxy" in listed()


@pytest.mark.parametrize(("number", "is_absent"), [(errno.EINVAL, True), (errno.ENOBUFS, False)])
def test_a_failed_read_of_tables_is_an_error_unless_the_kernel_lacks_nf_tables(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, *, is_absent: bool
) -> None:
    generation = Mock(side_effect=KernelError(action="read the generation of nf_tables", errno=number))
    monkeypatch.setattr(nft_message, "generation", generation)
    subject = LeftoverTables(tmp_path)
    if is_absent:
        assert subject.read(IPV4) is None
        assert LeftoverTables(tmp_path).read(IPV6) is None
        assert generation.call_count == 1, "each question makes such a kernel start modprobe"
        (tmp_path / "sys/module/nf_tables").mkdir(parents=True)
        assert subject.read(IPV4) is None
        assert generation.call_count == 2, "it shows now"
        return
    with pytest.raises(KernelError):
        subject.read(IPV4)


def test_a_leftover_table_is_named_by_its_family_and_by_its_nft_name() -> None:
    assert (str(IPV4), IPV4.where, IPV4.variant) == ("nftables IPv4", "the table ip kube-proxy", "nftables")
    assert (str(IPV6), IPV6.where) == ("nftables IPv6", "the table ip6 kube-proxy")
    assert [place.family for place in (IPV4, IPV6)] == list(Family)
