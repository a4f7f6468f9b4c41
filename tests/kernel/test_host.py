"""Tests how kernel versions and missing requirements are found. Only one test uses the real process file system."""

import enum
import errno
import os
import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel import host
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS
from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import SetType
from tests.support import fake_netlink
from tests.support.old_kernel import OLD_KERNELS, OldSocket
from tests.support.programs import make_program


class StrangeType(enum.StrEnum):
    """A set type that no kernel has."""

    NONE = "hash:none"


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> pathlib.Path:
    """A stand-in for ``/proc``, as on a host that meets all requirements."""
    files = {
        "sys/net/ipv4/vs/conntrack": "1\n",
        "self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n",
        "thread-self/net/ip_vs": "IP Virtual Server version 1.2.1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(("text", "version"), [("5.15.0-91-generic", (5, 15)), ("6.1.176", (6, 1)), ("6.12-rc1", (6, 12))])
def test_the_kernel_version_consists_of_the_first_two_numbers_of_the_release(
    monkeypatch: pytest.MonkeyPatch, text: str, version: tuple[int, int]
) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(release=text))
    assert host.kernel_version() == version


def test_nothing_is_reported_as_missing_on_a_host_that_meets_all_requirements(proc: pathlib.Path) -> None:
    assert host.missing_privileges(proc) == host.missing_features(proc) == ()


def test_missing_privileges_are_reported_with_a_way_to_fix_them(proc: pathlib.Path) -> None:
    (proc / "self/status").write_text("CapEff:\t000001ffffffefff\n")
    (missing,) = host.missing_privileges(proc)
    assert str(missing) == (
        "this process may not change the network (it has no CAP_NET_ADMIN): "
        "run it as root, in a container with privileged: true, or with CAP_NET_ADMIN after --init-only"
    )
    (proc / "self/status").write_text("CapEff:\t0000000000003000\n")
    assert host.missing_privileges(proc) == ()


def test_the_datagram_library_is_required_if_raw_sockets_cannot_be_opened(proc: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (proc / "self/status").write_text("CapEff:\t0000000000001000\n")
    (missing,) = host.missing_privileges(proc, library=tmp_path / "datagram.so")
    assert "it has no CAP_NET_RAW" in missing.what
    assert "with a C compiler" in missing.remedy
    (tmp_path / "datagram.so").touch()
    assert host.missing_privileges(proc, library=tmp_path / "datagram.so") == ()


def test_features_that_depend_on_ipvs_are_not_reported_separately_if_ipvs_is_missing(proc: pathlib.Path) -> None:
    (proc / "thread-self/net/ip_vs").unlink()
    (proc / "sys/net/ipv4/vs/conntrack").unlink()
    (missing,) = host.missing_features(proc)
    assert missing.what == "this kernel has no IPVS (/proc/net/ip_vs does not exist)"
    assert "modprobe ip_vs" in missing.remedy


def test_ipvs_without_connection_tracking_is_reported(proc: pathlib.Path) -> None:
    (proc / "sys/net/ipv4/vs/conntrack").unlink()
    (missing,) = host.missing_features(proc)
    assert "CONFIG_IP_VS_NFCT" in missing.remedy


def test_all_missing_modules_are_loaded_by_one_run_of_modprobe(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        *(f"modprobe: WARNING: Module {name} not found in directory /lib/modules/6.1" for name in ("ip_vs", "dummy")),
        "",
        "EPERM",
    )
    said = "".join(f'echo "{line}" >&2\n' for line in lines)
    make_program(tmp_path, "modprobe", f'echo "$@" >> {tmp_path}/arguments\n{said}exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "module/xt_set").mkdir(parents=True)
    assert host.load_modules(("ip_vs", "xt_set", "dummy"), tmp_path) == "modprobe says: it finds no module ip_vs, dummy; EPERM"
    assert (tmp_path / "arguments").read_text() == "-a ip_vs dummy\n"


def test_modprobe_is_not_run_if_all_modules_are_loaded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module/ip_vs").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.load_modules(("ip_vs",), tmp_path) == ""


@pytest.mark.parametrize(
    ("version", "state", "names"),
    [
        ((4, 18), ModuleState.LOADABLE, ("nf_conntrack_ipv4", "nf_conntrack_ipv6")),
        ((4, 18), ModuleState.MISSING, ()),
        ((4, 19), ModuleState.LOADABLE, ()),
    ],
)
def test_a_kernel_before_4_19_gets_the_conntrack_module_of_each_family_if_the_module_exists(
    version: tuple[int, int], state: ModuleState, names: tuple[str, ...]
) -> None:
    assert host.modules_of_older_kernels(version, lambda _name: state) == names


def test_a_host_without_modprobe_is_not_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.load_modules(sys=tmp_path) == "modprobe is not in PATH"


def test_an_error_is_reported_if_modprobe_cannot_be_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modprobe").write_bytes(b"\x7fELF")
    (tmp_path / "modprobe").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.load_modules(sys=tmp_path) == f"{tmp_path}/modprobe: Exec format error"


def test_the_kernel_version_and_processor_count_of_the_real_host_are_read() -> None:
    assert host.kernel_version() > (2, 6)
    assert host.processor_count() >= 1


@pytest.mark.checklist(94)
def test_no_set_type_is_missing_if_ipset_has_a_suitable_revision_of_each_type() -> None:
    content = bytes(4) + fake_netlink.attribute(4, bytes([5])) + fake_netlink.attribute(10, bytes([0]))
    socket = fake_netlink.FakeSocket(lambda data: [fake_netlink.message(fake_netlink.sequences(data)[0], content)])
    assert host.missing_set_types(lambda _protocol: socket) == ()


@pytest.mark.checklist(94)
def test_all_set_types_count_as_missing_if_ipset_refuses_our_protocol_version() -> None:
    ipset_err_protocol = 4097
    missing = host.missing_set_types(fake_netlink.refusing(ipset_err_protocol))
    assert len(missing) == len(SetType) * len(Family)
    assert str(missing[0]).startswith("this kernel has no ipset type hash:ip for IPv4: run modprobe ip_set_hash_ip on the host")


@pytest.mark.checklist(94)
def test_only_ipset_itself_is_reported_as_missing_if_the_kernel_has_no_ipset() -> None:
    (missing,) = host.missing_set_types(fake_netlink.refusing(errno.ENOENT))
    assert missing.what == "this kernel has no ipset (No such file or directory)"
    assert "kernel" in missing.remedy


def test_after_a_lost_answer_no_set_type_counts_as_missing() -> None:
    with pytest.raises(KernelError, match="find hash:ip"):
        host.missing_set_types(lambda _protocol: fake_netlink.FakeSocket(lambda _: []))


@pytest.mark.checklist(94)
@pytest.mark.usefixtures("network_namespace")
def test_set_types_that_the_kernel_does_not_have_are_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {missing.what for missing in host.missing_set_types()}
    assert not any("hash:ip," in what for what in here)
    monkeypatch.setattr("ipvsproxy.kernel.host.SetType", StrangeType)
    assert [missing.what for missing in host.missing_set_types()] == [
        f"this kernel has no ipset type hash:none for {family.label}" for family in Family
    ]


def write_settings(root: pathlib.Path, value: str) -> None:
    for path in INDISPENSABLE_SETTINGS:
        (root / "sys" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / path).write_text(f"{value}\n")


@pytest.mark.parametrize(("value", "writable", "is_missing"), [("0", False, True), ("0", True, False), ("1", False, False)])
def test_a_required_kernel_setting_must_be_on_or_writable(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, value: str, writable: bool, is_missing: bool
) -> None:
    write_settings(tmp_path, value)
    # for root, os.access returns False only on a read-only mount
    monkeypatch.setattr(os, "access", lambda _path, _mode: writable)
    found = host.missing_settings(tmp_path)
    assert len(found) == (len(INDISPENSABLE_SETTINGS) if is_missing else 0)
    assert all("--init-only" in one.remedy for one in found)


def test_a_kernel_setting_that_cannot_be_read_at_the_moment_does_not_count_as_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path, "0")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert len(host.missing_settings(tmp_path)) == len(INDISPENSABLE_SETTINGS)
    monkeypatch.setattr(pathlib.Path, "read_text", Mock(side_effect=OSError(errno.ENFILE, os.strerror(errno.ENFILE))))
    assert host.missing_settings(tmp_path) == ()


# Features that some supported kernels do not have.


def lists_connections(data: bytes) -> list[fake_netlink.Answer]:
    """The answer of Linux 6.12 to a request for the list of connections.

    Without a filter, the answer has one flow, and more messages follow.
    """
    ((_, _, _, sequence, payload),) = fake_netlink.split(data)
    has_filter = len(payload) > 4
    return [fake_netlink.error(sequence, errno.EINVAL) if has_filter else fake_netlink.message(sequence, bytes(24))]


def names(version: tuple[int, int], connect: Callable[[int], object], *, needs_arrival: bool = True) -> list[str]:
    return [one.name for one in host.lacking(version, needs_arrival=needs_arrival, connect=connect)]  # type: ignore[arg-type]  # fake objects are passed


@pytest.mark.parametrize(
    ("answers", "version", "lacking"),
    [
        ("", (6, 12), []),
        ("5.4", (5, 4), ["arrival-behind-ipvs", "filtered-connections", "prompt-reuse"]),
        ("4.18", (4, 18), ["filtered-routes", "arrival-behind-ipvs", "filtered-connections", "prompt-reuse"]),
        ("5.4", (5, 5), ["filtered-connections", "prompt-reuse"]),
        ("", (5, 9), []),
    ],
)
def test_the_program_detects_at_its_start_which_workarounds_for_older_kernels_it_needs(
    answers: str, version: tuple[int, int], lacking: list[str]
) -> None:
    opened: list[fake_netlink.FakeSocket] = []

    def connect(_protocol: int) -> fake_netlink.FakeSocket | OldSocket:
        opened.append(fake_netlink.FakeSocket(lists_connections))
        return OldSocket(opened[-1], OLD_KERNELS[answers]) if answers else opened[-1]

    assert names(version, connect) == lacking
    assert [one for one in lacking if one != "arrival-behind-ipvs"] == names(version, connect, needs_arrival=False)
    assert all(one.closed for one in opened)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ERANGE, errno.EPERM])
def test_a_kernel_counts_as_supporting_filters_if_it_refuses_an_impossible_filter_or_does_not_answer(number: int) -> None:
    """Linux 5.10 refuses the impossible filter with EOPNOTSUPP (``ctnetlink_parse_filter``).

    Linux 6.1 refuses it with EINVAL, because of its policy for masks.
    """
    assert names((5, 10), fake_netlink.refusing(number)) == []


def test_no_module_counts_as_missing_after_an_answer_was_lost() -> None:
    def connect(protocol: int) -> fake_netlink.FakeSocket:
        if not protocol:
            raise OSError(errno.EMFILE, "too many open files")
        return fake_netlink.FakeSocket(lambda _data: [])

    assert names((6, 1), connect) == []
