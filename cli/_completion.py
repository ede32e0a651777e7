"""Completion of ``--option=value`` and of values with colons, which each shell splits in its own way."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import ClassVar

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

__all__ = ["register"]

_BREAKS = ":="  # of bash's COMP_WORDBREAKS; its other characters need quotes anyway


class _Bash(BashComplete):
    """bash treats ``:`` and ``=`` as separate words, and replaces only what follows the last of them."""

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        words = [*args, incomplete]
        whole = words[:1]
        for before, word in pairwise(words):
            joined = word and (word[0] in _BREAKS or before[-1:] in set(_BREAKS))
            whole[-1:] = [whole[-1] + word] if joined and len(whole) > 1 else [whole[-1], word]
        return whole[:-1], whole[-1]

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        _, value = _option_and_value(incomplete)
        there = max(map(value.rfind, _BREAKS)) + 1
        return [
            CompletionItem(item.value[there:], item.type, item.help) if item.type == "plain" else item
            for item in super().get_completions(args, incomplete)
        ]


class _WholeWord(ShellComplete):
    """zsh and fish replace the whole word, the option in front of ``=`` included."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        option, _ = _option_and_value(incomplete)
        return [
            CompletionItem(option + item.value, item.type, item.help) if item.type == "plain" else item
            for item in super().get_completions(args, incomplete)
        ]


class _Zsh(_WholeWord, ZshComplete):
    name: ClassVar[str] = "zsh"


class _Fish(_WholeWord, FishComplete):
    name: ClassVar[str] = "fish"


def _option_and_value(word: str) -> tuple[str, str]:
    """Return ``--option=`` and what follows; an empty string and the word if it is not of this form."""
    found = re.match(r"--[^=]+=", word)
    return (found[0], word[found.end() :]) if found else ("", word)


def register() -> None:
    """Register these classes with click."""
    for shell in (_Bash, _Zsh, _Fish):
        add_completion_class(shell)
