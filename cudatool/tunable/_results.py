"""Which candidate was fastest for which product, and the file of that: CSV, in the form of PyTorch's TunableOp.

::

    Validator,DRIVER_VERSION,13000
    GemmTunableOp_float_NN,nn_64_64_64_ld_64_64_64,Default,0.00512

A line is operator, parameters, solution, milliseconds. What a file says holds only where all validators are the same.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cudatool.errors import FileFormatError
from cudatool.files import replacing
from cudatool.tunable._problem import Problem

__all__ = ["Result", "Results", "append_untuned", "read_untuned"]

_VALIDATOR = "Validator"


class Result(NamedTuple):
    """The fastest candidate, and the milliseconds that it took."""

    solution: str
    milliseconds: float


class Results(dict[Problem, Result]):
    """Results by product."""

    def write(self, path: str, validators: Iterable[tuple[str, str]]) -> None:
        """Write all to a file, in the place of one that is there.

        Raises
        ------
        OutputError
            It cannot be written.
        """
        with replacing(path) as name, open(name, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows((_VALIDATOR, *validator) for validator in validators)
            writer.writerows(
                (*problem, result.solution, f"{result.milliseconds:.6g}") for problem, result in self.items()
            )

    def read(self, path: str, validators: Iterable[tuple[str, str]]) -> list[str]:
        """Take over a file's results if its validators are these.

        Returns
        -------
        list
            How its validators differ. If they do, nothing is taken over.

        Raises
        ------
        FileFormatError
            It is no such file.
        OSError
            It cannot be read.
        """
        stated: dict[str, str] = {}
        found: dict[Problem, Result] = {}
        with open(path, newline="", errors="replace") as file:
            for number, row in enumerate(csv.reader(file), 1):
                try:
                    if row[0] == _VALIDATOR:
                        _, name, value = row
                        stated[name] = value
                    else:
                        operator, parameters, solution, *time = row
                        found[Problem(operator, parameters)] = Result(solution, float(time[0]) if time else 0)
                except (IndexError, ValueError) as error:
                    raise FileFormatError(path, f"line {number} is no result: {','.join(row)}") from error
        present = dict(validators)
        differences = [
            f"{name} was {stated.get(name, 'not stated')} and is {present.get(name, 'not known')}"
            for name in sorted(stated.keys() | present.keys())
            if stated.get(name) != present.get(name)
        ]
        if not differences:
            self.update(found)
        return differences


def append_untuned(path: str, problem: Problem) -> None:
    """Add a product to a file of those that are to be tuned, unless it is there."""
    line = ",".join(problem)
    if not os.path.exists(path) or line not in Path(path).read_text().splitlines():
        with open(path, "a") as file:
            file.write(f"{line}\n")


def read_untuned(path: str) -> list[Problem]:
    """Return the products in a file, each once.

    Raises
    ------
    FileFormatError
        It is no such file.
    """
    found: dict[Problem, None] = {}
    with open(path, newline="", errors="replace") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if row and row[0] != _VALIDATOR:
                if len(row) < 2:
                    raise FileFormatError(path, f"line {number} names no product: {','.join(row)}")
                found[Problem(*row[:2])] = None
    return list(found)
