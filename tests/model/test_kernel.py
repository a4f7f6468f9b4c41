"""The names and texts of kernel objects, as ipset, ipvsadm and iptables-save print them."""

import pytest

from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.rules import ChainKey, Jump
from ipvsproxy.model.service import NODE_OWNER, Owner, ServiceName
from tests.support import builders

FRONTEND, BACKEND = builders.frontend("10.96.0.10", 443), builders.backend("10.244.0.5", 8443)
FRONTEND_V6 = builders.frontend("fd00::10", 53, Protocol.UDP)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (FRONTEND, "TCP 10.96.0.10:443"),
        (FRONTEND_V6, "UDP [fd00::10]:53"),
        (BACKEND, "10.244.0.5:8443"),
        (ChainKey("nat", "KUBE-SERVICES"), "nat/KUBE-SERVICES"),
        (Jump("nat", "OUTPUT", "KUBE-SERVICES", "portals"), "nat/OUTPUT -> KUBE-SERVICES"),
        (Owner(7, ServiceName("shop", "web")), "shop/web"),
        (NODE_OWNER, "(node)"),
    ],
)
def test_each_kernel_object_has_a_text_for_operators(item: object, text: str) -> None:
    assert str(item) == text


@pytest.mark.parametrize(
    ("observed", "exactly", "at_least"), [("4", True, True), ("5", False, True), ("3", False, False), ("", False, False)]
)
def test_a_setting_with_a_lower_bound_accepts_larger_numbers(observed: str, exactly: bool, at_least: bool) -> None:  # noqa: FBT001 - the arguments come from a parametrize table
    assert Sysctl("x", "4").is_met_by(observed) is exactly
    assert Sysctl("x", "4", at_least=True).is_met_by(observed) is at_least
