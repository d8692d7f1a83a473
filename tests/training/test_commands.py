"""One door for all commands."""

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


def test_options_and_exit_code_are_those_of_the_command(capsys, tmp_path):
    assert main(["fill", "CC[MASK]", "--run", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["pretrian"]) == 2
    assert "did you mean pretrain" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"exlm-mini {__version__}\n"
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "--help"])
    assert stopped.value.code == 0


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


@pytest.mark.parametrize(
    "typed", ["--help", *(f"{name} --help" for name in COMMANDS), *MISTYPED]
)
def test_help_and_a_mistyped_path_wait_for_no_large_library(typed):
    program = f"""
import sys
from exlm_mini.__main__ import main
try:
    code = main({typed.split()})
finally:
    slow = {{"torch", "transformers", "pandas", "scipy", "datasets"}} & set(sys.modules)
    if slow:
        sys.exit(f"imports {{slow}}")
sys.exit(code)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if typed in MISTYPED:
        assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
        assert "nowhere" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert "--help" in result.stdout
