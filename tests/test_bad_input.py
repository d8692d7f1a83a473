"""Bad input of every kind, through every command: one line of error, or what was asked for.

``tests/bad_input.py`` tries more of it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

NUM_CASES = 500


@pytest.mark.slow
@pytest.mark.reliability
def test_no_input_ends_a_command_badly():
    # A process of its own, since it is forked and must have no threads.
    script = Path(__file__).with_name("bad_input.py")
    command = [sys.executable, str(script), "--cases", str(NUM_CASES)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0 and f"{NUM_CASES} cases" in done.stdout, (
        done.stdout + done.stderr
    )
