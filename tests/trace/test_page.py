"""The page: what is on it, that it asks for nothing, and that no text can become a part of it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from dspark.trace import Trace, render_page, terminal_view, write_page
from dspark.trace.page import json_block, title
from dspark.trace.tokens import laid_out
from tests.trace import made

EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "<script>document.title='owned'</script>",
    "--><svg onload=alert(1)>",
    '"><b onmouseover=alert(1)>',
    "'; alert(1); //",
    "{{ 7 * 7 }}{% raw %}",
    "]]><!--",
    "&lt;b&gt; &amp;",
    "\u2028\u2029\x00\x1b[31m\u202e",
]


class Parsed(HTMLParser):
    """Elements with their attributes, and the text inside each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "img", "rect", "circle", "path"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.inside), data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def texts_in(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside and inside[-1] == tag]


def evil_trace(num_tokens: int = 80) -> Trace:
    return made.trace(
        num_tokens, texts=EVIL, target=EVIL[0], drafter=EVIL[1], settings={EVIL[2]: EVIL[3], "policy": EVIL[0]},
        made_by={EVIL[0]: EVIL[1]}, text="".join(EVIL),
    )  # fmt: skip


def test_every_token_is_an_option_in_its_round() -> None:
    trace = made.trace(120)
    parsed = Parsed(render_page([trace]))
    options = [attrs for attrs in parsed.of("span") if attrs.get("role") == "option"]
    assert [attrs["class"] for attrs in options] == [f"t {kind}" for kind in trace.row.kinds()]
    groups = [attrs for attrs in parsed.of("span") if attrs.get("role") == "group"]
    assert [int(attrs["data-round"]) for attrs in groups] == list(range(len(trace.row.rounds) + 1))
    page = render_page([trace])
    shown = re.findall(r'role="option"[^>]*>(.*?)</span>', page, re.DOTALL)
    want = [laid_out(trace.texts[token], token) for token in trace.row.token_ids()]
    assert [text.replace("&lt;", "<").replace("&gt;", ">") for text in shown] == want


def test_the_figures_stand_on_the_page() -> None:
    text = render_page([made.trace(60)])
    for words in ("some-drafter, policy threshold, threshold 0.5", "accepted length", "verify", "Prompt (2 tokens)"):
        assert words in text


def test_traces_stand_side_by_side() -> None:
    parsed = Parsed(render_page([made.trace(30), made.trace(40, seed=3), made.trace(1)]))
    assert [attrs["data-trace"] for attrs in parsed.of("article")] == ["0", "1", "2"]


def test_a_page_without_traces_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        render_page([])


@pytest.mark.parametrize("trace", [made.trace(60), evil_trace()], ids=["plain", "evil"])
def test_the_page_asks_for_nothing(trace: Trace) -> None:
    parsed = Parsed(render_page([trace]))
    for tag, attrs in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "form", "base", "a", "audio", "video", "use"), (
            tag
        )
        assert not any(name.startswith("on") or name in ("src", "href", "style", "srcset") for name in attrs), attrs


def test_the_policy_lets_in_only_the_pages_own_style_and_script() -> None:
    page = render_page([evil_trace()])
    parsed = Parsed(page)
    (policy,) = [m["content"] for m in parsed.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (style,), (data, script) = parsed.texts_in("style"), parsed.texts_in("script")
    for part in (style, script):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    json.loads(data)
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_no_text_becomes_markup() -> None:
    evil, tame = (Parsed(render_page([t])) for t in (evil_trace(), made.trace(80, texts=["x"] * len(EVIL))))
    count = Counter(tag for tag, _ in evil.elements)
    assert count["script"] == 2
    assert count["style"] == 1
    assert not {"img", "svg onload"} & count.keys()
    # Beside the rows of settings, the same elements as with harmless texts.
    for tag in ("b", "span", "svg", "details", "article", "del", "table"):
        assert count[tag] == Counter(t for t, _ in tame.elements)[tag], tag
    texts = {text for inside, text in evil.texts if inside and inside[-1] == "span"}
    assert "{{ 7 * 7 }}{% raw %}" in texts


def test_the_data_block_comes_back_whole_and_holds_nothing_that_ends_it() -> None:
    trace = evil_trace()
    (data, _) = Parsed(render_page([trace])).texts_in("script")
    assert not set("<>&\u2028\u2029") & set(data)
    (entry,) = json.loads(data)["traces"]
    assert entry["rounds"] == json.loads(json.dumps(trace.to_json()))["rounds"]
    assert entry["shown"]["0"] == EVIL[0]
    assert entry["shown"]["8"] == "\\u{2028}\\u{2029}\\u{0}\\u{1b}[31m\\u{202e}"
    assert json.loads(json_block({"a": EVIL})) == {"a": EVIL}


def test_a_page_of_2000_tokens_is_of_a_size_to_mail(tmp_path: Path) -> None:
    trace = made.trace(2000)
    write_page(tmp_path / "t.html", [trace])
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 1_500_000
    parsed = Parsed(page)
    assert len([1 for attrs in parsed.of("span") if attrs.get("role") == "option"]) == 2000
    assert len(parsed.elements) < 6000  # tokens, rounds and refused drafts; nothing is drawn per round
    script = parsed.texts_in("script")[1]
    assert "innerHTML" not in script
    assert "insertAdjacentHTML" not in script
    assert not re.search(r"tokens?\.forEach\([^;]*addEventListener", script)  # the page listens, not its tokens


def test_titles_say_what_is_compared() -> None:
    assert title(made.trace()) == "some-drafter, policy threshold, threshold 0.5"
    assert title(made.trace(settings={})) == "some-drafter"


def shown_in_terminal(trace: Trace, *, is_terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=is_terminal, color_system="truecolor" if is_terminal else None).print(
        terminal_view(trace)
    )
    return file.getvalue()


def test_the_terminal_tells_kinds_without_colour() -> None:
    trace = made.trace(60, texts=[f" w{i}" for i in range(50)])
    text = " ".join(shown_in_terminal(trace).split())
    for number, entry in enumerate(trace.row.rounds):
        if entry.rejection is not None:
            refused, own = entry.draft_ids[entry.num_accepted], entry.emitted_ids[-1]
            assert f"[ w{refused}] w{own}|" in text, number
    assert text.count("|") >= len(trace.row.rounds) + 1
    assert "share of time" in text


def test_no_text_reaches_the_terminal_as_markup_or_command() -> None:
    text = shown_in_terminal(made.trace(40, texts=["[bold]x[/bold]", "\x1b]0;owned\x07", "[/]"]))
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text
    assert "\\u{1b}]0;owned\\u{7}" in text.replace("\n", "")


def test_a_text_of_one_token_is_shown() -> None:
    assert "0 rounds" in shown_in_terminal(made.trace(1), is_terminal=True)
    assert "The text ended with its first token." in render_page([made.trace(1)])
