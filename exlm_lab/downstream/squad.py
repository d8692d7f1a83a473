"""SQuAD 2.0: questions about a paragraph, some without an answer; ``answers`` scores them.

SQuAD 1.1 has the same files, with an answer to every question.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_lab.downstream.answers import (
    part_of,
    rows_of,
)
from exlm_lab.downstream.files import find_file, read_json
from exlm_lab.downstream.task import Task
from exlm_mini.config import UserError

HUB_ID = "rajpurkar/squad_v2"

TASK = Task("squad_v2", "span", (), "best_f1", "text")

_FILE = re.compile(r"(train|dev)-(v2\.0|v1\.1)\.json(\.gz|\.xz)?")


class Question(NamedTuple):
    """A question with its paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """Gold answers; none if the question has no answer."""
    span: tuple[int, int] | None
    """Characters of the first gold answer in the context, end excluded; none without one."""


class Squad(NamedTuple):
    """The two splits, as official JSON; ``read_questions`` gives their questions."""

    train: dict
    validation: dict


# ---- reading ----


def load_squad(source: str | Path = HUB_ID) -> Squad:
    """The data set, from its two files or from the hub.

    Args:
        source: a directory with ``train-v2.0.json`` and ``dev-v2.0.json`` (or ``-v1.1``), each
            plain or compressed, or one of these two, the other beside it; else the hub id.
            Version 2.0 is read where both are there.

    Raises:
        UserError: if a file is missing or is not SQuAD's.
    """
    if str(source) == HUB_ID:
        return _from_hub()
    return Squad(*map(load_dataset, find_files(Path(source))))


def find_files(source: Path, is_train_optional: bool = False) -> tuple[Path | None, Path]:
    """Training and dev set of one version.

    Args:
        source: their directory, or one of them.
        is_train_optional: return none where the dev set is alone.

    Raises:
        UserError: if one is missing, or ``source`` is neither.
    """
    folder, named = source, _FILE.fullmatch(source.name)
    if source.is_file():
        if not named:
            raise UserError(
                f"{source} is neither train-v2.0.json nor dev-v2.0.json (or -v1.1), so which "
                "part it is cannot be told; give the directory with both"
            )
        folder, version = source.parent, named[2]
    elif source.is_dir():
        newer, older = (
            find_file(source, f"dev-{v}.json", is_optional=True) for v in ("v2.0", "v1.1")
        )
        version = "v1.1" if older and not newer else "v2.0"
    else:
        raise UserError(f"{source} is no directory; give SQuAD's, or the hub id {HUB_ID}")
    train, dev = (
        source
        if source != folder and named[1] == split
        else find_file(folder, f"{split}-{version}.json", is_optional)
        for split, is_optional in (("train", is_train_optional), ("dev", False))
    )
    return train, dev


def load_dataset(path: str | Path) -> dict:
    """The official JSON of one file, which holds at least one question.

    Raises:
        UserError: if the file cannot be read, or a part of it is missing.
    """
    dataset = read_json(Path(path))
    num_questions = sum(1 for _ in rows_of(dataset, str(path)))
    if not num_questions:
        raise UserError(f"{path} holds no question; copy or download it again")
    return dataset


def read_questions(dataset: dict, source: str = "the data set") -> tuple[list[Question], int]:
    """The questions of a data set, in its order.

    Now and then a published offset is a few characters off; the span is then the occurrence of
    the answer that lies nearest. An answer that does not occur in its paragraph gives no span,
    and the question is left out.

    Args:
        dataset: the official JSON, as ``load_dataset`` reads it.
        source: how messages call it.

    Returns:
        questions: those with a span and those without an answer.
        num_left_out: questions whose first answer does not occur.

    Raises:
        UserError: if a part of a question is missing.
    """
    questions, num_left_out = [], 0
    for paragraph, row in rows_of(dataset, source):
        where = f"{source} question {row['id']}"
        context = part_of(paragraph, "context", str, where)
        answers = tuple(answer["text"] for answer in row["answers"])
        span = None
        if answers:
            start = part_of(row["answers"][0], "answer_start", int, where)
            span = _nearest(context, answers[0], start)
            if span is None:
                num_left_out += 1
                continue
        text = part_of(row, "question", str, where)
        questions.append(Question(row["id"], text, context, answers, span))
    return questions, num_left_out


def from_rows(rows: Any) -> dict:
    """The official JSON of rows as the hub has them.

    Args:
        rows: one a question: ``id``, ``title``, ``context``, ``question`` and ``answers``, a
            dict of the lists ``text`` and ``answer_start``.

    Returns:
        articles and paragraphs in the order of their first question.
    """
    articles: dict[str, dict[str, list]] = {}
    for row in rows:
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(
                row["answers"]["text"], row["answers"]["answer_start"], strict=True
            )
        ]
        question = {"id": row["id"], "question": row["question"], "answers": answers}
        question["is_impossible"] = not answers
        paragraphs = articles.setdefault(row["title"], {})
        paragraphs.setdefault(row["context"], []).append(question)
    return {
        "version": "v2.0",
        "data": [
            {
                "title": title,
                "paragraphs": [{"context": c, "qas": q} for c, q in paragraphs.items()],
            }
            for title, paragraphs in articles.items()
        ],
    }


def split_articles(dataset: dict, validation_share: float, seed: int) -> Squad:
    """Two parts of one file, no article in both, for where only the dev set is at hand.

    Args:
        dataset: the official JSON.
        validation_share: of the articles, at least one of them.
        seed: of the choice.

    Raises:
        UserError: if there are fewer than two articles.
    """
    articles = dataset["data"]
    if len(articles) < 2:
        raise UserError(
            f"the data set has {len(articles)} article(s); 2 are needed to split it"
        )
    order = np.random.default_rng(seed).permutation(len(articles))
    num_held_out = min(max(1, round(validation_share * len(articles))), len(articles) - 1)
    held_out = set(order[:num_held_out].tolist())
    parts = ([], [])
    for index, article in enumerate(articles):
        parts[index in held_out].append(article)
    return Squad(*({**dataset, "data": part} for part in parts))


def _nearest(context: str, answer: str, start: int) -> tuple[int, int] | None:
    """The occurrence of an answer that begins nearest to a character."""
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", context)]
    if not starts or not answer:
        return None
    nearest = min(starts, key=lambda found: abs(found - start))
    return nearest, nearest + len(answer)


def _from_hub() -> Squad:
    """Both splits of the hub, their rows gathered into paragraphs."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"reading {HUB_ID} needs datasets; pip install 'exlm-mini[text]', or give SQuAD's "
            "directory"
        ) from None
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(HUB_ID)
        return Squad(*(from_rows(splits[name]) for name in ("train", "validation")))
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load {HUB_ID} ({reason}); check the network, or give SQuAD's directory"
        ) from None
