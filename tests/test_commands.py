"""One door for all commands."""

import subprocess
import sys

import pytest

from exlm_mini.__main__ import COMMANDS, about, main


def test_every_command_says_what_it_does(capsys):
    assert main([]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, module in COMMANDS.items():
        assert len(about(module)) > 20
        assert any(line.split()[:1] == [name] and len(line) <= 80 for line in lines)


def test_options_and_exit_code_are_those_of_the_command(capsys, tmp_path):
    assert main(["fill", "CC[MASK]", "--run", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "--help"])
    assert stopped.value.code == 0


def test_a_mistyped_command_is_offered_the_nearest(capsys):
    assert main(["pretrian"]) == 2
    assert "did you mean pretrain" in capsys.readouterr().err


def test_two_dashes_are_no_value(capsys):
    assert main(["fill", "CC[MASK]", "--top=--"]) == 2
    assert "--top" in capsys.readouterr().err


def test_the_list_needs_no_torch():
    program = """
import sys
from exlm_mini.__main__ import main
main([])
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
