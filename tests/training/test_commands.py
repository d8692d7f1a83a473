"""``python -m exlm_mini``, the single entry point for all commands."""

import json
import os
import subprocess
import sys

import pytest

from exlm_lab.downstream.catalogue import INPUT_OF
from exlm_mini import __version__
from exlm_mini.__main__ import COMMANDS, about, main
from exlm_mini.config.checks import nearest
from exlm_mini.config.recipes import recipe_names


def test_every_command_says_what_it_does(capsys):
    assert main([]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, module in COMMANDS.items():
        assert len(about(module)) > 20
        assert any(line.split()[:1] == [name] and len(line) <= 80 for line in lines)


def test_a_mistyped_command_and_the_version_are_told(capsys):
    assert main(["pretrian"]) == 2
    assert "did you mean pretrain" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"exlm-mini {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("pretrian", "pretrain"),
        ("Pretrain", "pretrain"),
        ("train", "pretrain"),
        ("smiles-tny", "smiles-tiny"),
        ("train.stpes", "train.steps"),
        ("steps", "train.steps"),
        ("model.steps", "train.steps"),
        ("BBBP", "bbbp"),
        (".cvs", ".csv"),
    ],
)
def test_a_slip_of_the_fingers_is_near(typed, suggested):
    known = [*COMMANDS, *recipe_names(), *INPUT_OF, "train.steps", "data.kind", ".csv"]
    assert nearest(typed, known).startswith(f"did you mean {suggested}")


@pytest.mark.parametrize("typed", ["nonsense", "mine", "my-molecules", "data.column", "x", ""])
def test_another_word_is_near_to_nothing(typed):
    for known in (COMMANDS, recipe_names(), INPUT_OF, ["train.steps", "data.kind"]):
        assert nearest(typed, known) == f"known: {', '.join(known)}"
        assert nearest(typed, known, "see --help") == "see --help"


@pytest.mark.parametrize("typed", ["--help | head -1", "--help >&-", "nonsense 2>&-"])
def test_a_closed_stream_and_an_old_encoding_make_no_traceback(typed):
    old = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = f"set -o pipefail; {sys.executable} -m exlm_mini {typed}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=old)
    assert ended.returncode == 2 * ("nonsense" in typed) and not ended.stderr


MISTYPED = [
    "prepare --source nowhere.smi",
    "pretrain --recipe nowhere.yaml",
    "fill C[MASK] --run nowhere",
    "plot nowhere",
    "export nowhere out",
    "finetune nowhere.csv --column a --target b --from molecules",
    "finetune --from nowhere",
    "predict nowhere table.csv --output out.csv",
    "embed molecules nowhere.csv --column a --output out.npy",
    "sweep nowhere",
]


TYPED = ["--help", *(f"{name} --help" for name in COMMANDS), *MISTYPED]
PROGRAM = """
import contextlib, io, json, sys
from exlm_mini.__main__ import main
ends = []
for typed in sys.argv[1:]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            code = main(typed.split())
        except SystemExit as end:
            code = end.code
    slow = {"torch", "transformers", "pandas", "scipy", "datasets"} & set(sys.modules)
    ends.append([code, told.getvalue(), sorted(slow)])
print(json.dumps(ends))
"""


def test_help_and_a_mistyped_path_wait_for_no_large_library():
    command = [sys.executable, "-c", PROGRAM, *TYPED]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for typed, (code, told, slow) in zip(TYPED, json.loads(result.stdout), strict=True):
        assert slow == [], typed
        if typed in MISTYPED:
            assert code == 2 and told.count("\n") == 1 and "nowhere" in told, told
        else:
            assert code == 0 and "--help" in told, told
