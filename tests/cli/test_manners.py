"""Suggestions, help, completion, settings of a project, and pages in a browser."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from cudatool.cli import _COMMANDS, _project, group
from cudatool.cli._pages import open_page
from cudatool.errors import ConfigError
from cudatool.sanitize.kinds import CHECKS
from cudatool.sanitize.report.outputs import FORMATS

DOCS = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["snapsot"], "Did you mean 'snapshot'?"),
        (["train.py", "-x"], "Did you mean 'cudatool run train.py'?"),
        (["run.ctrace"], "Did you mean 'cudatool snapshot run.ctrace'?"),
        (["zzz"], "There is no command 'zzz'."),
        (["sh", "x.py"], "Did you mean 'cudatool run sh'?"),
        (["run", "--forse", "x.py"], "--force"),
        (["sanitize", "--format", "sarf", "x.py"], "did you mean 'sarif'?"),
        (["sanitize", "--checks", "race,memchek", "x.py"], "did you mean 'memcheck'?"),
        (["sanitize", "--checks", "zzz", "x.py"], "there are race, memcheck"),
        (["snapshot", "xx.pickel"], "did you mean 'xx.pickle'?"),
        (["devices", "--device", "simm"], "did you mean 'sim'?"),
        (["devices", "--device", "sim:memry=1GiB"], "did you mean 'memory'?"),
        (["devices", "--device", "sim:schedule=liffo"], "did you mean 'lifo'?"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(run_here, folder, words, suggestion):
    for name in ("x.py", "xx.pickle"):
        (folder / name).touch()
    done = run_here(*words)
    assert (2, "") == (done.returncode, done.stdout)
    assert suggestion in done.stderr


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_help_of_a_command_has_an_example_that_its_options_allow(name, monkeypatch):
    text = CliRunner().invoke(group, [name, "--help"], terminal_width=80).output
    assert all(len(line) <= 80 for line in text.splitlines())
    command = group.get_command(None, name)
    lines = text.split("Examples:\n")[1].splitlines()
    examples = [shlex.split(line)[2:] for line in lines if line.lstrip().startswith("$ ")]
    assert examples
    for words in examples:
        assert name == words[0]
        command.make_context(name, words[1:], resilient_parsing=False)


def test_the_help_fits_80_columns_and_names_every_command():
    text = CliRunner().invoke(group, ["--help"], terminal_width=80).output
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(f"\n  {name} " in text for name in _COMMANDS)


def completed(line: str) -> list[str]:
    """Return what the shell would offer for the last word of a line."""
    words = line.split(" ")
    found = BashComplete(group, {}, "cudatool", "_CUDATOOL_COMPLETE").get_completions(words[1:-1], words[-1])
    return [item.value if item.type == "plain" else item.type for item in found]


@pytest.fixture
def files(folder: Path) -> None:
    (folder / "deep" / "deeper").mkdir(parents=True)
    for name in ("train.py", "run.ctrace", "gpt.pickle.xz", "notes.txt", "deep/deeper/one.ctrace", ".hidden.py"):
        (folder / name).touch()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cudatool sn", ["snapshot"]),
        ("cudatool run --no", ["--no-on-oom", "--no-stacks", "--no-children"]),
        ("cudatool run ", ["deep/", "train.py"]),
        ("cudatool run --device sim t", ["train.py"]),
        ("cudatool run train.py ", ["file"]),
        ("cudatool sanitize ", ["deep/", "run.ctrace", "train.py"]),
        ("cudatool snapshot ", ["deep/", "gpt.pickle.xz", "run.ctrace"]),
        ("cudatool snapshot de", ["deep/deeper/one.ctrace"]),
        ("cudatool snapshot zz", ["file"]),
        ("cudatool diff run.ctrace g", ["gpt.pickle.xz"]),
        ("cudatool sanitize --checks race,mem", ["race,memcheck"]),
        ("cudatool sanitize --checks ", [*CHECKS, "all"]),
        ("cudatool sanitize --format ", list(FORMATS)),
        (
            "cudatool run --device s",
            [
                "sim",
                *(f"sim:schedule={s}" for s in ("fifo", "lifo", "late", "random")),
                "sim:memory=8GiB",
                "sim:count=2",
            ],
        ),
        ("cudatool export --to p", ["perfetto", "parquet"]),
        ("cudatool replay --conf max_split_size_mb:32,exp", ["max_split_size_mb:32,expandable_segments:True"]),
    ],
)
def test_completion_offers_what_fits(line, expected):
    assert expected == completed(line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_line_sets_completion_up(folder, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    (folder / "cudatool").write_text(f'#!/bin/sh\nexec {sys.executable} -m cudatool "$@"\n')
    (folder / "cudatool").chmod(0o755)
    (line,) = [line for line in DOCS.splitlines() if f"{shell}_source" in line]
    line = line.removeprefix("$ echo '").split("' >>")[0]
    shown = {"bash": "complete -p cudatool", "zsh": "print ${_comps[cudatool]}", "fish": "complete cudatool"}[shell]
    before = "autoload -U compinit; compinit -u -D; " if shell == "zsh" else ""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", f"{before}{line}\n{shown}"], env=environment, capture_output=True, text=True)
    assert "cudatool_completion" in done.stdout, done.stderr


def asked_by(shell: str, words: list[str]) -> list[str]:
    """Return the values that a shell is given for the last of its words."""
    environment = {
        **os.environ,
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
        "_CUDATOOL_COMPLETE": f"{shell}_complete",
    }
    command = [sys.executable, "-c", "from cudatool.cli import main; main()"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    if shell == "zsh":
        return lines[1::3]
    return [line.removeprefix("plain,") for line in lines]


@pytest.mark.parametrize(
    ("words", "expected"),
    [  # as bash splits them
        (["--device", "=", "sim", ":", "sch"], "schedule=lifo"),
        (["--device", "=", "au"], "auto"),
        (["--device", "="], "cuda"),
        (["--device", "sim", ":", "schedule", "=", "l"], "lifo"),
        (["--device", "sim", ":"], "memory=8GiB"),
        (["--device", "si"], "sim:schedule=lifo"),
    ],
)
def test_bash_completes_what_stands_after_its_word_breaks(words, expected):
    assert expected in asked_by("bash", ["cudatool", "run", *words])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_keeps_the_option_before_an_equals_sign(shell):
    found = asked_by(shell, ["cudatool", "sanitize", "--checks=race,mem"])
    assert ["--checks=race,memcheck"] == found
    assert ["sim:schedule=fifo"] == asked_by(shell, ["cudatool", "run", "--device", "sim:schedule=f"])


def settings(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.cudatool]\n{text}\n")


RACY = """
import cudatool as ct
a = ct.empty(1024, "f4")
with ct.stream(ct.Stream()):
    a.fill_(1)
with ct.stream(ct.Stream()):
    a.fill_(2)
ct.synchronize()
"""


def test_the_file_replaces_options_that_are_not_given(run_command, folder):
    (folder / "racy.py").write_text(RACY)
    settings(folder, 'checks = ["memcheck", "leak"]\nformat = ["json=sub/found.json"]\nbaseline = "known.json"')
    (folder / "sub").mkdir()
    (folder / "known.json").write_text('{"schema": "cudatool.baseline/1", "findings": []}')
    done = run_command("sanitize", "../racy.py", cwd=folder / "sub")
    assert "cudatool: settings of ../pyproject.toml: " in done.stderr
    assert 0 == done.returncode, done.stdout  # races are not looked for
    assert (folder / "sub" / "found.json").exists()
    done = run_command("sanitize", "--checks", "race", "--json", "racy.py")
    assert 1 == done.returncode
    assert '"race-waw"' in done.stdout


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(run_warm, folder):
    settings(folder, 'device = "sim:memory=3GiB"')

    def memory(*options: str, device: str) -> str:
        return run_warm("devices", *options, environment={"CUDATOOL_DEVICE": device}).stdout

    assert "3 GiB" in memory(device="")
    assert "4 GiB" in memory(device="sim:memory=4GiB")
    assert "5 GiB" in memory("--device", "sim:memory=5GiB", device="sim:memory=4GiB")


def test_the_nearest_file_with_the_table_counts(folder, monkeypatch):
    settings(folder, 'checks = "race"')
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "pyproject.toml").write_text("[tool.other]\nname = 'cudatool'\n")
    monkeypatch.chdir(folder / "a" / "b")
    assert "race" == _project.setting("checks", several=False)
    assert os.path.join("..", "..", "pyproject.toml") == _project.project_file()


def test_the_file_is_not_read_for_help(run_warm, folder):
    settings(folder, "nonsense = 1")
    assert 0 == run_warm("sanitize", "--help").returncode
    assert "no setting 'nonsense'" in run_warm("sanitize", "x.py").stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chekcs = 'race'", "no setting 'chekcs'; did you mean 'checks'?"),
        ("zzz = 1", "there are baseline, checks, device, format, suppress"),
        ("checks = 1", "checks has to be a string or a list of strings"),
        ("checks = ['race', 1]", "checks has to be a string or a list of strings"),
        ("device = ['sim', 'cuda']", "device has to be one string"),
        ("device = ''", "device has to be"),
        ("format = 'json=../out.json'", "outside of"),
        ("format = 'json=link/out.json'", "outside of"),
        ("format = 'json=/etc/out.json'", "outside of"),
        ("checks = ", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_error(folder, text, message):
    (folder / "link").symlink_to("/")
    settings(folder, text)
    with pytest.raises(ConfigError, match="pyproject") as raised:
        _project.setting("checks", several=False)
    assert message in str(raised.value)


def test_files_are_named_from_the_directory_of_the_file(folder, monkeypatch):
    settings(
        folder,
        "baseline = 'known.json'\nsuppress = ['@rules.txt', 'kind=leak']\nformat = ['text', 'json=out.json', 'sarif=-']",
    )
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    assert "../known.json" == _project.setting("baseline", several=False)
    assert ("@../rules.txt", "kind=leak") == _project.setting("suppress", several=True)
    assert ("text", "json=../out.json", "sarif=-") == _project.setting("format", several=True)


def test_the_documented_table_is_one(folder):
    table = DOCS.split("```toml\n")[1].split("```")[0]
    assert set(tomllib.loads(table)["tool"]["cudatool"]) == set(_project._SETTINGS)
    (folder / "pyproject.toml").write_text(table)
    assert "race,memcheck,leak" == _project.setting("checks", several=False)


@pytest.mark.parametrize(
    "words", [["run", "--open", "x.py"], ["sanitize", "--html", "page.html", "--open", "x.py"], ["snapshot", "--open"]]
)
def test_open_shows_the_page_in_the_browser(run_warm, folder, words):
    (folder / "x.py").write_text("import cudatool as ct\nct.zeros(1, 'f4')\n")
    if words[0] == "snapshot":
        run_warm("run", "x.py")
    browser = folder / "browser"
    browser.write_text('#!/bin/sh\necho "$1" > opened\n')
    browser.chmod(0o755)
    done = run_warm(*words, environment={"BROWSER": f"{browser} %s"})
    assert 0 == done.returncode, done.stderr
    (page,) = folder.glob("*.html")
    assert page.as_uri() == (folder / "opened").read_text().strip()


@pytest.mark.parametrize("commands", [(), ("lynx",)])
def test_without_a_browser_the_page_is_named(folder, monkeypatch, capsys, commands):
    import webbrowser

    for name in commands:  # one that would take the terminal
        (folder / name).write_text("#!/bin/sh\ntouch taken\n")
        (folder / name).chmod(0o755)
    for name, value in {"PATH": str(folder), "BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"_browsers": {}, "_tryorder": None, "_os_preferred_browser": None}.items():
        monkeypatch.setattr(webbrowser, name, value)
    open_page("page.html")
    assert f"The page is {folder / 'page.html'}; it is one file and needs no network" in capsys.readouterr().err
    assert not (folder / "taken").exists()


def test_open_needs_a_page(run_warm, folder):
    (folder / "x.py").touch()
    assert "--open needs --html FILE" in run_warm("sanitize", "--open", "x.py").stderr
