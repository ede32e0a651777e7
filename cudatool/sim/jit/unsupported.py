"""Kernels that the software device cannot run, and the errors that say why."""

from __future__ import annotations

from cudatool.ptx.errors import PtxError
from cudatool.source_text import SourceLine

__all__ = ["UnsupportedInstruction", "UntranslatedInstruction"]


class UnsupportedInstruction(PtxError):
    """A kernel uses something that the software device cannot run; names it, the kernel and the source line.

    Parameters
    ----------
    instruction
        As PTX spells it.
    kernel
        Its name.
    source
        The line of the CUDA source, None where the PTX does not say.
    line
        PTX line, 0 where that is not known either.
    """

    def __init__(self, instruction: str, kernel: str, source: SourceLine | None, line: int) -> None:
        where = source or SourceLine("", line)
        super().__init__(f"{kernel}: the software device does not support {instruction} ({where})", line)
        self.args = (instruction, kernel, source, line)
        self.instruction, self.kernel, self.source = instruction, kernel, source

    def __str__(self) -> str:
        where = self.source or SourceLine("", self.line)
        return f"{self.kernel}: the software device does not support {self.instruction} ({where})"

    def at(self, kernel: str, source: SourceLine | None) -> UnsupportedInstruction:
        """Return the same error, of this kernel and line of the CUDA source."""
        return UnsupportedInstruction(self.instruction, kernel, source, self.line)


class UntranslatedInstruction(UnsupportedInstruction):
    """The translator failed at an instruction, or LLVM refuses its code, as `reason` says. A fault of ours."""

    def __init__(self, instruction: str, kernel: str, source: SourceLine | None, line: int, reason: str) -> None:
        super().__init__(instruction, kernel, source, line)
        self.args = (instruction, kernel, source, line, reason)
        self.reason = reason

    def __str__(self) -> str:
        where = self.source or (SourceLine("", self.line) if self.line else None)
        place = f" ({where})" if where else ""
        return f"{self.kernel}: the software device cannot translate {self.instruction}{place}: {self.reason}"

    def at(self, kernel: str, source: SourceLine | None) -> UntranslatedInstruction:
        return UntranslatedInstruction(self.instruction, kernel, source, self.line, self.reason)
