"""Pages in a browser."""

from __future__ import annotations

import os
from pathlib import Path

from cudatool.cli._text import say

__all__ = ["open_page"]


def open_page(page: str | os.PathLike[str]) -> None:
    """Open a page in the user's browser, or say where it is."""
    import webbrowser

    path = Path(page).resolve()
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        browser = None
    # Without a desktop Python would take lynx or w3m, which cannot draw the page and take the terminal.
    in_terminal = type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER")
    if browser is None or in_terminal or not browser.open(path.as_uri()):
        say(f"No browser opens here. The page is {path}; it is one file and needs no network.")
