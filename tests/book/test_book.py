"""The built book as readers see it: in a browser, offline, in both themes, on a phone.

The browser tests need Debian's ``chromium`` (or ``CHROMIUM=/path/to/it``) and skip without one.
``EXLM_BOOK_HTML`` names the folder of a book that is already built; without it, a book is built.
"""

import functools
import http.server
import os
import re
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest
import yaml
from redirects import MOVED

ROOT = Path(__file__).resolve().parents[2]
TOC = yaml.safe_load((ROOT / "book" / "_toc.yml").read_text())
CONFIG = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
PAGES = [TOC["root"], *(c["file"] for part in TOC["parts"] for c in part["chapters"])]
CHAPTERS = [page for page in PAGES if page.startswith("chapters/")]
EXPLORER = "chapters/08_where_it_pays"
WIDE, PHONE = {"width": 1400, "height": 1000}, {"width": 390, "height": 844}
REFERENCE = sorted((ROOT / "book" / "api").glob("*.md"))
SHOWN = (
    "article table td", "article p", "article h1", "div.cell_input pre", "div.cell_output pre",
)  # fmt: skip


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> Path:
    """Folder of the built pages; a warning during the build is an error."""
    if given := os.environ.get("EXLM_BOOK_HTML"):
        return Path(given)
    output = tmp_path_factory.mktemp("book")
    command = [
        Path(sysconfig.get_path("scripts")) / "jupyter-book", "build", "-W", "-n",
        "--keep-going", ".", "--config", "book/_config.yml", "--toc", "book/_toc.yml",
        "--path-output", output,
    ]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output / "_build" / "html"


@pytest.fixture(scope="session")
def site(book):
    """Address of a local server for the built pages."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(book))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(chromium):
    """A browser tab for all pages, so that shared files such as MathJax are loaded only once."""
    return chromium.new_context().new_page()


@pytest.fixture
def open_page(tab, site):
    """A function that opens a page by name. The test fails on a script error, a console error, a
    missing file or a request that leaves the book."""
    used, troubles = set(), []

    def is_ours(url):
        return url.startswith((site, "file:", "data:", "blob:"))

    listeners = {
        "pageerror": lambda error: troubles.append(f"script error: {error}"),
        "console": lambda m: troubles.append(m.text) if m.type == "error" else None,
        "requestfailed": lambda r: troubles.append(f"failed: {r.url}"),
        "response": lambda r: troubles.append(r.url) if r.status >= 400 else None,
        "request": lambda r: None if is_ours(r.url) else troubles.append(r.url),
    }

    def open_(name, viewport=WIDE, base=None, has_snippets=True):
        page = tab if has_snippets else tab.context.new_page()
        used.add(page)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme="light")
        if not has_snippets:
            # Pages opened from file:// may not fetch others: the search lists its hits without
            # snippets and logs console errors, which this stub prevents.
            page.add_init_script("window.fetch = () => new Promise(() => {})")
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(f"{base or site}/{name}", wait_until="load")
        return page

    yield open_
    for page in used:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert troubles == []


def contrast(page, selector: str) -> float:
    """Contrast ratio (WCAG) between the first matching element's text and its background."""
    return page.evaluate(
        """selector => {
          const parse = text => {
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data];
          };
          const luminance = rgb => {
            const [r, g, b] = rgb.map(v => v / 255)
              .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const element = document.querySelector(selector);
          let ground = element, color = [0, 0, 0, 0];
          while (ground && color[3] < 128) {
            color = parse(getComputedStyle(ground).backgroundColor);
            ground = ground.parentElement;
          }
          if (color[3] < 128) color = [255, 255, 255, 255];
          const a = luminance(parse(getComputedStyle(element).color).slice(0, 3));
          const b = luminance(color.slice(0, 3));
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }""",
        selector,
    )


def test_every_page_is_built_and_no_file_names_a_foreign_script(book):
    repository = CONFIG["repository"]["url"].removeprefix("https://github.com/")
    for name in PAGES:
        html = (book / f"{name}.html").read_text()
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(https?://[^"]+)"', html)
        assert [url for url in loaded if "canonical" not in url] == [], name
        if name in CHAPTERS:  # the launch buttons
            notebook = f"{repository}/blob/main/{name}.ipynb"
            assert f"colab.research.google.com/github/{notebook}" in html
            assert f"mybinder.org/v2/gh/{repository}/main" in html


@pytest.mark.parametrize("name", [*PAGES, *(f"book/api/{p.stem}" for p in REFERENCE)])
def test_a_page_is_whole_in_both_themes_and_on_a_phone(open_page, book, name):
    formulas = (book / f"{name}.html").read_text().count('class="math ')
    assert formulas > 0 or name not in CHAPTERS
    page = open_page(f"{name}.html")
    assert page.locator("article h1").count() == 1
    assert page.locator("article img").evaluate_all("all => all.every(i => i.naturalWidth > 0)")
    if formulas:
        page.wait_for_function(
            "n => document.querySelectorAll('mjx-container').length >= n", arg=formulas
        )
    assert page.locator("mjx-merror").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE["width"]
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f"html[data-theme={theme}]")
        for selector in SHOWN:
            if page.locator(selector).count():
                assert contrast(page, selector) > 4.5, (theme, selector)
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    figures = page.locator("article figure:not(.pipeline) img, article div.cell_output img")
    assert figures.evaluate_all("all => all.every(i => i.width < innerWidth)")


def test_a_chapter_of_an_earlier_edition_leads_to_its_successor(book):
    for old, new in MOVED.items():
        assert f"url={new}.html" in (book / "chapters" / f"{old}.html").read_text()
        assert f"chapters/{new}" in PAGES and f"chapters/{old}" not in PAGES


@pytest.mark.parametrize("kind", ["server", "file"])
def test_search_finds_a_chapter(open_page, book, kind):
    base = book.as_uri() if kind == "file" else None
    page = open_page("search.html?q=rotary", base=base, has_snippets=kind == "server")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results a[href*='01_one_notebook']").count() >= 1


def test_a_hidden_solution_opens(open_page):
    page = open_page("chapters/01_one_notebook.html")
    solution = page.locator("details.hide.above-input").last
    assert not solution.locator("pre").first.is_visible()
    title = solution.locator("summary")
    assert title.get_attribute("aria-label") is None, "its text is its name"
    title.click()
    assert solution.locator("pre").first.is_visible()


def explorer_of(page):
    """The page's first explorer, and a function that reads the shares it shows for a mask."""
    widget = page.locator("div.cell_output .exlm-widget").first
    widget.scroll_into_view_if_needed()

    def words(mask: int) -> dict[str, str]:
        rows = widget.locator("button").filter(has_text="%").all_inner_texts()
        pairs = [row.split("\n") for row in rows]
        half = len(pairs) // 2
        return dict(pairs[half * mask : half * (mask + 1)])

    return widget, words


def test_the_explorer_moves_the_other_mask_when_a_word_is_fixed(open_page):
    page = open_page(f"{EXPLORER}.html", viewport=PHONE)
    widget, words = explorer_of(page)
    before = words(1)
    chosen = next(iter(words(0)))
    widget.locator("button", has_text=chosen).click()
    assert words(0)[chosen] == "100%"
    after = words(1)
    assert set(after) == set(before)
    assert sum(share != after[word] for word, share in before.items()) > len(before) / 2
    widget.get_by_role("button", name="release all").click()
    assert words(1) == before
    widget.locator("button", has_text=chosen).focus()
    page.keyboard.press("Enter")
    assert words(1) == after
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f"html[data-theme={theme}]")
        assert contrast(page, ".exlm-widget button:nth-of-type(2)") > 4.5


def test_on_the_first_page_a_word_rules_others_out_with_exlm_alone(open_page):
    page = open_page("book/intro.html")
    for tab, num_out in (("ExLM", 9), ("Masked language model", 0)):
        page.locator("label", has_text=tab).click()
        widget = page.locator(".exlm-widget:visible")
        words = widget.locator(".exlm-mask").nth(1).locator("button em")
        widget.locator("button", has_text="sad").click()
        shares = words.all_inner_texts()
        assert len(shares) == 12 and sum(share in ("0%", "<1%") for share in shares) == num_out


def test_dragging_a_slider_changes_the_table_and_the_paths(open_page):
    page = open_page("chapters/05_sum_over_paths.html")
    widget = page.locator(".exlm-table")
    printed = re.search(r"three loops ([\d.]+),", page.locator("article").inner_text())
    assert printed, "the likelihood of the chapter's own loops"

    def told() -> tuple[float, list[str]]:
        total = widget.locator(".paths p").inner_text().split()[-1]
        return float(total), widget.locator(".path em").all_inner_texts()

    total, before = told()
    assert total == round(float(printed[1]), 4) and widget.locator(".changed").count() == 0
    widget.get_by_label("1.1 says great").fill("0")
    lower, after = told()
    assert 0 < lower < total and before != after == [*["0%"] * 3, *after[3:]]
    # The word in 1.1, the next word in each of the three states that follow, and the end.
    assert widget.locator(".changed").count() == 5
