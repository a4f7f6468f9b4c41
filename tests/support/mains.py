"""Main functions for ``Program(main=...)``; each changes something in its own process, then runs the program."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

from ipvsproxy import cli
from ipvsproxy.kernel.iptables import process

READ_ONLY_SETTINGS = "for dir in /proc/sys /sys; do mount --bind $dir $dir && mount -o remount,bind,ro $dir || exit 9; done"
OWN_SYS = "mount -t sysfs none /sys"
"""After this command, ``/sys`` shows the interfaces of this network namespace, as in a pod in the host network."""
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION = 0x20080522
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)


def answering_long(flags: Sequence[str]) -> int:
    """Run the program so that it still answers for 5 s after a signal, long enough for a request on a busy machine."""
    from ipvsproxy.daemon.process import lifecycle  # noqa: PLC0415 - imported only in the process that needs it

    lifecycle.LAST_ANSWERS_S, lifecycle.STOP_WITHIN_S = 5.0, 60.0
    return cli.main(flags)


def without_net_admin(flags: Sequence[str]) -> int:
    _keep_capabilities(~(1 << process.NET_ADMIN))
    return cli.main(flags)


def unprivileged_with_own_sys(flags: Sequence[str]) -> int:
    """Run the program as in the second container of manifests/base: it has one capability, and cannot write kernel settings."""
    _mount(f"{OWN_SYS}; {READ_ONLY_SETTINGS}")
    # After an installation without a compiler, ipvsproxy also needs net_raw.
    kept = 1 << process.NET_ADMIN | (0 if process.LIBRARY.exists() else 1 << process.NET_RAW)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for number in range(64):
        if not kept >> number & 1:
            _libc.prctl(_PR_CAPBSET_DROP, number)  # the call fails for capabilities that this kernel does not have
    _keep_capabilities(kept)
    return cli.main(flags)


def with_own_sys(flags: Sequence[str]) -> int:
    _mount(OWN_SYS)
    return cli.main(flags)


def with_read_only_settings(flags: Sequence[str]) -> int:
    _mount(READ_ONLY_SETTINGS)
    return cli.main(flags)


def first_process_without_modules(flags: Sequence[str]) -> int:
    """Run the program as the first process of a container: by default, no signal ends such a process.

    ``/sys/module`` is empty, so the program runs modprobe.
    """
    _mount("mount -t tmpfs none /sys/module")
    _unshare(_CLONE_NEWPID)
    inner = os.fork()
    if inner == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(cli.main(flags))
    return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])


def _mount(script: str) -> None:
    """Enter a new mount namespace, and run a shell script that mounts something in this namespace."""
    _unshare(_CLONE_NEWNS)
    subprocess.run(("sh", "-ec", f"mount --make-rprivate / && {script}"), check=True)


def _keep_capabilities(mask: int) -> None:
    """Drop all effective, permitted and inheritable capabilities that are not in this mask."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    _libc.capget(header, sets)
    for number in range(len(sets)):  # three sets of the capabilities 0 to 31, then three sets of the capabilities from 32 on
        sets[number] &= mask >> (32 * (number // 3)) & 0xFFFFFFFF
    if _libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities stay")


def _unshare(flag: int) -> None:
    if _libc.unshare(flag) != 0:
        raise OSError(ctypes.get_errno(), "no such namespace")
