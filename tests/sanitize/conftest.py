"""What several tests of the sanitizer share."""

from __future__ import annotations

import pytest
from sanitize_program import Program


@pytest.fixture
def program() -> Program:
    """A program to which the test adds what it does."""
    return Program()
