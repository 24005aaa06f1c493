"""`DSparkConfig`: every field a DSpark drafter needs, validated when it is built.

Nothing is inherited silently from a target: what the modeling code reads stands here under one name for all backbone
families. Field sources: DSpark (arXiv 2607.05147) and the reference repository deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig
from transformers.utils import logging

from .configuration_rules import check_choice, check_config, check_raw, unknown_keys

logger = logging.get_logger("dspark.configuration")

Family = Literal["qwen3", "llama", "gemma4"]
MarkovHeadType = Literal["none", "vanilla", "gated", "rnn"]
WindowRule = Literal["ctx_from_anchor", "per_slot_ctx", "per_slot_all", "abs_all"]


class DSparkConfig(PreTrainedConfig):
    """Configuration of a [`DSparkDrafter`].

    Args:
        family (`str`): Draft-layer family: `"qwen3"` (Llama-like block with QK-norm), `"llama"` (the same without
            QK-norm) or `"gemma4"` (sandwich norms, value norm, layer scalar, unit attention scale).
        vocab_size (`int`, *optional*): Rows of the TARGET's vocabulary V; every token id of the drafter's interface
            lives here. `None`: whatever the target has, for a drafter without any table of V rows.
        draft_vocab_size (`int`, *optional*): Rows Vd of a reduced draft vocabulary; the checkpoint then stores the
            sorted target ids as `draft_token_ids [Vd]`. `None`: the drafter speaks all of V.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`):
            Sizes of the draft layers. For `gemma4` these are the sizes of its global (full-attention) layers.
        hidden_act (`str`): Activation of the gated MLP.
        rms_norm_eps (`float`): Epsilon of every RMSNorm.
        attention_bias (`bool`): Whether q, k, v and o projections have a bias.
        attention_k_eq_v (`bool`): `gemma4` only: values are the normed key projections, there is no `v_proj`.
        fc_bias (`bool`): Whether the context projection has a bias.
        attention_windows (`list[int | None]`, *optional*): Per draft layer the window W of its attention, None: all.
        window_rule (`str`, *optional*): What W cuts; for slot position q, key position k and anchor position a:
            `"ctx_from_anchor"` (speculators): context from a-W on, the block whole. `"per_slot_ctx"` (SpecForge):
            context from q-(W-1) on, the block whole. `"per_slot_all"` (z-lab): |q-k| < W everywhere. `"abs_all"`
            (transformers' Muse Glimmer): |q-k| <= W everywhere. Set exactly when a layer has a window.
        causal_in_block (`list[bool]`, *optional*): Per draft layer, whether a slot sees only the slots up to itself;
            `None`: no layer is causal.
        attention_dropout (`float`): Dropout on attention weights in training, in [0, 1).
        max_position_embeddings (`int`): Longest position the rotary tables were made for.
        rope_parameters (`dict`): Flat rotary parameters as transformers names them (`rope_type`, `rope_theta`, ...).
        initializer_range (`float`): Standard deviation of new weights.
        logit_scale (`float`): Factor on the base logits, before the cap.
        final_logit_softcapping (`float`, *optional*): tanh cap on the BASE logits; the transition bias is added after.
        embed_scale (`float`): Factor on the rows of an embedding that the drafter owns, or borrows raw.
        raw_target_embedding (`bool`): A borrowed embedding gives its stored rows, without the factor that the target's
            own module applies (Gemma's has one), times `embed_scale`. False: what the target itself would see.
        block_size (`int`): Input slots of a block: the anchor and `block_size - 1` masks (paper's gamma).
        sample_from_anchor (`bool`): True (DSpark): slot k predicts token anchor+k+1, `block_size` drafts. False
            (DFlash): slot k predicts token anchor+k, slot 0 is ignored, `block_size - 1` drafts.
        mask_token_id (`int`): Id in V that fills the slots after the anchor.
        target_layer_ids (`list[int]`): Tapped target layers, strictly increasing. `l` is the output of decoder layer l
            (`hidden_states[l + 1]`), -1 the embedding output. The last layer is refused: transformers returns it after
            the final norm.
        num_target_layers (`int`, *optional*): Decoder layers of the target; `None`: not known, see the pairing check.
        target_hidden_size (`int`, *optional*): Width D_t of the target's hidden states; `None`: `hidden_size`.
        markov_rank (`int`): Rank r of the sequential head's factors (eq. 5); 0 means no sequential head.
        markov_head_type (`str`): `"vanilla"`, `"gated"`, `"rnn"` (eq. 6) or `"none"`.
        enable_confidence_head (`bool`): Whether the drafter predicts acceptance (eq. 7).
        confidence_head_with_markov (`bool`): Whether that head also sees the previous token's Markov embedding.
        confidence_head_bias (`bool`): Whether its projection has a bias (DeepSpec: yes, DeepSeek-V4: no).
        confidence_temperatures (`list[float]` or `dict[str, list[float]]`, *optional*): Calibrated temperature per
            draft position (section 3.2.1), for every decoding temperature or, keyed by it (`{"0": [...], "1": [...]}`,
            0 is greedy), for some: see [`DSparkConfig.temperatures_at`].
        share_embedding (`bool`): The embedding is borrowed from the target by reference and not stored.
        share_lm_head (`bool`): The LM head is borrowed from the target by reference and not stored.
        target (`dict`, *optional*): Note on the target it was trained for, as `dspark.pairing.fingerprint`
            writes it: `name`, `model_type`, sizes, hashes of a few weights; nothing private.

    Raises:
        ValueError: A field is missing, out of range or contradicts another; the message names the field, the value
            found, the rule and the way out.
        TypeError: There is no such field.
    """

    model_type = "dspark"
    # transformers compares with a default instance when saving; there is none, as some fields have no safe default.
    has_no_defaults_at_init = True

    def __init__(
        self,
        *,
        family: Family = "qwen3",
        vocab_size: int | None = 151936,
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
        fc_bias: bool = False,
        attention_windows: list[int | None] | None = None,
        window_rule: WindowRule | None = None,
        causal_in_block: list[bool] | None = None,
        attention_dropout: float = 0.0,
        max_position_embeddings: int = 40960,
        rope_parameters: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        logit_scale: float = 1.0,
        final_logit_softcapping: float | None = None,
        embed_scale: float = 1.0,
        raw_target_embedding: bool = False,
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
        confidence_temperatures: list[float] | dict[str, list[float]] | None = None,
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
        self.head_dim = head_dim if head_dim is not None else hidden_size // (num_attention_heads or 1)
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.attention_k_eq_v = attention_k_eq_v
        self.fc_bias = fc_bias
        self.window_rule = window_rule
        self.attention_windows, self.causal_in_block = _as_list(attention_windows), _as_list(causal_in_block)
        self.attention_dropout = attention_dropout
        self.max_position_embeddings = max_position_embeddings
        if rope_parameters is None:
            rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        # A copy: the base class fills in defaults in place, and the dict may belong to a target's config.
        self.rope_parameters = dict(rope_parameters) if isinstance(rope_parameters, dict) else rope_parameters
        self.initializer_range = initializer_range
        self.logit_scale = logit_scale
        self.final_logit_softcapping = final_logit_softcapping
        self.embed_scale, self.raw_target_embedding = embed_scale, raw_target_embedding
        self.block_size = block_size
        self.sample_from_anchor = sample_from_anchor
        self.mask_token_id = mask_token_id
        self.target_layer_ids = _as_list(target_layer_ids)
        self.num_target_layers = num_target_layers
        self.target_hidden_size = target_hidden_size
        self.markov_rank = markov_rank
        self.markov_head_type = (
            ("vanilla" if markov_rank else "none") if markov_head_type is None else markov_head_type
        )
        self.enable_confidence_head = enable_confidence_head
        # Left open, the head sees the Markov embedding exactly when there is one.
        self.confidence_head_with_markov = (
            enable_confidence_head and bool(markov_rank)
            if confidence_head_with_markov is None
            else confidence_head_with_markov
        )
        self.confidence_head_bias = confidence_head_bias
        self.confidence_temperatures = _as_rows(confidence_temperatures)
        self.share_embedding = share_embedding
        # A reduced vocabulary has no head to borrow, so it owns one.
        self.share_lm_head = draft_vocab_size is None if share_lm_head is None else share_lm_head
        self.target = target
        self.tie_word_embeddings = False
        kwargs.pop("tie_word_embeddings", None)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, kwargs.pop(name, None))  # transformers' pipelines compare these with the target's
        _refuse_unknown(kwargs)
        check_choice(self, "family", get_args(Family))
        check_choice(self, "markov_head_type", get_args(MarkovHeadType))
        if window_rule is not None:
            check_choice(self, "window_rule", get_args(WindowRule))
        # Before the base class, which fills gaps in the rotary parameters.
        check_config(self, kwargs.get("dtype", kwargs.get("torch_dtype")))
        super().__init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Config of a folder or Hub id as a dict, in whatever format it has; see `PreTrainedConfig.get_config_dict`.

        Through here others read the config of a drafter by its class: PEFT does when it saves an adapter of one.
        """
        # Here, as conversion imports this module.
        from dspark.conversion import is_recognised, open_checkpoint, read_record

        raw, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if raw.get("model_type", cls.model_type) == cls.model_type and "speculators_model_type" not in raw:
            return raw, rest
        if not is_recognised(raw):
            return raw, rest
        places = {key: kwargs[key] for key in _PLACES if key in kwargs}
        checkpoint = open_checkpoint(pretrained_model_name_or_path, raw, **places)
        return read_record(checkpoint).to_config().to_dict(), rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Config of a dict as `to_dict` or config.json has it; see `PreTrainedConfig.from_dict`.

        Fields this version does not know are named in a warning and left out.

        Raises:
            ValueError: The dict is another model's, or a rule is broken.
        """
        check_raw(config_dict, cls.model_type)
        if unknown := unknown_keys(config_dict, _field_names()):
            logger.warning(
                f"The drafter's config has fields this version of dspark does not know, and ignores: "
                f"{', '.join(unknown)}. If a newer version wrote it, update dspark: drafts may be accepted less often."
            )
            config_dict = {key: value for key, value in config_dict.items() if key not in unknown}
        return super().from_dict(config_dict, **kwargs)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens a block gives: `block_size`, or one fewer when the anchor slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def num_logits(self) -> int | None:
        """Width of the drafter's logits: the reduced draft vocabulary, or all of V; None: as many as the target's."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def context_width(self) -> int:
        """Width of the target hidden states the drafter takes: tapped layers times D_t."""
        return len(self.target_layer_ids or ()) * (self.target_hidden_size or self.hidden_size)

    def temperatures_at(self, decoding_temperature: float) -> list[float] | None:
        """Confidence temperatures, one per draft position, for text decoded at `decoding_temperature` (0: greedy).

        Of several lists the one whose key is nearest, the lower of two equally near; None: not calibrated. Drafts are
        accepted by agreement of the arg-maxes at 0 and by overlap of the laws above, so the lists differ.
        """
        return nearest_row(self.confidence_temperatures, decoding_temperature)


_PLACES = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def nearest_row(rows: list[float] | dict[str, list[float]] | None, decoding_temperature: float) -> list[float] | None:
    """[`DSparkConfig.temperatures_at`] of a `confidence_temperatures` on its own."""
    if not isinstance(rows, dict):
        return rows
    return rows[min(rows, key=lambda key: (abs(float(key) - decoding_temperature), float(key)))]


def _as_list(values: Any) -> Any:
    return list(values) if isinstance(values, list | tuple) else values


def _as_rows(values: Any) -> Any:
    """A list, or lists by decoding temperature with keys as JSON has them."""
    if not isinstance(values, Mapping):
        return _as_list(values)
    rows = {key if isinstance(key, str) else str(key): _as_list(row) for key, row in values.items()}
    return rows if len(rows) == len(values) else values  # `1` and `"1"`: the rules name both


def _field_names() -> set[str]:
    return set(inspect.signature(DSparkConfig.__init__).parameters) - {"self", "kwargs"}


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    names = _field_names()
    for key in unknown_keys(kwargs, names):
        close = difflib.get_close_matches(key, names, n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        if key in ("rope_theta", "rope_scaling"):
            hint = " It goes into `rope_parameters`."
        raise TypeError(f"DSparkConfig has no field `{key}` (got {kwargs[key]!r}).{hint}")


__all__ = ["DSparkConfig", "Family", "MarkovHeadType", "WindowRule", "nearest_row"]
