"""The toy languages by name, from two moods and one word pair to a town with four latents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.data.toy import Grammar, Position


def _one(words: str) -> Position:
    """A position that no latent drives."""
    return Position({(): words})


def _sentence(*parts: str | Position) -> tuple[Position, ...]:
    """Positions, of which those given as words depend on no latent."""
    return tuple(_one(part) if isinstance(part, str) else part for part in parts)


def _by(latents: str, **choices: str) -> Position:
    """A position driven by one or more latents; two values join as ``value_value``."""
    return Position(
        {tuple(key.split("_")): words for key, words in choices.items()}, tuple(latents.split())
    )


_FELT = {
    "happy": "happy merry cheerful",
    "sad": "sad gloomy tearful",
    "angry": "angry cross furious",
    "afraid": "afraid nervous fearful",
}
_DID = {
    "happy": "smiled laughed danced",
    "sad": "wept sighed mourned",
    "angry": "shouted cursed stamped",
    "afraid": "trembled fled hid",
}


def _moods(name: str, num_moods: int, num_words: int) -> Grammar:
    """Two slots far apart that one mood drives, among words that do not depend on it.

    With both slots masked the joint entropy is log2(moods) + 2 log2(words) bits, the floor of
    MLM 2 log2(moods · words).
    """
    moods = tuple(_FELT)[:num_moods]

    def slot(words: dict[str, str]) -> Position:
        return _by("mood", **{m: " ".join(words[m].split()[:num_words]) for m in moods})

    positions = _sentence(
        *("the", "old young tall", "baker farmer sailor", "felt", slot(_FELT), "this"),
        *("morning evening winter", "so", "his", "sister mother neighbour", slot(_DID)),
    )
    return Grammar(name, {"mood": moods}, np.full(num_moods, 1 / num_moods), positions)


def _town() -> Grammar:
    """A language of four interacting latents, with agreement at a distance.

    "today these gloomy sailors from the harbour near the old bridge are wearily carrying some
    ropes before the storm with their cousins": the number shows in the determiner, the noun,
    eight words later in the verb, and at the end in the pronoun; the topic in four places; the
    mood in three and in which topics it goes with; the tense in the first word and the verb.
    Some words fit more than one value ("the", "carrying"), so a context often leaves doubt.
    """
    latents = {
        "topic": ("market", "harbour", "school", "farm", "clinic", "theatre"),
        "mood": ("glad", "grim", "calm"),
        "number": ("one", "many"),
        "tense": ("now", "then"),
    }
    topic_T = np.array([0.22, 0.18, 0.18, 0.16, 0.14, 0.12])
    mood_TM = np.array(
        [[5, 2, 3], [2, 5, 3], [4, 2, 4], [2, 2, 6], [1, 6, 3], [7, 2, 1]]
    ) / 10  # fmt: skip
    number_TP = np.array([[4, 6], [5, 5], [3, 7], [6, 4], [7, 3], [5, 5]]) / 10
    tense_MQ = np.array([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    prior = np.einsum("t,tm,tp,mq->tmpq", topic_T, mood_TM, number_TP, tense_MQ)
    people = {
        "market": ("grocer merchant tailor", "grocers merchants tailors"),
        "harbour": ("sailor fisher pilot", "sailors fishers pilots"),
        "school": ("teacher pupil tutor", "teachers pupils tutors"),
        "farm": ("farmer shepherd miller", "farmers shepherds millers"),
        "clinic": ("doctor nurse surgeon", "doctors nurses surgeons"),
        "theatre": ("actor singer dancer", "actors singers dancers"),
    }
    subject = {
        f"{topic}_{number}": words
        for topic, forms in people.items()
        for number, words in zip(latents["number"], forms, strict=True)
    }
    positions = _sentence(
        _by("tense", now="today now currently tonight", then="yesterday once formerly tonight"),
        _by("number", one="the this every one", many="the these many several"),
        _by(
            "mood",
            glad="cheerful lively merry young",
            grim="gloomy weary bitter young",
            calm="patient gentle quiet young",
        ),
        _by("topic number", **subject),
        "from",
        "the",
        _by(
            "topic",
            market="market shop stall square",
            harbour="harbour pier dock square",
            school="school college library library",
            farm="farm mill barn barn",
            clinic="clinic hospital ward ward",
            theatre="theatre stage opera square",
        ),
        "near",
        "the",
        "old new stone wooden narrow",
        "bridge gate church tower river",
        _by("number tense", one_now="is", many_now="are", one_then="was", many_then="were"),
        _by(
            "mood",
            glad="happily gladly proudly often",
            grim="sadly grimly wearily often",
            calm="calmly quietly slowly often",
        ),
        _by(
            "topic",
            market="selling weighing carrying counting",
            harbour="mending hauling carrying painting",
            school="reading explaining learning counting",
            farm="feeding planting carrying counting",
            clinic="washing binding examining counting",
            theatre="rehearsing singing learning painting",
        ),
        "the some all our",
        _by(
            "topic",
            market="apples spices carpets baskets",
            harbour="ropes sails anchors baskets",
            school="lessons poems maps letters",
            farm="horses seeds turnips baskets",
            clinic="wounds bandages patients letters",
            theatre="songs verses costumes letters",
        ),
        "before after during",
        "the",
        _by(
            "mood",
            glad="feast wedding parade rain",
            grim="funeral storm quarrel rain",
            calm="sunset prayer supper rain",
        ),
        "with",
        _by("number", one="his her", many="their"),
        "friends cousins brothers children",
    )
    return Grammar("town", latents, prior, positions)


_LADDER = {
    "beast": "fox hen goat crow",
    "colour": "red green brown white",
    "fruit": "apple plum pear fig",
    "time": "dawn noon dusk night",
    "place": "river barn wall gate",
}
"""The slots of the ladder, four equally likely words each: 2 bits."""
LADDER = {0: 0, 1: 2, 2: 2, 4: 3, 8: 5}
"""Bits of total correlation: how many slots, from the first on, share a latent."""


def _ladder(bits: int) -> Grammar:
    """Five slots of 2 bits each, which share 0, 1, 2, 4 or 8 bits.

    With all slots masked the floor of MLM is 10 bits in every rung, the joint entropy 10 - bits:
    the rungs differ in nothing but how much information the slots share. The first slots share
    one latent that is the whole word, in the rung of 1 bit half of it; the others have their own.
    """
    shared = list(_LADDER)[: LADDER[bits]]
    latents: dict[str, tuple[str, ...]] = {"theme": ("0", "1", "2", "3")} if bits > 1 else {}
    slots: dict[str, Position] = {}
    values: list[tuple[str, ...]]
    drivers: tuple[str, ...]
    for name, text in _LADDER.items():
        words = text.split()
        if name in shared and bits > 1:
            values, drivers = [(str(n),) for n in range(4)], ("theme",)
        elif name in shared:
            latents |= {"half": ("0", "1"), name: ("0", "1")}
            values, drivers = list(itertools.product("01", repeat=2)), ("half", name)
        else:
            latents[name] = tuple(words)
            values, drivers = [(word,) for word in words], (name,)
        slots[name] = Position(dict(zip(values, words, strict=True)), drivers)
    template = "the old beast ate a colour fruit at time near the place today"
    positions = _sentence(*(slots.get(part, part) for part in template.split()))
    shape = tuple(len(values) for values in latents.values())
    return Grammar(f"ladder-{bits}", latents, np.full(shape, 1 / np.prod(shape)), positions)


def _shifts() -> Grammar:
    """Two neighbouring slots that say the next two of four words, from any of the first three.

    With both masked the floor of MLM is 2 log2(3) bits, the joint entropy log2(3). Two states for
    each mask are too few for three phrases, unless a mask lends one of its own to its neighbour.
    """
    did = ("sang", "danced", "rested", "left")
    first = Position({(str(n),): did[n] for n in range(3)}, ("start",))
    second = Position({(str(n),): did[n + 1] for n in range(3)}, ("start",))
    start = "the", "old young tall", "baker farmer sailor"
    positions = _sentence(*start, first, second, "this", "morning evening winter")
    return Grammar("shifts", {"start": ("0", "1", "2")}, np.full(3, 1 / 3), positions)


GRAMMARS: dict[str, Callable[[], Grammar]] = {
    "pairs": lambda: _moods("pairs", 2, 1),
    "pairs-of-four": lambda: _moods("pairs-of-four", 2, 2),
    "fours": lambda: _moods("fours", 4, 1),
    "quartets": lambda: _moods("quartets", 4, 3),
    "town": _town,
    "shifts": _shifts,
    **{f"ladder-{bits}": partial(_ladder, bits) for bits in LADDER},
}
"""Makers of the grammars by name. Both slots masked, the floors of MLM and of a model of
dependencies are 2 and 1 bits (pairs), 4 and 3 (pairs-of-four), 4 and 2 (fours), 7.17 and 5.17
(quartets), 3.17 and 1.58 (shifts), 10 and 10 - n (ladder-n)."""


def grammar(name: str) -> Grammar:
    """The grammar of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in GRAMMARS:
        raise UserError(f"data.grammar is '{name}'; {nearest(name, GRAMMARS)}")
    return GRAMMARS[name]()


def slots_of(config: RunConfig) -> tuple[int, ...]:
    """Columns the masking strategy ``slots`` hides: the grammar's, after [BOS]; else none."""
    if config.masking.strategy != "slots":
        return ()
    return tuple(slot + 1 for slot in grammar(config.data.grammar).slots)
