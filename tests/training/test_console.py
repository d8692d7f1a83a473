"""Every command ends with an exit code, and with one line if something was wrong."""

import errno
import re
import sys
import tomllib
from pathlib import Path

import pytest

from exlm_mini.config.checks import EXTRAS, UserError
from exlm_mini.training import console
from exlm_mini.training.console import INTERRUPTED, ProgressLine, exit_code

ROOT = Path(__file__).resolve().parents[2]


def raising(error):
    def run(*_):
        raise error

    return run


def test_an_interrupt_is_told_in_one_line(capsys):
    assert exit_code(raising(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_mistake_and_what_the_system_refuses_are_told_in_one_line(capsys):
    for error, line in (
        (UserError("steps is 0"), "error: steps is 0"),
        (
            OSError(errno.ENOSPC, "full", "a.bin"),
            "error: no space left to write a.bin; free some space",
        ),
        (
            OSError(errno.ENOSPC, "full"),
            "error: no space left to write the output; free some space",
        ),
        (
            OSError(errno.EISDIR, "Is a directory", "a.tmp"),
            "error: cannot read or write a.tmp (Is a directory); check its type and permissions, "
            "or choose another path",
        ),
    ):
        assert exit_code(raising(error)) == 2
        assert capsys.readouterr() == ("", f"{line}\n")


def test_letters_that_are_joined_stay_so_in_a_message():
    assert str(UserError("\u0645\u06cc\u200c\u062e\n")) == "\u0645\u06cc\u200c\u062e\\n"


def test_a_command_says_what_an_unread_end_means(monkeypatch):
    monkeypatch.setattr("exlm_mini.training.console.drop_output", lambda: None)
    assert exit_code(raising(BrokenPipeError())) == INTERRUPTED
    assert exit_code(raising(BrokenPipeError()), unread=0) == 0
    assert exit_code(sys.stdout.flush) == 0


def test_a_library_that_was_left_out_is_told_with_its_extra(capsys):
    assert exit_code(raising(ModuleNotFoundError(name="sklearn.inner"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs the package sklearn; pip install 'exlm-mini[tasks] @ git+https" in line
    for error in (ModuleNotFoundError(name="ours"), PermissionError(errno.EACCES, "no")):
        with pytest.raises(type(error)):  # our own mistakes are not hidden
            exit_code(raising(error))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_line_now_and_then_says_how_far_and_how_long_still(is_terminal, monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with ProgressLine("mlm", 30) as line:
        for step in range(1, 31):
            line.tell(step, "text")
            now += 4.0
    shown = [f"mlm {n}/30: text, ETA {eta}" for n, eta in (
        (1, "unknown"), (4, "104 s"), (7, "92 s"), (28, "8 s"), (30, "0 s")
    )]  # fmt: skip
    err = capsys.readouterr().err
    assert all(one in err for one in shown)
    # On a terminal each line replaces the one before.
    assert err.count("\n") == (1 if is_terminal else 11)
    assert err.count("\r") == (30 if is_terminal else 0)


def test_the_extras_bring_what_they_are_named_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brings = {"pandas": "datasets", "pyarrow": "datasets"}
    brings |= {"yaml": "PyYAML", "sklearn": "scikit-learn"}
    for name, extra in EXTRAS.items():
        wanted = project["optional-dependencies"][extra]
        assert brings.get(name, name) in {re.match(r"[\w-]+", r)[0] for r in wanted}
