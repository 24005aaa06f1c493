"""`DSparkDrafter`: the drafter as a `PreTrainedModel` (steps 1 to 4 of the round; `training_forward.py` has the loss).

Context features `H_ctx = RMSNorm(W_c [h_l1; ...; h_lm])` (paper eq. 2) become keys and values in every draft layer
(eq. 3); one bidirectional pass over `[anchor, mask, ...]` gives base logits U_k; a sequential head repairs the block
left to right (eq. 4-6); a confidence head predicts how far it survives (eq. 7). The decoding loop around it is in
`decoding/`.
Shape letters: `B` rows, `S` context length, `g` draft tokens, `q` block slots, `D` drafter width, `D_t` target width,
`m` tapped layers, `V` target vocabulary, `Vd` width of the drafter's logits (V unless reduced).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .adapters import CarriesAdapters
from .borrowing import SharedModules, TeacherHead, borrow, call_embedding, call_head, own_factor, teacher_head
from .configuration_dspark import DSparkConfig
from .context_cache import ContextCache
from .draft_masks import draft_masks
from .families import FAMILIES, DraftLayer, DraftRotaryEmbedding, RMSNorm, Rotary, reset_layer_scalar
from .heads import ConfidenceHead, build_sequential_head
from .hub import LoadsAnyFormat
from .modeling_outputs import DraftBlock, DraftOutput, DSparkTrainingOutput, Walk, split_anchor
from .objective import Objective, sample_anchors
from .peft_layers import base_module
from .scheduling import VerifyPolicy
from .speculation import SpeculationConfig
from .training_forward import check_shapes, training_forward

# A choice of tokens for one slot: (k, logits [B, Vd], tokens chosen so far, each int64 [B]) -> target ids int64 [B].
Chooser = Callable[[int, torch.Tensor, list[torch.Tensor]], torch.Tensor]


class DSparkPreTrainedModel(PreTrainedModel):
    """Loading, initialisation and capabilities shared by DSpark models."""

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = [layer.__name__ for layer in FAMILIES.values()]  # noqa: RUF012 - transformers' own attribute
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_layer_scalar(module)
        if module is self and isinstance(self, DSparkDrafter) and self.draft_token_ids is not None:
            init.copy_(self.draft_token_ids, torch.arange(self.draft_token_ids.shape[0]))

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any
    ) -> None:
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "Gradient checkpointing of a drafter needs use_reentrant=False, got True: all layers read the same "
                "context, whose graph the reentrant form would run backward through once per layer."
            )
        if gradient_checkpointing_func is not None:
            kwargs["gradient_checkpointing_func"] = gradient_checkpointing_func
        super()._set_gradient_checkpointing(enable=enable, **kwargs)


class DSparkDrafter(CarriesAdapters, LoadsAnyFormat, DSparkPreTrainedModel):
    """A DSpark drafter.

    Tensor names follow DeepSpec: `fc`, `hidden_norm`, `layers.*`, `norm`, `markov_head.*`, `confidence_head.proj.*`,
    and `embed_tokens`, `lm_head` where the checkpoint stores its own.
    """

    draft_token_ids: torch.Tensor | None

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.context_width, config.hidden_size, bias=config.fc_bias)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer_class = FAMILIES[config.family]
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DraftRotaryEmbedding(config)
        self.markov_head = build_sequential_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        width, rows = config.hidden_size, cast("int", config.vocab_size)  # a drafter with tables knows V
        logits = cast("int", config.num_logits)
        self.embed_tokens = None if config.share_embedding else nn.Embedding(rows, width)
        self.lm_head = None if config.share_lm_head else nn.Linear(width, logits, bias=False)
        reduced = config.draft_vocab_size
        self.register_buffer("draft_token_ids", None if reduced is None else torch.arange(reduced))
        self.speculation = SpeculationConfig()
        self.objective = Objective()
        self.last_stats: Any = None
        self._shared: SharedModules | None = None
        self._teacher: TeacherHead | None = None
        self._policies: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Any, VerifyPolicy]]] | None = None
        self.post_init()

    # --- borrowed parts -------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module | None:
        """The drafter's own embedding; None when it borrows the target's."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        """The drafter's own LM head; None when it borrows the target's."""
        return self.lm_head

    def shared_modules(self, target: PreTrainedModel | None) -> SharedModules:
        """The modules to borrow for a call: `target`'s, or those of `share_with` when `target` is None.

        Raises:
            ValueError: The config borrows from the target and none is known, or it lacks the part.
        """
        config = self.config
        borrowed = {"embedding": config.share_embedding, "LM head": config.share_lm_head}
        needed = [name for name, is_shared in borrowed.items() if is_shared]
        if not needed:
            return SharedModules(None, None)
        if target is None:
            if self._shared is None:
                raise ValueError(
                    f"This drafter borrows the target's {' and '.join(needed)}, and no target is known. Pass "
                    "`target=model`, or call `drafter.share_with(model)` once."
                )
            return self._shared
        return borrow(config, target)

    def __getstate__(self) -> dict[str, Any]:
        # A deep copy or a pickle would take the target's modules along: the copy is to call `share_with` itself.
        return {**super().__getstate__(), "_shared": None, "_teacher": None, "_policies": None}

    def take_policy(self, target: PreTrainedModel, settings: SpeculationConfig) -> VerifyPolicy:
        """A policy for one call: the one that earlier calls on this target taught, or a new one where that is in use.

        Give it back by `keep_policy`.
        """
        known = None if self._policies is None or not settings.is_learnt else self._policies.get(target, {})
        curve, taught = (None, None) if known is None else known.pop(settings.policy, (None, None))
        return settings.new_policy() if taught is None or curve is not settings.throughput_curve else taught

    def keep_policy(self, target: PreTrainedModel, settings: SpeculationConfig, policy: VerifyPolicy) -> None:
        """Keep what a call taught for later ones; it lives and dies with the two models."""
        if settings.is_learnt:
            if self._policies is None:
                self._policies = WeakKeyDictionary()
            self._policies.setdefault(target, {})[settings.policy] = (settings.throughput_curve, policy)

    def share_with(self, target: PreTrainedModel | None) -> None:
        """Keep references to the modules borrowed from `target` (None: forget them); nothing is copied or saved.

        Needed for the training forward and for `draft` without `target=`; `generate` borrows by itself. A deep copy
        and a pickle of the drafter have forgotten them.

        Raises:
            ValueError: The target lacks a part the drafter borrows.
        """
        self._shared = self._teacher = None
        if target is None:
            return
        self._shared = self.shared_modules(target)
        self._teacher = teacher_head(target, self.draft_token_ids)

    @property
    def _plain_weight(self) -> torch.Tensor:
        """A weight on the device and in the dtype the drafter computes in; norms are not quantised, linears may be."""
        weight = self.hidden_norm.weight
        assert weight is not None
        return weight

    def embed(self, token_ids: torch.Tensor, shared: SharedModules) -> torch.Tensor:
        """Embeddings `[..., D]` of target ids, from the drafter's own or the borrowed embedding."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids) * self.config.embed_scale
        assert shared.embedding is not None
        rows = call_embedding(shared.embedding, token_ids).to(self._plain_weight)
        if not self.config.raw_target_embedding:
            return rows
        factor = self.config.embed_scale / own_factor(shared.embedding)
        return rows if factor == 1 else rows * factor

    def base_logits(self, hidden: torch.Tensor, shared: SharedModules) -> torch.Tensor:
        """U_k `[..., Vd]` of hidden states `[..., D]`, from the drafter's own or the borrowed LM head."""
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            assert shared.lm_head is not None
            logits = call_head(shared.lm_head, hidden).to(hidden.device)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def to_target_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Target ids of indices into the drafter's logits (the identity without a reduced vocabulary)."""
        return indices if self.draft_token_ids is None else self.draft_token_ids[indices]

    # --- steps of a round -----------------------------------------------------------------------------------------

    def project_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        """Context features (eq. 2): `[B, S, m*D_t]` target hidden states to `[B, S, D]`.

        Raises:
            ValueError: The last dimension is not `m * D_t`.
        """
        if target_hidden_states.shape[-1] != self.config.context_width:
            layers = self.config.target_layer_ids
            raise ValueError(
                f"`target_hidden_states` must be {self.config.context_width} wide ({len(layers or [])} tapped layers "
                f"{layers} of width {self.config.target_hidden_size or self.config.hidden_size}), got "
                f"{target_hidden_states.shape[-1]}."
            )
        # The one place where target activations enter: device and dtype change here and nowhere else.
        weight = self._plain_weight
        return self.hidden_norm(self.fc(target_hidden_states.to(weight.device, weight.dtype)))

    def _rotary(self, like: torch.Tensor, positions: torch.Tensor) -> Rotary:
        return self.rotary_emb(like, positions)

    def context_keys_values(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer (eq. 3) for context features `[B, S, D]` at positions int64 `[B, S]`."""
        rotary = self._rotary(features, positions)
        layers = cast("list[DraftLayer]", list(self.layers))
        return [layer.self_attn.keys_values(features, rotary) for layer in layers]

    def masked_blocks(self, anchor_ids: torch.Tensor, num_drafts: int | None = None) -> torch.Tensor:
        """Input ids of blocks: anchors int64 `[...]` followed by mask tokens, `[..., q]`.

        Args:
            anchor_ids: The first token of each block.
            num_drafts: Drafts the block is to give; None: all that it was trained for.
        """
        # A block that does not draft from its anchor slot has one slot more than it gives drafts.
        fewer = 0 if num_drafts is None else self.config.num_draft_tokens - num_drafts
        size = self.config.block_size - fewer
        block_ids = anchor_ids.new_full((*anchor_ids.shape, size), cast("int", self.config.mask_token_id))
        block_ids[..., 0] = anchor_ids
        return block_ids

    def extend_context(self, cache: ContextCache, features: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Step 1: append context features `[B, S, D]` (the first `counts[b]` of each row) to the context cache."""
        positions = cache.next_positions(features.shape[1], features.device)
        cache.append(self.context_keys_values(features, positions), counts)

    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        cache: ContextCache,
        shared: SharedModules,
        num_drafts: int | None = None,
    ) -> DraftBlock:
        """Step 2: one bidirectional pass over `[anchor, mask, ...]` behind the context of `cache`.

        Args:
            anchor_ids: int64 `[B]`, last committed tokens; each sits at its row's next position.
            cache: Context of all earlier tokens.
            shared: Borrowed modules.
            num_drafts: Drafts to give, 1..`config.num_draft_tokens`; None: all. Attention within a block goes both
                ways, so the first k drafts of a narrower block are not those of a wider one.
        """
        device = self._plain_weight.device
        hidden = self.embed(self.masked_blocks(anchor_ids.to(device), num_drafts), shared)
        masks = draft_masks(self.config, hidden, cache)
        hidden = self.run_layers(hidden, cache.next_positions(hidden.shape[1], device), cache, masks)
        hidden, anchor_hidden = split_anchor(self.config, hidden)
        return DraftBlock(hidden, self.base_logits(hidden, shared), anchor_hidden)

    def run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, context: Any, masks: Sequence[Any]
    ) -> torch.Tensor:
        """Draft layers, each under its mask, and final norm on `[B, n, D]`; `context` adds its keys and values."""
        rotary = self._rotary(hidden, positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, rotary, context, mask)
        return self.norm(hidden)

    def walk_block(
        self, block: DraftBlock, anchor_ids: torch.Tensor, choose: Chooser, candidates: torch.Tensor | None = None
    ) -> Walk:
        """Step 3: repair a block left to right; `choose` picks each slot's token from its corrected logits.

        Args:
            block: Result of `draft_block`.
            anchor_ids: int64 `[B]`.
            choose: See `Chooser`.
            candidates: Columns that see the head's bias, int64 `[B, g, n]`; the others become -inf. None: all.
        """
        previous, head = anchor_ids.to(block.hidden.device), self.markov_head
        state = None if head is None else head.start(previous, block.anchor_hidden, like=block.hidden)
        tokens: list[torch.Tensor] = []
        corrected = []
        for k, logits in enumerate(block.base_logits.unbind(1)):
            if head is not None:
                columns = None if candidates is None else candidates[:, k]
                logits, state = head.correct(logits, previous, block.hidden[:, k], state, columns)
            corrected.append(logits)
            previous = choose(k, logits, tokens)
            tokens.append(previous)
        token_ids = torch.stack(tokens, dim=1)
        previous_ids = torch.cat([anchor_ids.to(token_ids.device)[:, None], token_ids[:, :-1]], dim=1)
        return Walk(token_ids, torch.stack(corrected, dim=1), previous_ids)

    def confidence_logits(self, hidden: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Step 4: raw confidence logits of hidden states `[..., g, D]` and previous tokens `[..., g]`, or None."""
        if self.confidence_head is None:
            return None
        with_markov = self.confidence_head.with_markov and self.markov_head is not None
        previous = self.markov_head.embed_previous(previous_ids) if with_markov else None  # type: ignore[union-attr]
        return self.confidence_head(hidden, previous)

    # --- inspection door ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draft(
        self,
        anchor_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
        *,
        target: PreTrainedModel | None = None,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
    ) -> DraftOutput:
        """One stateless round: draft a block behind a context of S positions, the anchor at position S.

        Args:
            anchor_ids: int64 `[B]`.
            target_hidden_states: `[B, S, m*D_t]`, outputs of `target_layer_ids` at positions 0..S-1, concatenated.
            target: Model to borrow embedding and head from, where the drafter stores none.
            do_sample: Sample from the softmax of the corrected logits instead of taking the largest.
            generator: Source of the draws.

        Raises:
            ValueError: Wrong shape of the hidden states, or a target is needed and unknown.
        """
        if target_hidden_states.dim() != 3 or len(target_hidden_states) != len(anchor_ids):
            raise ValueError(
                f"`target_hidden_states` must be [B, S, m*D_t] with a row per anchor ({len(anchor_ids)}), got "
                f"{list(target_hidden_states.shape)}."
            )
        shared = self.shared_modules(target)
        features = self.project_context(target_hidden_states)
        cache = ContextCache(len(self.layers), [0] * features.shape[0])
        self.extend_context(cache, features)
        block = self.draft_block(anchor_ids.to(features.device), cache, shared)

        def choose(_k: int, logits: torch.Tensor, _tokens: list[torch.Tensor]) -> torch.Tensor:
            if do_sample:
                drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0]
            else:
                drawn = logits.argmax(-1)
            return self.to_target_ids(drawn)

        walk = self.walk_block(block, anchor_ids, choose)
        return DraftOutput(
            token_ids=walk.token_ids,
            base_logits=block.base_logits,
            logits=walk.logits,
            confidence_logits=self.confidence_logits(block.hidden, walk.previous_ids),
            hidden_states=block.hidden,
            context_features=features,
        )

    def decode(self, target: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Decoding method: `target.generate(**inputs, custom_generate=drafter.decode)` is `assistant_model=drafter`.

        Wrapped in another callable it gets neither streamer nor tokenizer from transformers, and takes its settings
        from `drafter.speculation` alone.
        """
        from .decoding.generate import decode_from_custom_generate

        return decode_from_custom_generate(self, target, input_ids, **kwargs)

    # --- training -------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
        loss_mask: torch.Tensor,
        target_last_hidden_states: torch.Tensor | None = None,
        target_logsumexp: torch.Tensor | None = None,
        anchor_positions: torch.Tensor | None = None,
        anchor_keep_mask: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DSparkTrainingOutput:
        """Training forward: blocks at sampled anchors, teacher-forced, with the loss of `self.objective`.

        Args:
            input_ids: int64 `[B, S]`, right-padded.
            target_hidden_states: `[B, S, m*D_t]`, the target's tapped layers on `input_ids`.
            loss_mask: bool or 0/1 `[B, S]`, True on tokens of the answer; False on padding.
            target_last_hidden_states: `[B, S, D_t]` after the target's final norm; needed for the L1 and confidence
                terms. Target logits are recomputed from it at block positions only.
            target_logsumexp: float32 `[B, S]` of the target's logits over V, if known: with a reduced draft vocabulary
                only its rows of the target's head are then evaluated. Needs `share_with(target)`.
            anchor_positions: int64 `[B, A]`; None: sampled from `loss_mask`.
            anchor_keep_mask: bool `[B, A]`, False for dummy anchors.
            generator: Source of the anchor draws.

        Raises:
            ValueError: Shapes disagree, or the objective needs the target's law and it is missing, or an adapter was
                to train what is borrowed.
        """
        self.check_adapters()
        check_shapes(
            input_ids,
            target_hidden_states=target_hidden_states,
            loss_mask=loss_mask,
            target_last_hidden_states=target_last_hidden_states,
            target_logsumexp=target_logsumexp,
        )
        if anchor_positions is None:
            anchors = sample_anchors(loss_mask, self.objective.num_anchors, generator=generator)
        else:
            keep = torch.ones_like(anchor_positions) if anchor_keep_mask is None else anchor_keep_mask
            anchors = (anchor_positions, keep.bool())
        return training_forward(
            self, input_ids, target_hidden_states, loss_mask, target_last_hidden_states, target_logsumexp, anchors
        )

    def teacher(self) -> TeacherHead:
        """The LM head whose law the loss compares with.

        Raises:
            ValueError: The drafter stores none of it and `share_with` was not called.
        """
        if self._teacher is not None:
            return self._teacher
        # DeepSpec stores a frozen copy of the target's whole head, which then serves as the target's.
        if self.lm_head is not None and self.draft_token_ids is None:
            return TeacherHead(base_module(self.lm_head), self.config.final_logit_softcapping, None)
        raise ValueError(
            "The loss compares with the target's law, which needs the target's LM head, and this drafter does not "
            "store all of it. Call `drafter.share_with(target)` before training."
        )


__all__ = ["DSparkDrafter", "DSparkPreTrainedModel", "DSparkTrainingOutput", "DraftBlock", "DraftOutput", "Walk"]
