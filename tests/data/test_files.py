"""Whatever goes wrong with a file, when it is read or written, is told in one line."""

import csv
import errno
import os

import pytest

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading, refused, write_atomically
from exlm_mini.pretrain import main


@pytest.mark.parametrize(
    "error",
    [ValueError("x\ny"), KeyError("x"), EOFError(), OSError("no number"), csv.Error("x")],
    ids=lambda error: type(error).__name__,
)
def test_what_a_parser_says_becomes_one_line_with_the_name(error):
    with (
        pytest.raises(UserError) as told,
        reading("some/file.json", "make it again", csv.Error),
    ):
        raise error
    line = str(told.value)
    assert line.startswith("cannot read some/file.json ") and line.endswith("; make it again")
    assert type(error).__name__ in line and line.isprintable()
    assert told.value.__cause__ is error  # what --debug shows


@pytest.mark.parametrize(
    "error",
    [
        UserError, KeyboardInterrupt, BrokenPipeError, GeneratorExit, ImportError,
        TypeError, AttributeError, IndexError, AssertionError,
    ],
)  # fmt: skip
def test_what_is_not_the_files_fault_passes(error):
    raised = error("as it was")
    with pytest.raises(error) as caught, reading("some/file.json"):
        raise raised
    assert caught.value is raised


def test_an_error_of_the_system_names_the_file_it_speaks_of(tmp_path):
    with pytest.raises(UserError, match=r"other\.bin"), reading("some/file.json"):
        (tmp_path / "other.bin").read_bytes()


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "a", b"x")
    assert (
        str(refused(caught.value))
        == f"no space left to write {tmp_path / 'a'}; free some space"
    )


def test_a_file_that_cannot_be_written_has_the_name_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "none" / "a.json", b"")
    assert str(caught.value).endswith(f"'{tmp_path / 'none' / 'a.json'}'")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/a\.json'$"):
        write_atomically(tmp_path / "file" / "a.json", b"")


@pytest.mark.parametrize(
    "text",
    ["x" * 5000, "word " * 1000, "a\nb\x1b[2J\0\u2028\ud800" * 100, "'" + "y z" * 3000 + "'"],
    ids=["one word", "words", "what cannot be printed", "quoted"],
)
def test_what_a_message_quotes_is_cut(text):
    line = str(UserError(f"train.steps is {text}; give a number"))
    assert len(line) <= 1000 and line.isprintable()
    assert line.startswith("train.steps is ") and line.endswith("; give a number")
    assert str(UserError(line)) == line


def test_debug_shows_the_traceback_and_changes_nothing_else(capsys):
    options = ["--recipe", "nowhere"]
    assert main([*options, "--debug"]) == 2
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    line = told.splitlines()[-1]
    assert main(options) == 2
    assert capsys.readouterr().err.splitlines() == [line]
