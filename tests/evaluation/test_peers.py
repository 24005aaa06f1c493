"""Ways side by side: only texts equal to the plain ones get a speed, and only others' ways may fail.

Catches: a figure of a way whose text differs, at once or in a later run; a failing way that ends the run; an error of
ours that hides in a table; passes of another way's call counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import SpeculationConfig
from dspark.evaluation import peers_report as report_module
from dspark.evaluation.peers import PLAIN, PeerCell, Way, generate_way, measure_peers
from dspark.evaluation.peers_report import peers_notes, peers_report, peers_tables, write_peers
from dspark.evaluation.plots import STYLES
from tests.decoding.pair import prompt
from tests.evaluation.test_replay import pair

NEW = 12
PROMPTS = {"a": [prompt(6, 0), prompt(3, 1)], "b": [prompt(9, 2)]}


def measured(target: Any, *ways: Way, repeats: int = 2) -> dict[tuple[str, str], PeerCell]:
    cells = measure_peers(target, PROMPTS, [generate_way(target, PLAIN, NEW, is_ours=True), *ways], repeats=repeats)
    return {(cell.prompt_set, cell.way): cell for cell in cells}


def test_ways_with_equal_texts_have_figures() -> None:
    target, drafter = pair()
    plain = generate_way(target, PLAIN, NEW).decode
    found = measured(
        target,
        generate_way(
            target, "ours", NEW, is_ours=True, assistant_model=drafter, speculation=SpeculationConfig("fixed")
        ),
        generate_way(target, "lookup", NEW, prompt_lookup_num_tokens=4),
        Way("list", lambda ids: plain(ids)[0].tolist()),
        Way("output", lambda ids: generate_way(target, "", NEW, return_dict_in_generate=True).decode(ids)),
    )
    assert len(found) == 2 * 5
    for (name, way), cell in found.items():
        count = len(PROMPTS[name])
        assert cell.is_equal, (name, way, cell.failure)
        assert (cell.num_prompts, cell.new_tokens, len(cell.seconds)) == (count, count * NEW, 2)
        assert cell.tokens_per_second == pytest.approx(cell.new_tokens / (sum(cell.seconds) / 2))
        ratios = cell.ratios(found[name, PLAIN])
        assert ratios == [p / s for p, s in zip(found[name, PLAIN].seconds, cell.seconds, strict=True)]
        if way in (PLAIN, "list", "output"):
            assert cell.tokens_per_pass == 1.0
    stats = [
        target.generate(ids, assistant_model=drafter, max_new_tokens=NEW, return_dict_in_generate=True).speculation
        for ids in PROMPTS["a"]
    ]
    assert found["a", "ours"].passes == sum(each.num_target_passes for each in stats) < 2 * NEW


def test_a_way_that_differs_or_fails_has_no_speed_and_is_not_timed() -> None:
    target, _ = pair()
    plain, calls = generate_way(target, PLAIN, NEW).decode, []

    def lying(ids: torch.Tensor) -> torch.Tensor:
        calls.append("liar")
        text = plain(ids)
        text[0, -2] += 1
        return text

    def failing(ids: torch.Tensor) -> torch.Tensor:
        calls.append("failing")
        raise RuntimeError("no such\nkernel")

    found = measured(
        target, Way("liar", lying), Way("failing", failing), Way("bare", lambda ids: plain(ids)[:, ids.shape[1] :])
    )
    assert calls.count("liar") == 3  # each prompt once
    assert calls.count("failing") == 2  # each set once
    for way in ("liar", "failing", "bare"):
        cell = found["a", way]
        assert (cell.tokens_per_second, cell.tokens_per_pass, cell.ratios(found["a", PLAIN])) == (None, None, [])
    assert found["a", "liar"].differing == [(0, NEW - 2), (1, NEW - 2)]
    assert found["a", "failing"].failure == "RuntimeError: no such kernel"
    assert "begins with the prompt's 6 ids" in str(found["a", "bare"].failure)
    report = peers_report(list(found.values()), {})
    notes = peers_notes(report)
    assert f"a, liar: differs from plain generate in 2 of 2 prompts; prompt 1 at new token {NEW - 1}." in notes
    assert "b, failing: fails (RuntimeError: no such kernel)." in notes
    speeds = {row[0]: row[1:] for row in peers_tables(report)[0].rows}
    assert speeds["liar"] == ["differs", "differs"]
    assert speeds["bare"] == ["fails", "fails"]
    assert speeds[PLAIN] == ["1.00 (1.00, 1.00)"] * 2


def test_a_text_that_changes_in_a_later_run_takes_the_speed_away() -> None:
    target, _ = pair()
    plain, calls = generate_way(target, PLAIN, NEW).decode, []

    def fickle(ids: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        text = plain(ids)
        text[0, -1] += len(calls) == 5  # the second timed run of the first set
        return text

    cell = measured(target, Way("fickle", fickle))["a", "fickle"]
    assert len(cell.differing) == 1
    assert cell.tokens_per_second is None


def test_an_error_of_ours_is_no_result() -> None:
    target, _ = pair()

    def failing(_ids: torch.Tensor) -> Any:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        measured(target, Way("fixed", failing, is_ours=True))


def test_the_plot_tells_ways_apart_without_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    names = [PLAIN, *(f"way {i}" for i in range(6))]
    cells = [PeerCell("a", name, 1, 10, seconds=[1.0 + i, 2.0 + i]) for i, name in enumerate(names)]
    cells.append(PeerCell("a", "liar", 1, 10, differing=[(0, 3)]))
    figures = []
    new = report_module.subplots()
    monkeypatch.setattr(report_module, "subplots", lambda: lambda *size: figures.append(new(*size)) or figures[-1])
    assert write_peers(peers_report(cells, {"machine": {"device": "cpu", "threads": 1}}), tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers.json", "peers.md", "peers.png"]
    assert "- machine: device cpu, threads 1" in (tmp_path / "peers.md").read_text()
    (panel,) = figures[0][1]
    points = [line for line in panel.lines if line.get_marker() not in ("None", None)]
    looks = {(line.get_marker(), line.get_markerfacecolor()) for line in points}
    assert len(points) == len(looks) == 7 > len(STYLES)
    assert all(line.get_color().replace(".", "").isdigit() for line in points)  # greys
    assert [label.get_text() for label in panel.get_yticklabels()] == [*names, "liar"]
    assert "differs" in [text.get_text() for text in panel.texts]
