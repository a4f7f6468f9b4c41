"""The lock of a node: which process gets the lock and which process is refused.

Also covers other programs' sockets that have the name of the lock.
"""

import contextlib
import itertools
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import types
from subprocess import PIPE

import pytest

from ipvsproxy.kernel import instance
from ipvsproxy.kernel.base.errors import KernelError

NAME = f"\0ipvsproxy-test-{os.getpid()}"
HOLD = """
import sys
from ipvsproxy.kernel import instance
held = instance.Instance("\\0" + sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_an_error_that_names_the_first_process() -> None:
    with contextlib.closing(instance.Instance(NAME)) as first:
        assert first.squatter == ""
        with pytest.raises(KernelError) as caught:
            instance.Instance(NAME)
        assert caught.value.detail == (
            f"another ipvsproxy (process {os.getpid()}) is running in this network namespace; stop it first"
        )
    instance.Instance(NAME).close()


def test_the_arguments_of_the_running_process_can_be_read_until_it_is_killed(tmp_path: pathlib.Path) -> None:
    assert instance.running(NAME) is None
    program = tmp_path / "ipvsproxy"
    program.write_text(HOLD)
    arguments = [NAME.removeprefix("\0"), "--config=a file.yaml"]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path.cwd())}
    with subprocess.Popen((sys.executable, program, *arguments), stdin=PIPE, stdout=PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = instance.running(NAME)
        holder.kill()
    assert found == instance.Running(holder.pid, arguments)
    instance.Instance(NAME).close()


def test_a_process_with_another_program_name_or_user_does_not_count_as_a_running_ipvsproxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(instance.Instance(NAME)):
        assert instance.running(NAME) is None  # the program name of this process is pytest, not ipvsproxy
        monkeypatch.setattr(instance, "_owner", lambda _: (os.getpid(), 4711))
        assert instance.running(NAME) is None


def test_files_of_a_process_in_another_container_are_not_mistaken_for_files_of_this_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(instance.Instance(NAME)):
        monkeypatch.setattr(instance, "_owner", lambda _: (0, 0))
        assert instance.running(NAME) == instance.Running(0, None)
        monkeypatch.setattr(instance, "_owner", lambda _: (7, 0))
        monkeypatch.setattr(pathlib.Path, "samefile", lambda *_: False)
        assert instance.running(NAME) == instance.Running(7, None)


def test_a_lock_in_another_network_namespace_is_ignored(request: pytest.FixtureRequest) -> None:
    with contextlib.closing(instance.Instance(NAME)):
        request.getfixturevalue("network_namespace")
        instance.Instance(NAME).close()


def test_the_start_succeeds_if_another_user_has_a_socket_with_the_name_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def credentials(*_: object) -> bytes:
        return struct.pack("3i", 4711, 1000, 1000)

    monkeypatch.setattr(socket.socket, "getsockopt", credentials)
    with contextlib.closing(instance.Instance(NAME)), contextlib.closing(instance.Instance(NAME)) as second:
        assert second.squatter == "a process of user 1000"


def test_the_start_succeeds_if_a_socket_with_the_name_of_the_lock_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance, "ANSWER_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(NAME)
        with contextlib.closing(instance.Instance(NAME)) as second:
            assert second.squatter == "a process that does not answer"


def test_a_process_that_has_bound_the_name_of_the_lock_is_asked_again_until_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as starting:
        starting.bind(NAME)
        clock = types.SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _pause_s: starting.listen())
        monkeypatch.setattr(instance, "time", clock)
        monkeypatch.setattr(instance, "ANSWER_WITHIN_S", 1)
        with pytest.raises(KernelError, match="another ipvsproxy"):
            instance.Instance(NAME)


def test_dismiss_closes_the_waiting_connections_of_processes_whose_start_was_refused() -> None:
    with contextlib.closing(instance.Instance(NAME)) as first:
        for _ in range(3):
            with pytest.raises(KernelError):
                instance.Instance(NAME)
        assert select.select([first], [], [], 1)[0]
        first.dismiss()
        assert not select.select([first], [], [], 0)[0]
