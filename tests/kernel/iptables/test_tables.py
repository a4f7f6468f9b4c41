"""What the kernel shows of the tables of iptables without a program."""

import pathlib
import subprocess

import pytest

from ipvsproxy.kernel.base import sockopt
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import tables as iptables_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey

STRANGE = ChainKey("nat", "STRANGE")


@pytest.mark.usefixtures("fresh_namespace")
@pytest.mark.parametrize("family", Family)
def test_only_chains_of_the_family_in_question_count(family: Family) -> None:
    command = "iptables-nft" if family is Family.IPV4 else "ip6tables-nft"
    tried = subprocess.run([command, "-t", "nat", "-N", "STRANGE"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel has no tables of {command}: {tried.stderr.strip()}")
    other = Family.IPV6 if family is Family.IPV4 else Family.IPV4
    assert iptables_tables.has_chain(family, lambda key: key == STRANGE)
    assert not iptables_tables.has_chain(family, lambda key: key == ChainKey("filter", "STRANGE"))
    assert not iptables_tables.has_chain(other, lambda _: True)


def test_an_answer_that_is_cut_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockopt, "ask", lambda *_: b"nat\0")
    with pytest.raises(KernelError, match="the answer is incomplete"):
        iptables_tables.digest(Family.IPV4, "nat")


def test_names_of_tables_that_cannot_be_read_are_an_error_and_no_list_means_no_table(tmp_path: pathlib.Path) -> None:
    (tmp_path / "thread-self/net/ip_tables_names").mkdir(parents=True)
    with pytest.raises(KernelError, match="ip_tables_names"):
        iptables_tables.names(Family.IPV4, tmp_path)
    assert iptables_tables.names(Family.IPV6, tmp_path) == ()
