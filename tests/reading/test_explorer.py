"""The explorer: its numbers against enumeration, its HTML as text, its page in a browser."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from linked_models import CONFIG, LINKED, exlm, log_joints, masked_lm

from exlm_mini.alignment.enumeration import paths
from exlm_mini.config import ModelConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import MaskedBatch
from exlm_mini.data.tokenizer import train_byte_level_bpe, word_level
from exlm_mini.model import ExLM
from exlm_mini.reading.decoding import read_row
from exlm_mini.reading.explorer import Explorer
from exlm_mini.reading.scene import Scene, conditionals, read_scene, scene_from_json
from exlm_mini.reading.structures import likeliest_fillings, structures

TOKENIZER = word_level(["sun", "rain", "glad", "grim"])
ROW = torch.tensor([[1, *TOKENIZER.encode_with_masks("sun [MASK] [MASK] rain"), 2]])
CONFIGS = [LINKED[name] for name in ("gated", "paper", "sparse", "one state", "spans", "late")]
ROUNDED = 1e-3  # at most five factors, each rounded to four significant digits

# Two moods, two masks; there is no edge from state 1.2 to state 2.1.
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


def scene_of(config: ModelConfig) -> Scene:
    return read_scene(read_row(exlm(config), ROW), TOKENIZER, ROW)


def weights(scene: Scene) -> dict[tuple, float]:
    """Probability of each pair of a path and a filling; word -1 is any word not in the scene."""
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
    """Words and states to fix: none, words of one or both masks, a state of mask 1, one of each."""
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
        expected = [np.zeros_like(table) for table in got[1:]]
        word_SW, state_SL, edge_LL = expected
        for (path, filling), p in kept.items():
            share = p / total if total else 0.0
            for s, w in enumerate(filling):
                state_SL[s, path[s + 1]] += share
                if w >= 0:
                    word_SW[s, w] += share
            for v, u in itertools.pairwise(path):
                edge_LL[v, u] += share
        for ours, same in zip(got[1:], expected, strict=True):
            np.testing.assert_allclose(ours, same, atol=1e-10)


@pytest.mark.parametrize("scene", [MOODS, *map(scene_of, CONFIGS)])
def test_the_likeliest_fillings_are_those_of_all(scene):
    offered = [[scene.words[w] for w in row] for row in scene.offered]
    expected = {
        words: conditionals(scene, dict(enumerate(words, start=1))).probability
        for words in itertools.product(*offered)
    }
    found = likeliest_fillings(scene, num_fillings=1000)
    assert {tuple(words): p for words, p in found} == pytest.approx(expected, abs=1e-12)
    assert [p for _, p in found] == sorted((p for _, p in found), reverse=True)


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
        assert "cannot read" in other and caption in other and "<svg" not in other


@pytest.mark.parametrize("config", CONFIGS)
def test_a_scene_says_what_the_model_says(config):
    """P(second | first = w) agrees with the joint probabilities of all fillings."""
    scene = scene_of(config)
    assert scene_from_json(scene.to_json()) == scene
    batch = MaskedBatch(ROW, TOKENIZER.special_ids.mask == ROW, ROW)
    joint_VV = log_joints(exlm(config), batch).exp().numpy()
    ids_W = [TOKENIZER.encode(word)[0] if word != "[SEP]" else 4 for word in scene.words]
    for word, given_V in zip(scene.words, joint_VV[ids_W], strict=True):
        ours, total = conditionals(scene, {1: word}), given_V.sum()
        assert ours.probability == pytest.approx(total, rel=ROUNDED)
        np.testing.assert_allclose(
            ours.word_SW[1], given_V[ids_W] / total, rtol=2 * ROUNDED, atol=1e-12
        )


def test_only_the_likeliest_words_are_kept():
    full = scene_of(CONFIG)
    short = read_scene(read_row(exlm(CONFIG), ROW), TOKENIZER, ROW, 1)
    best = conditionals(full).word_SW.argmax(axis=1)
    words = [full.words[w] for w in best]
    assert [[short.words[w] for w in row] for row in short.offered] == [[w] for w in words]
    # Words left out of the scene keep their share of the probability.
    ours, expected = (conditionals(scene, {1: words[0]}) for scene in (short, full))
    assert ours.probability == pytest.approx(expected.probability)


def test_words_that_differ_by_a_blank_are_told_apart():
    """Byte-level BPE has "a" and " a", and a reader must be able to choose either."""
    tokenizer = train_byte_level_bpe(["a cat\n a cat"] * 5, 270)
    row = torch.tensor([[1, *tokenizer.encode_with_masks("a [MASK] cat"), 2]])
    reading = read_row(ExLM(CONFIG, tokenizer.vocab_size).eval(), row)
    scene = read_scene(reading, tokenizer, row, tokenizer.vocab_size)
    assert {"a", "\u2423a", "\\n"} <= set(scene.words)


def test_in_an_mlm_a_choice_moves_no_other_mask():
    reading = read_row(masked_lm(), ROW)
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
    for words, states in [({1: "angry"}, {}), ({}, {1: "3.1"}), ({}, {3: "1.1"}),
                          ({0: "glad"}, {}), ({1: "glad"}, {1: "1.1"})]:  # fmt: skip
        with pytest.raises(ValueError):
            conditionals(MOODS, words, states)
    with pytest.raises(ValueError):
        MOODS._replace(token_LW=[[math.nan]]).to_json()


# ---- the page ----


def test_the_page_is_a_function_of_the_scene_and_asks_for_nothing_from_elsewhere(tmp_path):
    html = Explorer(MOODS).html
    assert html == Explorer(MOODS)._repr_html_()
    other = Explorer(MOODS._replace(text=["they felt", "and", "!"])).html
    assert len({re.search('data-exlm="(\\w+)"', page)[1] for page in (html, other)}) == 2
    Explorer(MOODS).save(tmp_path / "explorer.html", title="</title><script>")
    page = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    assert html in page and page.startswith("<!doctype html>")
    assert "<title>&lt;/title&gt;&lt;script&gt;</title>" in page
    assert not re.search(r"https?:|url\(|@import|src=|fetch\(|XMLHttp", page)
    assert " id=" not in html  # ids could collide with those of the surrounding page
    # Jupyter and the book typeset no formulas between dollar signs inside these classes.
    assert 'class="exlm-widget tex2jax_ignore mathjax_ignore"' in html


def percent(p: float) -> str:
    """A probability in whole percent, as on the page; halves round up despite float errors."""
    whole = math.floor(100 * p + 0.5 + 1e-9)
    return "0%" if p <= 0 else f"{whole}%" if whole else "<1%"


@pytest.fixture
def show(chromium, tmp_path):
    """Function that opens a page of explorers; page errors and outside requests fail the test."""
    contexts, pages, troubles, asked = [], [], [], []

    def open_page(*scenes, width=1000):
        path = tmp_path / f"{len(pages)}.html"
        Explorer(scenes[0]).save(path, below="".join(Explorer(s).html for s in scenes[1:]))
        contexts.append(chromium.new_context(viewport={"width": width, "height": 800}))
        pages.append(path.as_uri())
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[-1])
        page.wait_for_selector("[data-exlm-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == [] and [u for u in asked if not u.startswith("data:")] == pages


def word(page, mask: int, text: str):
    """The button of a word for a mask; masks are counted from 1."""
    selector = f".exlm-word[data-mask='{mask - 1}']"
    exact = re.compile(f"^\\s*{re.escape(text)}\\s*$")
    inner = page.locator("span", has_text=exact)
    return page.locator(".exlm-widget").first.locator(selector).filter(has=inner)


def state(page, label: str, scene: Scene):
    return page.locator(f".exlm-node[data-state='{scene.labels.index(label)}']").first


def assert_shows(page, scene: Scene, expected, root: int = 0) -> None:
    """Assert that every word, state and edge shows the share that Python computes."""
    widget = page.locator(".exlm-widget").nth(root)
    words = [(s, w) for s, row in enumerate(scene.offered) for w in row]
    owned = [(o - 1, u) for u, o in enumerate(scene.owners) if 1 <= o <= scene.num_masks]
    for selector, shares in (
        (".exlm-word em", [expected.word_SW[place] for place in words]),
        ("svg .exlm-share", [expected.state_SL[place] for place in owned]),
    ):
        shown = [text for text in widget.locator(selector).all_text_contents() if text]
        assert shown == list(map(percent, shares))
    read = "paths => paths.map(p => [p.dataset.edge, p.getAttribute('stroke-width')])"
    for edge, width in widget.locator("path[data-edge]").evaluate_all(read):
        v, u = map(int, edge.split("-"))
        assert float(width) == pytest.approx(0.8 + 6 * expected.edge_LL[v, u], abs=0.006)


@pytest.mark.parametrize("scene", [MOODS, *map(scene_of, CONFIGS[1:3])])
def test_the_page_computes_what_python_computes(show, scene):
    page = show(scene, MOODS)
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
    assert_shows(page, MOODS, conditionals(MOODS), root=1)  # the other explorer is unchanged
    page.locator(".exlm-reset").first.click()
    assert_shows(page, scene, conditionals(scene))


def test_words_are_text_and_never_markup(show):
    words = ["<script>alert(1)</script>", "</script>", "\"quoted'", "&amp;<b>$x$`${1}`"]
    scene = MOODS._replace(words=words, text=words[:3], labels=["<BOS>", *MOODS.labels[1:]])
    page = show(scene)
    assert_shows(page, scene, conditionals(scene))
    assert page.locator(".exlm-widget script").count() == 1
    shown = page.locator(".exlm-widget > div").text_content()
    assert all(text in shown for text in [*words[:3], "<BOS>"])
    assert page.locator(".exlm-masks b, svg b").count() == 0


def test_what_no_path_allows_cannot_be_chosen(show):
    scene = MOODS._replace(offered=[[0, 1, 2], [2, 3]])
    page = show(scene)
    state(page, "1.2", scene).click()
    assert word(page, 2, "wept").is_enabled()
    # State 2.1, reached from BOS, gives the first mask "sang"; state 2.2 must then follow.
    word(page, 1, "sang").click()
    page.locator(".exlm-reset").click()
    state(page, "2.1", scene).click()
    assert word(page, 1, "sang").is_disabled()
    before = page.locator(".exlm-status").text_content()
    state(page, "1.2", scene).click()
    assert page.locator(".exlm-status").text_content() == before


def test_mouse_and_keyboard_choose_show_and_release(show):
    page = show(MOODS)
    for label in ("BOS", "EOS"):  # boundaries cannot be chosen
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
    assert_shows(page, MOODS, conditionals(MOODS))


def test_what_is_said_of_a_state_is_true_of_the_present_choice(show):
    page = show(MOODS)
    node = state(page, "1.2", MOODS)
    for choose in (node.click, page.locator(".exlm-reset").click):
        choose()
        told = f"on {node.locator('.exlm-share').text_content()} of the paths"
        assert told in page.locator(".exlm-detail").text_content()
        assert node.get_attribute("aria-label").endswith(told)
    assert page.evaluate("document.activeElement.className") == "exlm-status"


def test_a_phone_needs_no_sideways_scrolling(show):
    scene = scene_of(LINKED["three states"])
    page = show(scene, width=390)
    word(page, 1, scene.words[scene.offered[0][0]]).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for button in page.locator(".exlm-word").all():
        box = button.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 28
    for label in page.locator("svg .exlm-label").all():
        assert label.bounding_box()["height"] >= 9
