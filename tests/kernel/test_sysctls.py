"""Reads and writes kernel settings: one test uses the real folder of settings, and all other tests use a fake folder."""

import errno
import os
import pathlib
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel import sysctls
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import TUNNEL_RECORD, Sysctl, parse_record
from ipvsproxy.model.plan import Operation, Outcome, Verb

FORWARD = "net/ipv4/ip_forward"


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that contains one kernel setting, which is off."""
    setting = tmp_path / "sys" / FORWARD
    setting.parent.mkdir(parents=True)
    setting.write_text("0\n")
    return tmp_path / "sys"


def write(root: pathlib.Path, path: str, value: str) -> Outcome:
    (outcome,) = SysctlDriver(root).apply([Operation(Verb.SET, Sysctl(path, value))])
    return outcome


def test_settings_that_do_not_exist_are_omitted_when_settings_are_read(root: pathlib.Path) -> None:
    assert SysctlDriver(root).observe(["net/ipv4/none", FORWARD]) == {FORWARD: "0"}


def test_a_reading_omits_settings_that_the_process_is_not_permitted_to_read(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert SysctlDriver(root).observe([FORWARD]) == {}


def test_a_setting_given_as_an_absolute_path_is_read_from_that_path(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "hashsize")
    pathlib.Path(path).write_text("131071\n")
    assert write(root, path, "131072").error == ""
    assert SysctlDriver(root).observe([path]) == {path: "131072"}


def test_the_operation_remove_does_not_change_the_value_of_a_setting(root: pathlib.Path) -> None:
    operation = Operation(Verb.REMOVE, Sysctl(FORWARD, "1"))
    assert SysctlDriver(root).apply([operation]) == [Outcome(operation)]
    assert SysctlDriver(root).observe([FORWARD]) == {FORWARD: "0"}


def test_a_setting_that_does_not_exist_is_not_created(root: pathlib.Path) -> None:
    outcome = write(root, "net/ipv4/none", "1")
    assert outcome.errno == errno.ENOENT
    assert outcome.error == (
        "net/ipv4/none = 1: No such file or directory; "
        "this kernel has no such setting: load the module that provides it, or use a kernel that has it"
    )
    assert not (root / "net/ipv4/none").exists()


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EROFS, "mounted read-only"), (errno.EACCES, "--init-only"), (errno.EINVAL, "this value")]
)
def test_the_error_of_a_refused_setting_says_how_to_fix_it(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(number, os.strerror(number))))
    outcome = write(root, FORWARD, "1")
    assert outcome.errno == number
    assert remedy in outcome.error
    assert "\n" not in outcome.error


def test_an_unreadable_setting_raises_an_error(root: pathlib.Path) -> None:
    with pytest.raises(KernelError) as caught:
        SysctlDriver(root).observe(["net/ipv4"])
    assert caught.value.errno == errno.EISDIR
    assert caught.value.action == "read net/ipv4"


def test_the_flags_of_a_device_are_set_by_ioctl_because_the_folder_sys_may_be_mounted_read_only(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bytes]] = []
    monkeypatch.setattr("fcntl.ioctl", lambda _, request, argument: asked.append((request, argument)))
    assert write(root, "/sys/class/net/tunl0/flags", "0x81").error == ""
    assert asked == [(0x8914, b"tunl0".ljust(16, b"\0") + b"\x81" + bytes(23))]


RP_FILTER = Sysctl("net/ipv4/conf/all/rp_filter", "0", for_tunnels=True)


@pytest.fixture
def tunnel(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of settings. Its file ``ifalias`` stands in for the alias of the tunnel device."""
    alias = root / "ifalias"
    alias.write_text("\n")
    monkeypatch.setattr(sysctls, "TUNNEL_RECORD", str(alias))
    monkeypatch.setattr(sysctls, "_set_alias", alias.write_text)
    (root / RP_FILTER.path).parent.mkdir(parents=True)
    (root / RP_FILTER.path).write_text("2\n")
    return root


def apply(root: pathlib.Path, verb: Verb, setting: Sysctl = RP_FILTER) -> str:
    (outcome,) = SysctlDriver(root).apply([Operation(verb, setting)])
    return outcome.error


def test_the_removal_of_a_setting_for_tunnels_restores_the_former_value_of_the_setting(tunnel: pathlib.Path) -> None:
    assert apply(tunnel, Verb.SET) == ""
    assert (tunnel / "ifalias").read_text() == "ipvsproxy found net/ipv4/conf/all/rp_filter=2"
    assert (tunnel / RP_FILTER.path).read_text() == "0\n"
    for _ in range(2):
        assert apply(tunnel, Verb.REMOVE) == ""
        assert ((tunnel / RP_FILTER.path).read_text(), (tunnel / "ifalias").read_text()) == ("2\n", "")


def test_a_setting_that_another_program_has_changed_is_not_restored(tunnel: pathlib.Path) -> None:
    apply(tunnel, Verb.SET)
    (tunnel / RP_FILTER.path).write_text("1\n")
    assert apply(tunnel, Verb.REMOVE) == ""
    assert ((tunnel / RP_FILTER.path).read_text(), (tunnel / "ifalias").read_text()) == ("1\n", "")


def test_no_setting_for_tunnels_is_written_if_its_former_value_cannot_be_recorded(tunnel: pathlib.Path) -> None:
    (tunnel / "ifalias").write_text("uplink\n")
    assert "the tunnel device has the alias of another program: uplink" in apply(tunnel, Verb.SET)
    assert apply(tunnel, Verb.REMOVE) == ""
    assert ((tunnel / RP_FILTER.path).read_text(), (tunnel / "ifalias").read_text()) == ("2\n", "uplink\n")


def test_the_former_value_of_a_setting_stays_recorded_if_the_value_cannot_be_restored(
    tunnel: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(tunnel, Verb.SET)
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    assert "mounted read-only" in apply(tunnel, Verb.REMOVE)
    assert parse_record((tunnel / "ifalias").read_text()) == {RP_FILTER.path: "2"}


def test_the_former_value_of_a_setting_stays_recorded_if_the_setting_cannot_be_read(tunnel: pathlib.Path) -> None:
    apply(tunnel, Verb.SET)
    (tunnel / RP_FILTER.path).unlink()
    (tunnel / RP_FILTER.path).mkdir()
    assert "Is a directory" in apply(tunnel, Verb.REMOVE)
    assert parse_record((tunnel / "ifalias").read_text()) == {RP_FILTER.path: "2"}


def test_a_packet_capture_on_a_tunnel_device_does_not_change_the_flags_that_are_restored(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = Sysctl("/sys/class/net/tunl0/flags", "0x81", for_tunnels=True)
    files = {TUNNEL_RECORD: "", flags.path: "0x180"}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, **_: files[str(path)])
    monkeypatch.setattr(sysctls, "_set_alias", lambda alias: files.update({TUNNEL_RECORD: alias}))
    monkeypatch.setattr(sysctls, "_set_flags", lambda _, value: files.update({flags.path: hex(value | 0x100)}))
    apply(root, Verb.SET, flags)
    assert flags.is_met_by(SysctlDriver(root).observe([flags.path])[flags.path])
    apply(root, Verb.REMOVE, flags)
    assert files == {TUNNEL_RECORD: "", flags.path: "0x180"}


def test_a_device_alias_that_is_not_text_counts_as_written_by_another_program(tunnel: pathlib.Path) -> None:
    (tunnel / "ifalias").write_bytes(b"B\xfcro\n")
    assert list(SysctlDriver(tunnel).observe(["ifalias"]).values()) == ["B\ufffdro"]
    assert "the tunnel device has the alias of another program" in apply(tunnel, Verb.SET)
    assert apply(tunnel, Verb.REMOVE) == ""


def test_a_damaged_record_of_former_settings_is_an_error(tunnel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Sysctl("/sys/class/net/tunl0/flags", "0x81", for_tunnels=True)
    damaged = f"ipvsproxy found {flags.path}=up"
    texts = {str(tunnel / "ifalias"): damaged, flags.path: "0x81"}
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, **_: texts[str(path)])
    assert "the recorded value cannot be read" in apply(tunnel, Verb.REMOVE, flags)
