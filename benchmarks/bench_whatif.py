"""What-if against what happened: one recording's requests under settings that were also recorded.

    python benchmarks/bench_whatif.py FOLDER

FOLDER holds WORKLOAD__SETTINGS.pickle.xz and .stats.json files, as record_torch_workloads.py writes them. For every
workload, the peak of reserved bytes under each of the other settings is predicted from WORKLOAD__default.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudatool import analyze
from cudatool.collect import torch_snapshot

MIB = 1024 * 1024


def facts_of(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(str(path).replace(".pickle.xz", ".stats.json")).read_text())
    fraction = facts["memory_fraction"]
    limit = f"per_process_memory_fraction:{fraction}" if fraction else ""
    facts["whole_conf"] = ",".join(part for part in (facts["conf"], limit) if part)
    return facts


def main() -> None:
    folder = Path(sys.argv[1])
    print(f"{'workload':24}{'settings':12}{'predicted':>12}{'measured':>12}{'error':>9}  runs out")
    errors: list[float] = []
    out_of_memory = [0, 0]  # alike, in all
    for default in sorted(folder.glob("*__default.pickle.xz")):
        workload = default.name.split("__")[0]
        own = facts_of(default)
        trace = torch_snapshot.read(default)
        settings, _ = analyze.recorded_settings(trace)
        settings = replace(settings, text=own["conf"])
        others = [path for path in sorted(folder.glob(f"{workload}__*.pickle.xz")) if path != default]
        facts = [facts_of(path) for path in others]
        predicted = analyze.what_if(
            trace,
            0,
            [found["whole_conf"] for found in facts],
            recorded=settings,
            recorded_memory=own["device_total_bytes"],
        )
        for path, found, outcome in zip(others, facts, predicted, strict=True):
            name = path.name.split("__")[1].split(".pickle")[0]
            measured = found["stats"]["reserved_bytes.all.peak"]
            error = 100 * (outcome.reserved_peak_bytes / measured - 1)
            ran_out = bool(found["stats"]["num_ooms"])
            out_of_memory[0] += ran_out == (outcome.oom is not None)
            out_of_memory[1] += 1
            errors.append(abs(error))
            peaks = f"{outcome.reserved_peak_bytes / MIB:12.0f}{measured / MIB:12.0f}"
            says = f"predicted {'yes' if outcome.oom else 'no'}, {'yes' if ran_out else 'no'}"
            print(f"{workload:24}{name:12}{peaks}{error:8.2f}%  {says}")
    if errors:
        errors.sort()
        good = sum(error < 1 for error in errors)
        print(
            f"{len(errors)} pairs: {good} within 1 %, median error {errors[len(errors) // 2]:.3f} %, "
            f"largest {errors[-1]:.2f} %; running out of memory foreseen rightly in {out_of_memory[0]}"
        )


if __name__ == "__main__":
    main()
