"""The screen of ``ipvsproxy top``, drawn with Textual.

Rule: all text from other programs is wrapped in a ``Text`` or ``Content``, so that Textual interprets no part of the text as
markup.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Literal

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from ipvsproxy.commands import top_data
from ipvsproxy.commands.top import Daemon, NoAnswerError
from ipvsproxy.commands.top_data import Column, Picture, Question, Row
from ipvsproxy.config.settings import Sort
from ipvsproxy.daemon.base.log import printable

FILTERS = "filter by name, address, port, pod address; namespace:demo node:a type:nodeport problems:only"
LEGEND = """
Enter  open a Service: its endpoints,
       and why each is in or out

Ends 3+1d-2
   3 endpoints get connections,
   1 drains, 2 are not used
Conn/s Pkt/s B/s
   new connections, and packets and
   bytes in both directions
"""

ONLY_PROBLEMS = "problems:only"
"""The word in a filter that selects only Services with a problem."""
LONGEST_FILTER = 200
"""The largest number of characters in a filter that the daemon accepts."""


class Rows(DataTable[Text]):
    """A table whose rows are all replaced at each update."""

    def __init__(self) -> None:
        super().__init__(id="rows", cursor_type="row")

    def fill(self, all_columns: Sequence[Column], rows: Sequence[Row], width: int) -> None:
        """Show these rows.

        The cursor moves with its row. If the row no longer exists, the cursor keeps its line number, or goes to the last row if
        the table has become too short.
        """
        columns, table = top_data.fitting(all_columns, rows, width)
        titles = [one.title for one in columns]
        widths = [max(map(len, texts)) for texts in zip(titles, *table, strict=True)]
        at, offset = self.cursor_row, self.scroll_offset
        key = self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value if self.row_count else None
        self.clear(columns=True)
        ways: list[Literal["left", "right"]] = ["right" if one.is_number else "left" for one in columns]
        for title, most, way in zip(titles, widths, ways, strict=True):
            self.add_column(Text(title, justify=way), key=title, width=most)
        names = [row.name for row in rows]
        for name, texts in zip(names, table, strict=True):
            self.add_row(*(Text(text, justify=way, no_wrap=True) for text, way in zip(texts, ways, strict=True)), key=name)
        if rows:
            self.move_cursor(row=names.index(key) if key in names else min(at, len(rows) - 1), scroll=False)
            self.scroll_to(offset.x, offset.y, animate=False)


class FollowingScreen(Screen[None]):
    """A screen that shows lines and a table, reads the data repeatedly, and warns if the daemon does not answer."""

    AUTO_FOCUS: ClassVar[str | None] = "#rows"

    def __init__(self, interval_s: float, columns: Sequence[Column], read: Callable[[], Awaitable[Picture | None]]) -> None:
        """``read`` returns None if the shown object no longer exists."""
        super().__init__()
        self.shown: Picture | None = None
        self.interval_s = interval_s
        self.read_now = asyncio.Event()
        self._lost_since_s: float | None = None
        self._is_held = False
        self._columns = columns
        self._read = read

    def compose(self) -> ComposeResult:
        """Creates the lines above the table, the line for a warning, the filter (only in ``MainScreen``), and the table."""
        yield Static(Content(printable(self.title or "asking …")), id="about")
        yield Static("", id="message")
        yield Input(placeholder="name, address, port, pod address", max_length=LONGEST_FILTER, id="filter")
        yield Rows()
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        """Read the data repeatedly until the screen is closed, and show each result, or the reason why there is no result."""
        while True:
            self.read_now.clear()
            if not self._is_held:
                result, problem = None, ""
                try:
                    result = await self._read()
                    self._lost_since_s = None
                except NoAnswerError as error:
                    problem = str(error)
                    self._lost_since_s = self._lost_since_s or time.monotonic()
                if not self.read_now.is_set():  # No newer reading was requested.
                    with contextlib.suppress(NoMatches):  # Textual raises NoMatches while the screen closes.
                        self.show(result, problem)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval_s):
                    await self.read_now.wait()

    def show(self, result: Picture | None, problem: str) -> None:
        """Show a new reading, or the reason why there is no reading."""
        self.shown = result or self.shown
        self.say(self._message(problem))
        self.draw()

    def _message(self, problem: str = "") -> str:
        """A sentence about a lost connection or a paused screen; empty if the daemon answers and the screen is not paused."""
        if problem:
            lost_s = time.monotonic() - (self._lost_since_s or time.monotonic())
            return f"NO ANSWER for {top_data.seconds(round(lost_s))}, trying again: {problem}"
        return "held: press space to go on" if self._is_held else ""

    def on_resize(self, _event: events.Resize) -> None:
        """Choose the columns that fit the new width."""
        self.draw()

    def action_hold(self) -> None:
        """Pause the updates of this screen, or resume them."""
        self._is_held = not self._is_held
        self.read_now.set()
        self.say(self._message())

    def say(self, text: str) -> None:
        """Show a warning of one line, or remove the previous warning."""
        message = self.query_one("#message", Static)
        message.update(Content(printable(text)))
        message.display = bool(text)

    def draw(self) -> None:
        """Draw the data of the last reading."""
        if self.shown is not None:
            self.query_one("#about", Static).update(Content("\n".join(map(printable, self.lines(self.shown)))))
            self.query_one(Rows).fill(self._columns, self.shown.rows, self.size.width)

    def lines(self, shown: Picture) -> Iterable[str]:
        """The lines above the table."""
        return shown.lines


class HelpScreen(Screen[None]):
    """A screen that explains the keys and the columns."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,h,question_mark,f1,enter", "app.pop_screen", "back")]

    def compose(self) -> ComposeResult:
        """The help text, which can be scrolled on a small terminal."""
        keys = [one for one in MainScreen.BINDINGS if isinstance(one, Binding)]
        lines = [f"{self.app.get_key_display(one):<6} {one.tooltip}" for one in keys]
        with VerticalScroll(id="help"):
            yield Static(Content("\n".join(lines) + LEGEND))
        yield Footer()


class ServiceScreen(FollowingScreen):
    """One Service with its endpoints, updated continuously."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "app.pop_screen", "back"),
        Binding("space", "hold", "hold"),
    ]

    def __init__(self, name: str, daemon: Daemon, interval_s: float) -> None:
        super().__init__(interval_s, top_data.ENDPOINT_COLUMNS, lambda: daemon.details(name))
        self.title = name

    def show(self, result: Picture | None, problem: str) -> None:
        """Show a new reading, or the reason why there is no reading."""
        if result or problem:
            super().show(result, problem)
        else:
            self.say(f"there is no Service {self.title} any more")


class MainScreen(FollowingScreen):
    """The node and its Services, updated continuously."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "app.quit", "quit", tooltip="quit"),
        Binding("h,question_mark,f1", "help", "help", key_display="h", tooltip="this help"),
        # The slash key has priority, so that the filter already has the focus when the next keys are typed.
        Binding("slash", "filter", "filter", priority=True, tooltip=FILTERS),
        Binding("escape", "unfilter", show=False, tooltip="all Services; back to them"),
        Binding("c", "sort('connections')", "conn", tooltip="sort by connections per second"),
        Binding("b", "sort('bytes')", "bytes", tooltip="sort by bytes per second"),
        Binding("p", "sort('packets')", "pkts", tooltip="sort by packets per second"),
        Binding("n", "sort('name')", "name", tooltip="sort by name"),
        Binding("w", "sort('problems')", "problems", tooltip="sort by problems"),
        Binding("exclamation_mark", "only_problems", show=False, tooltip="problems only, or all again"),
        Binding("r", "reverse", "reverse", tooltip="reverse the order"),
        Binding("greater_than_sign", "page(1)", show=False, tooltip="next page"),
        Binding("less_than_sign", "page(-1)", show=False, tooltip="page before"),
        Binding("space", "hold", "hold", tooltip="hold the picture, or go on"),
    ]

    def __init__(self, question: Question, interval_s: float, daemon: Daemon) -> None:
        super().__init__(interval_s, top_data.SERVICE_COLUMNS, lambda: daemon.picture(self._question))
        self._question = question
        self._daemon = daemon
        self._is_new_order = False

    def on_mount(self) -> None:
        """Prepare the filter; Textual also calls the base class's ``on_mount``, which starts the updates."""
        box = self.query_one("#filter", Input)
        box.value, box.display = self._question.filter, bool(self._question.filter)

    def show(self, result: Picture | None, problem: str) -> None:
        """Show a new reading, or the reason why there is no reading; if the order has changed, show the first rows."""
        if result and self._is_new_order:
            self._is_new_order = False
            self.query_one(Rows).clear()
        super().show(result, problem)

    def lines(self, shown: Picture) -> Iterable[str]:
        """The lines about the node, and a line about the shown Services and their order."""
        order = f"by {self._question.sort}" + (", reversed" if self._question.is_reversed else "")
        page = f", page {shown.page} of {shown.pages}" if shown.pages > 1 else ""
        return *shown.lines, f"Services {order}: {shown.matching}{page}"

    def action_sort(self, by: str) -> None:
        """Sort the table by a figure, the largest first; if the table is already sorted by that figure, reverse the order."""
        if self._question.sort is Sort(by):
            self.action_reverse()
        else:
            self._ask(self._question._replace(sort=Sort(by), is_reversed=False, page=1))

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._ask(self._question._replace(is_reversed=not self._question.is_reversed, page=1))

    def action_page(self, step: int) -> None:
        """Show the next page, or the previous page."""
        pages = self.shown.pages if self.shown else 1
        self._ask(self._question._replace(page=min(max(1, self._question.page + step), pages)))

    def _ask(self, question: Question) -> None:
        """Put a new question to the daemon, and show the first rows of the answer."""
        self._question = question
        self._is_new_order = True
        self.read_now.set()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 - as in the base class
        """While the operator types a filter, the key ``/`` adds a slash to the filter."""
        return action != "filter" or not isinstance(self.focused, Input)

    def action_filter(self) -> None:
        """Let the operator type a filter."""
        box = self.query_one("#filter", Input)
        box.display = True
        self.set_focus(box)

    def action_unfilter(self) -> None:
        """Show all Services."""
        self.query_one("#filter", Input).value = ""
        self._apply_filter("")

    def action_only_problems(self) -> None:
        """Show only Services with a problem, or show all Services again."""
        words = self._question.filter.split()
        text = " ".join([word for word in words if word != ONLY_PROBLEMS] + [ONLY_PROBLEMS] * (ONLY_PROBLEMS not in words))
        self.query_one("#filter", Input).value = text
        self._apply_filter(text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply the filter that the operator has typed."""
        self._apply_filter(event.value.strip())

    def _apply_filter(self, text: str) -> None:
        self.query_one("#filter").display = bool(text)
        self.set_focus(self.query_one(Rows))
        self._ask(self._question._replace(filter=text, page=1))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the chosen Service."""
        if event.row_key.value:
            self.app.push_screen(ServiceScreen(event.row_key.value, self._daemon, self.interval_s))

    def action_help(self) -> None:
        """Show the keys."""
        self.app.push_screen(HelpScreen())


class TopApp(App[None]):
    """The whole screen of ``ipvsproxy top``."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #about { height: auto; max-height: 50%; }
    #message { height: auto; max-height: 3; text-style: bold; color: ansi_red; display: none; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    Rows { height: 1fr; }
    #help { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit"), Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(self, question: Question, interval_s: float, daemon: Daemon) -> None:
        super().__init__()
        self.theme = "ansi-dark"  # use the terminal's own colours
        self._main = MainScreen(question, interval_s, daemon)

    def get_default_screen(self) -> Screen[None]:
        """All Services."""
        return self._main
