"""`DSparkConfig`: every field a DSpark drafter needs, validated when it is built.

Nothing is inherited silently from a target: what the modeling code reads stands here under one name for all backbone
families. Field sources: DSpark (arXiv 2607.05147) and the reference repository deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

Family = Literal["qwen3", "llama", "gemma4"]
MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]


class DSparkConfig(PreTrainedConfig):
    """Configuration of a [`DSparkDrafter`].

    Args:
        family (`str`): Draft-layer family: `"qwen3"` (Llama-like block with QK-norm), `"llama"` (the same without
            QK-norm) or `"gemma4"` (sandwich norms, value norm, layer scalar, unit attention scale).
        vocab_size (`int`): Rows of the TARGET's vocabulary V; every token id of the drafter's interface lives here.
        draft_vocab_size (`int`, *optional*): Rows Vd of a reduced draft vocabulary; the checkpoint then stores the
            sorted target ids as `draft_token_ids [Vd]`. `None`: the drafter speaks all of V.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`):
            Sizes of the draft layers. For `gemma4` these are the sizes of its global (full-attention) layers.
        hidden_act (`str`): Activation of the gated MLP.
        rms_norm_eps (`float`): Epsilon of every RMSNorm.
        attention_bias (`bool`): Whether q, k, v and o projections have a bias.
        attention_k_eq_v (`bool`): `gemma4` only: values are the normed key projections, there is no `v_proj`.
        attention_dropout (`float`): Dropout on attention weights in training, in [0, 1).
        max_position_embeddings (`int`): Longest position the rotary tables were made for.
        rope_parameters (`dict`): Flat rotary parameters as transformers names them (`rope_type`, `rope_theta`, ...).
        initializer_range (`float`): Standard deviation of new weights.
        final_logit_softcapping (`float`, *optional*): tanh cap on the BASE logits; the transition bias is added after.
        embed_scale (`float`): Factor on the embeddings of the block when the drafter owns its (unscaled) embedding.
        block_size (`int`): Input slots of a block: the anchor and `block_size - 1` masks (paper's gamma).
        sample_from_anchor (`bool`): True (DSpark): slot k predicts token anchor+k+1, `block_size` drafts. False
            (DFlash): slot k predicts token anchor+k, slot 0 is ignored, `block_size - 1` drafts.
        mask_token_id (`int`): Id in V that fills the slots after the anchor.
        target_layer_ids (`list[int]`): Tapped target layers, strictly increasing. `l` is the output of decoder layer l
            (`hidden_states[l + 1]`), -1 the embedding output. The last layer is refused: transformers returns it after
            the final norm.
        num_target_layers (`int`): Decoder layers of the target.
        target_hidden_size (`int`, *optional*): Width D_t of the target's hidden states; `None`: `hidden_size`.
        markov_rank (`int`): Rank r of the sequential head's factors (eq. 5); 0 means no sequential head.
        markov_head_type (`str`): `"vanilla"`, `"gated"`, `"rnn"` (eq. 6) or `"none"`.
        enable_confidence_head (`bool`): Whether the drafter predicts acceptance (eq. 7).
        confidence_head_with_markov (`bool`): Whether that head also sees the previous token's Markov embedding.
        confidence_head_bias (`bool`): Whether its projection has a bias (DeepSpec: yes, DeepSeek-V4: no).
        confidence_temperatures (`list[float]`, *optional*): Calibrated temperature per draft position (section 3.2.1).
        share_embedding (`bool`): The embedding is borrowed from the target by reference and not stored.
        share_lm_head (`bool`): The LM head is borrowed from the target by reference and not stored.
        target (`dict`, *optional*): Note on the target it was trained for, as `dspark.pairing.fingerprint`
            writes it: `name`, `model_type`, sizes, hashes of a few weights; nothing private.

    Raises:
        ValueError: A field is missing, out of range or contradicts another; the message names the field, the value
            found, the rule and the way out.
    """

    model_type = "dspark"
    # transformers compares with a default instance when saving; there is none, as some fields have no safe default.
    has_no_defaults_at_init = True

    def __init__(
        self,
        *,
        family: Family = "qwen3",
        vocab_size: int = 151936,
        draft_vocab_size: int | None = None,
        hidden_size: int = 2560,
        intermediate_size: int = 9728,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        attention_k_eq_v: bool = False,
        attention_dropout: float = 0.0,
        max_position_embeddings: int = 40960,
        rope_parameters: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        final_logit_softcapping: float | None = None,
        embed_scale: float = 1.0,
        block_size: int = 7,
        sample_from_anchor: bool = True,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int | None = None,
        target_hidden_size: int | None = None,
        markov_rank: int = 256,
        markov_head_type: MarkovHeadType | None = None,
        enable_confidence_head: bool = True,
        confidence_head_with_markov: bool | None = None,
        confidence_head_bias: bool = True,
        confidence_temperatures: list[float] | None = None,
        share_embedding: bool = True,
        share_lm_head: bool | None = None,
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.family = family
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim if head_dim is not None else hidden_size // max(num_attention_heads, 1)
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.attention_k_eq_v = attention_k_eq_v
        self.attention_dropout = attention_dropout
        self.max_position_embeddings = max_position_embeddings
        # A copy: the base class fills in defaults in place, and the dict may belong to a target's config.
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0})
        self.initializer_range = initializer_range
        self.final_logit_softcapping = final_logit_softcapping
        self.embed_scale = embed_scale
        self.block_size = block_size
        self.sample_from_anchor = sample_from_anchor
        self.mask_token_id = mask_token_id
        self.target_layer_ids = None if target_layer_ids is None else list(target_layer_ids)
        self.num_target_layers = num_target_layers
        self.target_hidden_size = target_hidden_size
        self.markov_rank = markov_rank
        self.markov_head_type = markov_head_type or ("vanilla" if markov_rank else "none")
        self.enable_confidence_head = enable_confidence_head
        # Left open, the head sees the Markov embedding exactly when there is one.
        self.confidence_head_with_markov = (
            enable_confidence_head and bool(markov_rank)
            if confidence_head_with_markov is None
            else confidence_head_with_markov
        )
        self.confidence_head_bias = confidence_head_bias
        self.confidence_temperatures = confidence_temperatures
        self.share_embedding = share_embedding
        # A reduced vocabulary has no head to borrow, so it owns one.
        self.share_lm_head = draft_vocab_size is None if share_lm_head is None else share_lm_head
        self.target = target
        self.tie_word_embeddings = False
        kwargs.pop("tie_word_embeddings", None)
        super().__init__(**kwargs)
        self._validate()

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens a block gives: `block_size`, or one fewer when the anchor slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_logits(self) -> int:
        """Width of the drafter's logits: the reduced draft vocabulary, or all of V."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def context_width(self) -> int:
        """Width of the target hidden states the drafter takes: tapped layers times D_t."""
        return len(self.target_layer_ids or ()) * (self.target_hidden_size or self.hidden_size)

    def _validate(self) -> None:
        self._check_literals()
        self._check_sizes()
        self._check_block()
        self._check_target_layers()
        self._check_heads()
        self._check_sharing()

    def _check_literals(self) -> None:
        for field, allowed in (("family", get_args(Family)), ("markov_head_type", get_args(MarkovHeadType))):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"`{field}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")

    def _check_sizes(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{field}` must be an integer of at least 1, got {value!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): every key/value head serves the same number of query heads."
            )
        if self.attention_k_eq_v and self.family != "gemma4":
            raise ValueError(f"`attention_k_eq_v` belongs to the family 'gemma4', got family {self.family!r}.")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie in 1..vocab_size ({self.vocab_size}), got {self.draft_vocab_size}. "
                "Leave it None for the whole vocabulary."
            )

    def _check_block(self) -> None:
        least = 1 if self.sample_from_anchor else 2
        if self.block_size < least:
            raise ValueError(
                f"`block_size` must be at least {least}, got {self.block_size}. It counts the anchor and the masks; "
                "with `sample_from_anchor=False` the anchor slot predicts nothing."
            )
        if self.mask_token_id is None:
            raise ValueError(
                "`mask_token_id` is missing. Set it to the id the drafter was trained with (DeepSpec: 151669 for "
                "Qwen3, 4 for Gemma 4); a padding or EOS id in its place lowers acceptance without an error."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} is outside the target's vocabulary of {self.vocab_size} rows."
            )
        temperatures = self.confidence_temperatures
        if temperatures is not None and (
            len(temperatures) != self.num_draft_tokens or not all(t > 0 for t in temperatures)
        ):
            raise ValueError(
                f"`confidence_temperatures` must be {self.num_draft_tokens} positive numbers, one per draft "
                f"position, got {temperatures}."
            )

    def _check_target_layers(self) -> None:
        ids, count = self.target_layer_ids, self.num_target_layers
        if not ids:
            raise ValueError(
                "`target_layer_ids` is missing. Name the decoder layers of the target whose outputs the drafter reads, "
                "e.g. [1, 9, 17, 25, 33] for Qwen3-4B."
            )
        if count is None or count < 1:
            raise ValueError(f"`num_target_layers` must be the target's number of decoder layers, got {count}.")
        if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
            raise ValueError(f"`target_layer_ids` must be strictly increasing, got {ids}.")
        if ids[0] < -1 or ids[-1] >= count - 1:
            raise ValueError(
                f"`target_layer_ids` must lie in -1..{count - 2} for a target of {count} layers, got {ids}. -1 is the "
                "embedding output; the last layer is refused, as transformers returns it after the final norm."
            )

    def _check_heads(self) -> None:
        if (self.markov_rank > 0) != (self.markov_head_type != "none") or self.markov_rank < 0:
            raise ValueError(
                f"`markov_rank` ({self.markov_rank}) and `markov_head_type` ({self.markov_head_type!r}) disagree: rank "
                "0 goes with 'none', a positive rank with 'vanilla', 'gated' or 'rnn'."
            )
        if self.confidence_head_with_markov and not (self.enable_confidence_head and self.markov_rank):
            raise ValueError(
                "`confidence_head_with_markov=True` needs both `enable_confidence_head=True` and a sequential head "
                f"(`markov_rank` > 0), got {self.enable_confidence_head} and {self.markov_rank}."
            )

    def _check_sharing(self) -> None:
        width = self.target_hidden_size or self.hidden_size
        if width != self.hidden_size and (self.share_embedding or self.share_lm_head):
            raise ValueError(
                f"`target_hidden_size` ({width}) differs from `hidden_size` ({self.hidden_size}), so neither embedding "
                "nor LM head can be borrowed: set `share_embedding=False` and `share_lm_head=False`."
            )
        if self.draft_vocab_size is not None and self.share_lm_head:
            raise ValueError(
                "`share_lm_head=True` with a reduced `draft_vocab_size`: the target's head has all of V's rows. Store "
                "the reduced head with the drafter (`share_lm_head=False`)."
            )


__all__ = ["DSparkConfig", "Family", "MarkovHeadType"]
