"""``cudatool devices``: the devices that programs can use here."""

from __future__ import annotations

from cudatool import _driver
from cudatool.cli._command import command, option
from cudatool.cli._options import device_option
from cudatool.cli._text import echo_json, results
from cudatool.runtime.device import device_count, get_device_properties
from cudatool.units import format_bytes

__all__ = ["devices"]


@command(
    examples=[
        ("The software device, even where there is a GPU", "cudatool devices --device sim"),
    ],
)
@device_option
@option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.devices/1").')
def devices(device: str | None, as_json: bool) -> None:
    """List the devices that programs can use here."""

    _driver.choose(device)
    choice = _driver.initialize()
    rows = []
    for index in range(device_count()):
        properties = get_device_properties(index)
        rows.append(
            {
                "device": index,
                "kind": choice.kind,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "total_memory": properties.total_memory,
            }
        )
    if as_json:
        echo_json({"schema": "cudatool.devices/1", "device": choice.description, "devices": rows})
        return
    from rich.table import Table

    table = Table("Device", "Kind", "Name", "Capability", "Multiprocessors", "Memory", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            str(row["device"]),
            str(row["kind"]),
            str(row["name"]),
            str(row["compute_capability"]),
            str(row["multiprocessors"]),
            format_bytes(int(str(row["total_memory"]))),
        )
    results().print(table)
