"""Shapes of models from their checkpoints: `config.json`, a folder with one, or a `.gguf` file (`gguf.py`).

A config is read by its keys, whatever its `architectures`. Attention may have grouped heads or be latent. An FFN may be
dense, or have routed and shared experts. Layers may have full or sliding attention, and the heads of the two kinds may
differ. `NAMES` lists all names under which configs state a dimension. Of a multimodal checkpoint only the text part is
served; its vision tower only adds bytes.

A config is refused, with a one-line error that names the key, if a key of `REFUSED` has a value. Such keys describe
encoders, sparse attention, or layers that have no attention, for example. A config is also refused for an unknown key
that seems to state a dimension (`STRUCTURE`): it might change bytes or the time of steps.

A config may lack a key for two facts. Whether an FFN is gated follows from the activation (`UNGATED`,
`hidden_activation`, `mlp_type`). If `tie_word_embeddings` is missing, the default of the checkpoint's class says
whether the head shares the embedding (`TIED`: transformers, `configuration_*.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.policy.parameters import parameters, stored_bytes
from harness.policy.types import Experts, Latent, Shape, Sliding, UserError
from workloads import bounds, gguf, quantised
from workloads.bounds import shown

MOST_BYTES = 4_000_000  # a larger config is refused; those with a list of all modules have 0.3 MB
MOST_INDEX = 200_000_000  # bytes of an index: those of the largest checkpoints have 20 MB
INDEX = "model.safetensors.index.json"
MOST_TOTAL = 1e16  # bytes of a checkpoint
NEAR = 0.01  # largest relative difference of bytes by keys and by an index
NAMES: Mapping[str, tuple[str, ...]] = {
    name: tuple(keys.split())
    for name, keys in {
        "layers": "num_hidden_layers n_layer n_layers num_layers",
        "hidden": "hidden_size n_embd d_model",
        "q_heads": "num_attention_heads n_head n_heads",
        "kv_heads": "num_key_value_heads n_head_kv num_kv_heads multi_query_group_num num_attention_groups",
        "head_dim": "head_dim kv_channels attention_head_dim",
        "ffn": "intermediate_size_mlp intermediate_size ffn_hidden_size n_inner ffn_dim dense_intermediate_size",
        "vocab": "padded_vocab_size vocab_size",
        "context": "max_position_embeddings n_positions seq_length max_sequence_length max_seq_len model_max_length",
        "experts": "num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts",
        "top": "num_experts_per_tok num_experts_per_token experts_per_token moe_topk moe_top_k moe_k top_k_experts",
        "expert_ffn": "moe_intermediate_size expert_ffn_hidden_size expert_hidden_dim",
        "shared": "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
        "shared_ffn": "shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim"
        " shared_intermediate_size",
        "first_dense": "first_k_dense_replace first_k_dense moe_first_k_dense_replace num_dense_layers",
        "every": "moe_layer_freq decoder_sparse_step interleave_moe_layer_step",
        "draft": "num_nextn_predict_layers num_mtp_modules mtp_num_hidden_layers mtp_num_layers",
    }.items()
}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
UNGATED = ("gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2")
TIED = ("gemma", "cohere", "gpt2", "gpt_bigcode", "bloom", "falcon", "mpt", "opt", "starcoder2", "phi3small")
# These are keys of hybrids, sparse attention and encoders: what they would cost is not in our tables.
REFUSED: Mapping[str, str] = {
    "index_topk": "sparse attention",
    "compress_ratios": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "moba_config": "sparse attention",
    "linear_attn_config": "linear attention",
    "full_attention_interval": "linear attention",
    "linear_num_value_heads": "linear attention",
    "attn_type_list": "linear attention",
    "hybrid_override_pattern": "state-space layers",
    "layers_block_type": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "ssm_state_size": "state-space layers",
    "ssm_cfg": "state-space layers",
    "block_types": "recurrent layers",
    "cross_attention_layers": "cross attention",
    "encoder_layers": "an encoder",
    "num_encoder_layers": "an encoder",
    "num_kv_shared_layers": "layers that share KV",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "audio_config": "an audio encoder",
    "block_configs": "layers of different shapes",
}
WHOLE = ("attention", "full_attention", "full", "global")
WINDOWED = ("sliding_attention", "chunked_attention", "sliding", "local")
NESTED = ("text_config", "llm_config", "language_config")
VISION = ("vision_config", "vision_tower_config", "vit_config")
# Keys that change neither bytes nor steps, or are read where they are listed elsewhere in this file.
KNOWN = frozenset(
    {*(name for names in NAMES.values() for name in names), *ACTIVATIONS, *NESTED, *VISION, *REFUSED}
    | set(
        "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim rope_head_dim use_mla"
        " sliding_window use_sliding_window max_window_layers sliding_window_pattern _sliding_window_pattern"
        " interleaved_sliding_window layer_types mlp_only_layers moe_layers moe_layers_enum mlp_layer_types"
        " global_head_dim num_global_key_value_heads attention_k_eq_v enable_moe_block"
        " attention_chunk_size no_rope_layers no_rope_layer_interval quantization_config compression_config"
        " n_group topk_group num_expert_group ep_size norm_topk_prob use_qk_norm original_max_position_embeddings"
        " initial_context_length max_model_len n_ctx num_labels num_logits_to_keep num_return_sequences"
        " layer_norm_eps layernorm_epsilon layer_norm_epsilon image_size spatial_merge_size patch_size"
        " ignore_index num_image_tokens vision_feature_layer mm_tokens_per_image type_vocab_size".split()
    )
)
# An unknown key of such a name, with a value that is no switch, stands for dimensions that we would miss.
STRUCTURE = re.compile(
    r"(?<![a-z])(num|n|dim|dims|size|sizes|rank|heads?|layers?|experts?|window|lora|ssm|mamba|conv|linear|index|indexer"
    r"|sparse|block|latent|state|kv|hash|engram|compress|loop|recurrent|depth|per_layer|bits)s?(?![a-z])"
)
HARMLESS = re.compile(
    r"(token|drop|init|loss|aux|coef|eps|epsilon|norm_|rope|rotary|scale|scaling|multiplier|softcap|"
    r"bias|cache|dtype|version|name|id$|ids$|labels?$|beam|penalty|tp$|std|range|jitter|router|chunk_size_feed|image|video|"
    r"vision|mm_|projector|max_batch|_tp|seq_aux|temperature|diversity|beta|theta|factor|clip|limit|position)"
)


class Read(NamedTuple):
    """A checkpoint's shape, and the bytes of the layers that are loaded for speculative decoding alone."""

    shape: Shape
    draft_bytes: int = 0


def is_checkpoint(name: str) -> bool:
    """Tell whether a model's name is the path of a checkpoint."""
    return name.endswith((".json", ".gguf")) or ("/" in name and not name.endswith(".toml")) or name in (".", "..")


def file_of(name: str) -> Path:
    """Return the file to read: the path itself or, in a folder, `config.json` or else the only `.gguf`.

    Raises UserError if there is no such file.
    """
    path = Path(name)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file():
            return path / "config.json"
        if len(ggufs) == 1:
            return ggufs[0]
        raise UserError(f"{name}: no config.json in this folder" + f", and {len(ggufs)} .gguf files" * bool(ggufs))
    if not path.is_file():
        raise UserError(f"{name}: no such file")
    return path


def read(name: str, dtype: str | None = None, kv_dtype: str | None = None) -> Shape:
    """Read the shape of a checkpoint from a `config.json` or `.gguf`, or from a folder that has one.

    `dtype` is the format to which a 16-bit checkpoint is quantised when it is loaded; `kv_dtype` is the format of its
    KV cache. UserError, in one line, names the file and the key that is missing, contradictory, unknown or not
    understood.

    If the folder has an index of tensors, the bytes that follow from the keys are compared with the index's total. They
    must be within 1 % of the total, or of half the total, as for weights stored in 32 bits. UserError otherwise.
    """
    path = file_of(name)
    label = path.parent.resolve().name if path.name == "config.json" else path.stem
    if path.suffix == ".gguf":
        return quantised.loaded(gguf.read(path, label), str(path), dtype, kv_dtype)
    named = of_config(label, _json(path), str(path), _optional_json(path.parent / "hf_quant_config.json"))
    if (total := _total(path.parent / INDEX)) is not None:
        ours = stored_bytes(named.shape)
        whole = min((ours, ours + named.draft_bytes), key=lambda size: abs(size / total - 1))
        if abs(whole / total - 1) > NEAR and abs(2 * whole / total - 1) > NEAR:  # or it is stored in 32 bits
            raise UserError(f"{path}: its keys make {whole / 1e9:.2f} GB of weights, {INDEX} {total / 1e9:.2f} GB")
    draw = _optional_json(path.parent / "generation_config.json")
    top_p, top_k = draw.get("top_p", 1.0), draw.get("top_k", 0)
    sampled = (isinstance(top_p, int | float) and 0 < top_p < 1) or (isinstance(top_k, int) and top_k > 1)
    return quantised.loaded(named.shape._replace(sampled=sampled), str(path), dtype, kv_dtype)


def of_config(label: str, raw: Mapping[str, Any], where: str, beside: Mapping[str, Any] | None = None) -> Read:
    """Return the checkpoint that a config's keys describe; UserError as for `read`.

    `beside` has the keys of the `hf_quant_config.json` in the same folder.
    """
    try:
        made = _Config(label, raw, where).read(beside or {})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where}: a value of another kind than its key has ({shown(str(error))})") from None
    return made._replace(shape=bounds.sound(made.shape, where))


class _Config:
    """The keys of one config; each method reads a part of the shape from them."""

    def __init__(self, label: str, raw: Mapping[str, Any], where: str) -> None:
        self.label, self.where, self.raw = label, where, raw
        inner: Mapping[str, Any] = next((raw[key] for key in NESTED if isinstance(raw.get(key), dict)), {})
        text = {**{k: v for k, v in raw.items() if k not in (*NESTED, *VISION)}, **inner}
        self.keys = {key: value for key, value in text.items() if value is not None}

    def wrong(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")

    def read(self, beside: Mapping[str, Any]) -> Read:
        self.refuse()
        layers, hidden, heads = (self.need(name) for name in ("layers", "hidden", "q_heads"))
        kv = self.count("kv_heads") or (1 if self.keys.get("multi_query") is True else heads)
        latent = self.latent()
        if (dim := self.count("head_dim")) is None:
            if hidden % heads and latent is None:
                raise self.wrong(f"no head_dim, and hidden_size {hidden} does not divide among {heads} heads")
            dim = hidden // heads
        experts = self.experts(layers)
        ffn = self.count("ffn") or (experts.ffn if experts and experts.layers == layers else 4 * hidden)
        shape = Shape(
            self.label,
            layers,
            hidden,
            heads,
            kv,
            dim,
            ffn,
            self.need("vocab"),
            self.gated(),
            self.tied(),
            self.need("context"),
            experts=experts,
            latent=latent,
            sliding=self.sliding(layers),
            other_bytes=2 * self.vision(hidden),
        )
        shape = bounds.sound(self.unlike(shape), self.where)
        draft = 2 * self.draft(shape)
        full = quantised.of_checkpoint(shape, {**self.raw, **self.keys}, beside, self.where)
        if full.formats is not None and draft:  # a draft layer is stored as the others are
            draft = round(draft * stored_bytes(full) / stored_bytes(shape))
        return Read(full, draft)

    def refuse(self) -> None:
        if not any(name in self.keys for name in NAMES["layers"]):
            raise self.wrong(f"no {NAMES['layers'][0]}: not the config of a decoder")
        if self.keys.get("is_encoder_decoder"):
            raise self.wrong("is_encoder_decoder: no model of an encoder")
        for key, what in REFUSED.items():
            value = self.keys.get(key) or self.raw.get(key)
            if value and not (isinstance(value, list) and all(kind in (1, *WHOLE) for kind in value)):
                raise self.wrong(f"{key}: no model of {what}")
        for key, value in self.keys.items():
            if key in KNOWN or isinstance(value, bool | str) or value in (0, 1, [], {}) or HARMLESS.search(key):
                continue
            if STRUCTURE.search(key.replace("_", " ")):
                raise self.wrong(f"{key} is not understood, and may change bytes or steps")

    def count(self, name: str) -> int | None:
        """Return a dimension that the config states under any name in `NAMES[name]`; None if it states none.

        Raises UserError if two names disagree. For "ffn" they may disagree, and the value of the first name is
        returned.
        """
        named = {key: self.whole(key, name) for key in NAMES[name] if key in self.keys}
        if name == "ffn":  # that of dense layers is the first
            return next(iter(named.values()), None)
        if len({*named.values()}) > 1:
            raise self.wrong(" and ".join(f"{key} {value}" for key, value in named.items()) + " contradict each other")
        return next(iter(named.values()), None)

    def whole(self, key: str, name: str) -> int:
        return bounds.count(self.keys[key], name, key, self.where)

    def need(self, name: str) -> int:
        if (value := self.count(name)) is None:
            raise self.wrong(f"no {NAMES[name][0]}")
        return value

    def gated(self) -> bool:
        if "mlp_type" in self.keys:
            return str(self.keys["mlp_type"]) != "default"
        if "hidden_activation" in self.raw or "hidden_activation" in self.keys:
            return True
        named = next((str(self.keys[key]) for key in ACTIVATIONS if key in self.keys), "silu")
        return named not in UNGATED or str(self.keys.get("model_type", "")).startswith("gemma")

    def tied(self) -> bool:
        for keys in (self.keys, self.raw):
            if (stated := keys.get("tie_word_embeddings")) is not None:
                if not isinstance(stated, bool):
                    raise self.wrong(f"tie_word_embeddings is {shown(stated)}, not true or false")
                return stated
        return str(self.keys.get("model_type", "")).startswith(TIED)

    def latent(self) -> Latent | None:
        if not self.keys.get("kv_lora_rank"):
            return None
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if missing := next((name for name in names if name not in self.keys), None):
            raise self.wrong(f"kv_lora_rank without {missing}")
        kv_rank, nope, rope, v = (self.whole(name, "rank") for name in names)
        return Latent(self.whole("q_lora_rank", "rank") if "q_lora_rank" in self.keys else 0, kv_rank, nope, rope, v)

    def experts(self, layers: int) -> Experts | None:
        count, top = self.count("experts"), self.count("top")
        if not count or count == 1:
            return None
        if not top:
            raise self.wrong(f"{count} experts without {NAMES['top'][0]}")
        if top > count:
            raise self.wrong(f"{top} experts of each token, of {count}")
        if (width := self.count("expert_ffn")) is None:
            if "intermediate_size" not in self.keys:
                raise self.wrong(f"{count} experts without {NAMES['expert_ffn'][0]}")
            width = self.whole("intermediate_size", "expert_ffn")
        shared = self.count("shared_ffn")
        if shared is None:
            shared = (self.count("shared") or 0) * width
            if not shared and str(self.keys.get("model_type", "")).startswith("llama4"):
                shared = width  # its one shared expert is in no key
            if self.keys.get("enable_moe_block") is True:  # Gemma 4: a dense FFN beside the experts of each layer
                shared = self.whole("intermediate_size", "ffn")
        with_experts = self.with_experts(layers)
        return Experts(with_experts, count, top, width, shared) if with_experts else None

    def with_experts(self, layers: int) -> int:
        """Count the layers that have experts."""
        for key in ("moe_layers", "moe_layers_enum"):
            if value := self.keys.get(key):
                return len(value.split(",") if isinstance(value, str) else self.listed(key))
        if "mlp_layer_types" in self.keys:
            return sum(kind != "dense" for kind in self.each("mlp_layer_types", layers))
        key = next((key for key in NAMES["every"] if key in self.keys), "")
        if isinstance(every := self.keys.get(key, 1), list):
            return sum(bool(x) for x in self.each(key, layers))
        every = bounds.count(every, "every", key, self.where)
        first = self.count("first_dense") or 0
        if first > layers:
            raise self.wrong(f"{first} dense layers at first, of {layers}")
        only = set(self.listed("mlp_only_layers")) if "mlp_only_layers" in self.keys else set()
        deepseek = "first_k_dense_replace" in self.keys
        return sum(i >= first and i not in only and (i if deepseek else i + 1) % every == 0 for i in range(layers))

    def listed(self, key: str) -> list[Any]:
        if not isinstance(value := self.keys[key], list):
            raise self.wrong(f"{key} is {shown(value)}, not a list")
        return value

    def each(self, key: str, layers: int) -> list[Any]:
        """Return the config's list `key`, with one entry per layer. Raises UserError if its length is not `layers`."""
        if len(value := self.listed(key)) != layers:
            raise self.wrong(f"{key} has {len(value)} layers, {NAMES['layers'][0]} says {layers}")
        return value

    def sliding(self, layers: int) -> Sliding | None:
        window, chunk = self.window("sliding_window"), self.window("attention_chunk_size")
        if self.keys.get("use_sliding_window") is False:
            window = None
        if "layer_types" in self.keys:
            kinds = self.each("layer_types", layers)
            if strange := next((kind for kind in kinds if kind not in (*WHOLE, *WINDOWED)), None):
                raise self.wrong(f"layer_types: no model of {shown(strange)}")
            slide = sum(kind in WINDOWED for kind in kinds)
            if slide and not (window or chunk):
                raise self.wrong("layer_types has sliding layers, and there is no sliding_window")
        elif chunk and (window is None):
            slide = (
                sum(bool(x) for x in self.listed("no_rope_layers"))
                if self.keys.get("no_rope_layers")
                else (
                    layers - layers // self.whole("no_rope_layer_interval", "every")
                    if self.keys.get("no_rope_layer_interval")
                    else layers - layers // 4
                )
            )
        elif not window:
            return None
        else:
            every = self.keys.get("sliding_window_pattern", self.keys.get("_sliding_window_pattern"))
            if every is None and str(self.keys.get("model_type", "")).startswith("gemma"):
                every = 2 if str(self.keys["model_type"]) == "gemma2" else 6
            if isinstance(every, str):  # "LLLG", again and again
                if not every or set(every) - set("LG"):
                    raise self.wrong(f"sliding_window_pattern is {shown(every)}, not as LLLG")
                slide = sum(every[i % len(every)] == "L" for i in range(layers))
            else:
                slide = layers - (layers // every if isinstance(every, int) and every > 1 else 0)
        tokens = window or chunk
        return Sliding(slide, tokens) if slide and tokens else None

    def unlike(self, shape: Shape) -> Shape:
        """Return a shape whose full-attention layers differ from its sliding-window layers, if the config says so.

        The full layers get the head dimension that the config states for them. They get the number of KV heads stated
        for them only if attention keys also serve as values (`attention_k_eq_v`), as in transformers. The sliding
        layers keep the heads of `shape`.
        """
        same, near = self.keys.get("attention_k_eq_v", False), shape.sliding
        if not isinstance(same, bool):
            raise self.wrong(f"attention_k_eq_v is {shown(same)}, not true or false")
        if str(self.keys.get("model_type", "")).startswith("gemma4") and "global_head_dim" not in self.keys:
            raise self.wrong("no global_head_dim")
        if (near and near.layers) == shape.layers or not (same or "global_head_dim" in self.keys):
            return shape
        dim = self.whole("global_head_dim", "head_dim") if "global_head_dim" in self.keys else shape.head_dim
        kv = shape.kv_heads
        if same and "num_global_key_value_heads" in self.keys:
            kv = self.whole("num_global_key_value_heads", "kv_heads")
        return shape._replace(
            kv_heads=kv,
            head_dim=dim,
            keys_as_values=same,
            sliding=near and near._replace(kv_heads=shape.kv_heads, head_dim=shape.head_dim),
        )

    def window(self, key: str) -> int | None:
        """Return the tokens of the window that `key` states; None if the key is missing or 0."""
        return self.whole(key, "window") if self.keys.get(key) else None

    def vision(self, hidden: int) -> int:
        """Count the parameters of a vision tower and of its projection into the text model."""
        tower = next((self.raw[key] for key in VISION if isinstance(self.raw.get(key), dict)), None)
        if tower is None:
            return 0

        def of(*names: str, least: int = 0) -> int:
            key = next((n for n in names if isinstance(tower.get(n), int) and tower[n]), None)
            return least if key is None else bounds.count(tower[key], "vision", f"vision_config.{key}", self.where)

        width = of("embed_dim", "hidden_size", "vt_hidden_size", "width")
        if "embed_dim" in tower and "depth" in tower and of("hidden_size") == hidden:
            width = of("embed_dim")
        layers = of("depth", "num_hidden_layers", "vt_num_hidden_layers", "layers")
        wide = of("intermediate_size", "vt_intermediate_size", "mlp_dim")
        ratio = tower.get("mlp_ratio", 4)
        if type(ratio) not in (int, float) or not 0 < ratio <= 100:
            raise self.wrong(f"vision_config.mlp_ratio is {shown(ratio)}, not a ratio")
        wide = wide or round(width * ratio)
        if not width or not layers:
            raise self.wrong("vision_config has no hidden_size or num_hidden_layers")
        gated = str(tower.get("hidden_act", "gelu")) == "silu" or tower.get("model_type") == "pixtral"
        stated = self.raw.get("spatial_merge_size") or 1
        merge = of("spatial_merge_size", least=bounds.count(stated, "vision", "spatial_merge_size", self.where)) ** 2
        return (
            layers * (4 * width * width + (3 if gated else 2) * width * wide)
            + width * 3 * of("patch_size", least=14) ** 2 * of("temporal_patch_size", least=1)
            + (width * merge) ** 2 * (merge > 1)
            + width * merge * hidden
        )

    def draft(self, shape: Shape) -> int:
        """Count the parameters of the layers that are loaded for speculative decoding alone."""
        n = self.count("draft") or 0
        if not n:
            return 0
        last = shape._replace(
            layers=n, experts=shape.experts and shape.experts._replace(layers=n), vocab=0, other_bytes=0
        )
        return sum(parameters(last)) + n * (2 * shape.hidden**2 + 2 * shape.hidden * shape.vocab)


def _json(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    if (size := path.stat().st_size) > most:
        raise UserError(f"{path}: {size / 1e6:.1f} MB, no config (at most {most / 1e6:.0f} MB)")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: no JSON ({next(iter(str(error).splitlines()), 'damaged')})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: {shown(value)}, not a table of keys")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    """Return the keys of an optional JSON file in a checkpoint's folder; {} if there is no such file."""
    return _json(path) if path.is_file() else {}


def _total(path: Path) -> float | None:
    """Return the bytes of all tensors that an index file states; None if there is no file or it states no total."""
    if not path.is_file():
        return None
    metadata = _json(path, MOST_INDEX).get("metadata")
    if not isinstance(metadata, dict | None):
        raise UserError(f"{path}: metadata is {shown(metadata)}, not a table of keys")
    if (total := (metadata or {}).get("total_size")) is None:
        return None
    if type(total) not in (int, float) or not 0 < total < MOST_TOTAL:
        raise UserError(f"{path}: metadata.total_size is {shown(total)}, not a number of bytes")
    return float(total)
