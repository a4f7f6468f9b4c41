"""The iptables driver of each IP family runs in a separate thread.

These tests show which calls of the driver wait for an iptables program, and for how long.

``test_iptables_driver.py`` covers the input of the programs. ``tests/packets/test_held_lock.py`` shows that Services are
programmed while the iptables programs wait for their lock.
"""

import concurrent.futures
import errno
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import rules_driver
from ipvsproxy.kernel.iptables.rules_driver import RulesDriver
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Skeleton
from tests.kernel.iptables.skeleton_example import SKELETON
from tests.support.programs import make_program

V6 = Skeleton(family=Family.IPV6, chains=SKELETON.chains, jumps=SKELETON.jumps)
PUT, PUT_V6 = Operation(Verb.SET, SKELETON), Operation(Verb.SET, V6)
LONG_S = 60.0
Make = Callable[..., RulesDriver]


@pytest.fixture
def programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Scripts in place of the iptables programs of both families.

    ``iptables-restore`` waits until the test creates the file ``iptables.go``, and ``ip6tables-restore`` waits for
    ``ip6tables.go``.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for command in ("iptables", "ip6tables"):
        make_program(tmp_path, command, "echo iptables v1.8.9")
        make_program(tmp_path, f"{command}-save")
        restore = f"cat >/dev/null; echo $$ >> {tmp_path}/{command}.began"
        make_program(tmp_path, f"{command}-restore", f"{restore}; while [ ! -e {tmp_path}/{command}.go ]; do sleep 0.01; done")
    return tmp_path


@pytest.fixture
def make(programs: pathlib.Path) -> Iterator[Make]:
    """Creates drivers. After the test, the fixture lets all waiting scripts end."""
    made: list[RulesDriver] = []

    def make(patience_s: float | None, on_late_end: Callable[[], None] = lambda: None) -> RulesDriver:
        driver = RulesDriver(chains=SKELETON.chains, jumps=SKELETON.jumps, patience_s=patience_s, on_late_end=on_late_end)
        made.append(driver)
        return driver

    yield make
    for command in ("iptables", "ip6tables"):
        (programs / f"{command}.go").touch()
    for driver in made:
        driver.close()


def began(programs: pathlib.Path, command: str = "iptables") -> int:
    """How many times a restore program was started."""
    path = programs / f"{command}.began"
    return len(path.read_text().split()) if path.exists() else 0


def apply_until_over(driver: RulesDriver, operation: Operation) -> Outcome:
    """Apply an operation repeatedly until it is no longer in progress, as the reconciler does."""
    for _ in range(2000):
        (outcome,) = driver.apply([operation])
        if outcome.errno != errno.EINPROGRESS:
            return outcome
        time.sleep(0.01)
    raise AssertionError("it never came to an end")


def test_a_write_starts_the_thread_for_rules_if_an_earlier_start_of_the_thread_failed(
    make: Make, programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs / "iptables.go").touch()
    driver = make(None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        (outcome,) = driver.apply([PUT])
    assert outcome.errno == errno.EAGAIN
    assert "can't start new thread" in outcome.error
    assert driver.apply([PUT]) == [Outcome(PUT)]


def test_a_later_attempt_returns_the_outcome_of_a_slow_iptables_program_that_kept_running(
    make: Make, programs: pathlib.Path
) -> None:
    is_over = threading.Event()
    driver = make(0.05, is_over.set)
    (outcome,) = driver.apply([PUT])
    assert (outcome.operation, outcome.errno) == (PUT, errno.EINPROGRESS)
    assert "waits for the lock of iptables, or hangs" in outcome.error
    (programs / "iptables.go").touch()
    assert is_over.wait(LONG_S)
    assert apply_until_over(driver, PUT) == Outcome(PUT)
    assert began(programs) == 1, "it was not begun a second time"


def test_no_second_iptables_program_of_a_family_is_started_while_the_first_one_is_running(
    make: Make, programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(0.05)
    driver.apply([PUT])
    running = driver._under_way[Family.IPV4]
    with pytest.raises(KernelError) as caught:
        driver.observe(Family.IPV4)
    assert caught.value.errno == errno.EINPROGRESS
    other = Operation(Verb.SET, Skeleton(family=Family.IPV4, chains={}, jumps=()))
    (outcome,) = driver.apply([other])
    assert outcome.errno == errno.EINPROGRESS
    assert driver._under_way[Family.IPV4] is running
    (programs / "iptables.go").touch()
    assert apply_until_over(driver, other) == Outcome(other)
    monkeypatch.setattr(rules_driver, "SHORT_PATIENCE_S", LONG_S)
    driver._patience_s = LONG_S
    assert driver.observe(Family.IPV4).jumps == frozenset(), "the programs of this test list nothing"


def test_a_slow_write_of_rules_in_one_family_does_not_delay_the_other_family(make: Make, programs: pathlib.Path) -> None:
    (programs / "ip6tables.go").touch()
    driver = make(3.0)
    first, second = driver.apply([PUT, PUT_V6])
    assert (first.operation, first.errno) == (PUT, errno.EINPROGRESS)
    assert second == Outcome(PUT_V6)


def test_a_slow_iptables_program_shortens_all_waits_until_one_program_ends_in_time(
    make: Make, programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float | None] = []
    driver = make(0.05)
    monkeypatch.setattr(rules_driver, "SHORT_PATIENCE_S", 0.001)
    wait = concurrent.futures.Future.result

    def result(future: concurrent.futures.Future[object], patience_s: float | None = None) -> object:
        waited_s.append(patience_s)
        return wait(future, patience_s)

    monkeypatch.setattr(concurrent.futures.Future, "result", result)
    driver.apply([PUT])
    driver.apply([PUT])
    assert waited_s == [0.05, 0.001]
    (programs / "iptables.go").touch()
    assert apply_until_over(driver, PUT) == Outcome(PUT)
    monkeypatch.setattr(rules_driver, "SHORT_PATIENCE_S", LONG_S)
    driver._patience_s = LONG_S
    assert driver.apply([PUT]) == [Outcome(PUT)]
    assert driver.apply([PUT]) == [Outcome(PUT)]
    assert driver._slow == set()


def test_rules_can_be_read_even_if_every_write_takes_too_long_and_fails(
    make: Make, programs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver waits for a slow read of the rules, because no later call would use the result of an abandoned read."""
    make_program(programs, "iptables-save", "sleep 0.2")
    make_program(programs, "iptables-restore", "sleep 0.2; echo 'no table mangle' >&2; exit 4")
    driver = make(0.01)
    monkeypatch.setattr(rules_driver, "SHORT_PATIENCE_S", 0.001)
    assert "no table mangle" in apply_until_over(driver, PUT).error
    driver._patience_s = LONG_S
    assert driver.observe(Family.IPV4).jumps == frozenset(), "the programs of this test list nothing"
    (outcome,) = driver.apply([PUT])
    assert outcome.errno == errno.EINPROGRESS, "a call for a write still waits only briefly"


def test_the_refusal_of_a_family_is_not_certain_if_a_trial_write_takes_too_long(make: Make) -> None:
    driver = make(LONG_S)
    driver.program(Family.IPV4)
    driver._patience_s = 0.5
    refusal = driver.try_writing(Family.IPV4)
    assert refusal is not None
    assert not refusal.is_certain
    driver._patience_s = LONG_S
    assert driver.usable(Family.IPV6) is None


def test_a_failed_iptables_program_has_the_same_outcome_whether_or_not_a_thread_runs_the_program(
    make: Make, programs: pathlib.Path
) -> None:
    make_program(programs, "iptables-restore", "echo 'no table nat' >&2; exit 4")
    driver = make(LONG_S)
    (outcome,) = driver.apply([PUT])
    assert outcome.error == "iptables-restore: no table nat"
    make_program(programs, "ip6tables", "exit 1")
    with pytest.raises(KernelError, match="ip6tables: exit status 1"):
        make(LONG_S).program(Family.IPV6)
    assert make(LONG_S).usable(Family.IPV6) is not None


def test_a_program_is_not_started_again_if_its_version_is_known(make: Make, programs: pathlib.Path) -> None:
    driver = make(LONG_S)
    assert driver.known_program(Family.IPV4) is None
    program = driver.program(Family.IPV4)
    (programs / "iptables").write_text("#!/bin/sh\nexit 1\n")
    assert driver.program(Family.IPV4) == driver.known_program(Family.IPV4) == program


def test_rules_that_contain_a_text_are_found_in_each_family_that_can_be_read(make: Make, programs: pathlib.Path) -> None:
    (programs / "iptables-save").write_text("#!/bin/sh\necho '-A INPUT -j KUBE-X'; echo '-A INPUT -j OTHER'\n")
    (programs / "ip6tables-save").write_text("#!/bin/sh\nexit 1\n")
    assert make(LONG_S).rules_with("KUBE-X", list(Family)) == ["-A INPUT -j KUBE-X"]
