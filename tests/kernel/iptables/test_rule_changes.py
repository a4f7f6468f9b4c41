"""Fingerprints of rules: any change by any program gives another one, packets do not. Both variants, in a fresh namespace."""

import contextlib
import errno
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.rule_changes import RuleChanges
from ipvsproxy.model.net import Family

CASES = [(family, variant) for family in Family for variant in ("nf_tables", "legacy")]
PROGRAMS = {"nf_tables": "nft", "legacy": "legacy"}


def run(family: Family, variant: str, *arguments: str) -> None:
    name = f"{'iptables' if family is Family.IPV4 else 'ip6tables'}-{PROGRAMS[variant]}"
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([name, "-t", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{name} cannot be used on this kernel: {done.stderr.strip()}")


def send_packet(family: Family) -> None:
    with socket.socket(socket.AF_INET if family is Family.IPV4 else socket.AF_INET6, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"x", ("127.0.0.1" if family is Family.IPV4 else "::1", 9))


@pytest.mark.usefixtures("network_namespace")
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_a_change_gives_another_mark_and_a_packet_does_not(family: Family, variant: str) -> None:
    run(family, variant, "nat", "-A", "OUTPUT", "-m", "comment", "--comment", "counts", "-j", "ACCEPT")
    run(family, variant, "filter", "-N", "SOME")
    changes = RuleChanges()
    before = changes.fingerprint(family, variant)
    send_packet(family)
    assert changes.fingerprint(family, variant) == before
    observed = [before]
    for arguments in (
        ("nat", "-I", "OUTPUT", "-j", "RETURN"),
        ("filter", "-A", "SOME", "-j", "RETURN"),
        ("filter", "-F", "SOME"),
        ("nat", "-N", "OTHER"),
    ):
        run(family, variant, *arguments)
        mark = changes.fingerprint(family, variant)
        assert mark not in observed[-1:]
        observed.append(mark)
    changes.close()


@pytest.mark.usefixtures("network_namespace")
def test_the_order_of_rules_counts() -> None:
    for target in ("ACCEPT", "RETURN"):
        run(Family.IPV4, "legacy", "nat", "-A", "OUTPUT", "-j", target)
    before = RuleChanges().fingerprint(Family.IPV4, "legacy")
    run(Family.IPV4, "legacy", "nat", "-D", "OUTPUT", "1")
    run(Family.IPV4, "legacy", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
    assert RuleChanges().fingerprint(Family.IPV4, "legacy") != before


@pytest.mark.parametrize("family", Family)
def test_where_no_socket_is_to_be_had_that_is_an_error_of_the_kernel(family: Family) -> None:
    with every_descriptor_taken(), pytest.raises(KernelError, match=r"table nat: Too many open files") as caught:
        RuleChanges().fingerprint(family, "legacy")
    assert caught.value.errno == errno.EMFILE


@contextlib.contextmanager
def every_descriptor_taken() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_kernel_without_a_mark_is_an_error() -> None:
    with pytest.raises(KernelError, match="read the IPv4 table no-such-table"):
        RuleChanges().fingerprint(Family.IPV4, "legacy", ("no-such-table",))
