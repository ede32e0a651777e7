"""Settings of a project: ``[tool.cudatool]`` in a pyproject.toml.

::

    [tool.cudatool]
    device = "sim:memory=8GiB"
    checks = ["race", "memcheck", "leak"]
    format = ["text", "sarif=findings.sarif"]
    baseline = "known.json"
    suppress = ["kind=race-* file=third_party/*.py", "@suppressions.txt"]

They are the values of options of the same names that are not given; an option that may be repeated takes a list.
Files are named from the directory of the pyproject.toml, and results stay inside of it. The file is the nearest one
from the working directory upwards that has this table, and belongs to the user, to root or to the owner of the working
directory: in ``/tmp``, another user may put one that hides findings.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Final

from cudatool.cli._text import say
from cudatool.errors import ConfigError, unknown
from cudatool.files import open_input
from cudatool.limits import PROJECT_BYTES, PROJECT_DOTS

__all__ = ["project_file", "setting"]

_NAME: Final = "pyproject.toml"
_SETTINGS: Final = ("baseline", "checks", "device", "format", "suppress")


def setting(name: str, *, several: bool) -> str | tuple[str, ...] | None:
    """Return the project's value of an option, in the option's form; None if it has none.

    Raises
    ------
    ConfigError
        The table has an unknown key, a value of the wrong type, or a result outside of the directory.
    """
    values = _settings(Path.cwd()).get(name, ())
    if not values:
        return None
    return values if several else ",".join(values)


def project_file() -> str:
    """Return the name of the file from the working directory; an empty string if there is none."""
    found = _table(Path.cwd())
    return os.path.relpath(found[0]) if found else ""


@functools.cache
def _table(here: Path) -> tuple[Path, Any] | None:
    """Return the nearest file with our table, and the table."""
    import tomllib

    trusted = {0, os.geteuid(), here.stat().st_uid}
    for folder in (here, *here.parents):
        path = folder / _NAME
        try:
            with open_input(path) as file:
                owner = os.fstat(file.fileno()).st_uid
                content = file.read(PROJECT_BYTES + 1)
        except OSError:
            continue  # other tools report this
        if b"cudatool" not in content.replace(b"\0", b""):  # UTF-16 has zeros in between
            continue
        if owner not in trusted:
            say(f"the settings in {os.path.relpath(path)} are not used: the file belongs to user {owner}")
            continue
        if len(content) > PROJECT_BYTES:
            raise ConfigError(f"{os.path.relpath(path)} is larger than {PROJECT_BYTES >> 10} KiB")
        if any(line.count(b".") > PROJECT_DOTS for line in content.splitlines()):
            raise ConfigError(f"{os.path.relpath(path)} has a line with more than {PROJECT_DOTS} dots")
        try:
            document = tomllib.loads(content.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{os.path.relpath(path)} is not UTF-8, as TOML is (byte {error.start})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{os.path.relpath(path)} is not TOML: {error}") from error
        tools = document.get("tool")
        if isinstance(tools, dict) and "cudatool" in tools:
            return path, tools["cudatool"]
    return None


@functools.cache
def _settings(here: Path) -> dict[str, tuple[str, ...]]:
    """Return the settings, each as the values that it lists."""

    found = _table(here)
    if found is None:
        return {}
    path, table = found
    where = f"{os.path.relpath(path)}: [tool.cudatool]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table")
    settings = {}
    for name, value in table.items():
        if name not in _SETTINGS:
            raise ConfigError(f"{where}: {unknown('setting', name, _SETTINGS)}")
        values = (value,) if isinstance(value, str) else value
        if not isinstance(values, tuple | list) or not all(isinstance(one, str) and one for one in values):
            raise ConfigError(f"{where}: {name} has to be a string or a list of strings")
        if any("\0" in one for one in values):  # no name of a file may have one
            raise ConfigError(f"{where}: {name} has a null character")
        if name in ("baseline", "device") and len(values) != 1:
            raise ConfigError(f"{where}: {name} has to be one string")
        settings[name] = tuple(_placed(name, one, path.parent, where) for one in values)
    return settings


def _placed(name: str, value: str, folder: Path, where: str) -> str:
    """Return a value with the file in it named from the working directory instead of from `folder`."""

    if name == "baseline":
        return os.path.relpath(folder / value)
    if name == "suppress" and value.startswith("@"):
        return f"@{os.path.relpath(folder / value[1:])}"
    form, equals, file = value.partition("=")
    if name != "format" or file in ("", "-"):
        return value
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()):  # the file may be a stranger's
        raise ConfigError(f"{where}: format {value!r} names a file outside of {folder}; give it with --format")
    return f"{form}{equals}{os.path.relpath(path)}"
