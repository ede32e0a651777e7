"""The browser of the tests of pages, which they share."""

from __future__ import annotations

from collections.abc import Iterator

import chromium
import pytest


@pytest.fixture(scope="session", autouse=True)
def browser_ends() -> Iterator[None]:
    """End the browser that pages have started."""
    yield
    chromium.close()
