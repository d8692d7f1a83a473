"""The studies of ``book/evidence.py``: carried to a bare machine, stopped, resumed, compared.

``book/gpu/carry.py --reduced`` makes what is carried, from embedded data.
"""

from __future__ import annotations

import json
import lzma
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import told

from exlm_lab.downstream.catalogue import task_names
from exlm_lab.downstream.grid import paper_numbers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "book"), str(ROOT / "book" / "gpu")]
import carried  # noqa: E402
import carry  # noqa: E402
import chapter_scripts  # noqa: E402
import evidence  # noqa: E402
import measurements  # noqa: E402
import studies  # noqa: E402
from study_sizes import LEAST_STEPS, QUICK, Sizes, sizes_from  # noqa: E402
from test_evidence import LIBRARIES, made, read, refused  # noqa: E402

CPU = torch.device("cpu")
SCRIPT = str(ROOT / "book" / "evidence.py")
ABOUT = {
    "kind": "text", "row_length": 32, "block_length": 32, "vocab_size": 400,
    "max_positions": 512, "states_per_mask": 4, "mask_ratio": 0.15,
}  # fmt: skip
MOLECULES = {**ABOUT, "kind": "smiles", "row_length": None}


@pytest.fixture(scope="module", autouse=True)
def one_hash():
    """Sources as they are now, though somebody may be editing them."""
    with pytest.MonkeyPatch.context() as patch:
        now = evidence.sources()
        patch.setattr(evidence, "sources", lambda: now)
        yield


@pytest.fixture(scope="module")
def luggage(tmp_path_factory) -> Path:
    """Both studies, made small."""
    folder = tmp_path_factory.mktemp("carry") / "carried"
    carry.run(carry._parser().parse_args(["--reduced", "--output", str(folder)]), print)
    return folder


def arguments(luggage: Path, folder: Path, only: str = "smiles") -> list[str]:
    return [
        "--quick", "--device", "cpu", "--only", only, "--carried", str(luggage),
        "--work", str(folder / "work"), "--output", str(folder / "evidence.json"),
    ]  # fmt: skip


def setting_of(folder: Path, luggage: Path, stored: dict | None = None, **changed):
    found = stored or {}
    return measurements.Setting(
        CPU, True, [], {}, lambda section, key: found.get(key), luggage, folder, **changed
    )


# ---- what is carried ----


@pytest.mark.slow
def test_what_is_carried_comes_back_as_it_was(luggage, tmp_path):
    study = carried.open_study(luggage, "smiles")
    assert study.tasks == ["embedded-molecules"]
    assert study.about["tasks"]["embedded-molecules"]["learning_rate"] == 1e-3
    train, validation = study.packs(tmp_path / "packs")
    assert (len(train), train.num_tokens) == (study.about["rows"], study.about["tokens"])
    assert train.tokenizer_sha256 == validation.tokenizer_sha256
    assert train.tokenizer_sha256 == study.about["tokenizer_sha256"]
    before = (tmp_path / "packs" / "train.bin").stat().st_mtime_ns
    study.packs(tmp_path / "packs")
    assert (tmp_path / "packs" / "train.bin").stat().st_mtime_ns == before
    encoded = study.task("embedded-molecules")
    assert {len(part.rows) for part in encoded.parts.values()} == {carry.REDUCED_ROWS}
    assert encoded.notes["rows"]["train"]["examples"] == carry.REDUCED_ROWS
    shared = study.about["overlap"]["embedded-molecules"]
    assert 0 < shared["shared"] < shared["molecules"]


@pytest.mark.slow
def test_damaged_luggage_is_told(luggage, tmp_path):
    folder = tmp_path / "carried"
    shutil.copytree(luggage, folder)
    packed = folder / "smiles" / "train.bin.xz"
    packed.write_bytes(packed.read_bytes()[:-20])
    study = carried.open_study(folder, "smiles")
    told(lambda: study.packs(tmp_path / "a"), packed, "damaged", "carry.py")
    plain = bytearray(lzma.decompress((luggage / "smiles" / "train.bin.xz").read_bytes()))
    plain[4] ^= 1
    packed.write_bytes(lzma.compress(plain))
    told(lambda: study.packs(tmp_path / "b"), "train.bin has changed")
    (folder / "smiles" / "train.json").unlink()
    told(lambda: carried.open_study(folder, "smiles"), "train.json is missing", "carry.py")
    other = study._replace(about={**study.about, "tokenizer_sha256": "other"})
    told(lambda: other.task("embedded-molecules"), "another tokenizer")
    file = folder / "text" / "study.json"
    file.write_text(file.read_text().replace('"tokens": ', '"tokens": 1'))
    told(lambda: carried.open_study(folder, "text"), file, "has changed", "carry.py")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "else"}'])
def test_a_folder_of_something_else_is_refused(content, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "study.json").write_text(content)
    told(lambda: carried.open_study(tmp_path, "text"), "text/study.json", "carry.py")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["nothing to carry", "--reduced"]),
        (["--smiles", "x"], ["--smiles and --moleculenet belong together"]),
        (["--glue", "x"], ["--text and --glue belong together"]),
        (["--smiles", "nowhere", "--moleculenet", "."], ["nowhere"]),
        (["--smiles", "nowhere", "--moleculenet", "x"], ["--moleculenet x is no directory"]),
        (["--text", "nowhere", "--glue", "setup.py"], ["--glue setup.py is no directory"]),
        (["--reduced", "--most-mib", "nan"], ["--most-mib is nan"]),
        (["--reduced", "--most-mib", "-1"], ["--most-mib is -1"]),
        (["--reduce"], ["--reduce", "--help"]),
    ],
)
def test_a_mistake_in_what_to_carry_is_told_in_one_line(words, parts, tmp_path, capsys):
    output = tmp_path / "out" / "carried"
    assert carry.main([*words, "--output", str(output)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err
    assert not output.exists() and not list(tmp_path.glob("out/.carry*"))


def test_where_nothing_can_be_carried_to_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "carried", Path("/proc/no/carried")):
        assert carry.main(["--reduced", "--output", str(output)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: cannot make {output} (")


def test_an_interrupt_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(carry, "carry", interrupted)
    assert carry.main(["--reduced", "--output", str(tmp_path / "carried")]) == 130
    assert capsys.readouterr() == ("", "interrupted\n") and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_is_missing_is_told_before_anything_is_trained(luggage, tmp_path, capsys):
    for name in ("tasks/embedded-molecules.safetensors", "validation.bin.xz", "train.json"):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(luggage, folder)
        (folder / "smiles" / name).unlink()
        file = tmp_path / "a.json"
        arguments = ["--quick", "--only", "smiles", "--carried", folder, "--output", file]
        refused(capsys, arguments, [folder / "smiles" / name, "missing", "carry.py"])
        assert not file.exists()


@pytest.mark.slow
def test_a_folder_for_runs_that_cannot_be_is_told(luggage, tmp_path, capsys):
    work = tmp_path / "file"
    work.write_text("")
    arguments = ["--quick", "--only", "smiles", "--carried", luggage, "--work", work]
    refused(capsys, [*arguments, "--output", tmp_path / "a.json"], [f"--work {work}"])


def test_what_is_there_already_is_not_replaced(tmp_path, capsys):
    assert carry.main(["--reduced", "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} is there already" in capsys.readouterr().err


@pytest.mark.slow
def test_too_much_to_carry_is_refused(tmp_path, capsys):
    output = tmp_path / "carried"
    words = ["--reduced", "--output", str(output), "--most-mib", "0.01"]
    assert carry.main(words) == 2
    assert "more than --most-mib 0.01" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_tasks_and_the_settings_are_those_of_the_papers_tables():
    tables = {"smiles": ("Table 1",), "text": ("Table 3",)}
    for kind, about in carry.KINDS.items():
        assert set(about.tasks) | {about.reduced_task} <= set(task_names())
        recipe = carry.load_tuning(about.recipe, task_names())
        for task in about.tasks:
            assert task in recipe.spaces
            assert paper_numbers(tables[kind], task)
    space = carry.load_tuning("table-11", task_names()).spaces["rte"]
    last = space.settings(carry.TuneConfig())[-1]
    assert (last.learning_rate, last.batch_size, last.epochs) == (5e-5, 32, 10)
    assert last.warmup_share == 0.1


# ---- sizes ----


def test_sizes_are_read_from_words():
    words = ["layers=12", "seconds=90.5", "pretrain_seeds=1,2", "compile=true", "steps=50"]
    found = sizes_from(words, Sizes())
    assert (found.layers, found.seconds, found.pretrain_seeds) == (12, 90.5, (1, 2))
    assert found.compile is True and found.steps == 50 and found.width == Sizes().width
    assert sizes_from(["compile=false"], found).compile is False


def test_the_studies_are_as_large_as_they_should_be():
    sizes = Sizes()
    assert sizes.layers >= 6 and sizes.width >= 384 and len(sizes.tune_seeds) == 3


def test_rows_of_one_length_are_counted_and_others_by_tokens():
    text = carried.Study(Path("text"), ABOUT)
    config = studies.config_of(text, QUICK, "exlm", 50, 1, "cpu")
    assert (config.train.batch_size, config.train.batch_tokens) == (32, None)
    assert config.model.states_per_mask == 4 and config.train.warmup_steps == 3
    smiles = carried.Study(Path("smiles"), MOLECULES)
    config = studies.config_of(smiles, QUICK, "mlm", 50, 1, "cpu")
    assert config.train.batch_tokens == QUICK.batch_tokens
    assert config.train.save_every == 50 // studies.SAVES


@pytest.mark.parametrize("steps", [4, 8, 16, 23, 100, 1000, 12345])
def test_the_log_has_lines_without_a_validation(steps):
    study = carried.Study(Path("text"), ABOUT)
    train = studies.config_of(study, QUICK, "exlm", steps, 1, "cpu").train
    logged = range(train.log_every, steps + 1, train.log_every)
    assert any(step % train.validate_every for step in logged if step > 1)


def test_mlm_at_equal_cost_makes_as_many_more_steps_as_they_are_faster(tmp_path):
    stored = {
        "plan": {"steps": 100},
        "pretrain exlm seed 1": {"ms_per_step": 30.0},
        "pretrain mlm seed 1": {"ms_per_step": 20.0},
    }
    study = carried.Study(Path("smiles"), MOLECULES)
    steps = {}
    for model in studies.MODELS:
        run = studies.Run(setting_of(tmp_path, tmp_path, stored), study, model, 1)
        config = studies._config(run)
        steps[model] = config.train.steps
        assert config.objective == model.removesuffix("-equal-cost")
    assert steps == {"exlm": 100, "mlm": 100, "mlm-equal-cost": 150}
    del stored["pretrain mlm seed 1"]
    run = studies.Run(setting_of(tmp_path, tmp_path, stored), study, "mlm-equal-cost", 1)
    told(lambda: studies._config(run), "'pretrain mlm seed 1' comes first")


def test_a_step_takes_the_median_of_the_lines_without_validation():
    def line(step: int, seconds: float, **more: float) -> dict:
        return {"step": step, "seconds": seconds, **more}

    lines = [
        line(10, 9.0), line(20, 10.0), line(30, 19.0, validation_bits_per_mask=1.0),
        line(40, 21.0), line(50, 22.0),
    ]  # fmt: skip
    assert studies._seconds_per_step(lines) == pytest.approx(0.1)


def test_a_study_of_other_sizes_is_not_mixed_but_seeds_may_be_added(tmp_path):
    plan = {"sizes": json.loads(json.dumps(vars(QUICK)))}
    stored = {"plan": plan}
    more = setting_of(tmp_path, tmp_path, stored, sizes=replace(QUICK, pretrain_seeds=(1, 2)))
    studies._check_sizes(more, "smiles")
    other = setting_of(tmp_path, tmp_path, stored, sizes=replace(QUICK, width=32))
    told(lambda: studies._check_sizes(other, "smiles"), "width=16, not 32", "--study width=16")


def test_without_luggage_the_reason_is_kept():
    setting = measurements.Setting(CPU, True, [], {}, lambda *_: None)
    for name in ("smiles", "text"):
        (item,) = studies.study_items(name, setting)
        assert "carry.py" in item.run()["skipped"]


# ---- both studies from end to end ----


@pytest.fixture(scope="module")
def done(luggage, tmp_path_factory) -> tuple[Path, str]:
    """Everything of both studies in one go."""
    folder = tmp_path_factory.mktemp("done")
    status, out = made(*arguments(luggage, folder, "smiles,text"))
    assert status == 0, out
    return folder, out


@pytest.mark.slow
def test_three_models_are_trained_tuned_and_put_into_tables(done):
    folder, out = done
    for kind, task in (("smiles", "embedded-molecules"), ("text", "sections")):
        found = read(folder / "evidence.json")["sections"][kind]
        steps = {m: found[f"pretrain {m} seed 1"]["steps"] for m in studies.MODELS}
        assert steps["exlm"] == steps["mlm"] == QUICK.steps
        ratio = (
            found["pretrain exlm seed 1"]["ms_per_step"]
            / found["pretrain mlm seed 1"]["ms_per_step"]
        )
        assert steps["mlm-equal-cost"] == max(LEAST_STEPS // 2, round(QUICK.steps * ratio))
        for model in studies.MODELS:
            curve = found[f"pretrain {model} seed 1"]["curve"]
            assert curve[-1][0] == steps[model] and curve[-1][1] > 0
            record = found[f"finetune {model} seed 1 {task}"]["record"]
            assert record["part"] == "test" and record["seeds"] == [1]
            assert record["changed"][-1] == "at most 1 epochs"
        lines = found["tables seed 1"]["lines"]
        assert [line for line in lines if line.endswith("seed 1:")] == [
            f"{model} seed 1:" for model in studies.MODELS
        ]
        assert sum(task in line for line in lines) >= len(studies.MODELS)
    assert any("pre-training saw" in line for line in _lines(folder, "smiles"))
    assert not any("pre-training saw" in line for line in _lines(folder, "text"))
    assert "smiles tables seed 1: 3 tables" in out


def _lines(folder: Path, kind: str) -> list[str]:
    return read(folder / "evidence.json")["sections"][kind]["tables seed 1"]["lines"]


@pytest.mark.slow
def test_a_second_seed_is_added_to_what_is_there(done, luggage, tmp_path):
    folder = tmp_path / "more"
    shutil.copytree(done[0], folder)
    before = read(folder / "evidence.json")["sections"]["smiles"]
    status, out = made(*arguments(luggage, folder), "--study", "pretrain_seeds=1,2")
    assert status == 0 and f"{len(before)} of {2 * len(before) - 1} results are there" in out
    after = read(folder / "evidence.json")["sections"]["smiles"]
    assert {key: after[key] for key in before} == before
    bits = [after[f"pretrain exlm seed {seed}"]["bits_per_mask"] for seed in (1, 2)]
    assert bits[0] != bits[1]


@pytest.mark.slow
def test_other_sizes_are_refused_before_anything_is_done(done, luggage, capsys):
    words = [*arguments(luggage, done[0]), "--study", "layers=2"]
    refused(capsys, words, ["layers=1, not 2"])


@pytest.mark.slow
def test_sizes_that_do_not_go_together_are_refused(luggage, tmp_path, capsys):
    words = [*arguments(luggage, tmp_path), "--study", "heads=3"]
    refused(capsys, words, ["model.width 16", "model.num_heads 3"])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_study_that_is_stopped_again_and_again_ends_with_the_same_bits(
    done, luggage, tmp_path, monkeypatch
):
    """Each piece does a little of what is left, as if its minutes were over."""
    asked = []

    def left() -> bool:
        asked.append(True)
        return len(asked) % 5 == 0

    monkeypatch.setattr(measurements.Setting, "is_time_up", lambda setting: left())
    for _ in range(60):
        status, out = made(*arguments(luggage, tmp_path), "--minutes", "9")
        if status == 0:
            break
        assert status == evidence.TIME_IS_UP, out
        assert "time is up; the same command goes on" in out
    assert status == 0
    whole, pieces = (
        read(folder / "evidence.json")["sections"]["smiles"] for folder in (done[0], tmp_path)
    )
    assert list(pieces) == list(whole)
    for key in ("pretrain exlm seed 1", "pretrain mlm seed 1"):
        assert pieces[key]["curve"] == whole[key]["curve"]
    key = "finetune exlm seed 1 embedded-molecules"
    assert pieces[key]["record"]["parts"] == whole[key]["record"]["parts"]


@pytest.mark.slow
def test_a_killed_study_goes_on_from_its_checkpoint(luggage, tmp_path):
    words = arguments(luggage, tmp_path)
    process = subprocess.Popen([sys.executable, SCRIPT, *words], stdout=subprocess.PIPE)
    checkpoints = tmp_path / "work" / "smiles" / "exlm-seed-1" / "checkpoints"
    try:
        deadline = time.monotonic() + 240
        while not list(checkpoints.glob("step-??????")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    finally:
        process.kill()
        process.stdout.close()
    kept = {path.name for path in checkpoints.glob("step-??????")}
    assert kept
    status, out = made(*words, "--again")
    assert status == 0, out
    metrics = (tmp_path / "work" / "smiles" / "exlm-seed-1" / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in metrics.splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == QUICK.steps


@pytest.mark.slow
def test_the_studies_run_with_nothing_but_torch_numpy_and_safetensors(luggage, tmp_path):
    """As on a machine with a GPU and nothing else: no git, nothing installed, no network."""
    unwanted = shutil.ignore_patterns("__pycache__", "_build", "_generated", "results")
    for folder in ("exlm_mini", "exlm_lab", "book", "cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unwanted)
    shutil.copytree(luggage, tmp_path / "carried")
    words = arguments(Path("carried"), tmp_path, "smiles,text")
    program = f"""
import sys
sys.path.remove({str(ROOT)!r}) if {str(ROOT)!r} in sys.path else None
for name in {sorted(LIBRARIES | {"regex", "lmdb", "pyarrow"})!r}:
    sys.modules[name] = None
sys.path.insert(0, "book")
import evidence, exlm_mini
assert exlm_mini.__file__.startswith({str(tmp_path)!r}), exlm_mini.__file__
sys.exit(evidence.main({words!r}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    sections = read(tmp_path / "evidence.json")["sections"]
    assert sections["text"]["finetune mlm seed 1 sections"]["record"]["part"] == "test"
    assert sections["smiles"]["pretrain exlm seed 1"]["steps"] == QUICK.steps


# ---- the chapters as scripts ----


def chapter(folder: Path, code: str, printed: list[str]) -> Path:
    source = folder / "01_mine.py"
    source.write_text(code)
    output = {"output_type": "stream", "name": "stdout", "text": [f"{p}\n" for p in printed]}
    ignored = {"output_type": "display_data", "data": {"text/plain": ["2 3"]}}
    cells = [{"cell_type": "markdown"}, {"outputs": [output, ignored]}]
    source.with_suffix(".ipynb").write_text(json.dumps({"cells": cells}))
    return source


def run_of(source: Path, **changed) -> dict:
    setting = measurements.Setting(CPU, True, [], {}, lambda *_: None, **changed)
    return chapter_scripts.run_chapter(source, setting)


@pytest.mark.slow
def test_a_chapter_is_compared_with_what_the_book_prints(tmp_path):
    code = """import os
from exlm_mini.config import SpecialIds
print(f"EXLM_SCALE={os.environ['EXLM_SCALE']}")
print("loss 2.004 after 1,000 steps")
print("speed 90")
print("new")
"""
    book = ["EXLM_SCALE=cpu", "loss 2.001 after 1000 steps", "speed 10", "gone"]
    result = run_of(chapter(tmp_path, code, book))
    assert (result["same"], result["other_numbers"], result["other_words"]) == (2, 1, 1)
    assert result["differences"] == [["speed 10", "speed 90"], ["gone", "new"]]
    assert result["passed"] is True


@pytest.mark.slow
def test_an_assertion_of_a_chapter_that_fails_is_a_failure(tmp_path):
    result = run_of(chapter(tmp_path, "print('a')\nassert 1 > 2, 'too small'", ["a"]))
    assert result["passed"] is False
    assert result["failures"][0] == "AssertionError: too small"
    assert "too small" in evidence.summary(result)


@pytest.mark.slow
def test_a_chapter_whose_library_is_missing_is_left_out(tmp_path):
    result = run_of(chapter(tmp_path, "import no_such_library", []))
    assert result == {"skipped": "ModuleNotFoundError: No module named 'no_such_library'"}


@pytest.mark.slow
def test_a_chapter_that_takes_too_long_is_stopped_with_all_it_started(tmp_path, monkeypatch):
    code = "import subprocess\nsubprocess.run(['sleep', '60'])"
    source = chapter(tmp_path, code, [])
    with pytest.raises(measurements.TimeIsUp, match="01_mine was not done"):
        run_of(source, seconds_left=lambda: 0.5)
    monkeypatch.setattr(chapter_scripts, "MOST_SECONDS", 0.5)
    assert run_of(source) == {"skipped": "not done after 0 s"}


def test_equal_pages_differ_in_nothing():
    lines = ["a 1", "b 2 3", ""]
    result = chapter_scripts.compared(lines, lines)
    assert (result["same"], result["differences"]) == (3, [])
    assert chapter_scripts.compared([], [])["same"] == 0


def test_on_a_cpu_only_a_trial_runs_chapters():
    setting = measurements.Setting(CPU, False, [], {}, lambda *_: None)
    found = list(chapter_scripts.chapter_scripts(setting))
    assert len(found) == len(list(chapter_scripts.CHAPTERS.glob("[0-9]*.ipynb")))
    assert {item.run()["skipped"] for item in found} == {"the device is no GPU"}
    trial = list(chapter_scripts.chapter_scripts(setting._replace(is_quick=True)))
    assert [item.key[:2] for item in trial] == list(chapter_scripts.QUICK_CHAPTERS)
