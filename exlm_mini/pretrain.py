"""``python -m exlm_mini.pretrain``: train a model from a recipe.

    python -m exlm_mini.pretrain --recipe smiles-tiny
    python -m exlm_mini.pretrain --recipe text-tiny --data.files my.txt --model.states_per_mask 8

A recipe is a YAML file of settings; dotted options replace single ones. The same command with
the same ``--output`` goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from exlm_mini.config import RunConfig, SpecialIds, UserError, nearest, run_config_from_dict
from exlm_mini.corpora import Corpus, prepare_corpus
from exlm_mini.corpora.toy import grammar
from exlm_mini.estimate import estimate
from exlm_mini.run_directory import CONFIG, LOCK, RunDirectory, settle_config
from exlm_mini.training import (
    Outcome,
    Progress,
    Trainer,
    check_row_length,
    choose_device,
    make_masker,
    versions,
)

RECIPES = Path(__file__).parent / "recipes"
DRY_RUN_DOCUMENTS = 10_000
SECONDS_BETWEEN_LINES = 10.0
INTERRUPTED = 130
"""Exit code of a run that was asked to stop, as shells report an interrupt."""


class Request(NamedTuple):
    """What the command line asked for."""

    config: RunConfig
    output: Path
    is_dry_run: bool


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` and ``--print_config`` print and exit.

    Raises:
        UserError: for an unknown recipe or setting, or a value that cannot be.
    """
    recipe, rest = _take_recipe(argv)
    path = _recipe_path(recipe)
    parser = _parser()
    if any(option in rest for option in ("-h", "--help")):
        parser.print_help()
        sys.exit(0)
    # The recipe's own file comes first, so that options replace what it says.
    arguments = ["--settings", json.dumps(_settings_of(path))] if path else []
    namespace = parser.parse_args([*arguments, *_join_files(rest)])
    settings = namespace.as_dict()
    output, is_dry_run = settings.pop("output"), settings.pop("dry_run")
    settings.pop("settings")
    config = run_config_from_dict({**settings, "recipe": path.stem if path else "none"})
    if output is None:
        output = Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Request(config, Path(output), is_dry_run)


def _take_recipe(argv: list[str]) -> tuple[str | None, list[str]]:
    """The value of --recipe and the other arguments."""
    recipe, rest, values = None, [], iter(argv)
    for value in values:
        if value == "--recipe":
            recipe = next(values, "")
        elif value.startswith("--recipe="):
            recipe = value.partition("=")[2]
        else:
            rest.append(value)
    return recipe, rest


def _recipe_path(recipe: str | None) -> Path | None:
    """The file of a recipe: a name of ours, or a path to one of the user's."""
    if recipe is None:
        return None
    if recipe.endswith((".yaml", ".yml")):
        if not Path(recipe).is_file():
            raise UserError(f"there is no recipe file {recipe}; give an existing path")
        return Path(recipe)
    if recipe not in recipe_names():
        raise UserError(f"unknown recipe '{recipe}'; {nearest(recipe, recipe_names())}")
    return RECIPES / f"{recipe}.yaml"


def _join_files(argv: list[str]) -> list[str]:
    """Let ``--data.files a b`` take several plain paths."""
    joined: list[str] = []
    values = list(argv)
    while values:
        value = values.pop(0)
        name, has_value, first = value.partition("=")
        if name != "--data.files" or first.startswith("["):
            joined.append(value)
            continue
        files = [first] if has_value else []
        while values and not values[0].startswith("--"):
            files.append(values.pop(0))
        if not files:
            raise UserError("--data.files names no file; give paths, or leave the option out")
        if len(files) == 1 and files[0].startswith("["):
            joined.append(f"--data.files={files[0]}")
        else:
            joined.append(f"--data.files={json.dumps(files)}")
    return joined


def _parser() -> Any:
    """The jsonargparse parser; its errors become ``UserError``."""
    from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise UserError(_one_line(message)) from None

    parser = Parser(
        prog="python -m exlm_mini.pretrain",
        usage="%(prog)s --recipe NAME [--output DIR] [--dry-run] [--key.subkey VALUE ...]",
        description=f"Train a model. Recipes: {', '.join(recipe_names())}, or a path to a .yaml.",
    )
    parser.add_class_arguments(RunConfig, None, skip={"recipe"})
    parser.add_argument("--settings", action=ActionConfigFile, help="a YAML file of settings")
    parser.add_argument("--output", help="run directory; default runs/<recipe>-<time>")
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, tokens and memory, and stop"
    )
    return parser


def _known_settings(kind: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    default = kind()
    for field in fields(kind):
        value = getattr(default, field.name)
        if is_dataclass(value):
            yield from _known_settings(type(value), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _one_line(message: str) -> str:
    """The parser's message on one line, with the nearest settings for a mistyped one."""
    message = " ".join(message.split())
    options = [*_known_settings(), "output", "dry-run", "recipe", "settings", "print_config"]
    if unknown := re.search(r"unrecognized arguments: --([^ =]+)", message):
        return f"unknown option --{unknown[1]}; {nearest(unknown[1], options)}"
    if choice := re.search(r'key "([\w.]+)": .*Literal\[(.+)\]\. Got value: (.*)', message):
        return f"{choice[1]} is {choice[3]}; it must be one of {choice[2]}".replace("'", "")
    if value := re.search(r'key "([\w.]+)": Expected an? (.+)\. Got value: (.*)', message):
        kind = re.sub(r"<class '(\w+)'>", r"\1", value[2])
        return f"{value[1]} is '{value[3]}'; it must be of type {kind}"
    return message


def _settings_of(path: Path) -> dict[str, Any]:
    """Settings of a recipe file, a run's ``config.yaml`` or the output of --print_config.

    Raises:
        UserError: if it is not YAML or holds an unknown setting.
    """
    import yaml

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read the recipe {path}: {reason}; correct the file") from None
    if not isinstance(settings, dict):
        raise UserError(f"the recipe {path} holds no settings; see --print_config for the form")
    known = [*_known_settings(), "output", "dry_run"]
    groups = {name.partition(".")[0] for name in known if "." in name}
    for key, value in settings.items():
        if key in groups and not isinstance(value, dict):
            raise UserError(f"the recipe {path}: {key} must hold settings, not {value!r}")
        names = [f"{key}.{inner}" for inner in value] if key in groups else [str(key)]
        for name in names:
            if name not in known:
                raise UserError(
                    f"the recipe {path} has an unknown setting {name}; {nearest(name, known)}"
                )
    return {key: value for key, value in settings.items() if key != "recipe"}


def slots_of(config: RunConfig) -> tuple[int, ...]:
    """Columns the strategy ``slots`` masks: the toy grammar's, after [BOS]."""
    if config.masking.strategy != "slots":
        return ()
    return tuple(slot + 1 for slot in grammar(config.data.grammar).slots)


def objectives_of(config: RunConfig) -> list[RunConfig]:
    """One configuration per model to train."""
    return [replace(config, objective=name) for name in config.objective.split("+")]


def check_before_reading(config: RunConfig) -> None:
    """Refuse what cannot work before any data is read.

    Raises:
        UserError: for an unknown device, rows too long for the model or too short for a mask.
    """
    choose_device(config.train.device)
    row_length = _row_length(config)
    for single in objectives_of(config):
        if config.data.pack is None:
            check_row_length(single, row_length, len(slots_of(single)) or None)
        if config.data.kind != "smiles" and config.data.pack is None:
            masker = make_masker(single, special_ids=SpecialIds(), slots=slots_of(single))
            masker.check_row_length(row_length)


def _row_length(config: RunConfig) -> int:
    """Longest row of a corpus that is not built yet."""
    if config.data.kind == "toy":
        return grammar(config.data.grammar).length + 2
    return config.data.block_length


def dry_run(config: RunConfig) -> None:
    """Print what a run would cost; nothing is written.

    Without ``model.vocab_size`` the corpus is built in a temporary directory, of at most
    ``DRY_RUN_DOCUMENTS`` documents when it is not embedded.
    """
    vocab_size, row_length = config.model.vocab_size, _row_length(config)
    if vocab_size is None:
        data = config.data
        if data.files or data.hub:
            limit = min(data.max_documents or DRY_RUN_DOCUMENTS, DRY_RUN_DOCUMENTS)
            data = replace(data, max_documents=limit)
        with tempfile.TemporaryDirectory() as directory:
            corpus = prepare_corpus(data, Path(directory) / "data", config.seed, _say)
            vocab_size = corpus.train.vocab_size
            row_length = int(corpus.train.lengths_R.max())
    for single in objectives_of(config):
        num_slots = len(slots_of(single)) or None
        costs = estimate(single, vocab_size, row_length, num_slots=num_slots)
        transition = costs.num_transition_parameters
        total = costs.weight_bytes + costs.activation_bytes
        without = (
            f" ({_millions(costs.num_parameters - transition)} without the transition head)"
        )
        print(f"objective          {single.objective}")
        print(
            f"parameters         {costs.num_parameters:,}"
            f" = {_millions(costs.num_parameters)}{without if transition else ''}"
        )
        print(f"vocabulary         {vocab_size:,}")
        print(f"row                {costs.row_length} tokens, {costs.expanded_length} expanded")
        print(f"tokens per step    {costs.tokens_per_step:,}")
        print(f"steps              {single.train.steps:,}")
        print(f"tokens             {costs.num_tokens:,}")
        print(
            f"memory             about {_mebibytes(total)} = {_mebibytes(costs.weight_bytes)} "
            f"weights, gradients, Adam + {_mebibytes(costs.activation_bytes)} activations"
        )


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def run(config: RunConfig, output: Path) -> int:
    """Train what the configuration names and print a summary; the exit code."""
    with RunDirectory(output, _say), _stop_signals() as should_stop:
        is_new = not (output / CONFIG).exists()
        try:
            outcomes = _train_all(config, output, should_stop)
        except UserError:
            # Where settings were stored just now, nothing but a corpus lay there before.
            was_accepted = is_new and (output / CONFIG).exists()
            if was_accepted and not any(output.rglob("step-*")):
                _forget(output)
            raise
    if not all(outcome.is_complete for outcome in outcomes.values()):
        return INTERRUPTED
    _print_summary(config, output, outcomes)
    return 0


def _train_all(
    config: RunConfig, output: Path, should_stop: Callable[[], bool]
) -> dict[str, Outcome]:
    """Train one model after the other, up to the first that is stopped."""
    corpus = _settle(config, output)
    singles = objectives_of(config)
    outcomes: dict[str, Outcome] = {}
    for single in singles:
        directory = output if len(singles) == 1 else output / single.objective
        outcome = outcomes[single.objective] = _train(single, corpus, directory, should_stop)
        if not outcome.is_complete:
            _say(
                f"stopped at step {outcome.step} of {config.train.steps}; the same command "
                f"with --output {output} goes on"
            )
            break
    return outcomes


def _settle(config: RunConfig, output: Path) -> Corpus:
    """Hold a resumed run to its settings, note versions, prepare the data."""
    import yaml

    text = yaml.safe_dump(_plain(config), sort_keys=False)
    for change in settle_config(output, text, _plain(config), _parse_stored):
        _say(f"changed since the last start: {change}")
    used = versions(choose_device(config.train.device)) | {"commit": _commit()}
    (output / "versions.json").write_text(json.dumps(used, indent=2) + "\n")
    return prepare_corpus(config.data, output / "data", config.seed, _say)


def _forget(output: Path) -> None:
    """Undo the start of a run that saved nothing, so that a corrected command may follow.

    A finished corpus stays: it may have taken hours, and it knows its own settings.
    """
    for path in output.iterdir():
        if path.name == LOCK or (path / "corpus.json").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _plain(config: RunConfig) -> dict[str, Any]:
    """Settings as YAML knows them."""
    return json.loads(json.dumps(asdict(config)))


def _parse_stored(text: str) -> dict[str, Any]:
    """Settings of a stored ``config.yaml``, missing ones at their default."""
    import yaml

    try:
        settings = yaml.safe_load(text)
        return _plain(run_config_from_dict(settings))
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise UserError(
            f"the stored config.yaml is damaged ({' '.join(str(error).split())}); restore it, or "
            "choose another --output"
        ) from None


def _commit() -> str:
    """Commit of the checkout the package runs from, or why there is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{commit} with changes" if changed else commit


def _train(
    config: RunConfig, corpus: Corpus, directory: Path, should_stop: Callable[[], bool]
) -> Outcome:
    """Train one model, with progress on stderr."""
    directory.mkdir(exist_ok=True)
    if config.train.num_threads is not None:
        import torch

        torch.set_num_threads(config.train.num_threads)
    trainer = Trainer(
        config, corpus.train, corpus.validation, directory, slots_of(config), _say
    )
    with ProgressLine(config.objective, config.train.steps) as progress:
        return trainer.run(progress.show, should_stop)


class ProgressLine:
    """Loss, tokens/s and ETA: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.bits = ""
        self._bar: Any = None
        self._start, self._first_step, self._last_line = time.monotonic(), 0, 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Tell of one step."""
        if progress.evaluation is not None:
            self.bits = f", validation {progress.evaluation.bits_per_mask:.3f} bits/mask"
        text = (
            f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s{self.bits}"
        )
        if sys.stderr.isatty():
            self._show_bar(progress.step, text)
        else:
            self._show_line(progress.step, text)

    def _show_bar(self, step: int, text: str) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=self.steps, initial=step - 1, desc=self.name, unit="step")
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def _show_line(self, step: int, text: str) -> None:
        now = time.monotonic()
        if not self._first_step:
            self._first_step, self._start = step, now
        if step < self.steps and now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        done = step - self._first_step
        eta = f"{(now - self._start) / done * (self.steps - step):.0f} s" if done else "unknown"
        _say(f"{self.name} step {step}/{self.steps}: {text}, ETA {eta}")


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request to save and stop after the step."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, previous[number])  # the second one stops at once
        _say("stopping after this step; a checkpoint will be saved")

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print_summary(config: RunConfig, output: Path, outcomes: dict[str, Outcome]) -> None:
    """What was reached, on stdout."""
    for objective, outcome in outcomes.items():
        reached = outcome.evaluation
        print(
            f"{objective}: {outcome.num_parameters:,} parameters, {outcome.step:,} steps, "
            f"validation {reached.bits_per_mask:.3f} bits per masked token "
            f"({reached.num_masks:,} masks in {reached.num_rows:,} rows)"
        )
        if reached.num_without_path:
            print(f"{objective}: {reached.num_without_path} rows without a path were left out")
    if config.masking.strategy == "slots" and "repeated-mlm" not in outcomes:
        language = grammar(config.data.grammar)
        print(f"joint entropy {language.joint_entropy_bits(language.mask()):.3f} bits")
        print(f"MLM floor {language.marginal_entropy_bits(language.mask()):.3f} bits")
        for objective, outcome in outcomes.items():
            print(f"{objective} reached {outcome.evaluation.bits_per_row:.3f} bits")
    print(f"run directory: {output}")


def _say(line: str) -> None:
    """A line for the person, apart from the results on stdout."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to resume."""
    try:
        request = parse(sys.argv[1:] if argv is None else argv)
        check_before_reading(request.config)
        if request.is_dry_run:
            dry_run(request.config)
            return 0
        return run(request.config, request.output)
    except UserError as error:
        _say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
