"""The screen of ``top``, driven by keys at two sizes; names with markup or control characters are shown as plain text.

``test_top_terminal.py`` tests the screen on a real terminal.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from ipvsproxy.commands import top
from ipvsproxy.commands.top import NoAnswerError
from ipvsproxy.commands.top_data import Picture, Question
from ipvsproxy.commands.top_screen import HelpScreen, MainScreen, ServiceScreen, TopApp
from ipvsproxy.config.settings import Sort
from tests.support import top_pictures
from tests.support.top_pictures import HOSTILE, endpoint, service

SIZES = ((120, 40), (40, 15))
PATIENCE_S = 60.0


class Daemon(top.Daemon):
    """A stand-in for a running ipvsproxy: it answers at once unless it is down, and records the requests."""

    def __init__(self, *services: str) -> None:
        super().__init__("http://127.0.0.1:10249")
        self.services = [service(name, connections_s=number) for number, name in enumerate(services)]
        self.asked: list[Question] = []
        self.is_down = False
        self.service: Picture | None = Picture(
            (self.services[0]["name"], "a note"),
            (endpoint("10.244.0.1:8080"), endpoint("10.244.0.2:8080", reason="it is not ready")),
        )

    async def picture(self, question: Question) -> Picture:
        self.asked.append(question)
        self._answer()
        found = [one for one in self.services if question.filter in one["name"]]
        return top_pictures.picture(*found, page=question.page, pages=3)

    async def details(self, name: str) -> Picture | None:
        self._answer()
        return self.service

    def _answer(self) -> None:
        if self.is_down:
            raise NoAnswerError(f"no ipvsproxy answers on {self.url}: Connection refused")


def _app(daemon: Daemon, interval_s: float = 3600) -> TopApp:
    return TopApp(Question(), interval_s, daemon)


async def _until_true(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await pilot.pause(0.01)


async def _until(pilot: Pilot[None], *texts: str) -> None:
    """Wait until the screen shows every text in ``texts``."""
    await _until_true(pilot, lambda: all(text in _shown(pilot) for text in texts))


@contextlib.asynccontextmanager
async def _screen(daemon: Daemon, interval_s: float = 3600) -> AsyncIterator[Pilot[None]]:
    """The screen of ``top`` after it has drawn its first picture."""
    async with _app(daemon, interval_s).run_test() as pilot:
        await _until(pilot, "demo/web")
        yield pilot


def _shown(pilot: Pilot[None]) -> str:
    """The texts that the screen shows now, without the borders."""
    screen = pilot.app.screen
    texts = [str(one.render()) for one in screen.query(Static) if one.display]
    for table in screen.query(DataTable):
        texts += [str(column.label) for column in table.ordered_columns]
        texts += [str(cell) for row in range(table.row_count) for cell in table.get_row_at(row)]
    return "\n".join(texts)


def _names(pilot: Pilot[None]) -> Sequence[str]:
    table = pilot.app.screen.query_one(DataTable)
    return [str(key.value) for key in table.rows]


async def test_top_draws_its_first_picture_after_a_single_request() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon) as pilot:
        await pilot.pause(0.2)
    assert daemon.asked == [Question()]


@pytest.mark.parametrize("size", SIZES)
async def test_keys_can_sort_services_and_filter_services_and_open_a_service_and_end_the_program(size: tuple[int, int]) -> None:
    daemon = Daemon("demo/web", "demo/dns")
    app = _app(daemon)
    async with app.run_test(size=size) as pilot:
        await _until(pilot, "demo/web", "demo-node: in force", "Conn/s")
        await pilot.press("n")
        await _until(pilot, "by name")
        await pilot.press("n")
        await _until(pilot, "by name, reversed")
        await pilot.press("slash", *"web", "enter")
        await _until(pilot, "reversed: 1,")
        assert _names(pilot) == ["demo/web"]
        await pilot.press("enter")
        await _until(pilot, "10.244.0.2:8080", "OUT: it is not ready", "a note")
        assert isinstance(app.screen, ServiceScreen)
        await pilot.press("escape")
        await _until(pilot, "demo/web")
        await pilot.press("escape")
        await _until(pilot, "demo/dns")
        await pilot.press("h")
        await _until(pilot, "sort by connections")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("q")
        await _until(pilot, "demo/dns")
        await pilot.press("q")
        await _until_true(pilot, lambda: not app.is_running)
    assert app.return_code == 0
    assert list(dict.fromkeys(daemon.asked)) == [
        Question(),
        Question(sort=Sort.NAME),
        Question(sort=Sort.NAME, is_reversed=True),
        Question(sort=Sort.NAME, is_reversed=True, filter="web"),
    ]


async def test_pressing_a_key_for_a_sort_order_requests_this_order_from_the_daemon() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon) as pilot:
        for key, asked in (
            ("r", Question(sort=Sort.CONNECTIONS, is_reversed=True)),
            ("b", Question(sort=Sort.BYTES)),
            ("p", Question(sort=Sort.PACKETS)),
            ("w", Question(sort=Sort.PROBLEMS)),
            ("c", Question(sort=Sort.CONNECTIONS)),
            ("c", Question(sort=Sort.CONNECTIONS, is_reversed=True)),
        ):
            await pilot.press(key)
            await _until(pilot, f"by {asked.sort}" + (", reversed:" if asked.is_reversed else ":"))
            assert daemon.asked[-1] == asked, key


@pytest.mark.parametrize("size", SIZES)
async def test_the_screen_shows_hostile_names_as_plain_text(size: tuple[int, int]) -> None:
    daemon = Daemon(HOSTILE)
    daemon.service = Picture((HOSTILE, f"problem: {HOSTILE}"), (endpoint(HOSTILE, node=HOSTILE, reason=HOSTILE),))
    async with _app(daemon).run_test(size=size) as pilot:
        await _until(pilot, top_pictures.SHOWN[:15])
        await pilot.press("enter")
        await _until(pilot, f"OUT: {top_pictures.SHOWN}", f"problem: {top_pictures.SHOWN}")
        assert all(one.isprintable() or one == "\n" for one in _shown(pilot))


async def test_the_screen_shows_a_lost_connection_and_its_recovery() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon, interval_s=0.02) as pilot:
        daemon.is_down = True
        await _until(pilot, "NO ANSWER", "Connection refused", "demo/web")
        daemon.is_down = False
        daemon.services = [service("demo/other")]
        await _until(pilot, "demo/other")
        assert "NO ANSWER" not in _shown(pilot)


async def test_the_details_of_a_service_show_a_lost_connection_and_the_deletion_of_the_service() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon, interval_s=0.02) as pilot:
        await pilot.press("enter")
        await _until(pilot, "10.244.0.1:8080")
        daemon.is_down = True
        await _until(pilot, "NO ANSWER")
        daemon.is_down = False
        daemon.service = None
        await _until(pilot, "there is no Service demo/web any more", "10.244.0.1:8080")


async def test_a_paused_screen_does_not_change_until_space_is_pressed_again() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon, interval_s=0.02) as pilot:
        await pilot.press("space")
        await _until(pilot, "held: press space to go on")
        asked = len(daemon.asked)
        await pilot.pause(0.2)
        assert len(daemon.asked) <= asked + 1, "one question may have been under way"
        await pilot.press("space")
        await _until_true(pilot, lambda: len(daemon.asked) > asked + 1)
        assert "held" not in _shown(pilot)


async def test_the_cursor_stays_with_its_service_when_the_order_of_rows_changes() -> None:
    daemon = Daemon("demo/a", "demo/b", "demo/c")
    async with _app(daemon, interval_s=0.02).run_test() as pilot:
        await _until(pilot, "demo/c")
        await pilot.press("down")
        daemon.services.reverse()
        daemon.services.insert(0, service("demo/new"))
        await _until(pilot, "demo/new")
        table = pilot.app.screen.query_one(DataTable)
        assert _names(pilot)[table.cursor_row] == "demo/b"


async def test_a_key_adds_and_removes_the_filter_for_services_with_problems() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon) as pilot:
        await pilot.press("slash", *"web", "enter")
        for wanted in ("web problems:only", "web"):
            await pilot.press("exclamation_mark")
            await _until_true(pilot, lambda: daemon.asked[-1].filter == wanted)  # noqa: B023 - called at once
            assert pilot.app.screen.query_one(Input).value == wanted


async def test_the_number_of_columns_depends_on_the_width_of_the_screen() -> None:
    async with _app(Daemon("demo/web")).run_test(size=(40, 15)) as pilot:
        await _until(pilot, "Conn/s")
        assert "Address" not in _shown(pilot)
        await pilot.resize_terminal(120, 40)
        await _until(pilot, "Address", "Type", "Pkt/s")


async def test_a_slash_typed_into_a_filter_is_part_of_the_filter() -> None:
    daemon = Daemon("demo/web")
    async with _screen(daemon) as pilot:
        await pilot.press("slash", *"demo", "slash", *"w")
        await _until_true(pilot, lambda: pilot.app.screen.query_one(Input).value == "demo/w")
        assert isinstance(pilot.app.screen, MainScreen)


async def test_paging_through_services_stops_at_the_first_and_last_page() -> None:
    daemon = Daemon("demo/web")
    async with _app(daemon).run_test() as pilot:
        await _until(pilot, "page 1 of 3")
        await pilot.press("less_than_sign")
        await pilot.press("greater_than_sign")
        await _until(pilot, "page 2 of 3")
        await pilot.press("greater_than_sign")
        await _until(pilot, "page 3 of 3")
        await pilot.press("n")
        await _until(pilot, "by name: 1, page 1 of 3")


async def test_a_column_is_as_wide_as_its_longest_text_on_the_screen() -> None:
    daemon = Daemon("demo/" + "x" * 60)
    async with _app(daemon, interval_s=0.02).run_test(size=(40, 15)) as pilot:
        await _until(pilot, "demo/xxx")
        table = pilot.app.screen.query_one(DataTable)
        assert table.virtual_size.width <= 40, "all columns can be seen"
        daemon.services = [service("demo/web")]
        await _until(pilot, "demo/web")
        assert table.ordered_columns[0].width == len("demo/web")
