"""The browser of the tests of pages, which they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Page


@pytest.fixture(scope="session", autouse=True)
def browser_ends() -> Iterator[None]:
    """End the browser that pages have started."""
    yield
    chromium.close()


@pytest.fixture(scope="module")
def opened(file: Path) -> Iterator[Page]:
    """The page in `file`, which a module makes. It has no errors, and loads nothing else."""
    with Page(file) as page:
        yield page
        assert [] == page.errors
        assert [file.as_uri()] == [url for url in page.requests if not url.startswith(("data:", "about:"))]
