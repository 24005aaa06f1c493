"""The page in a real browser: layout at two widths in light and dark, keyboard, tips, filters, and no foreign script.

Run with `pytest -m browser tests/trace`; needs selenium, Chromium and its driver.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.trace import Trace, write_page
from tests.trace import made
from tests.trace.test_page import evil_trace

pytestmark = pytest.mark.browser

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
# Pairs of visible siblings that cover each other, and what sticks out of the page to the right.
_OVERLAPS = """
const found = [];
const box = (e) => e.getBoundingClientRect();
const parents = "body, header, .legend, .controls, main, .trace, .card, .more, .beside, .figures";
for (const parent of document.querySelectorAll(parents)) {
  const children = [...parent.children].filter((e) => e.id !== "tip" && box(e).width && box(e).height);
  for (let i = 0; i < children.length; i++) for (let j = i + 1; j < children.length; j++) {
    const a = box(children[i]), b = box(children[j]);
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 1)
      found.push(children[i].outerHTML.slice(0, 80) + " over " + children[j].outerHTML.slice(0, 80));
  }
}
for (const e of document.querySelectorAll("body *")) {
  const isFree = !e.closest(".scroller > *, details:not([open])") && e.checkVisibility();
  if (isFree && box(e).right > document.documentElement.clientWidth + 1)
    found.push("sticks out: " + e.outerHTML.slice(0, 80));
}
return found;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'dspark[browser]'")
    from selenium.webdriver.chrome.service import Service

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver on the path (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    yield browser
    browser.quit()


def show(browser: Any, folder: Path, *traces: Trace, width: int = 1280, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    write_page(folder / "t.html", traces)
    browser.get_log("browser")
    browser.get((folder / "t.html").as_uri())


def tokens(browser: Any) -> list[Any]:
    return browser.find_elements("css selector", ".text .t")


def focus(browser: Any) -> int:
    """Which token has the focus; -1: none."""
    return browser.execute_script("return [...document.querySelectorAll('.text .t')].indexOf(document.activeElement)")


def press(browser: Any, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(key).perform()


def tip(browser: Any) -> Any:
    return browser.find_element("id", "tip")


def is_beside(a: dict[str, float], b: dict[str, float]) -> bool:
    return (
        a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
        or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
    )  # fmt: skip


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("is_evil", [False, True])
def test_nothing_overlaps_or_sticks_out(browser: Any, tmp_path: Path, width: int, scheme: str, is_evil: bool) -> None:
    traces = [evil_trace(), evil_trace(40)] if is_evil else [made.trace(150), made.trace(100, seed=2)]
    show(browser, tmp_path, *traces, width=width, scheme=scheme)
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    browser.execute_script("document.querySelectorAll('.text .t.recovered')[2].focus()")
    assert browser.execute_script(_OVERLAPS) == []
    assert (
        browser.execute_script("const tip = document.getElementById('tip'); return tip.scrollWidth - tip.clientWidth")
        == 0
    )
    assert (
        browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        == 0
    )
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_short(browser: Any, tmp_path: Path, width: int) -> None:
    """Every column of a round at the desk, every sign of the diagram, each swatch beside its word; what has to be
    scrolled to is announced by a shadow and reached by keyboard."""
    traces = [made.trace(150, texts=["calculate"] * 4), made.trace(150, texts=[" number"] * 4, seed=2)]
    show(browser, tmp_path, *traces, width=width)
    wide = next(n for n, entry in enumerate(traces[0].row.rounds, 1) if len(entry.draft_ids) == made.BLOCK)
    browser.find_element("css selector", f".text [data-round='{wide}'] .t").click()
    hidden, shadow, index = browser.execute_script("""
        const scroller = document.querySelector(".chosen .scroller"), style = getComputedStyle(scroller);
        return [scroller.scrollWidth - scroller.clientWidth, style.backgroundImage, scroller.tabIndex];
    """)
    assert hidden == 0 or width < 1280
    assert "gradient" in shadow
    assert index == 0
    assert (
        browser.execute_script("""
        const box = (e) => e.getBoundingClientRect();
        return [...document.querySelectorAll(".diagram > :is(circle, .own)")].filter((sign) => {
          const a = box(sign), b = box(sign.closest("svg"));
          return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom;
        }).length;
    """)
        == 0
    )
    apart = browser.execute_script("""
        return [...document.querySelectorAll(".key .swatch")].map((swatch) => {
          const range = document.createRange();
          range.selectNodeContents(swatch.nextSibling);
          return range.getClientRects()[0].top > swatch.getBoundingClientRect().bottom;
        });
    """)
    assert apart == [False] * 6


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_underlines_stand_out(browser: Any, tmp_path: Path, scheme: str) -> None:
    show(browser, tmp_path, made.trace(80), scheme=scheme)
    pairs = browser.execute_script("""
        const style = (e) => getComputedStyle(e);
        return [...document.querySelectorAll(".text .t")].map((t) => [style(t).color, style(t).textDecorationColor,
          style(t.parentElement).backgroundColor]);
    """)
    assert len({background for _, _, background in pairs}) == 4
    for ink, underline, background in pairs:
        for colour, least in ((ink, 7.0), (underline, 3.0)):  # WCAG AAA for text, AA for graphics
            light, dark = sorted((_luminance(colour), _luminance(background)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, (colour, background)


def test_kinds_differ_without_colour(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, made.trace(80))
    styles = browser.execute_script("""
        return ["first", "accepted", "recovered", "bonus"].map((kind) =>
          getComputedStyle(document.querySelector(".text .t." + kind)).textDecorationStyle);
    """)
    assert sorted(styles) == ["dotted", "double", "solid", "wavy"]


def test_arrows_move_by_token_and_by_round(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    trace = made.trace(120, texts=[" word"] * 5)
    show(browser, tmp_path, trace)
    starts = [0, *(entry.anchor + 1 for entry in trace.row.rounds)]
    tokens(browser)[0].click()
    assert focus(browser) == 0
    for key, want in (
        (Keys.ARROW_RIGHT, 1), (Keys.ARROW_RIGHT, 2), (Keys.ARROW_LEFT, 1), (Keys.HOME, 0), (Keys.ARROW_LEFT, 0),
        (Keys.ARROW_DOWN, starts[1]), (Keys.ARROW_DOWN, starts[2]), (Keys.ARROW_DOWN, starts[3]),
        (Keys.ARROW_UP, starts[2]), (Keys.END, 119), (Keys.ARROW_RIGHT, 119), (Keys.ARROW_UP, starts[-2]),
    ):  # fmt: skip
        press(browser, key)
        assert focus(browser) == want, key
    selected = browser.find_elements("css selector", ".text [aria-selected=true]")
    assert len(selected) == len(browser.find_elements("css selector", ".text [tabindex='0']")) == 1
    assert f"Round {len(starts) - 2}" in browser.find_element("css selector", ".chosen").text


def test_tab_reaches_the_text_and_escape_hides_the_tip(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, tmp_path, made.trace(40))
    for _ in range(20):
        press(browser, Keys.TAB)
        if focus(browser) == 0:
            break
    assert focus(browser) == 0
    assert tip(browser).is_displayed()
    browser.execute_async_script(
        "const done = arguments[0]; scrollBy(0, 40); requestAnimationFrame(() => requestAnimationFrame(done));"
    )
    assert browser.execute_script("return scrollY") > 0
    assert is_beside(tip(browser).rect, tokens(browser)[0].rect)  # it goes along
    press(browser, Keys.ESCAPE)
    assert not tip(browser).is_displayed()
    assert focus(browser) == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_hover_tells_what_was_refused(browser: Any, tmp_path: Path, width: int) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    trace = made.trace(150, texts=[f" w{i}" for i in range(40)])
    show(browser, tmp_path, trace, width=width)
    number, entry = next(
        (n, e) for n, e in enumerate(trace.row.rounds, 1) if e.rejection is not None and e.draft_probs
    )
    element = browser.find_element("css selector", f".text [data-round='{number}'] .recovered")
    ActionChains(browser).move_to_element(element).perform()
    shown = tip(browser).text
    refused = entry.draft_ids[entry.num_accepted]
    for words in ("Recovered", f"round {number}", f"Refused draft  w{refused}", "chance", "survival", "after head"):
        assert words.replace("  ", " ") in shown.replace("  ", " "), words
    assert all(f"w{candidate.token_id}" in shown for candidate in entry.rejection.target)
    box, page = tip(browser).rect, browser.execute_script("return [innerWidth, innerHeight, scrollY]")
    assert 0 <= box["x"] <= box["x"] + box["width"] <= page[0]
    assert is_beside(box, element.rect)
    ActionChains(browser).move_to_element(browser.find_element("css selector", "h1")).perform()
    assert not tip(browser).is_displayed()


def test_the_round_shows_every_slot(browser: Any, tmp_path: Path) -> None:
    trace = made.trace(60)
    show(browser, tmp_path, trace)
    number, entry = next((n, e) for n, e in enumerate(trace.row.rounds, 1) if len(e.draft_ids) == 7 and e.rejection)
    browser.find_element("css selector", f".text [data-round='{number}'] .t").click()
    rows = browser.find_elements("css selector", ".chosen tbody tr")
    assert len(rows) == 7
    outcomes = [row.find_elements("css selector", "td")[2].text for row in rows]
    assert outcomes[entry.num_accepted] == "refused"
    assert outcomes.count("accepted") == entry.num_accepted


def test_a_click_on_the_strip_goes_to_its_round(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, made.trace(100, texts=[" w"] * 4))
    count = browser.execute_script("""
        const strip = document.querySelector(".strip"), box = strip.getBoundingClientRect();
        const count = document.querySelectorAll(".text .round").length - 1;
        strip.dispatchEvent(new MouseEvent("click", {bubbles: true, clientX: box.left + box.width * 4.5 / count}));
        return count;
    """)
    assert count > 10
    assert "Round 5" in browser.find_element("css selector", ".chosen").text


def test_filters_dim_and_are_skipped(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    trace = made.trace(120, texts=[" w"] * 4)
    show(browser, tmp_path, trace)
    browser.find_element("css selector", "input[value=accepted]").click()
    kinds = trace.row.kinds()
    own = [at for at, kind in enumerate(kinds) if kind != "accepted"]
    assert browser.find_element("id", "matches").text == f"{len(own)} of 120 tokens"
    tokens(browser)[own[0]].click()
    for want in own[1:6]:
        press(browser, Keys.ARROW_RIGHT)
        assert focus(browser) == want
    Select(browser.find_element("id", "rounds")).select_by_value("plain")
    plain = sum(len(entry.emitted_ids) for entry in trace.row.rounds if not entry.draft_ids)
    assert browser.find_element("id", "matches").text == f"{plain} of 120 tokens"
    refused = browser.find_element("css selector", "del")
    assert not refused.is_displayed()
    browser.find_element("id", "refused").click()
    assert refused.is_displayed()


def test_the_same_token_is_marked_in_the_other_text(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, made.trace(50), made.trace(50, seed=4))
    tokens(browser)[7].click()
    marked = browser.execute_script("""
        const second = [...document.querySelectorAll(".trace")[1].querySelectorAll(".t")];
        return second.map((t, at) => t.classList.contains("same") ? at : -1).filter((at) => at >= 0);
    """)
    assert marked == [7]


def test_no_foreign_script_runs(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, evil_trace())
    assert browser.title.startswith("Decoding trace: <script>document.title='owned'")
    assert browser.find_elements("css selector", "img, .text b, .text script, .text svg") == []
    for token in tokens(browser)[:40]:
        browser.execute_script("arguments[0].focus()", token)  # fills tip and round
    assert browser.find_elements("css selector", "#tip img, #tip script, .chosen img, .chosen script") == []
    assert browser.get_log("browser") == []
    browser.execute_script("""
        const added = document.createElement("script");
        added.textContent = "window.owned = 1";
        document.body.append(added);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.owned = 2'>");
    """)
    assert browser.execute_script("return window.owned ?? null") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_no_request_leaves_the_page(browser: Any, tmp_path: Path) -> None:
    """Neither by what a text says nor by a script: a server that listens hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        place = f"http://127.0.0.1:{server.getsockname()[1]}/"
        texts = [f"<img src='{place}'>", f"<style>@import '{place}'</style>", f"<iframe src='{place}'></iframe>", "x"]
        show(browser, tmp_path, made.trace(60, texts=texts, text="".join(texts)))
        for token in tokens(browser)[:20]:
            browser.execute_script("arguments[0].focus()", token)
        refused = browser.execute_async_script(
            """
            const [place, done] = arguments;
            const image = new Image(), told = new Promise((tell) => { image.onload = () => tell(false);
              image.onerror = () => tell(true); });
            image.src = place;
            const sent = fetch(place, {mode: "no-cors"}).then(() => false, () => true);
            Promise.all([told, sent]).then(done);
            """,
            place,
        )
        assert refused == [True, True]
        with pytest.raises(TimeoutError):
            server.accept()
    browser.get_log("browser")  # what the policy refused is told there


def test_2000_tokens_do_not_lag(browser: Any, tmp_path: Path) -> None:
    show(browser, tmp_path, made.trace(2000))
    assert len(tokens(browser)) == 2000
    milliseconds = browser.execute_script("""
        const text = document.querySelector(".text");
        text.querySelector(".t").focus();
        const times = [];
        for (let i = 0; i < 100; i++) {
          const start = performance.now();
          document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
          document.activeElement.getBoundingClientRect();
          times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b)[50];  // the first ones also load fonts
    """)
    assert focus(browser) == 100
    assert milliseconds < 50  # of one step with its tip laid out; below what one notices
