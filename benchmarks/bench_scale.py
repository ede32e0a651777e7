"""Time and memory of `cudatool snapshot` on large recordings, compared with plain Python on the same file.

    python benchmarks/bench_scale.py [--events 2100000] [--only "replay --check"] [--ending .ctrace]

The peer of a pickle is ``pickle.load`` and one walk over its events that adds up what is live, as PyTorch's own
_memory_viz.py does first; that of a trace is one pass of ``zlib.crc32`` over its bytes, which any reader of it must
make. Each runs in a separate process; measured are CPU seconds, and peak memory beyond that of the imports.

Then every command that reads a recording runs as for a user; the cost is that beyond the same command on 1,000 events.

The goal is 3 us and 150 bytes per event. Measured with the compiled policy on 2 cores that other programs kept busy,
which makes the times too long, but not the memory. "Before" was measured at the same time: then calls of the allocator
were replayed one by one, and times in exports were floats (of 2,100,000 events: more columns were kept)::

    8,100,000 events, .ctrace                                 before
    snapshot                                1.3 us 150 bytes
    snapshot --html                         1.6 us 150 bytes
    leaks                                   0.7 us  98 bytes
    replay --check                          1.1 us 127 bytes
    replay --conf (one setting)             2.7 us 127 bytes
    replay --advise                         2.7 us 134 bytes 13.6 us 127 bytes
    export --to torch                       1.5 us  88 bytes
    export --to sqlite                      2.5 us 117 bytes  5.4 us 118 bytes
    export --to perfetto                    2.2 us 125 bytes  3.7 us 125 bytes

    1,000,000 events, .ctrace
    replay --check                          1.0 us 131 bytes  2.5 us 121 bytes
    replay --conf (one setting)             2.4 us 132 bytes  5.4 us 120 bytes
    export --to sqlite                      3.3 us 120 bytes  3.3 us 121 bytes
    export --to perfetto                    2.6 us 128 bytes  3.6 us 128 bytes

    500,000 events, .pickle
    replay --check                          2.2 us 143 bytes  4.1 us 131 bytes
    replay --conf (one setting)             3.8 us 143 bytes  7.0 us 133 bytes
    snapshot                                2.4 us 137 bytes  2.2 us 138 bytes

    2,100,000 events, .pickle                                 before
    snapshot                                1.8 us 138 bytes  2.4 us 157 bytes
    snapshot --html                         2.2 us 141 bytes  2.7 us 154 bytes
    snapshot --torch                        2.7 us 150 bytes  3.4 us 157 bytes

``replay --advise`` takes as long as three replays: of twelve settings it skips the ten that cannot be the best, as soon
as that is sure. If all may be the best, it takes about 17 replays, one to three for each. An export to Perfetto is half
the writing of 290 bytes for each event: with all frames of each stack, which this file is too large for, 560.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

MEASURE = """
import json, resource, sys, time
{imports}
def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
memory, start = used(), time.process_time()
{work}
print(json.dumps([time.process_time() - start, (used() - memory) * 1024]))
"""

OURS = (
    "import io\nfrom pathlib import Path\nfrom rich.console import Console\nfrom cudatool import analyze\n"
    "from cudatool.cli._snapshot_text import print_report\nfrom cudatool.cli._sources import read_trace\n"
    "from cudatool.collect import rmm_log, torch_snapshot",
    "report = analyze.report(read_trace(Path(sys.argv[1])))\nprint_report(Console(file=io.StringIO()), report)",
)
PICKLE = (
    "import gc, pickle",
    "gc.disable()\nwith open(sys.argv[1], 'rb') as file:\n    data = pickle.load(file)\n"
    "live = most = 0\n"
    "for event in data['device_traces'][0]:\n"
    "    action = event['action']\n"
    "    if action == 'alloc':\n        live += event['size']\n        most = max(most, live)\n"
    "    elif action == 'free_completed':\n        live -= event['size']",
)
CRC = (
    "import zlib",
    "with open(sys.argv[1], 'rb') as file:\n    crc = 0\n    while piece := file.read(1 << 18):\n"
    "        crc = zlib.crc32(piece, crc)",
)


COMMANDS = (
    ("snapshot", "@"),
    ("snapshot", "@", "--html", "out.html"),
    ("snapshot", "@", "--json"),
    ("snapshot", "@", "--torch", "out.pickle"),
    ("leaks", "@"),
    ("diff", "@", "@"),
    ("export", "@", "--to", "torch", "-o", "out.pickle"),
    ("export", "@", "--to", "sqlite", "-o", "out.sqlite"),
    ("export", "@", "--to", "perfetto", "-o", "out.json"),
    ("replay", "@", "--check"),
    ("replay", "@", "--conf", "expandable_segments:True"),
    ("replay", "@", "--advise"),
)


def make(events: int, path: Path) -> None:
    subprocess.run([sys.executable, str(HERE / "large_recordings.py"), str(events), str(path)], check=True)


def run(command: tuple[str, ...], path: Path) -> tuple[float, int]:
    """Return CPU seconds and bytes of memory of a whole command."""
    words = [str(path) if word == "@" else word for word in command]
    if any(word.startswith("out.") for word in words):
        words.append("--force")
    null = subprocess.DEVNULL
    started = subprocess.Popen([sys.executable, "-m", "cudatool", *words], cwd=path.parent, stdout=null, stderr=null)
    _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode not in (0, 1, 4):  # leaks: found some, could not tell; replay --check: differs
        raise SystemExit(f"cudatool {' '.join(words)} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(parts: tuple[str, str], path: Path) -> tuple[float, float]:
    """Return CPU seconds and bytes of memory."""
    program = MEASURE.format(imports=parts[0], work=parts[1])
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    seconds, memory = json.loads(done.stdout)
    return seconds, memory


def compare(path: Path, peer: tuple[str, str], name: str, events: int) -> None:
    """Print what a report takes, and what the peer does."""
    ours, theirs = measure(OURS, path), measure(peer, path)
    for who, (seconds, memory) in ((f"cudatool snapshot, {path.suffix}", ours), (name, theirs)):
        print(f"{who:40}{seconds / events * 1e6:10.2f}{memory / events:16.0f}")
    if path.suffix == ".pickle":
        print(f"{'ratio, ours to theirs':40}{ours[0] / theirs[0]:10.2f}{ours[1] / theirs[1]:16.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=2_100_000)
    parser.add_argument("--only", default="", help="only the commands that begin with these words")
    parser.add_argument("--ending", choices=(".pickle", ".ctrace"), help="only recordings of one kind")
    options = parser.parse_args()
    events = options.events
    print(f"{f'{events:,} events':36}{'us an event':>14}{'bytes an event':>16}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for ending, peer, name in ((".pickle", PICKLE, "pickle.load and a walk"), (".ctrace", CRC, "zlib.crc32")):
            if options.ending not in (None, ending):
                continue
            path = Path(folder) / f"made{ending}"
            make(events, path)
            if not options.only:
                compare(path, peer, name, events)
            few = path.with_name(f"few{ending}")
            make(1000, few)
            for command in COMMANDS:
                title = " ".join(word for word in command if word not in ("@", "-o") and not word.startswith("out."))
                if title.startswith(options.only):
                    (seconds, memory), (least, base) = run(command, path), run(command, few)
                    figures = f"{(seconds - least) / events * 1e6:10.2f}{(memory - base) / events:16.0f}"
                    print(f"{title:40}{figures}", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
