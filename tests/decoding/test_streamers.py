"""A streamer sees the prompt, then exactly the tokens of the output, then one end.

Catches: drafts streamed before they are decided, tokens behind a stop, an end that is missing or doubled, a door that
takes a streamer and never feeds it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tests.decoding.pair import BLOCK, distinct, hostile, oracle, plain, prompt, target
from tests.decoding.words import tokenizer
from tests.scripted import CYCLE

PROMPT = 6


class Recorder(BaseStreamer):
    """Keeps everything it is given, in order."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends, "a token behind the end"
        assert value.device.type == "cpu"
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


def stream(drafter: Any, **kwargs: Any) -> tuple[Recorder, list[int]]:
    recorder = Recorder()
    ids, _ = distinct()
    out = plain(target(), ids, streamer=recorder, assistant_model=drafter, **kwargs)
    return recorder, out[0].tolist()


@pytest.mark.parametrize("script", [(None,), (3,), CYCLE], ids=str)
@pytest.mark.parametrize("place", [None, *range(BLOCK + 3)])
def test_the_stream_is_the_output(script: tuple[Any, ...], place: int | None) -> None:
    ids, text = distinct()
    rules: dict[str, Any] = {"max_new_tokens": 20}
    if place is not None:
        rules["eos_token_id"] = text[PROMPT + place]
    theirs, expected = stream(None, **rules)
    ours, out = stream(oracle(script), **rules)
    assert out == expected
    assert torch.equal(ours.puts[0], ids)
    assert [tuple(put.shape) for put in ours.puts] == [tuple(put.shape) for put in theirs.puts]
    assert torch.cat([put.flatten() for put in ours.puts]).tolist() == out
    assert ours.ends == 1


@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_stop_string_ends_the_stream(place: int) -> None:
    _, text = distinct()
    string = tokenizer().decode(text[PROMPT + place : PROMPT + place + 1])
    recorder, out = stream(oracle((None,)), stop_strings=string, tokenizer=tokenizer(), max_new_tokens=20)
    assert torch.cat([put.flatten() for put in recorder.puts]).tolist() == out == text[: PROMPT + place + 1]
    assert recorder.ends == 1


def test_sampled_tokens_are_streamed_too() -> None:
    ids, _ = distinct()
    recorder = Recorder()
    out = target().generate(ids, do_sample=True, max_new_tokens=20, streamer=recorder, assistant_model=oracle())
    assert torch.cat([put.flatten() for put in recorder.puts]).tolist() == out[0].tolist()


def test_every_door_feeds_the_streamer() -> None:
    ids, text = distinct()
    for door in ({"assistant_model": oracle()}, {"custom_generate": oracle().decode}):
        recorder = Recorder()
        plain(target(), ids, max_new_tokens=12, streamer=recorder, **door)
        assert torch.cat([put.flatten() for put in recorder.puts]).tolist() == text[: PROMPT + 12]
        assert recorder.ends == 1


def test_a_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    ids, text = distinct()
    plain(
        target(), ids, max_new_tokens=20, assistant_model=oracle(),
        streamer=TextStreamer(tokenizer(), skip_prompt=True, skip_special_tokens=True),
    )  # fmt: skip
    assert capsys.readouterr().out.strip() == tokenizer().decode(text[PROMPT : PROMPT + 20], skip_special_tokens=True)


def test_an_iterator_in_a_thread_gives_the_text_piece_by_piece() -> None:
    ids, text = distinct()
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    call = {"max_new_tokens": 20, "assistant_model": oracle(), "streamer": streamer, "do_sample": False}
    thread = threading.Thread(target=target().generate, args=(ids,), kwargs=call)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer().decode(text[PROMPT : PROMPT + 20])


def test_an_error_in_a_streamer_comes_through() -> None:
    class Closed(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if len(self.puts) == 5:
                raise ConnectionError("the reader hung up")
            super().put(value)

    ids, text = distinct()
    with pytest.raises(ConnectionError, match="hung up"):
        plain(target(), ids, max_new_tokens=20, streamer=Closed(), assistant_model=oracle())
    assert plain(target(), ids, max_new_tokens=20, assistant_model=oracle())[0].tolist() == text[: PROMPT + 20]


def test_several_rows_cannot_be_streamed() -> None:
    batch = torch.cat([prompt(seed=1), prompt(seed=2)])
    with pytest.raises(ValueError, match="single row, got a batch of 2"):
        plain(target(), batch, max_new_tokens=5, streamer=Recorder(), assistant_model=hostile())
