"""The text of ``cudatool snapshot``, the most important part first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.analyze.fragmentation import Occasion
from cudatool.cli._text import bytes_or_unknown, counted, new_table, plain, print_rest, print_table
from cudatool.text import printable, short_names, short_paths
from cudatool.trace.physical import uncounted
from cudatool.units import format_bytes, format_share, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import (
        CallSite,
        Categories,
        DeviceMemory,
        Diagnosis,
        Fragmentation,
        Ledger,
        LibraryBlocks,
        LintFinding,
        MemoryPlan,
        MemoryReport,
        Modules,
        PinnedHolders,
        Remedy,
        Summary,
        Usage,
    )
    from cudatool.collect.nvml import NvmlDevice
    from cudatool.trace.model import PinnedMemory

__all__ = [
    "print_advice",
    "print_categories",
    "print_ledger",
    "print_library_blocks",
    "print_modules",
    "print_report",
    "print_sites",
    "print_split",
]

_MOST = 8  # rows of each table
_MOST_HOLES = 3


def print_report(console: Console, report: MemoryReport, gpus: Sequence[NvmlDevice] = ()) -> None:
    """Print a report at the console's width."""
    summary = report.summary
    took = f", {format_time(summary.duration)}" if summary.duration else ""
    where = f", {summary.recorded_on}" if summary.recorded_on else ""
    part = ""
    if summary.window:
        start, stop, count = summary.window
        part = f" (numbers {start:,} to {stop - 1:,} of {count:,})"
    _print_line(console, f"{summary.source}: {counted(summary.events, 'event')}{part}{took}{where}")
    for finding in report.findings:
        _print_finding(console, finding, several=len(summary.devices) > 1)
    if not summary.devices:
        console.print(f"no {'other ' if uncounted(report.trace) else ''}device memory was allocated")
    for device, diagnosis, ledger in zip(summary.devices, report.diagnoses, report.ledgers, strict=True):
        _print_device(console, device, diagnosis)
        if ledger is not None:
            print_ledger(console, ledger, int(report.trace.records["time"][0]))
    for plan in summary.plans:
        _print_plan(console, plan)
    for blocks in summary.library_blocks:
        print_library_blocks(console, blocks)
    if summary.pinned is not None:
        _print_pinned(console, summary.pinned)
    if summary.pinned_holders is not None:
        _print_pinned_holders(console, summary.pinned_holders)
    _print_work(console, summary)
    own = [gpu for gpu in gpus if report.trace.header.get("pid") in gpu.processes]
    for gpu in gpus:
        _print_gpu(console, gpu, report, is_only=own == [gpu])


def _print_line(console: Console, text: str) -> None:
    """Print one line, which a terminal wraps between words."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _print_finding(console: Console, finding: LintFinding, several: bool) -> None:
    device = f"device {finding.device}: " if several and finding.device >= 0 else ""
    doubt = "" if finding.confidence == "high" else f" (confidence {finding.confidence})"
    _print_line(console, f"{finding.severity}: {device}{finding.message}{doubt}")


def _print_device(console: Console, device: DeviceMemory, diagnosis: Diagnosis) -> None:
    failed = f", {device.ooms:,} failed: out of memory" if device.ooms else ""
    console.print(f"\nDevice {device.device}: {counted(device.allocations, 'allocation')}{failed}", style="bold")
    _print_moments(console, device)
    print_advice(console, diagnosis.advice)
    print_sites(console, "Held at that time", device.at_chosen)
    print_sites(console, "Held at the peak", device.at_peak)
    for sentence in () if device.generated is None else device.generated.sentences():
        _print_line(console, sentence)
    print_categories(console, "Held at the peak, by purpose (inferred)", diagnosis.categories)
    print_modules(console, "Held at the peak, by module", diagnosis.modules)
    split = diagnosis.fragmentation
    for moment in [*split[:1], *(m for m in split[-1:] if len(split) > 1)]:
        print_split(console, moment)
    for title, usage in (("By stream", diagnosis.by_stream), ("By pool", diagnosis.by_pool)):
        if len(usage) > 1:
            _print_usage(console, title, usage)
    _print_outside(console, diagnosis)
    print_sites(console, "Never freed", device.still_live)


def _print_moments(console: Console, device: DeviceMemory) -> None:
    shown = {"At the peak": device.peak, "At the end": device.now}
    if device.chosen is not None:
        shown = {"At that time": device.chosen, **shown}
    table = new_table("", numbers=(*shown, "Highest"))

    def row(name: str, attribute: str, highest: int | None) -> None:
        at = [format_bytes(getattr(moment, attribute)) for moment in shown.values()]
        table.add_row(name, *at, "" if highest is None else format_bytes(highest))

    row("Allocated", "allocated", device.peak_allocated)
    row("  of it requested", "requested", None)
    row("Active", "active", device.peak_active)
    if device.reserved_known:
        row("Reserved", "reserved", device.peak_reserved)
        row("Largest free block", "largest_free", None)
        table.add_row("Fragmentation", *(format_share(moment.fragmentation) for moment in shown.values()), "")
    else:
        table.add_row("Reserved", *("unknown",) * (len(shown) + 1))
    console.print(table)


def print_advice(console: Console, remedies: Sequence[Remedy]) -> None:
    """Print what to do."""
    if remedies:
        console.print("\nWhat to do", style="bold")
    for remedy in remedies:
        console.print(f"- {remedy.text}", markup=False)


def print_sites(console: Console, title: str, sites: Sequence[CallSite]) -> None:
    """Print the largest call sites, if there are any."""
    if not sites:
        return
    table = new_table("Call site", numbers=("Blocks", "Bytes"))
    for site in sites[:_MOST]:
        table.add_row(plain(site.described), f"{site.count:,}", format_bytes(site.size))
    print_table(console, title, table)
    print_rest(console, len(sites), _MOST, "call sites")


def print_categories(console: Console, title: str, categories: Categories) -> None:
    """Print what blocks are for, if anything is known of it."""
    shares = [share for share in categories.at_peak if share.size]
    if all(share.rule.category == "unknown" for share in shares):
        return
    table = new_table("Purpose", "Because", numbers=("Confidence", "Bytes"))
    for share in shares[:_MOST]:
        rule = share.rule
        table.add_row(str(rule.category), rule.reason, str(rule.confidence), format_bytes(share.size))
    print_table(console, title, table)
    print_rest(console, len(shares), _MOST, "rows")


def print_modules(console: Console, title: str, modules: Modules | None) -> None:
    """Print what modules of PyTorch hold, equal layers as one, if anything is known of it."""
    if modules is None:
        return
    columns = ("Parameters", "Gradients", "Optimizer", "Activations", "In all")
    table = new_table("Module", numbers=columns)
    rows = analyze.merged_layers(modules.held)
    shown = rows[:_MOST]
    cells = [
        [format_bytes(size) if size else "" for size in sizes]
        for row in shown
        for sizes in [(row.parameters, row.gradients, row.optimizer_state, row.activations, row.size)]
    ]
    several = [f" ({row.modules})" if row.modules > 1 else "" for row in shown]
    # What the numbers, each two blanks from the others, leave of the line.
    left = console.width - sum(2 + max(map(len, column)) for column in zip(columns, *cells, strict=True))
    paths = short_paths([printable(row.path) for row in shown], left - max(map(len, several), default=0))
    for path, more, numbers in zip(paths, several, cells, strict=True):
        table.add_row(plain(path) + more, *numbers)
    print_table(console, title, table)
    print_rest(console, len(rows), _MOST, "modules")
    for sentence in modules.sentences():
        _print_line(console, sentence)


def print_split(console: Console, moment: Fragmentation) -> None:
    """Print why more is reserved than was requested, and what pins the largest holes."""
    lost = moment.reserved - moment.requested
    if not lost:
        if moment.moment is Occasion.OOM:
            console.print("\nWhen memory ran out, all that was reserved was in use")
        return
    title = f"Reserved but unused, at the {moment.moment}"
    if moment.moment is Occasion.OOM:
        title = "Reserved but unused, when memory ran out"
    table = new_table("Cause", numbers=("Pieces", "Bytes", "Of reserved"))
    for share in moment.causes:
        if share.size:
            part = format_share(share.size / moment.reserved)
            table.add_row(str(share.cause), f"{share.count:,}", format_bytes(share.size), part)
    table.add_row("in all", "", format_bytes(lost), format_share(lost / moment.reserved))
    print_table(console, title, table)
    if moment.wanted is not None:
        text = f"A request of {format_bytes(moment.wanted.size)} found no reusable free block"
        text += f"; the largest had {format_bytes(moment.largest_usable)}." if moment.largest_usable else "."
        console.print(text, markup=False)
    for hole in moment.holes[:_MOST_HOLES]:
        pin = hole.pins[0] if hole.pins else None
        text = f"a hole of {format_bytes(hole.size)} in a segment of {format_bytes(hole.segment_size)}"
        if pin is not None:
            age = f", {format_time(pin.lived)} old" if pin.lived is not None else ""
            more = f", and {counted(hole.pinned_by - 1, 'more block')}" if hole.pinned_by > 1 else ""
            text += f": pinned by {format_bytes(pin.size)} of {pin.compiled.described(pin.label)}{age}{more}"
        console.print(f"- {text}", markup=False)


def _print_usage(console: Console, title: str, usage: Sequence[Usage]) -> None:
    table = new_table("", numbers=("At the peak", "Highest", "Reserved then", "Highest reserved"))
    for row in usage[:_MOST]:
        sizes = (row.at_peak, row.peak, row.reserved_at_peak, row.reserved_peak)
        table.add_row(plain(row.label), *map(bytes_or_unknown, sizes))
    print_table(console, title, table)
    print_rest(console, len(usage), _MOST, "rows")


def _print_outside(console: Console, diagnosis: Diagnosis) -> None:
    beside = diagnosis.outside
    if beside.taken_peak:
        console.print(f"\nThe program itself took at most {format_bytes(beside.taken_peak)} from the driver")
    for reading in beside.readings[-1:]:
        text = f"When an allocation failed last, the driver had {format_bytes(reading.free)} free"
        if reading.outside is None:
            text += " (pass the GPU's memory with --memory to see how much others held)"
        elif reading.outside:
            text += f"; {format_bytes(reading.outside)} were neither free nor reserved here: contexts, libraries, "
            text += "other processes"
        console.print(f"\n{text}", markup=False)


def print_ledger(console: Console, ledger: Ledger, start: int) -> None:
    """Print what all the memory of the process was; `start` is the time of the recording's first event."""
    whole = ledger.used if ledger.process is None else ledger.process
    table = new_table("Held by", "As", numbers=("Bytes", "Share"))
    for line in ledger.lines:
        owner, how = line.words
        table.add_row(
            plain(owner), plain(how), format_bytes(line.size), format_share(line.size / whole) if whole else ""
        )
    if ledger.unknown:
        table.add_row(
            "unknown", "", format_bytes(ledger.unknown), format_share(ledger.unknown / whole) if whole else ""
        )
    table.add_row("in all", "", format_bytes(whole), "")
    whose = "of all processes (NVML does not name them)" if ledger.process is None else "by NVML of this process"
    what = "Most memory" if ledger.is_most else "Memory"
    print_table(console, f"{what} {whose}, at {format_time(ledger.time - start)}", table)
    if ledger.process is not None:
        text = f"Of {format_bytes(ledger.total)}, {format_bytes(ledger.used)} were in use: "
        text += f"{format_bytes(ledger.beside)} by other processes and by the driver for itself"
        console.print(text, markup=False)


def _print_plan(console: Console, plan: MemoryPlan) -> None:
    table = new_table("Buffer of", "Call site", numbers=("Bytes", "At byte", "Nodes"))
    for buffer in sorted(plan.buffers, key=lambda own: -own.size)[:_MOST]:
        life = f"{buffer.first} to {max(buffer.end - 1, buffer.first)}" + (", kept" if buffer.kept else "")
        table.add_row(plain(buffer.node), plain(buffer.label), format_bytes(buffer.size), f"{buffer.offset:,}", life)
    print_table(console, f"Planned memory of {plain(plan.function)}", table)
    print_rest(console, len(plan.buffers), _MOST, "buffers")
    text = f"Compiled at {plan.label}: {counted(plan.nodes, 'node')}; {format_bytes(plan.planned)} planned, "
    text += f"{format_bytes(plan.ran)} used, {format_bytes(plan.most_live)} live at once at most; "
    console.print(text + f"{format_bytes(plan.unshared)} if no buffers shared a place", markup=False)
    if plan.fused:
        table = new_table("Node", "Operation", "Call site")
        for kernel in plan.fused[:_MOST]:
            table.add_row(f"{kernel.node:,}", plain(kernel.name), "")
            for operation in kernel.operations:
                table.add_row("", f"  {plain(operation.name)}", plain(operation.label))
        print_table(console, f"Fused kernels of {plain(plan.function)}", table)
        print_rest(console, len(plan.fused), _MOST, "kernels")


def print_library_blocks(console: Console, blocks: LibraryBlocks) -> None:
    """Print which call sites hold a library's blocks, as it said itself."""
    table = new_table("Call site", numbers=("Arrays", "Bytes"))
    for site in blocks.sites[:_MOST]:
        table.add_row(plain(site.label), f"{site.count:,}", format_bytes(site.size))
    title = f"Arrays of {plain(blocks.library)} on device {blocks.device}, at the largest of its reports"
    print_table(console, title, table)
    print_rest(console, len(blocks.sites), _MOST, "call sites")
    most = f"; {format_bytes(blocks.most)} in use at most, temporary memory included" if blocks.most is not None else ""
    console.print(f"{format_bytes(blocks.size)} together{most}", markup=False)


def _print_pinned(console: Console, pinned: PinnedMemory) -> None:
    console.print("\nPinned host memory", style="bold")
    table = new_table("", numbers=("At the end", "Highest"))
    table.add_row(
        "In use", format_bytes(pinned.active), format_bytes(pinned.peak_active) if pinned.events else "unknown"
    )
    table.add_row(f"Reserved, {counted(pinned.segments, 'segment')}", format_bytes(pinned.reserved), "unknown")
    console.print(table)


def _print_pinned_holders(console: Console, pinned: PinnedHolders) -> None:
    table = new_table("Library", "Call site", "What", numbers=("Pieces", "Bytes"))
    for site in pinned.sites[:_MOST]:
        row = (plain(site.owner), plain(site.label), site.holder.words, f"{site.count:,}", format_bytes(site.size))
        table.add_row(*row)
    print_table(console, "Pinned host memory at its peak", table)
    print_rest(console, len(pinned.sites), _MOST, "call sites")
    console.print(f"{format_bytes(pinned.size)} together; {format_bytes(pinned.now)} at the end", markup=False)


def _print_work(console: Console, summary: Summary) -> None:
    def took(time: int | None) -> str:
        return "not recorded" if time is None else format_time(time)

    clock = "Device time (simulated)" if summary.simulated else "Device time"
    if summary.kernels:
        table = new_table("Kernel", numbers=("Launches", clock))
        shown = summary.kernels[:_MOST]
        for kernel, name in zip(shown, short_names([one.name for one in shown]), strict=True):
            table.add_row(plain(name), f"{kernel.launches:,}", took(kernel.time))
        print_table(console, "Kernels", table)
        print_rest(console, len(summary.kernels), _MOST, "kernels")
    if summary.copies:
        table = new_table("Copy", numbers=("Count", "Bytes", clock))
        for copies in summary.copies:
            table.add_row(copies.direction, f"{copies.count:,}", format_bytes(copies.size), took(copies.time))
        print_table(console, "Copies", table)


def _print_gpu(console: Console, gpu: NvmlDevice, report: MemoryReport, *, is_only: bool) -> None:
    """Print which processes use a device of this machine now; with details for the trace's program if it still runs.

    And if `is_only` this device has that program: CUDA numbers devices in another order than NVML, so that only one
    device of a trace and one of the machine can be said to be the same.
    """

    console.print(f"\nOn this machine now, GPU {gpu.index}: {plain(gpu.name)}", style="bold")
    console.print(f"{format_bytes(gpu.used)} of {format_bytes(gpu.total)} are used", markup=False)
    process = report.trace.header.get("pid")
    reserved = [device.now.reserved for device in report.summary.devices if device.now.reserved]
    if process in gpu.processes and is_only and len(reserved) <= 1:
        use = analyze.device_use(gpu.used, gpu.processes, process, sum(reserved))
        rows = {
            "reserved by this program's allocator": use.allocator,
            "this program, not its allocator: context, kernels, libraries": use.beside_allocator,
            "other processes": use.other_processes,
            "the driver itself, and what it does not show": use.unexplained,
        }
    else:
        rows = {f"process {pid}": size for pid, size in sorted(gpu.processes.items(), key=lambda item: -item[1])}
        rows["the driver itself, and what it does not show"] = gpu.used - sum(gpu.processes.values())
    table = new_table("", numbers=("Bytes",))
    for name, size in rows.items():
        table.add_row(name, format_bytes(size))
    console.print(table)
