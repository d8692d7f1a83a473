"""Checkpoints: bitwise round trip, and nothing broken is ever loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from crashes import Crash, crash_at
from refusals import told
from torch import Tensor

from exlm_mini.data import files
from exlm_mini.data.files import write_atomically
from exlm_mini.training import checkpoint
from exlm_mini.training.checkpoint import (
    MANIFEST,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)

TENSORS = {
    "model": {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(3)},
    "optimizer": {"layer.weight/step": torch.tensor(7)},
}
STATE = {"recipe": "toy", "sha256": "ab" * 32, "learning_rate": 0.1, "best": float("inf")}


def assert_bitwise_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for ours, other in ((left[name], right[name]) for name in left):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        bytes_of = (t.contiguous().view(-1).view(torch.uint8) for t in (ours, other))
        assert torch.equal(*bytes_of)


def is_equal(loaded: checkpoint.Checkpoint) -> bool:
    same = loaded.tensors.keys() == TENSORS.keys() and loaded.step == 7
    for group, named in TENSORS.items() if same else ():
        assert_bitwise_equal(loaded.tensors[group], named)
    return same and loaded.state == STATE


def flip_bit(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan"), -0.0]).to(torch.bfloat16),
        torch.arange(6.0).view(2, 3).t(),
    ],
    ids=["bf16-nan", "transposed"],
)
def test_any_tensor_comes_back_bitwise(tmp_path, tensor):
    path = save_checkpoint(tmp_path, 0, {"any": {"x": tensor}, "nothing": {}}, {})
    loaded = load_checkpoint(path)
    assert_bitwise_equal(loaded.tensors["any"], {"x": tensor})
    assert loaded.tensors["nothing"] == {} and loaded.step == 0


@pytest.mark.reliability
def test_every_flipped_bit_is_refused_and_the_previous_checkpoint_used(tmp_path):
    save_checkpoint(tmp_path, 6, TENSORS, {"previous": True})
    path = save_checkpoint(tmp_path, 7, TENSORS, STATE)
    assert is_equal(latest_checkpoint(tmp_path, pytest.fail))
    rng = random.Random(0)
    for file in sorted(path.iterdir()):
        for bit in rng.sample(range(8 * file.stat().st_size), 50):
            flip_bit(file, bit)
            line, lines = told(lambda: load_checkpoint(path), path), []
            found = latest_checkpoint(tmp_path, lines.append)
            assert (found.step, found.state) == (6, {"previous": True}), (file, bit)
            assert lines == [f"skipped checkpoint step-000007: {line}"]
            flip_bit(file, bit)
    assert is_equal(latest_checkpoint(tmp_path, pytest.fail))


FOREIGN = [
    "notes.tmp", "old-step-000001.tmp", "step-00001.tmp", "step-000001.tmp.zip", "step-best",
    "step-best.tmp", "step-000001.old", "step-000001.tmp2",
]  # fmt: skip
"""Names that saving a checkpoint never gives."""


def test_latest_falls_back_on_the_newest_intact_checkpoint(tmp_path):
    for step in (9, 10, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, TENSORS, {"step": step})
    flip_bit(tmp_path / "step-1000000" / "model.safetensors", 900)
    (tmp_path / "step-999999" / "optimizer.safetensors").unlink()
    for name in ("step-2000000", "step-3000000.tmp", *FOREIGN):
        (tmp_path / name).mkdir()
    (tmp_path / "step-4000000").write_text("a file of somebody else")
    lines = []
    latest = latest_checkpoint(tmp_path, lines.append)
    assert latest.step == 10 and latest.state == {"step": 10}
    skipped = [line.split()[2].rstrip(":") for line in lines]
    assert skipped == ["step-2000000", "step-1000000", "step-999999"]


def test_latest_of_nothing_is_none_and_of_only_broken_ones_an_error(tmp_path):
    assert latest_checkpoint(tmp_path / "missing", pytest.fail) is None
    assert latest_checkpoint(tmp_path, pytest.fail) is None
    (tmp_path / "step-000001.tmp").mkdir()
    assert latest_checkpoint(tmp_path, pytest.fail) is None
    (tmp_path / "step-000001").mkdir()
    words = f"no checkpoint in {tmp_path}", "manifest.json (No such file"
    told(lambda: latest_checkpoint(tmp_path, pytest.fail), *words)


@pytest.mark.reliability
def test_crashes_at_any_two_system_calls_leave_a_whole_checkpoint(tmp_path, monkeypatch):
    """Saving step 7 over a damaged one crashes at each system call, and so does saving it again."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # this test has no power cuts
    save_checkpoint(tmp_path / "0", 6, TENSORS, {})
    (save_checkpoint(tmp_path / "0", 7, TENSORS, {}) / "model.safetensors").write_bytes(b"")
    at = iter(range(1, 1000))
    lefts, ends = [tmp_path / "0"], []
    for _ in range(2):
        before, lefts = lefts, []
        for left in before:
            for count in range(100):
                directory = shutil.copytree(left, tmp_path / str(next(at)))
                lefts.append(directory)
                with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
                    crash_at(patch, count)
                    save_checkpoint(directory, 7, TENSORS, STATE)
                    ends.append(count)
                    break
    for left in lefts:
        found = latest_checkpoint(left, lambda line: None)
        assert found.step == 6 or is_equal(found)
        save_checkpoint(left, 7, TENSORS, STATE)
        assert is_equal(latest_checkpoint(left, pytest.fail))
        assert sorted(path.name for path in left.iterdir()) == ["step-000006", "step-000007"]
    assert min(ends) > 6


def test_names_are_given_only_to_what_the_disk_has(tmp_path, monkeypatch):
    """A power cut may lose what is not synced: so sync files, then rename, then sync the folder."""
    done, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(old, new):
        done.append(f"-> {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    directory = tmp_path / "run"
    save_checkpoint(directory, 7, TENSORS, STATE, {"config.json": b"{}"})
    names = ["model.safetensors", "optimizer.safetensors", "config.json", MANIFEST]
    each = [[f"{file}.{os.getpid()}.partial", f"-> {file}"] for file in names]
    steps = [step for written in each for step in (*written, "step-000007.tmp")]
    assert done == [*steps, "-> step-000007", "run"]
    with pytest.raises(IsADirectoryError):
        write_atomically(directory, b"")
    assert not list(tmp_path.glob("run.*"))


@pytest.mark.reliability
def test_a_disk_full_later_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, TENSORS, STATE)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((checkpoint, "write_atomically"), (files, "sync_directory")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(tmp_path, 2, TENSORS, {})
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert is_equal(latest_checkpoint(tmp_path, pytest.fail)._replace(step=7))


# ---- deleting old checkpoints ----


def save_steps(directory: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(directory, step, TENSORS, {})


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def test_other_files_are_never_deleted(tmp_path):
    prune_checkpoints(tmp_path / "missing", 1, 2)
    for name in (*FOREIGN, "step-000001.tmp", "step-1000000.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000").write_text("a file of somebody else")
    save_steps(tmp_path, 1, 2)
    prune_checkpoints(tmp_path, 1, 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*FOREIGN, "step-000000", "step-000002"}


@pytest.mark.reliability
@pytest.mark.parametrize("keep_last", [0, 1, 2, 9])
def test_the_newest_intact_checkpoints_are_never_deleted(tmp_path, keep_last):
    """Whichever checkpoints are damaged, deleting old ones keeps the newest intact one."""
    save_steps(tmp_path / "whole", 1, 2, 3, 4)
    for damaged in range(2**4 - 1):
        directory = shutil.copytree(tmp_path / "whole", tmp_path / str(damaged))
        for index in range(4):
            if damaged >> index & 1:
                flip_bit(directory / f"step-{index + 1:06d}" / "model.safetensors", 999)
        newest = latest_checkpoint(directory, lambda line: None).step
        prune_checkpoints(directory, keep_last, newest)
        assert latest_checkpoint(directory, lambda line: None).step == newest, damaged
        # Newer checkpoints that are damaged stay, and do not count among those to keep.
        first = max(0, newest - keep_last) if keep_last else 0
        assert steps_in(directory) == [1, 2, 3, 4][first:]


@pytest.mark.reliability
def test_a_crash_while_old_checkpoints_go_loses_none_that_stays(tmp_path):
    for count in range(100):
        directory = tmp_path / str(count)
        save_steps(directory, 1, 2, 3, 4)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            crash_at(patch, count)
            prune_checkpoints(directory, 1, 4)
            break
        for path in directory.glob("step-??????"):
            load_checkpoint(path)  # whatever has the name of a checkpoint is whole
        save_steps(directory, 5)
        prune_checkpoints(directory, 1, 5)
        assert steps_in(directory) == [5]
    assert count > 6


def test_a_checkpoint_stays_as_it_is_when_an_optimiser_goes_on_from_it():
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())

    def learn() -> None:
        model(torch.ones(2)).sum().backward()
        adam.step()

    learn()
    tensors = {
        name: tensor.clone()
        for name, tensor in checkpoint.optimizer_tensors(adam, model).items()
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoint.restore_optimizer(adam, model, tensors)
    learn()
    assert_bitwise_equal(tensors, before)
