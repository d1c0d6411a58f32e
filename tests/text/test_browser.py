"""The page in a browser: what a reader sees and does. Chromium is driven through playwright; without it, skipped."""

import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from sinkformer.text import Aligner, pages
from sinkformer.text.pages import visible

A, B = "the cat sat on a mat , small dog", "the feline rested upon rug , large canine"
# Twelve copies of a sentence whose last words have partners far down the other text.
LONG = " . ".join(["the cat sat on a big red mat at home"] * 30)
EVIL = [
    "<script>hacked=1</script>", "</script><script>hacked=1</script>", "<img src=x onerror=hacked=1>", "]]>", "<!--",
    "\"><svg onload=hacked=1>", "'onmouseover='hacked=1", "javascript:hacked=1", "&lt;b&gt;", "a\u2028b\u2029c",
    "\u202eevil\u202c", "\u2066", "a\0b", "\ufeff", "${hacked=1}", "<style>*{display:none}</style>",
    "<link rel=stylesheet href=http://localhost:1/x.css>", "<meta http-equiv=refresh content=0;url=http://localhost:1/>",
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests: playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = shutil.which("chromium") or shutil.which("chromium-browser") or (own if Path(own).exists() else None)
        if path is None:
            pytest.skip(
                "browser tests: no Chromium; install the Debian package chromium, or `playwright install chromium`"
            )
        # Chromium refuses its sandbox to root.
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] * root)
        yield browser
        browser.close()


class Reader:
    """A page, and everything it did that a page must not do."""

    def __init__(self, context, path):
        self.page = context.new_page()
        self.trouble = []
        self.page.on("dialog", lambda dialog: (self.trouble.append(dialog.message), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("request", lambda r: r.url == path.as_uri() or self.trouble.append(r.url))
        self.page.goto(path.as_uri())

    def word(self, side, k, pair=0):
        return self.page.locator(f".pair:nth-of-type({pair + 1}) .text.{side} .word").nth(k)

    def lit(self):
        """Index and share of the words lit in the target text."""
        return self.page.evaluate(
            "[...document.querySelectorAll('.target .word')].flatMap((w, k) => w.matches('.lit') ? [[k, w.dataset.share]] : [])"
        )

    def here(self):
        return self.page.evaluate("[...document.querySelectorAll('.word.here')].map(word => word.textContent)")

    def links(self):
        return self.page.evaluate(
            "[...document.querySelectorAll('.list tbody tr')].map(r => [+r.cells[0].textContent, +r.cells[3].textContent])"
        )

    def alone(self, side):
        return self.page.evaluate(
            f"[...document.querySelectorAll('.text.{side} .word')].flatMap((w, k) => w.matches('.alone') ? [k] : [])"
        )

    def counts(self):
        return [int(self.page.inner_text(f"[data-count={name}]")) for name in ("links", "source", "target")]

    def slide(self, threshold):
        self.page.eval_on_selector(
            ".threshold", "(e, x) => { e.value = x; e.dispatchEvent(new Event('input', { bubbles: true })) }", threshold
        )


@pytest.fixture
def read(chromium, tmp_path):
    """Open alignments, or a page as text: ``read(r, ...)``. The page must not have misbehaved by the end of the test."""
    opened = []

    def open_page(*what, watched=True, **options):
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(what[0] if isinstance(what[0], str) else pages.page(what), encoding="utf-8")
        context = chromium.new_context(**options)
        reader = Reader(context, path)
        opened.append((context, reader, watched))
        return reader

    yield open_page
    for context, _, _ in opened:
        context.close()
    assert [reader.trouble for _, reader, watched in opened if watched and reader.trouble] == []


@pytest.fixture(scope="module")
def soft(table):
    """Confidences between 0 and 1, so that a threshold matters."""
    return Aligner(table, epsilon=0.3)


def partners(r, i):
    found = [(j, c) for (k, j), c in zip(r.links, r.confidence, strict=True) if k == i]
    return [[j, f"{c:.2f}"] for j, c in sorted(found)]


def test_pointing_at_a_word_lights_its_partners_with_their_confidence(read, soft):
    r = soft(A, B)
    reader = read(r)
    for i in range(len(r.source)):
        reader.word("source", i).hover()
        assert reader.here() == [r.source.words[i]]
        assert [[k, pytest.approx(float(x), abs=0.011)] for k, x in reader.lit()] == [
            [k, float(x)] for k, x in partners(r, i)
        ]
    (i, j) = r.links[0]
    reader.word("target", j).hover()
    assert reader.page.inner_text(".source .lit") == r.source.words[i]
    assert reader.page.inner_text("[role=status]").startswith(f"{r.target.words[j]} ({j} in the target)")
    reader.page.mouse.move(1, 1)
    assert reader.here() == []
    assert reader.lit() == []
    assert reader.page.inner_text("[role=status]") == ""


def test_a_word_that_stays_alone_says_so(read, static):
    r = static("the cat zyx", "a feline !")
    reader = read(r)
    assert (reader.alone("source"), reader.alone("target")) == ([2], [2])
    reader.word("source", 2).hover()
    share = f"{float(r.null_source[2]) * 6:.2f}"
    assert reader.page.inner_text("[role=status]") == f"zyx (2 in the source) stays alone: {share} of it has no partner"
    decoration = "getComputedStyle(document.querySelectorAll('.target .word')[2]).textDecorationStyle"
    assert reader.page.evaluate(decoration) == "dotted"


def test_the_slider_changes_links_marks_and_counts(read, table, soft):
    reader = read(soft(A, B))
    seen = set()
    for threshold in (0.06, 0.2, 0.44, 0.46, 0.95):
        reader.slide(threshold)
        wanted = Aligner(table, epsilon=0.3, threshold=threshold)(A, B)
        assert reader.links() == [list(link) for link in wanted.links]
        assert [reader.alone("source"), reader.alone("target")] == list(wanted.unaligned)
        assert reader.counts() == [len(wanted.links), *map(len, wanted.unaligned)]
        assert reader.page.inner_text("output") == f"{threshold:.2f}"
        framed = reader.page.evaluate("document.querySelectorAll('.map td.link').length")
        assert framed == len(wanted.links)
        seen.add(len(wanted.links))
    assert len(seen) > 3
    reader.page.get_by_role("button", name="as found").click()
    assert reader.links() == [list(link) for link in soft(A, B).links]
    assert reader.page.get_by_role("button", name="as found").is_disabled()


def test_the_slider_is_moved_by_keys_and_the_lit_word_follows(read, soft):
    r = soft(A, B)
    reader = read(r)
    (i, _), c = r.links[0], r.confidence[0]
    reader.word("source", i).click()
    assert reader.lit()
    slider = reader.page.get_by_role("slider", name="Least confidence of a link")
    slider.focus()
    slider.press("End")
    assert reader.page.inner_text("output") == "1.00"
    assert c < 1
    assert reader.lit() == []
    assert "stays alone" in reader.page.inner_text("[role=status]")
    slider.press("Home")
    assert reader.lit()


def test_words_are_reached_by_keys(read, static):
    reader = read(static("the cat sat", "a feline rested"))
    page = reader.page
    reader.page.get_by_role("slider").focus()
    page.keyboard.press("Tab")
    assert reader.here() == ["the"]
    page.keyboard.press("ArrowRight")
    assert reader.here() == ["cat"]
    assert [k for k, _ in reader.lit()] == [1]
    page.keyboard.press("End")
    assert reader.here() == ["sat"]
    page.keyboard.press("Tab")
    assert reader.here() == ["a"]
    page.keyboard.press("Shift+Tab")
    assert reader.here() == ["sat"]
    page.keyboard.press("Enter")
    reader.word("target", 0).hover()
    assert reader.here() == ["sat"]
    page.keyboard.press("Escape")
    assert reader.here() == []


def test_a_tap_keeps_the_partners_lit(read, static):
    reader = read(static("the cat sat", "a feline rested"), has_touch=True)
    reader.word("source", 1).tap()
    assert [k for k, _ in reader.lit()] == [1]
    reader.word("source", 2).tap()
    assert [k for k, _ in reader.lit()] == [2]
    reader.page.locator("h1").tap()
    assert reader.lit() == []


def test_hostile_texts_do_nothing(read, static):
    r = static(EVIL, [*reversed(EVIL), "x" * 20_000])
    reader = read(pages.page([r, r], title=EVIL[0]))
    assert reader.page.evaluate("typeof hacked") == "undefined"
    shown = reader.page.evaluate(
        "[...document.querySelectorAll('.pair:nth-of-type(1) .source .word')].map(w => w.textContent)"
    )
    assert shown == [visible(word) for word in EVIL]
    for k in range(len(EVIL)):
        reader.word("source", k).hover()
    reader.slide(0.05)
    reader.slide(1.0)
    assert reader.page.evaluate("typeof hacked") == "undefined"
    assert reader.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert reader.page.title() == EVIL[0]


def test_the_policy_stops_what_the_page_does_not_bring(read, static):
    page = static("the cat", "a feline").to_html()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    extra = (
        f"<script>hacked=1</script><img src='http://127.0.0.1:{listener.getsockname()[1]}/x.png' onerror='hacked=2'>"
        "<style>h1 { color: rgb(1, 2, 3) }</style><p id=p style='color: rgb(1, 2, 3)'>p</p>"
    )
    reader = read(page.replace("</main>", extra + "</main>"), watched=False)
    assert reader.page.evaluate("typeof hacked") == "undefined"
    colours = "['h1', '#p'].map(name => getComputedStyle(document.querySelector(name)).color)"
    assert "rgb(1, 2, 3)" not in reader.page.evaluate(colours)
    for part in ("script-src", "style-src", "img-src"):
        assert [line for line in reader.trouble if "Content Security Policy" in line and part in line]
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_right_to_left_order(read, static):
    reader = read(static("جلس القط 12 the cat على", "the cat القط sat"))

    def left(side):
        return reader.page.evaluate(
            f"[...document.querySelectorAll('.text.{side} .word')].map(word => word.getBoundingClientRect().left)"
        )

    assert left("source") == sorted(left("source"), reverse=True)
    assert left("target") == sorted(left("target"))
    reader.word("source", 0).click()
    reader.page.keyboard.press("ArrowLeft")
    assert reader.here() == ["القط"]


def test_everything_is_readable_without_scripts(read, static):
    r = static("the cat zyx", "a feline !")
    reader = read(r, java_script_enabled=False)
    page = reader.page
    assert [page.inner_text(".text.source"), page.inner_text(".text.target")] == ["the cat zyx", "a feline !"]
    assert page.locator(".list tbody tr").count() == len(r.links)
    assert page.locator(".map tbody tr").count() == 4
    assert not page.locator(".controls").is_visible()
    assert not page.locator(".hint").is_visible()


def test_the_data_of_a_pair_are_read_when_it_is_touched(read, static):
    r = static("the cat sat", "a feline rested")
    reader = read(*[r] * 200)
    reader.page.evaluate(
        """() => {
            parsed = 0;
            const parse = JSON.parse;
            JSON.parse = (text) => { parsed += text.includes('"pairs"'); return parse(text); };
        }"""
    )
    reader.word("source", 1, pair=150).hover()
    reader.word("target", 1, pair=150).hover()
    assert reader.page.evaluate("parsed") == 1
    assert reader.here() == ["feline"]


@pytest.mark.parametrize("width", [360, 1200])
def test_the_partner_in_a_long_text_is_brought_into_view(read, static, width):
    r = static(LONG, "home . " + LONG)
    reader = read(r, viewport={"width": width, "height": 700}, reduced_motion="reduce")
    assert r.links[-1][1] > 250
    before = reader.page.evaluate("document.querySelector('.text.target').scrollTop")
    reader.word("source", 0).focus()
    reader.page.keyboard.press("End")
    inside = """() => {
        const box = document.querySelector('.text.target').getBoundingClientRect();
        const word = document.querySelector('.target .lit').getBoundingClientRect();
        return word.top >= box.top && word.bottom <= box.bottom;
    }"""
    assert reader.page.evaluate(inside)
    assert reader.page.evaluate("document.querySelector('.text.target').scrollTop") > before
    assert reader.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_for_screen_readers(read, static):
    page = read(static("the cat", "a feline")).page
    assert page.get_by_role("group", name="source text").inner_text() == "the cat"
    assert page.get_by_role("group", name="target text").inner_text() == "a feline"
    assert page.get_by_role("slider", name="Least confidence of a link").is_visible()
    assert page.get_by_role("rowheader").all_inner_texts() == ["the", "cat", "(none)"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_at_least_that_of_wcag_aa(read, static, scheme):
    page = read(static("the cat zyx", "a feline !"), color_scheme=scheme).page
    Colours = namedtuple("Colours", "ink ground page")
    page.evaluate(
        """() => {
            const section = document.querySelector('section');
            for (let k = 0; k <= 10; k++) {
                const word = document.createElement('span');
                word.className = `probe s${k}`;
                section.append(word);
            }
            for (const name of ['note', 'alone']) document.querySelector('.' + name).classList.add('probe');
        }"""
    )
    found = page.evaluate(
        """[...document.querySelectorAll('.probe')].map(e => [
            getComputedStyle(e).color, getComputedStyle(e).backgroundColor, getComputedStyle(document.body).backgroundColor])"""
    )
    assert len(found) == 13
    for colours in map(Colours._make, found):
        ground = _over(_rgba(colours.ground), _rgba(colours.page))
        assert _contrast(_rgba(colours.ink)[:3], ground) >= 4.5, colours


def _rgba(colour):
    numbers = [float(x) for x in colour[colour.index("(") + 1 : -1].replace("/", " ").replace(",", " ").split()]
    return numbers if len(numbers) == 4 else [*numbers, 1.0]


def _over(top, below):
    return [top[3] * x + (1 - top[3]) * y for x, y in zip(top[:3], below[:3], strict=True)]


def _contrast(a, b):
    """Contrast ratio of WCAG 2.2."""

    def luminance(colour):
        linear = [x / 255 / 12.92 if x <= 10.0 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_of_evaluate_obeys_its_policy(read, tmp_path):
    cli = pytest.importorskip("typer.testing")
    from sinkformer.cli.app import app

    (tmp_path / "gold").write_text(
        '{"source": ["<script>hacked=1</script>", "b"], "target": ["\u202ec", "d"], "sure": [[0, 0]]}\n'
    )
    (tmp_path / "found").write_text("0-1\n")
    done = cli.CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "gold"), str(tmp_path / "found"), "--html", str(tmp_path / "page.html")]
    )
    assert done.exit_code == 0, done.output
    reader = read((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert reader.page.evaluate("typeof hacked") == "undefined"
    assert reader.page.locator(".map td.wrong").count() == 1
    assert (
        reader.page.evaluate("getComputedStyle(document.querySelector('td.wrong')).backgroundColor")
        == "rgb(243, 211, 205)"
    )
