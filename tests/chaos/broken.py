"""Removes one fix from the program, to prove that the chaos tests then find the fault.

Each function removes one fix, but only in the process that calls the function.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from tests.chaos.moments import Moment


def _give_up_families() -> None:
    """Treat every failed trial write as a proof that the IP family is not supported."""
    from ipvsproxy.kernel.iptables import iptables_driver as iptables  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.kernel.iptables import rules_driver  # noqa: PLC0415 - imported only in the process that needs it

    usual = rules_driver.RulesDriver.try_writing

    def try_writing(self: rules_driver.RulesDriver, family: Any) -> iptables.Refusal | None:
        refusal = usual(self, family)
        return refusal and iptables.Refusal(refusal.reason, is_certain=True)

    rules_driver.RulesDriver.try_writing = try_writing  # type: ignore[method-assign]  # replaced on purpose


def _wait_for_all_parts() -> None:
    """Write nothing to the kernel until the whole kernel state has been read."""
    from ipvsproxy.daemon.loop import reader  # noqa: PLC0415 - imported only in the process that needs it

    usual = reader.KernelReader.observe

    async def observe(self: reader.KernelReader) -> None:
        await usual(self)
        if self.unreadable:
            await asyncio.Event().wait()

    reader.KernelReader.observe = observe  # type: ignore[method-assign]  # replaced on purpose


def _grant_no_grace() -> None:
    """Stop serving node ports on an address of the node as soon as the address is gone."""
    from ipvsproxy.translate import view  # noqa: PLC0415 - imported only in the process that needs it

    view.GRACE_S = 0.0


def _bear_silence() -> None:
    """Tolerate a silent watch for an unlimited time."""
    from ipvsproxy.daemon.sources import reflector  # noqa: PLC0415 - imported only in the process that needs it

    reflector.LONGEST_SILENCE_S = math.inf


def _end_with_reload() -> None:
    """End the process after a failed reload, as the program does if an HTTP server cannot listen on its port."""
    from ipvsproxy.daemon import app  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.daemon.base.cannot_start import CannotStartError  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.daemon.http import server  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.kernel.base.errors import KernelError  # noqa: PLC0415 - imported only in the process that needs it

    usual = app._Node._reconfigure

    async def reconfigure(self: app._Node, *arguments: Any) -> None:
        try:
            await usual(self, *arguments)
        except (CannotStartError, KernelError) as error:
            raise server.BindError(str(error)) from error

    app._Node._reconfigure = reconfigure  # type: ignore[method-assign, assignment]  # replaced on purpose


WITHOUT_MEND: Mapping[Moment, Callable[[], None]] = {
    Moment.LOCKED_RESTART: _give_up_families,
    Moment.NATIVE_RULE: _wait_for_all_parts,
    Moment.BLINKING_ADDRESS: _grant_no_grace,
    Moment.SILENT_PROXY: _bear_silence,
    Moment.FULL_RELOAD: _end_with_reload,
}
