"""`BatchDecoder`: rows that come and go. Texts are submitted at any time, join the batch between rounds and leave it
when they end; every text is exactly what it would be alone.

One process, one target, one thread: there is no server here. Beneath it are the loop's own rounds. transformers'
continuous batching could not be used: its runner draws one token per request inside its own forward function, its
request state appends one token per pass, and its paged cache has no way to take tokens back (all three seen in 5.24).

Longer than a module here should be: submitting, joining, stepping and leaving are one class's business, and halves of
it would reach into each other's rows.
"""

from __future__ import annotations

import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..compat import pop_cache
from ..modeling_dspark import DSparkDrafter
from ..pairing import require_pair
from ..speculation import SpeculationConfig
from ..stats import SpeculationStats
from ..target import describe, logit_rows, unwrap
from .arguments import as_drafter, bind_stop_strings, check_arguments, check_mode
from .capture import HiddenStateCapture
from .commit import drop_finished
from .context import extend_context
from .curve import warn_of_another_curve
from .draws import Draws
from .inputs import PER_ROW
from .loop import commit_first, decode_round
from .processors import Processors
from .prompt import read_prompt
from .record import Recorder
from .request import Request
from .session import TargetSession, learned_positions
from .state import DecodingRun, DraftVocabulary, Text
from .stopping import StopRules
from .target_cache import check_cache

OnToken = Callable[[int], Any]
Reason = Literal["stopped", "cancelled", "failed"]
_ENGINES = (
    "speculation", "assistant_model", "custom_generate", "streamer", "num_return_sequences", "row_generators",
    *(field.name for field in fields(SpeculationConfig)),
)  # fmt: skip
_MOST_ROUNDS = 10_000  # row-rounds kept in the statistics of all texts: a decoder may run for ever


@dataclass(eq=False)
class Submission:
    """A text that was handed in.

    Attributes:
        input_ids: Prompt, int64 `[1, P]`.
        max_length: Most tokens of prompt and text together.
        is_cancelled: Whether it was taken back.
    """

    input_ids: torch.Tensor
    max_length: int
    is_cancelled: bool = False
    _request: Request = field(repr=False, kw_only=True)
    _config: GenerationConfig = field(repr=False, kw_only=True)
    _model_kwargs: dict[str, Any] = field(repr=False, kw_only=True)
    _decoder: weakref.ref[BatchDecoder] = field(repr=False, kw_only=True)


@dataclass(frozen=True)
class FinishedText:
    """A text that left.

    Attributes:
        submission: What it answers.
        new_ids: New tokens; those up to the cancellation or the failure, if it did not end by itself.
        reason: `"stopped"` by its own rules, `"cancelled"`, or `"failed"`.
        error: What its processors, criteria or callback raised.
        stats: Its own counts.
    """

    submission: Submission
    new_ids: list[int]
    reason: Reason
    error: Exception | None
    stats: SpeculationStats

    @property
    def ids(self) -> torch.Tensor:
        """Prompt and text, int64 `[1, n]`."""
        prompt = self.submission.input_ids
        return torch.cat([prompt, torch.tensor([self.new_ids], dtype=torch.long, device=prompt.device)], dim=1)


class BatchDecoder:
    """Decodes submitted texts together.

    ```python
    with BatchDecoder(target, drafter, max_rows=8) as decoder:
        decoder.submit(tokenizer(prompt, return_tensors="pt").input_ids, max_new_tokens=64)
        for finished in decoder.run():
            print(tokenizer.decode(finished.new_ids))
    ```

    Args:
        target: Any target that decodes batches with a drafter.
        drafter: Its drafter.
        max_rows: Texts decoded together at most.
        max_cached_tokens: Cap on the K/V cache of the target: rows times the longest one's `max_length`. Texts wait
            while there is no room. Buffers grow in steps, so up to 256 slots or half again per row come on top. None:
            no cap.
        speculation: Settings; None: the drafter's. The policy and what it learns live as long as the decoder.
        tokenizer: For `stop_strings`.

    Raises:
        ValueError: The pair does not fit, or a number is out of range.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Any,
        *,
        max_rows: int = 8,
        max_cached_tokens: int | None = None,
        speculation: SpeculationConfig | None = None,
        tokenizer: Any = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_cached_tokens", max_cached_tokens)):
            if (value is not None or name == "max_rows") and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        found = as_drafter(drafter)
        if found is None:
            raise ValueError(f"`drafter` must be a DSparkDrafter, got {type(drafter).__name__}.")
        if speculation is not None and not isinstance(speculation, SpeculationConfig):
            raise ValueError(f"`speculation` must be a SpeculationConfig, got {type(speculation).__name__}.")
        target = unwrap(target)  # a wrapper's forward may hide what the target's takes
        self.target: Any = target
        self.drafter: DSparkDrafter = found
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.max_cached_tokens = max_cached_tokens
        require_pair(target, found, tokenizer=tokenizer)
        settings = found.speculation if speculation is None else speculation
        warn_of_another_curve(target, settings.throughput_curve)
        self.stats = SpeculationStats()
        self._capture = HiddenStateCapture(target, found.config.target_layer_ids or [])
        self._run = DecodingRun(
            drafter=found,
            shared=found.shared_modules(target),
            vocabulary=DraftVocabulary.of(found, logit_rows(target), target.device),
            session=TargetSession(target, {}, self._capture, self.stats, joins=True),
            settings=settings,
            policy=found.take_policy(target, settings),
            text=Text(torch.zeros(max_rows, 0, dtype=torch.long, device=target.device), [0] * max_rows, 0),
            stats=self.stats,
            is_open=True,
        )
        self._waiting: deque[Submission] = deque()
        self._live: dict[int, Submission] = {}  # by row
        self._unread: deque[FinishedText] = deque()  # left, but not handed out yet
        self._is_closed = self._is_stepping = False

    # --- handing in -----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Texts that have not joined yet."""
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Rows of the batch."""
        return len(self._live)

    def submit(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        on_token: OnToken | None = None,
        generator: torch.Generator | None = None,
        **generate: Any,
    ) -> Submission:
        """Hand in a text; nothing is computed yet.

        Args:
            input_ids: Prompt, int64 `[1, P]` or a list of ids, without padding.
            on_token: Called with every new token, from inside `step`.
            generator: Source of this text's draws, so that they do not depend on the batch.
            **generate: Arguments of `generate`: `max_new_tokens`, `do_sample`, `temperature`, `logits_processor`,
                `stopping_criteria`, `stop_strings`, `generation_config`, ... `max_time` counts from here.

        Raises:
            ValueError: An option cannot be exact in a batch, or the text would not fit into `max_cached_tokens`.
            RuntimeError: The decoder is closed.
        """
        self._require_open()
        ids = self._own_ids(input_ids)
        if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            raise ValueError(f"A submission is one prompt [1, P] of at least one token, got {list(ids.shape)}.")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ValueError(f"`generator` must be a torch.Generator, got {type(generator).__name__}.")
        if on_token is not None and not callable(on_token):
            raise ValueError(f"`on_token` must be callable, got {type(on_token).__name__}.")
        wrong = [name for name in _ENGINES if generate.get(name) is not None]
        if wrong:
            raise ValueError(f"`{wrong[0]}` is not a submission's to choose; see the arguments of BatchDecoder.")
        submission = self._prepare(ids, on_token, generator, dict(generate))
        if self.max_cached_tokens is not None and submission.max_length > self.max_cached_tokens:
            raise ValueError(
                f"A text of up to {submission.max_length} tokens does not fit into `max_cached_tokens` "
                f"{self.max_cached_tokens}. Lower its `max_new_tokens`, or raise the cap."
            )
        self._waiting.append(submission)
        return submission

    def cancel(self, submission: Submission) -> None:
        """Take a text back; it leaves with the next `step`. One that has left already is not touched.

        Raises:
            ValueError: It was not submitted here.
        """
        if not isinstance(submission, Submission) or submission._decoder() is not self:
            raise ValueError("`cancel` takes a Submission of this decoder.")
        submission.is_cancelled = True

    # --- decoding -------------------------------------------------------------------------------------------------

    def step(self) -> list[FinishedText]:
        """Let texts join, run one round, and return those that left.

        Raises:
            RuntimeError: The decoder is closed, or this is called from inside a step (by a callback).
        """
        self._require_open()
        if self._is_stepping:
            raise RuntimeError("A step is under way: callbacks may submit and cancel, but not step, run or close.")
        self._is_stepping = True
        try:
            # What a caller's inference mode makes could not be written to by a later step outside of it.
            with self._capture, torch.inference_mode(False), torch.no_grad():
                self._unread += self._drop_cancelled()
                self._unread += self._admit()
                if self._run.rows:
                    decode_round(self._run)
                self._unread += self._collect()
        except BaseException:
            self._is_stepping = False
            self.close()  # rows may be half done; what is not a text's own failure ends all of them
            raise
        self._is_stepping = False
        for counts in (self.stats.drafted, self.stats.verified, self.stats.accepted, self.stats.confidence_logits):
            del counts[:-_MOST_ROUNDS]
        finished = list(self._unread)
        self._unread.clear()
        return finished

    def run(self, submissions: Iterable[Mapping[str, Any]] = ()) -> Iterator[FinishedText]:
        """Steps until all texts have left.

        Args:
            submissions: Arguments of `submit`, taken only as rows come free, so a long or endless source is fine.
        """
        source = iter(submissions)
        is_dry = False
        while not is_dry or self._waiting or self._live or self._unread:
            while not is_dry and len(self._waiting) + len(self._live) < self.max_rows:
                arguments = next(source, None)
                is_dry = arguments is None
                if arguments is not None:
                    self.submit(**arguments)
            if self._waiting or self._live:
                self._unread += self.step()
            while self._unread:  # one by one: a consumer that stops here gets the rest from the next call
                yield self._unread.popleft()

    def close(self) -> None:
        """Forget all texts and free their caches. Closing again changes nothing."""
        if self._is_closed:
            return
        if self._is_stepping:
            raise RuntimeError("A step is under way: close the decoder after it.")
        self._is_closed = True
        run = self._run
        self.drafter.keep_policy(self.target, run.settings, run.policy)
        self._waiting.clear()
        self._live.clear()
        self._forget_rows()
        run.requests.clear()
        run.text = Text(run.text.ids[:, :0].clone(), run.text.lengths, 0)

    def __enter__(self) -> BatchDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("This BatchDecoder is closed. Make a new one.")

    def _own_ids(self, input_ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """A copy of a prompt as int64 `[1, P]`: the caller may use its buffer again."""
        try:
            ids = torch.as_tensor(input_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"`input_ids` must be token ids, got {type(input_ids).__name__}. Tokenize text first."
            ) from error
        if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise ValueError(f"`input_ids` must be integers, got {ids.dtype}.")
        ids = ids.to(self.target.device, torch.long, copy=True)
        rows = logit_rows(self.target)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            raise ValueError(f"`input_ids` must lie in 0..{rows - 1}, the target's vocabulary, got {int(ids.max())}.")
        return ids[None] if ids.dim() == 1 else ids

    def _prepare(
        self, ids: torch.Tensor, on_token: OnToken | None, generator: torch.Generator | None, call: dict[str, Any]
    ) -> Submission:
        """Have `generate` itself prepare processors, criteria and inputs, without a pass."""
        check_arguments(self.target, call)
        call.setdefault("attention_mask", torch.ones_like(ids))  # else one is guessed from padding tokens
        if pop_cache(call)[1] is not None:
            raise ValueError("A submission cannot bring a cache of its own: rows share the decoder's.")
        bind_stop_strings(self.target, call, call.pop("tokenizer", None) or self.tokenizer)
        taken: list[Submission] = []

        def take(
            _target: Any, input_ids: torch.Tensor, *, logits_processor: Any, stopping_criteria: Any,
            generation_config: GenerationConfig, **model_kwargs: Any,
        ) -> torch.Tensor:  # fmt: skip
            if input_ids.shape[0] != 1:
                raise ValueError("`num_return_sequences` is set in a generation config: submit once per sequence.")
            recorder = Recorder(generation_config, None if on_token is None else _Callback(on_token))
            check_mode(self.target, generation_config, recorder, batch_size=1)
            stop_rules = StopRules(stopping_criteria)
            self._check_inputs(recorder, stop_rules, model_kwargs)
            request = Request(
                processors=Processors(logits_processor, num_rows=1),
                stop_rules=stop_rules,
                do_sample=bool(generation_config.do_sample),
                draws=Draws(None if generator is None else [generator]),
                recorder=recorder,
                stats=SpeculationStats(num_rows=1),
                is_isolated=True,
            )
            request.calibrate(self.drafter)
            longest = stop_rules.max_length
            assert longest is not None
            taken.append(
                Submission(
                    input_ids,
                    longest,
                    _request=request,
                    _config=generation_config,
                    _model_kwargs=model_kwargs,
                    _decoder=weakref.ref(self),
                )
            )
            return input_ids

        GenerationMixin.generate(self.target, ids, custom_generate=take, **call)
        return taken[0]

    def _check_inputs(self, recorder: Recorder, stop_rules: StopRules, model_kwargs: dict[str, Any]) -> None:
        wants_states = recorder.attentions is not None or recorder.hidden_states is not None
        if recorder.wants_scores or wants_states:
            raise ValueError("A BatchDecoder returns tokens only: leave out scores, logits and hidden states.")
        mask = model_kwargs.get("attention_mask")
        tensors = [name for name in (*PER_ROW, "inputs_embeds") if model_kwargs.get(name) is not None]
        if tensors or (mask is not None and not bool(mask.all())):
            raise ValueError(
                f"A submission is text without padding, got {tensors[0] if tensors else 'an attention mask'} "
                f"for {describe(self.target)}. Use `generate`."
            )
        _, cache = pop_cache(dict(model_kwargs))
        longest = stop_rules.max_length or 0
        room = learned_positions(self.target)
        if room is not None and longest - 1 > room:
            raise ValueError(
                f"A text of up to {longest} tokens does not fit into the {room} learned positions of "
                f"{describe(self.target)}. Lower `max_new_tokens`."
            )
        check_cache(self.target, cache, max_length=longest, batch_size=2, is_callers=False)

    def _drop_cancelled(self) -> list[FinishedText]:
        cancelled = [submission for submission in self._waiting if submission.is_cancelled]
        for submission in cancelled:
            self._waiting.remove(submission)
        gone = [FinishedText(s, [], "cancelled", None, s._request.stats) for s in cancelled]
        drop_finished(self._run, [self._live[row].is_cancelled for row in self._run.rows])
        return gone + self._collect("cancelled")

    def _admit(self) -> list[FinishedText]:
        """First come, first served: a text that does not fit holds back those behind it."""
        finished = []
        while self._waiting and self._has_room(self._waiting[0]):
            submission = self._waiting.popleft()
            try:
                single = self._read(submission)
            except Exception as error:  # noqa: BLE001 - any failure of one text is that text's
                finished.append(FinishedText(submission, [], "failed", error, submission._request.stats))
                continue
            if single.rows:
                self._join(submission, single)
            else:
                finished.append(self._finished(submission, single.text, 0, "stopped"))
        return finished

    def _has_room(self, submission: Submission) -> bool:
        if len(self._live) >= self.max_rows:
            return False
        if self.max_cached_tokens is None:
            return True
        longest = max([submission.max_length, *(live.max_length for live in self._live.values())])
        return (len(self._live) + 1) * longest <= self.max_cached_tokens

    def _read(self, submission: Submission) -> DecodingRun:
        """A run of the text alone, after its prompt's pass and first token."""
        run, request, ids = self._run, submission._request, submission.input_ids
        start = time.perf_counter()
        single = DecodingRun(
            drafter=run.drafter,
            shared=run.shared,
            vocabulary=run.vocabulary,
            session=TargetSession(self.target, submission._model_kwargs, self._capture, self.stats, joins=True),
            settings=run.settings,
            policy=run.policy,
            text=Text(ids.clone(), [ids.shape[1]], ids.shape[1]),
            stats=self.stats,
            requests={0: request},
            rows=[0],
        )
        commit_first(single, read_prompt(single, ids, submission._config))
        self.stats.num_rows += 1
        request.stats.num_target_passes += 1
        request.stats.prefill_seconds = time.perf_counter() - start
        return single

    def _join(self, submission: Submission, single: DecodingRun) -> None:
        run = self._run
        run.text.ids = run.text.ids.clone()  # criteria may have kept views of a row that is used again
        row = next(row for row in range(self.max_rows) if row not in self._live)
        if run.rows:
            extend_context(run)  # afterwards all rows' contexts are whole
            run.session.join(single.session)
            assert run.context is not None
            assert single.context is not None
            run.context.join(single.context)
        else:
            run.session, run.context = single.session, single.context
        submission._request.first_row = row
        run.requests[row] = submission._request
        run.text.lengths[row] = 0
        run.text.write(row, single.text.prefix(0)[0].tolist())
        run.text.lengths[row] = single.text.lengths[0]
        run.rows.append(row)
        run.anchors += single.anchors
        self._live[row] = submission

    def _collect(self, reason: Reason = "stopped") -> list[FinishedText]:
        """Texts whose rows have left the batch."""
        run = self._run
        gone = [row for row in self._live if row not in run.rows]
        finished = [self._finished(self._live.pop(row), run.text, row, reason) for row in gone]
        for row in gone:
            del run.requests[row]
        if not run.rows:
            self._forget_rows()
        return finished

    def _finished(self, submission: Submission, text: Text, row: int, reason: Reason) -> FinishedText:
        request = submission._request
        new_ids = text.prefix(row)[0, submission.input_ids.shape[1] :].tolist()
        if request.error is not None:
            reason = "failed"
            traceback.clear_frames(request.error.__traceback__)  # they hold the tensors of a whole round
        return FinishedText(submission, new_ids, reason, request.error, request.stats)

    def _forget_rows(self) -> None:
        run = self._run
        run.rows, run.anchors, run.pending, run.context, run.outputs = [], [], [], None, None
        run.session = TargetSession(self.target, {}, self._capture, self.stats, joins=True)


class _Callback:
    """A streamer for `Recorder` that hands tokens on as they are emitted."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token = on_token

    def put(self, tokens: torch.Tensor) -> None:
        """One emitted token."""
        self.on_token(int(tokens))


__all__ = ["BatchDecoder", "FinishedText", "Submission"]
