"""The explorer: its numbers against enumeration, its HTML as text, and the page in a browser.

The browser tests need Debian's ``chromium`` (or ``CHROMIUM=/path/to/it``) and skip without one.
"""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from exlm_mini.alignment.enumeration import paths
from exlm_mini.config import ModelConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.tokenizer import train_byte_level_bpe, word_level
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.reading.decoding import read_row
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import Scene, conditionals, read_scene, scene_from_json
from exlm_mini.reading.structures import likeliest_fillings, structures

TOKENIZER = word_level(["sun", "rain", "glad", "grim"])
ROW, TOUCHING = (
    torch.tensor([[1, *TOKENIZER.encode_with_masks(text), 2]])
    for text in ("sun [MASK] rain [MASK]", "sun [MASK] [MASK] rain")
)
CONFIG = ModelConfig(
    width=16, num_heads=2, ffn_width=16, max_positions=64, states_per_mask=2, init_std=0.5
)
CONFIGS = [
    CONFIG,
    replace(CONFIG, boundary="paper", states_per_mask=3, transition="paper"),
    replace(CONFIG, boundary="paper", sparse=True),
    replace(CONFIG, states_per_mask=1),
    replace(CONFIG, transition="spans"),
    replace(CONFIG, boundary="paper", states_per_mask=3, transition="chains", expand_at=1),
]
ROUNDED = 1e-3  # four significant digits of each of at most five factors

# Two moods, two masks; the second state of the first mask never leads to the first of the second.
MOODS = Scene(
    text=["they felt", "and", "."],
    labels=["BOS", "1.1", "1.2", "2.1", "2.2", "EOS"],
    owners=[0, 1, 1, 2, 2, 3],
    words=["glad", "grim", "sang", "wept"],
    offered=[[0, 1], [2, 3]],
    token_LW=[
        [0.25, 0.25, 0.25, 0.25],
        [0.9, 0.1, 0, 0],
        [0, 0.8, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0.25, 0.75],
        [0.25, 0.25, 0.25, 0.25],
    ],
    transition_LL=[
        [0, 0.5, 0.25, 0.25, 0, 0],
        [0, 0, 0.125, 0.75, 0.125, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0.5, 0.5],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0],
    ],
)
NASTY = [
    "<script>alert(1)</script>",
    "</script>",
    "\"quoted'",
    "&amp;<b>$x$`${1}`",
]


def exlm(config: ModelConfig) -> ExLM:
    torch.manual_seed(0)
    return ExLM(config, TOKENIZER.vocab_size).double().eval()


def row_of(config: ModelConfig) -> Tensor:
    """Two masks, side by side for links within spans."""
    return TOUCHING if config.transition in ("spans", "chains") else ROW


def scene_of(config: ModelConfig) -> Scene:
    row = row_of(config)
    return read_scene(read_row(exlm(config), row), TOKENIZER, row)


def weights(scene: Scene) -> dict[tuple, float]:
    """Probability of each path with each filling; the word -1 is any other word."""
    token_LW, link_LL = np.array(scene.token_LW), np.array(scene.transition_LL)
    token_LW = np.concatenate([token_LW, 1 - token_LW.sum(axis=1, keepdims=True)], axis=1)
    out = {}
    for path in paths(scene.num_masks + 2, len(scene.labels)):
        links = math.prod(link_LL[v, u] for v, u in itertools.pairwise(path))
        for filling in itertools.product(range(-1, len(scene.words)), repeat=scene.num_masks):
            said = [token_LW[u, w] for u, w in zip(path[1:-1], filling, strict=True)]
            out[path, filling] = links * math.prod(said)
    return out


def choices(scene: Scene) -> list[tuple[dict, dict]]:
    """No choice, every word or state of every mask, and pairs of them."""
    single = [[{}, *[{mask: w} for w in scene.words]] for mask in (1, 2)]
    words = [({**a, **b}, {}) for a, b in itertools.product(*single)]
    states = [({}, {1: label}) for label in scene.labels[1:]]
    return [*words, *states, ({2: scene.words[0]}, {1: scene.labels[1]})]


@pytest.mark.parametrize("scene", [MOODS, *map(scene_of, CONFIGS)])
def test_conditionals_are_those_of_all_paths_and_fillings(scene):
    weight = weights(scene)
    for words, states in choices(scene):
        kept = {
            (path, filling): p
            for (path, filling), p in weight.items()
            if all(filling[m - 1] == scene.words.index(w) for m, w in words.items())
            and all(scene.labels[path[m]] == label for m, label in states.items())
        }
        total = sum(kept.values())
        got = conditionals(scene, words, states)
        assert got.probability == pytest.approx(total, rel=1e-10, abs=1e-15)
        word_SW, state_SL = np.zeros_like(got.word_SW), np.zeros_like(got.state_SL)
        edge_LL = np.zeros_like(got.edge_LL)
        for (path, filling), p in kept.items():
            share = p / total if total else 0.0
            for s, w in enumerate(filling):
                state_SL[s, path[s + 1]] += share
                if w >= 0:
                    word_SW[s, w] += share
            for v, u in itertools.pairwise(path):
                edge_LL[v, u] += share
        np.testing.assert_allclose(got.word_SW, word_SW, atol=1e-10)
        np.testing.assert_allclose(got.state_SL, state_SL, atol=1e-10)
        np.testing.assert_allclose(got.edge_LL, edge_LL, atol=1e-10)


@pytest.mark.parametrize("scene", [MOODS, *map(scene_of, CONFIGS)])
def test_the_likeliest_fillings_are_those_of_all(scene):
    total: dict[tuple, float] = {}
    for (_, filling), p in weights(scene).items():
        if all(w in offered for w, offered in zip(filling, scene.offered, strict=True)):
            words = tuple(scene.words[w] for w in filling)
            total[words] = total.get(words, 0.0) + p
    found = likeliest_fillings(scene, num_fillings=1000)
    assert {tuple(words): p for words, p in found} == pytest.approx(total, abs=1e-12)
    probabilities = [p for _, p in found]
    assert probabilities == sorted(probabilities, reverse=True)


def test_a_filling_is_drawn_with_its_new_atoms_or_named_as_unreadable():
    pytest.importorskip("rdkit")
    scene = Scene(
        text=["[H]C", "C"],
        labels=["BOS", "1", "EOS"],
        owners=[0, 1, 2],
        words=["N(C)", "Cl", "("],
        offered=[[0, 1, 2]],
        token_LW=[[0.0] * 3, [0.6, 0.3, 0.1], [0.0] * 3],
        transition_LL=[[0, 1, 0], [0, 0, 1], [0, 0, 0]],
    )
    first, *others = structures(scene).split("<figure")[1:]
    assert set(re.findall(r"<ellipse[^>]*class='(.*?)'", first)) == {"atom-2", "atom-3"}
    assert "0.6: [H]CN(C)C<" in first
    for other, caption in zip(others, ("0.3: [H]CClC<", "0.1: [H]C(C<"), strict=True):
        assert "RDKit cannot read" in other and caption in other and "<svg" not in other


@pytest.mark.parametrize("config", CONFIGS)
def test_a_scene_says_what_the_model_says(config):
    # P(second | first = w) from the joint probabilities of all fillings, as validation has them.
    model, scene, row = exlm(config), scene_of(config), row_of(config)
    assert scene_from_json(scene.to_json()) == scene
    fillings = list(itertools.product(range(TOKENIZER.vocab_size), repeat=2))
    filled = row.repeat(len(fillings), 1)
    filled[filled == TOKENIZER.special_ids.mask] = torch.tensor(fillings).flatten()
    with torch.no_grad():
        scores = model(row.expand_as(filled), row.eq(5).expand_as(filled), filled)
    joint_VV = log_likelihood(scores, with_boundaries=False).exp().view(2 * (10,)).numpy()
    ids_W = [TOKENIZER.encode(word)[0] if word != "[SEP]" else 4 for word in scene.words]
    for w, word in enumerate(scene.words):
        given = joint_VV[ids_W[w]]
        got = conditionals(scene, {1: word})
        assert got.probability == pytest.approx(given.sum(), rel=ROUNDED)
        np.testing.assert_allclose(
            got.word_SW[1], given[ids_W] / given.sum(), rtol=2 * ROUNDED, atol=1e-12
        )


def test_only_the_likeliest_words_are_kept():
    full = scene_of(CONFIG)
    short = read_scene(read_row(exlm(CONFIG), ROW), TOKENIZER, ROW, 1)
    assert [len(row) for row in short.offered] == [1, 1]
    best = [conditionals(full).word_SW[s].argmax() for s in range(2)]
    assert [short.words[row[0]] for row in short.offered] == [full.words[w] for w in best]
    # What is left out of the scene still has its share of the paths.
    word = short.words[short.offered[0][0]]
    assert conditionals(short, {1: word}).probability == pytest.approx(
        conditionals(full, {1: word}).probability
    )


def test_words_that_differ_by_a_blank_are_told_apart():
    # Byte-level BPE has "a" and " a", and one must be able to choose either.
    tokenizer = train_byte_level_bpe(["a cat\n a cat"] * 5, 270)
    torch.manual_seed(0)
    model = ExLM(CONFIG, tokenizer.vocab_size).eval()
    row = torch.tensor([[1, *tokenizer.encode_with_masks("a [MASK] cat"), 2]])
    scene = read_scene(read_row(model, row), tokenizer, row, tokenizer.vocab_size)
    assert {"a", "\u2423a", "\\n"} <= set(scene.words)


def test_in_an_mlm_a_choice_moves_no_other_mask():
    torch.manual_seed(0)
    reading = read_row(MaskedLM(CONFIG, TOKENIZER.vocab_size).eval(), ROW)
    scene = read_scene(reading, TOKENIZER, ROW)
    alone_S, fixed_S = (conditionals(scene, c).word_SW[1] for c in ({}, {1: scene.words[0]}))
    np.testing.assert_array_equal(alone_S, fixed_S)
    likeliest = [scene.words[row[0]] for row in scene.offered]
    p = conditionals(scene, dict(enumerate(likeliest, start=1))).probability
    assert math.log(p) == pytest.approx(reading.log_joint, rel=1e-3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="have none"):
        reading = read_row(exlm(CONFIG), ROW)
        read_scene(reading._replace(graph=None), TOKENIZER, ROW)
    for words, states in [({1: "angry"}, {}), ({}, {1: "3.1"}), ({3: "glad"}, {}),
                          ({0: "glad"}, {}), ({1: "glad"}, {1: "1.1"})]:  # fmt: skip
        with pytest.raises(ValueError):
            conditionals(MOODS, words, states)


# ---- the page ----


def test_the_page_is_a_function_of_the_scene_and_asks_for_nothing_from_elsewhere(tmp_path):
    html = explorer(MOODS).html
    assert html == explorer(MOODS)._repr_html_()
    other = explorer(MOODS._replace(text=["they felt", "and", "!"])).html
    names = [re.search('data-exlm="(\\w+)"', page)[1] for page in (html, other)]
    assert names[0] != names[1]
    explorer(MOODS).save(tmp_path / "explorer.html", title="</title><script>")
    page = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert html in page and page.startswith("<!doctype html>")
    assert "<title>&lt;/title&gt;&lt;script&gt;</title>" in page
    assert not re.search(r"https?:|url\(|@import|src=|fetch\(|XMLHttp", page)
    assert " id=" not in html  # ids would collide with those of the page around
    # Jupyter and the book leave dollars alone where these classes are.
    assert 'class="exlm-widget tex2jax_ignore mathjax_ignore"' in html


def percent(p: float) -> str:
    """Whole percent; halves round up despite rounding errors."""
    whole = math.floor(100 * p + 0.5 + 1e-9)
    return "0%" if p <= 0 else f"{whole}%" if whole else "<1%"


@pytest.fixture
def show(chromium, tmp_path):
    """Opens explorers in one page; errors and requests for anything else fail the test."""
    contexts, troubles, asked = [], [], []

    def open_page(*scenes, width=1000, **options):
        path = tmp_path / f"{len(contexts)}.html"
        explorer(scenes[0]).save(path)
        extra = "".join(explorer(scene).html for scene in scenes[1:])
        path.write_text(path.read_text().replace("</body>", f"{extra}</body>"))
        contexts.append(
            chromium.new_context(viewport={"width": width, "height": 800}, **options)
        )
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("[data-exlm-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
    assert [u for u in asked if not u.startswith("data:")] == [
        (tmp_path / f"{i}.html").as_uri() for i in range(len(contexts))
    ]


def word(page, mask: int, text: str, root: int = 0):
    """The button of a word; masks from 1."""
    selector = f".exlm-word[data-mask='{mask - 1}']"
    exact = re.compile(f"^\\s*{re.escape(text)}\\s*$")
    inner = page.locator("span", has_text=exact)
    return page.locator(".exlm-widget").nth(root).locator(selector).filter(has=inner)


def state(page, label: str, scene: Scene):
    return page.locator(f".exlm-node[data-state='{scene.labels.index(label)}']").first


def assert_shows(page, scene: Scene, expected, root: int = 0) -> None:
    """Every word and every state has the share that Python computes."""
    widget = page.locator(".exlm-widget").nth(root)
    shown = widget.locator(".exlm-word em").all_text_contents()
    words = [(s, w) for s, row in enumerate(scene.offered) for w in row]
    assert shown == [percent(expected.word_SW[s, w]) for s, w in words]
    shares = widget.locator("svg .exlm-share").all_text_contents()
    owned = [(o - 1, u) for u, o in enumerate(scene.owners) if 1 <= o <= scene.num_masks]
    assert [t for t in shares if t] == [percent(expected.state_SL[s, u]) for s, u in owned]
    read = "paths => paths.map(p => [p.dataset.edge, p.getAttribute('stroke-width')])"
    for edge, width in widget.locator("path[data-edge]").evaluate_all(read):
        v, u = map(int, edge.split("-"))
        assert float(width) == pytest.approx(0.8 + 6 * expected.edge_LL[v, u], abs=0.006)


@pytest.mark.parametrize("scene", [MOODS, *map(scene_of, CONFIGS[1:3])])
def test_the_page_computes_what_python_computes(show, scene):
    page = show(scene)
    assert_shows(page, scene, conditionals(scene))
    for first in scene.offered[0]:
        word(page, 1, scene.words[first]).click()
        chosen = {1: scene.words[first]}
        assert_shows(page, scene, conditionals(scene, chosen))
    second = scene.words[scene.offered[1][0]]
    word(page, 2, second).click()
    assert_shows(page, scene, conditionals(scene, {**chosen, 2: second}))
    label = next(la for la, o in zip(scene.labels, scene.owners, strict=True) if o == 1)
    state(page, label, scene).click()
    assert_shows(page, scene, conditionals(scene, {2: second}, {1: label}))
    page.locator(".exlm-reset").click()
    assert_shows(page, scene, conditionals(scene))


def test_words_are_text_and_never_markup(show):
    scene = MOODS._replace(words=NASTY, text=NASTY[:3], labels=["<BOS>", *MOODS.labels[1:]])
    page = show(scene)
    assert_shows(page, scene, conditionals(scene))
    assert page.locator(".exlm-widget script").count() == 1
    shown = page.locator(".exlm-widget > div").text_content()
    assert all(text in shown for text in [*NASTY[:3], "<BOS>"])
    assert page.locator(".exlm-masks b, svg b").count() == 0


def test_what_no_path_allows_cannot_be_chosen(show):
    scene = MOODS._replace(offered=[[0, 1, 2], [2, 3]])
    page = show(scene)
    state(page, "1.2", scene).click()
    assert word(page, 2, "wept").is_enabled()
    # The first mask takes "sang" from 2.1, reached from BOS, and 2.2 is then forced.
    word(page, 1, "sang").click()
    page.locator(".exlm-reset").click()
    state(page, "2.1", scene).click()
    assert word(page, 1, "sang").is_disabled()
    before = page.locator(".exlm-status").text_content()
    state(page, "1.2", scene).click()
    assert page.locator(".exlm-status").text_content() == before


def test_mouse_and_keyboard_choose_show_and_release(show):
    page = show(MOODS)
    for label in ("BOS", "EOS"):  # a boundary is no choice
        state(page, label, MOODS).click()
    button, status = word(page, 1, "glad"), page.locator(".exlm-status")
    assert status.text_content() == "Nothing is fixed."
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator(".exlm-slot").all_text_contents() == ["glad", "[MASK]"]
    probability = conditionals(MOODS, {1: "glad"}).probability
    assert f"Joint probability {float(f'{probability:.2g}')}" in status.text_content()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    state(page, "1.1", MOODS).hover()
    detail = page.locator(".exlm-detail").text_content()
    assert "glad 90%, grim 10%" in detail and "2.1 75%, 1.2 13%, 2.2 13%" in detail
    lit = [p.get_attribute("data-edge") for p in page.locator("path.exlm-on").all()]
    assert sorted(lit) == ["1-2", "1-3", "1-4"]
    state(page, "1.2", MOODS).focus()
    page.keyboard.press("Enter")
    assert_shows(page, MOODS, conditionals(MOODS, {}, {1: "1.2"}))
    page.keyboard.press(" ")
    word(page, 2, "wept").focus()
    page.keyboard.press("Enter")
    assert_shows(page, MOODS, conditionals(MOODS, {2: "wept"}))


def test_two_explorers_keep_to_themselves(show):
    other = scene_of(CONFIG)
    page = show(MOODS, other, MOODS)
    word(page, 1, "glad").click()
    assert_shows(page, MOODS, conditionals(MOODS, {1: "glad"}))
    assert_shows(page, other, conditionals(other), root=1)
    assert_shows(page, MOODS, conditionals(MOODS), root=2)


@pytest.mark.parametrize("scene", [scene_of(CONFIGS[1])])
def test_a_phone_needs_no_sideways_scrolling(show, scene):
    page = show(scene, width=390)
    word(page, 1, scene.words[scene.offered[0][0]]).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for button in page.locator(".exlm-word").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["height"] >= 28
    labels = page.locator("svg .exlm-label").all()
    assert min(box["height"] for box in (text.bounding_box() for text in labels)) >= 9
