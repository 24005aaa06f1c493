"""The tensors a `DSparkConfig` asks for, and how a record's differ from them: told before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from dspark.configuration_dspark import DSparkConfig
from dspark.files import some

from .record import Record
from .stored import FLOATS, StoredTensor

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: DSparkConfig) -> Shapes:
    """Names and shapes of the tensors of a drafter with this config."""
    width = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (width, config.context_width), "hidden_norm.weight": (width,), "norm.weight": (width,),
    }  # fmt: skip
    if config.fc_bias:
        shapes["fc.bias"] = (width,)
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(config).items()}
    shapes |= _heads(config)
    rows, vocab = config.num_logits or 0, config.vocab_size or 0  # tables are only stored where these are known
    if not config.share_embedding:
        shapes["embed_tokens.weight"] = (vocab, width)
    if not config.share_lm_head:
        shapes["lm_head.weight"] = (rows, width)
    if config.draft_vocab_size is not None:
        shapes["draft_token_ids"] = (config.draft_vocab_size,)
    return shapes


def _heads(config: DSparkConfig) -> Shapes:
    width, rank, shapes = config.hidden_size, config.markov_rank, Shapes()
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size or 0, rank)
        shapes["markov_head.markov_w2.weight"] = (config.num_logits or 0, rank)
    if config.markov_head_type == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov_head_type == "rnn":
        joint = "markov_head.joint_proj"
        shapes |= {f"{joint}.weight": (3 * rank, width + 2 * rank), f"{joint}.bias": (3 * rank,)}
    if config.enable_confidence_head:
        shapes["confidence_head.proj.weight"] = (1, width + (rank if config.confidence_head_with_markov else 0))
        if config.confidence_head_bias:
            shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _layer(config: DSparkConfig) -> Shapes:
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: Shapes = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "self_attn.q_proj.weight": (queries, width), "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width), "self_attn.o_proj.weight": (width, queries),
    }  # fmt: skip
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys, "o": width}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.attention_k_eq_v:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.v_proj")}
    if config.family in ("qwen3", "gemma4"):
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if config.family == "gemma4":
        norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
        shapes |= {**dict.fromkeys(norms, (width,)), "layer_scalar": (1,)}
    return shapes


def check_tensors(record: Record, config: DSparkConfig, *, ignores_shapes: bool = False) -> None:
    """Hold a record's tensors to the config they are to be loaded under.

    Raises:
        OSError: There are none.
        ValueError: Some are missing, unexpected, of another shape or no plain floats; all are named.
    """
    if record.tensors is None:
        raise OSError(
            f"{record.source} has no file named model.safetensors and no model.safetensors.index.json, so there are "
            "no weights to load."
        )
    wanted = expected_tensors(config)
    problems = [*_head_problems(record, wanted)]
    if missing := sorted(wanted.keys() - record.tensors.keys()):
        problems.append(f"missing tensors: {some(missing)}")
    if unexpected := sorted(record.tensors.keys() - wanted.keys()):
        problems.append(f"unexpected tensors: {some(unexpected)}")
    shared = [(name, record.tensors[name]) for name in sorted(wanted.keys() & record.tensors.keys())]
    if not ignores_shapes:
        problems += _shape_problems(shared, wanted)
    problems += _dtype_problems(shared)
    if problems:
        raise ValueError(
            f"The checkpoint {record.source} does not fit its config: {'; '.join(problems)}. Either the weights or "
            "config.json belong to another drafter; nothing was loaded."
        )


def _head_problems(record: Record, wanted: Shapes) -> list[str]:
    """Contradictions between a field and the tensors, in the words of the field."""
    tensors, rank, problems = record.tensors or {}, record["markov_rank"], []
    w1 = tensors.get("markov_head.markov_w1.weight")
    if w1 is not None and rank and len(w1.shape) == 2 and w1.shape[-1] != rank:
        problems.append(f"`markov_rank` is {rank}, but {w1.key} has {w1.shape[-1]} columns")
    for part in ("gate_proj", "joint_proj"):
        name = f"markov_head.{part}.weight"
        if (name in wanted) != (name in tensors):
            found = "stored" if name in tensors else "not stored"
            problems.append(
                f"`markov_head_type` is {record['markov_head_type']!r}, but markov_head.{part}.* is {found}"
            )
    proj = tensors.get("confidence_head.proj.weight")
    fits = proj is None or proj.shape == wanted.get("confidence_head.proj.weight", proj.shape)
    if proj is not None and len(proj.shape) == 2 and not fits:
        problems.append(
            f"`confidence_head_with_markov` is {record['confidence_head_with_markov']}, but {proj.key} has "
            f"{proj.shape[-1]} columns"
        )
    return problems


def _shape_problems(shared: Iterable[tuple[str, StoredTensor]], wanted: Shapes) -> list[str]:
    wrong = [
        f"{name} is {tensor.shape}, the config wants {wanted[name]}"
        for name, tensor in shared
        if tensor.shape != wanted[name]
    ]
    return [f"wrong shapes: {some(wrong, '; ')}"] if wrong else []


def _dtype_problems(shared: Iterable[tuple[str, StoredTensor]]) -> list[str]:
    wrong = [
        f"{name} is {tensor.dtype}"
        for name, tensor in shared
        if name != "draft_token_ids" and tensor.dtype not in FLOATS and not tensor.transform
    ]
    return [f"wrong dtypes: {some(wrong, '; ')} (floating-point numbers are wanted)"] if wrong else []


def check_finite(record: Record) -> None:
    """Refuse numbers that are NaN or infinite in the tensors that were read.

    Raises:
        ValueError: Names the tensors.
    """
    bad = sorted(tensor.key for tensor in (record.tensors or {}).values() if not tensor.is_finite)
    if bad:
        raise ValueError(
            f"{record.source} has NaN or infinite numbers in {some(bad)}: a table that was never trained or a "
            "damaged file. Export it again; nothing was loaded."
        )


__all__ = ["check_finite", "check_tensors", "expected_tensors"]
