"""Another user of the same machine, for tests of what that user can reach."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

__all__ = ["OTHER_USER", "run_as_other_user"]

OTHER_USER = 65534  # "nobody" on most machines; any id that is not ours will do

_BECOME = f"""
import os
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})
"""


def run_as_other_user(imports: str, program: str) -> str:
    """Run `program` as another user and return what it prints; `imports` runs before it gives up its rights.

    Skips the test if this process may not become another user.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can act as a second user")
    code = textwrap.dedent(imports) + _BECOME + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
