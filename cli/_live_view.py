"""The view of a running recording in a terminal, with textual."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from cudatool.analyze.live_device import CURVE_NS, CURVE_POINTS
from cudatool.analyze.live_rows import LiveDevice, LivePicture
from cudatool.cli._live_text import change, clock, device_words, ledger_rows, rate
from cudatool.cli._watched import Watched
from cudatool.text import printable, short_names
from cudatool.trace.frames import frame_rank
from cudatool.trace.model import Ending
from cudatool.units import counted, format_bytes, format_share, format_time

__all__ = ["LiveView", "curve_lines", "is_due"]

_LOOK_S: Final = 1.0  # between two looks; keys are obeyed at once
_SHARE: Final = 0.08  # of a core: where looking and drawing take more, the picture is drawn less often,
_RARELY_S: Final = 5.0  # but at least so often
_BUSY_S: Final = 0.25  # of one look: a long recording is caught up with step by step, and keys work in between
_ROWS: Final = 60
_CURVE_ROWS: Final = 5
_LABEL: Final = 12  # columns of the curve's label
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_SORTS: Final = {
    # what is listed -> the fields that it can be sorted by, and the words for them
    "sites": {
        "bytes": "live bytes",
        "change": "change since the mark",
        "blocks": "blocks",
        "allocations": "allocations so far",
    },
    "kernels": {"per_second": "launches a second", "launches": "launches so far", "time_ns": "time on the device"},
    "streams": {"per_second": "operations a second", "operations": "operations so far"},
    "ledger": {"bytes": "bytes"},
}
_COLUMNS: Final = {
    "sites": ("Bytes", "Change", "Blocks", "Call site"),
    "kernels": ("A second", "Launches", "Time", "Kernel"),
    "streams": ("A second", "Operations", "Stream"),
    "ledger": ("Bytes", "Share", "Held by, and as what"),
}
_TITLES: Final = {"sites": "Call sites", "kernels": "Kernels", "streams": "Streams"}


def is_due(rest_s: float, used_s: float) -> bool:
    """Return whether to draw again so many seconds after the last time, with so much processor time used since."""
    return used_s <= _SHARE * rest_s or rest_s >= _RARELY_S


def curve_lines(allocated: list[int], reserved: list[int], rows: int) -> list[str]:
    """Return a drawing of two curves: allocated as filled columns, what is reserved beyond it as dots."""
    top = max([*allocated, *reserved, 1])
    lines = []
    for row in range(rows - 1, -1, -1):
        line = ""
        for used, taken in zip(allocated, reserved, strict=True):
            eighths = max(0, min(8, -(-used * rows * 8 // top) - row * 8))
            line += _EIGHTHS[eighths] if eighths or taken * rows <= row * top else "·"
        lines.append(line)
    return lines


class _StackScreen(ModalScreen[None]):
    """The stack of one call site, innermost frame first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Back"),
    ]
    CSS = "_StackScreen { align: center middle; } #frames { width: 100%; height: 100%; padding: 0 1; }"

    def __init__(self, lines: Iterable[str]) -> None:
        super().__init__()
        self._lines = list(lines)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="frames"):
            yield Static(Text("\n".join(self._lines)))
        yield Footer()


class LiveView(App[None]):
    """Shows a recording until it ends, or the user leaves."""

    CSS = """
    #head { height: auto; max-height: 5; }
    #curve { height: 5; }
    #what { height: 1; text-style: bold; }
    #search { display: none; height: 3; }
    #search.open { display: block; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p,space", "pause", "Pause"),
        Binding("m", "mark", "Mark"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "search", "Search"),
        Binding("escape", "clear_search", "Clear", show=False),
        Binding("1", "show('sites')", "Sites"),
        Binding("2", "show('kernels')", "Kernels"),
        Binding("3", "show('streams')", "Streams"),
        Binding("4", "show('ledger')", "Ledger"),
        Binding("d", "device", "Device", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched
        self._listed = "sites"
        self._sort = {listed: next(iter(fields)) for listed, fields in _SORTS.items()}
        self._search = ""
        self._device = 0  # place among the devices, of the one whose curve is drawn
        self._paused = False
        self._picture: LivePicture | None = None
        self._drawn_s, self._drawn_cpu_s = 0.0, 0.0  # when the picture was drawn last, and the time used up to then
        self.failure: Exception | None = None

    def compose(self) -> ComposeResult:
        """Return the parts of the view."""
        yield Static(id="head")
        yield Static(id="curve")
        yield Static(id="what")
        yield Input(id="search", placeholder="a part of a call site or name; Enter")
        table: DataTable[Text] = DataTable(id="rows", cursor_type="row", zebra_stripes=False)
        yield table
        yield Footer(show_command_palette=False)

    def _handle_exception(self, error: Exception) -> None:
        """Leave at our own bugs, which textual would print and forget."""
        self.failure = error
        super()._handle_exception(error) if self.is_headless else self.exit()

    def on_mount(self) -> None:
        """Begin to look."""
        self.action_show("sites")
        self._table.focus()
        self._look()
        self.set_interval(_LOOK_S, self._tick)

    # --- keys ---

    def action_show(self, listed: str) -> None:
        """List call sites, kernels, streams, or what the memory is that the driver charges."""
        self._listed = listed
        self._table.clear(columns=True)
        for title in _COLUMNS[listed]:
            self._table.add_column(title, key=title)
        self._draw()

    def action_sort(self) -> None:
        """Sort by the next of the columns with numbers."""
        fields = [*_SORTS[self._listed]]
        self._sort[self._listed] = fields[(fields.index(self._sort[self._listed]) + 1) % len(fields)]
        self._draw()

    def action_pause(self) -> None:
        """Stop following, or go on: the file keeps what was recorded in between."""
        self._paused = not self._paused
        self._draw()

    def action_mark(self) -> None:
        """Count changes from here on."""
        self._watched.state.mark()
        self._draw()

    def action_device(self) -> None:
        """Draw the curve of the next device."""
        self._device += 1
        self._draw()

    def action_search(self) -> None:
        """Ask for a text that call sites and names have to contain."""
        field = self.query_one("#search", Input)
        field.add_class("open")
        field.focus()

    def action_clear_search(self) -> None:
        """Show all rows again."""
        field = self.query_one("#search", Input)
        field.value = ""
        self._close_search("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the text that was asked for."""
        self._close_search(event.value)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the stack of a call site."""
        if self._listed == "sites" and event.row_key.value is not None:
            self.push_screen(_StackScreen(self._frames(int(event.row_key.value))))

    # --- the picture ---

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#rows", DataTable)

    def _close_search(self, text: str) -> None:
        self._search = text.strip()
        self.query_one("#search", Input).remove_class("open")
        self._table.focus()
        self._draw()

    def _tick(self) -> None:
        rest_s, used_s = time.monotonic() - self._drawn_s, time.process_time() - self._drawn_cpu_s
        self._look(draws=is_due(rest_s, used_s))

    def _look(self, *, draws: bool = True) -> None:
        if self._paused:
            return
        self._watched.advance(_BUSY_S)
        if self._watched.ending is not Ending.GROWING and not self._watched.is_behind:
            self.exit()
            return
        if draws and self.is_running and len(self.screen_stack) == 1:
            self._drawn_s, self._drawn_cpu_s = time.monotonic(), time.process_time()
            self._draw()

    def _draw(self) -> None:
        picture = self._picture = self._watched.picture(most=_ROWS, sort=self._sort[self._listed], search=self._search)
        self.query_one("#head", Static).update(self._head(picture))
        self.query_one("#curve", Static).update(self._curve(picture))
        self.query_one("#what", Static).update(self._what(picture))
        self._fill([*self._rows(picture)])

    def _head(self, picture: LivePicture) -> Text:
        watched = self._watched
        state = "PAUSED" if self._paused else "catching up" if watched.is_behind else "recording"
        name = printable(watched.path.rpartition("/")[2])
        events = f"{counted(picture.events, 'event')}, {rate(picture.per_second)} a second"
        first = f"{name}  {state} {clock(picture.time_ns)}  {events}"
        words = [f"Device {device.device}: {device_words(device)}" for device in picture.devices]
        more = [f"and {len(words) - 3} more devices"] if len(words) > 4 else []
        return Text("\n".join([first, *words[: 3 if more else 4], *more]), overflow="ellipsis", no_wrap=len(words) > 1)

    def _curve(self, picture: LivePicture) -> Text:
        if not picture.devices:
            return Text("No memory was allocated yet.")
        device = self._chosen(picture).device
        columns = max(self.size.width - _LABEL, 10)
        allocated, reserved = self._watched.state.curve(device, columns)
        lines = curve_lines(allocated, reserved, _CURVE_ROWS)
        top = format_bytes(max([*allocated, *reserved, 0]))
        length = clock(min(len(allocated) if len(allocated) < columns else CURVE_POINTS, CURVE_POINTS) * CURVE_NS)
        labels = [top, "█ allocated", "· reserved", f"device {device}", f"{length}"]
        return Text(
            "\n".join(f"{label[: _LABEL - 1]:<{_LABEL}}{line}" for label, line in zip(labels, lines, strict=True))
        )

    def _chosen(self, picture: LivePicture) -> LiveDevice:
        return picture.devices[self._device % len(picture.devices)]

    def _what(self, picture: LivePicture) -> Text:
        listed = self._listed
        if listed == "ledger":
            return Text(self._whose(picture), overflow="ellipsis", no_wrap=True)
        count = {"sites": picture.site_count, "kernels": picture.kernel_count, "streams": picture.stream_count}[listed]
        search = f", containing {self._search!r}" if self._search else ""
        mark = f"; marked at {clock(picture.marked_ns)}" if picture.marked_ns and listed == "sites" else ""
        by = _SORTS[listed][self._sort[listed]]
        return Text(
            printable(f"{_TITLES[listed]} by {by} ({count:,}{search}){mark}"), overflow="ellipsis", no_wrap=True
        )

    def _whose(self, picture: LivePicture) -> str:
        if not picture.devices or not self._chosen(picture).ledger:
            return "Ledger: NVML has not said what the driver charges (it does on a GPU)"
        device = self._chosen(picture)
        whose = "all processes (NVML does not name them)" if device.charged is None else "this process"
        return f"Memory of {whose} on device {device.device}, by who holds it"

    def _rows(self, picture: LivePicture) -> Iterable[tuple[str, tuple[str, ...]]]:
        if self._listed == "sites":
            for site in picture.sites:
                grows = "grows: " if site.grows else ""
                numbers = format_bytes(site.bytes), change(site.change), f"{site.blocks:,}"
                yield str(site.stack), (*numbers, grows + site.label)
        elif self._listed == "kernels":
            names = short_names([kernel.name for kernel in picture.kernels])
            for kernel, name in zip(picture.kernels, names, strict=True):
                time = format_time(kernel.time_ns) if kernel.time_ns else ""
                yield kernel.name, (rate(kernel.per_second), f"{kernel.launches:,}", time, name)
        elif self._listed == "ledger":
            rows = ledger_rows(self._chosen(picture)) if picture.devices else []
            whole = sum(size for size, _, _ in rows)
            for size, owner, how in rows:
                share = format_share(size / whole) if whole else ""
                yield f"{owner}, {how}", (format_bytes(size), share, f"{owner}, {how}" if how else owner)
        else:
            for stream in picture.streams:
                yield stream.label, (rate(stream.per_second), f"{stream.operations:,}", stream.label)

    def _fill(self, rows: list[tuple[str, tuple[str, ...]]]) -> None:
        """Show the rows; the cursor stays with its row, wherever that goes."""
        table = self._table
        at = table.cursor_row
        keys = [row.key.value for row in table.ordered_rows]
        under = keys[at] if 0 <= at < len(keys) else None
        scrolled = table.scroll_y
        last = len(_COLUMNS[self._listed]) - 1
        table.clear()
        for key, cells in dict(rows).items():
            table.add_row(
                *(
                    Text(printable(cell), justify="left" if place == last else "right")
                    for place, cell in enumerate(cells)
                ),
                key=key,
            )
        found = next(
            (place for place, (key, _) in enumerate(rows) if key == under), min(max(at, 0), max(len(rows) - 1, 0))
        )
        table.move_cursor(row=found, scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _frames(self, stack: int) -> list[str]:
        picture, frames = self._picture, self._watched.tables.stack(stack)
        site = next((site for site in picture.sites if site.stack == stack), None) if picture else None
        lines = []
        if site is not None:
            lines.append(
                f"{format_bytes(site.bytes)} in {counted(site.blocks, 'block')}, "
                f"{counted(site.allocations, 'allocation')} so far"
            )
        for frame in frames:
            own = ">" if not frame_rank(frame) else " "
            lines.append(printable(f"{own} {frame.function}  {frame.file}:{frame.line}"))
        return lines if frames else [*lines, "The recording has no stack for it."]
