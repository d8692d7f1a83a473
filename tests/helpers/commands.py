"""Commands run in this process, what they say, and what they leave."""

import importlib

from exlm_mini.__main__ import COMMANDS

SMALL = [
    *("--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"),
    *("--train.batch_size", "4", "--train.validation_rows", "16", "--train.device", "cpu"),
]
"""Options of a run that takes a moment."""
TOY = ["--recipe", "toy-pairs", *SMALL, "--data.num_sentences", "64"]


def ended(capsys, main, *arguments):
    """Exit code, stdout and stderr of a command run in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def succeeds(capsys, main, *arguments):
    """The stdout of a command that must end well."""
    code, out, err = ended(capsys, main, *arguments)
    assert code == 0 and "error" not in err, err
    return out


def fails(capsys, main, *arguments, parts=()):
    """The one line a mistake gets, the last on stderr and all there is but what went before."""
    code, out, err = ended(capsys, main, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(lines)) == (2, "", 1) and err.endswith(f"{lines[0]}\n"), err
    for part in parts:
        assert str(part) in lines[0], lines[0]
    return lines[0]


def main_of(command):
    """The function of a command."""
    return importlib.import_module(COMMANDS[command]).main


def dry_run(capsys, *arguments):
    """What ``pretrain --dry-run`` prints, by the name of each line, and what it says besides."""
    code, out, err = ended(capsys, main_of("pretrain"), *arguments, "--dry-run")
    assert code == 0, err
    lines = out.replace("\n" + 19 * " ", " ").splitlines()
    return {line[:18].strip(): line[18:].strip() for line in lines}, err


def contents(folder):
    """Every file below a folder with its bytes, every folder; not a lock, which holds a pid."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != ".lock"
    }
