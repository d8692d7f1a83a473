"""Runs commands in this process, and looks at what they print and which files they leave."""

import importlib

from exlm_mini.__main__ import COMMANDS

SMALL = [
    *("--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"),
    *("--train.batch_size", "4", "--train.validation_rows", "16", "--train.device", "cpu"),
]
"""Options that make a run take only a moment."""
TOY = ["--recipe", "toy-pairs", *SMALL, "--data.num_sentences", "64"]


def ended(capsys, main, *arguments):
    """Run a command in this process; returns its exit code, stdout and stderr."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def succeeds(capsys, main, *arguments):
    """Run a command that must succeed; returns its stdout."""
    code, out, err = ended(capsys, main, *arguments)
    assert code == 0 and "error" not in err, err
    return out


def fails(capsys, main, *arguments, parts=()):
    """Run a command that must fail with one error line, the last on stderr; returns that line.

    Nothing may be on stdout, and the line must contain all ``parts``.
    """
    code, out, err = ended(capsys, main, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(lines)) == (2, "", 1) and err.endswith(f"{lines[0]}\n"), err
    for part in parts:
        assert str(part) in lines[0], lines[0]
    return lines[0]


def main_of(command):
    """The ``main`` function of a command, by the command's name."""
    return importlib.import_module(COMMANDS[command]).main


def dry_run(capsys, *arguments):
    """What ``pretrain --dry-run`` prints, by the name of each line, and its stderr."""
    code, out, err = ended(capsys, main_of("pretrain"), *arguments, "--dry-run")
    assert code == 0, err
    lines = out.replace("\n" + 19 * " ", " ").splitlines()
    return {line[:18].strip(): line[18:].strip() for line in lines}, err


def contents(folder):
    """All files below a folder with their bytes, and all folders; not locks, which hold a pid."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }
