"""The error that says what is wrong with PTX."""

from __future__ import annotations

from cudatool.errors import CudatoolError

__all__ = ["PtxError"]

_LONGEST_MESSAGE = 200


class PtxError(CudatoolError):
    """PTX text that cannot be read or used.

    Parameters
    ----------
    message
        What is wrong.
    line
        Line of the PTX text, from 1; 0 if no single line is to blame.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        if len(message) > _LONGEST_MESSAGE:  # it quotes what stands in the text, which may be of any length
            message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 4 :]}"
        super().__init__(message, line)
        self.line = line

    def __str__(self) -> str:
        message: str = self.args[0]
        return f"{message} (PTX line {self.line})" if self.line else message
