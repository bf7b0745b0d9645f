# SPDX-License-Identifier: Apache-2.0
"""The plans that tensor parallelism finds: models as people write them, torch's layers and those of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from rankwise.tensor_parallel.plan import find_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))

import split_models

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 12


class NanoMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class SwiGlu(nn.Module):
    """As Llama's reference code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 10, bias=False)
        self.w2 = nn.Linear(10, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rotated(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs_cis[:, None, :]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class ReferenceLlamaAttention(nn.Module):
    """Needs complex rotations and a mask, repeats keys for queries, and scales by the size of a head."""

    def __init__(self, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = heads, kv_heads, heads // kv_heads, 4
        self.wq = nn.Linear(WIDTH, heads * 4, bias=False)
        self.wk = nn.Linear(WIDTH, kv_heads * 4, bias=False)
        self.wv = nn.Linear(WIDTH, kv_heads * 4, bias=False)
        self.wo = nn.Linear(heads * 4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        k, v = (one.repeat_interleave(self.n_rep, dim=2) for one in (k, v))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        if mask is not None:
            scores = scores + mask
        y = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class MaskedAttention(nn.Module):
    """Calls its layers by keys, values and queries of its own, and needs a mask of what may be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = 4, 3
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = query.size(0)
        q = self.q_proj(query).view(batch, -1, self.h, self.d_k).transpose(1, 2)
        k = self.k_proj(key).view(batch, -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_proj(value).view(batch, -1, self.h, self.d_k).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)).masked_fill(mask == 0, -1e9)
        y = self.dropout(scores.softmax(dim=-1)) @ v
        return self.out_proj(y.transpose(1, 2).reshape(batch, -1, self.h * self.d_k))


class GivesWeights(nn.Module):
    """Returns its weights beside its output, as BERT's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = 4, 3
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (self.heads(one(hidden_states)) for one in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / 3**0.5).softmax(dim=-1)
        return self.dense((weights @ v).permute(0, 2, 1, 3).flatten(-2)), weights


class ConvNet(nn.Module):
    """Begins with images; its two last layers are a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, stride=4)
        self.fc1 = nn.Linear(2 * 7 * 7, 8)
        self.fc2 = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(F.relu(self.conv(x)), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class WordsNet(nn.Module):
    """Begins with numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(x).mean(1))))


class AlwaysDropout(nn.Module):
    """Drops in evaluation too, and works in lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(self.up(x)), 0.3).float()
        h *= 0.5
        y = self.down(h.to(self.down.weight.dtype))
        y += x
        return y


class Chunked(SwiGlu):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.piece(one) for one in x.split(1)])

    def piece(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ManyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([SwiGlu() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        return sum(one(x) * shares[..., i : i + 1] for i, one in enumerate(self.experts))  # type: ignore[return-value]


def transformers_model(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of transformers on the meta device."""

    def build() -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind)
        with torch.device("meta"):
            return model_class(model_class.config_class(**sizes))

    return build


def eager_llama() -> nn.Module:
    """Its attention returns the weights of all heads."""
    model = split_models.llama()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


SIZES = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ_SIZES = {
    "vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip

Q_K_V_O = "q_proj k_proj v_proj | o_proj"
Q_K_V_OUT = "q_proj k_proj v_proj | out_proj"
GATED = "gate_proj up_proj | down_proj"

FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "nanoGPT's MLP": (NanoMlp, {"": "c_fc | c_proj"}),
    "a gated MLP": (SwiGlu, {"": "w1 w3 | w2"}),
    "a gated MLP in pieces": (Chunked, {"": "w1 w3 | w2"}),
    "an MLP that drops always": (AlwaysDropout, {"": "up | down"}),
    "experts": (ManyExperts, {f"experts.{i}": "w1 w3 | w2" for i in range(3)}),
    "Llama's own attention": (ReferenceLlamaAttention, {"": "wq wk wv | wo; n_heads=2 n_kv_heads=1"}),
    "an attention with a mask": (MaskedAttention, {"": "q_proj k_proj v_proj | out_proj; h=2"}),
    "an attention that returns weights": (GivesWeights, {"": "query key value | dense"}),
    "a net of images": (ConvNet, {"": "fc1 | fc2"}),
    "a net of words": (WordsNet, {"": "up | down"}),
    "a Sequential": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        ),
        {"": "0 | 3, 4 | 5"},
    ),
    "gpt of the tests": (
        split_models.Gpt,
        {f"layers.{i}.attention": "wq wk wv | wo; n_head=2" for i in range(2)}
        | {f"layers.{i}.mlp": "fc1 | fc2" for i in range(2)}
        | {"": "wte: vocab, lm_head: head"},
    ),
    "mlp of the tests": (split_models.Mlp, {"layers.0": "0 | 2", "": "first: vocab, layers.1: head"}),
    "encoder of the tests": (
        split_models.Encoder,
        {f"encoder.layers.{i}": "linear1 | linear2" for i in range(2)} | {"": "embed: vocab, head: head"},
    ),
    "llama of the tests": (
        split_models.llama,
        {f"model.layers.{i}.self_attn": Q_K_V_O for i in range(2)}
        | {f"model.layers.{i}.mlp": GATED for i in range(2)}
        | {"": "model.embed_tokens: vocab, lm_head: head"},
    ),
    "llama in eager mode": (
        eager_llama,
        {f"model.layers.{i}.self_attn": Q_K_V_O for i in range(2)}
        | {f"model.layers.{i}.mlp": GATED for i in range(2)}
        | {"": "model.embed_tokens: vocab, lm_head: head"},
    ),
    "torch's decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 3, 8, batch_first=True),
        {"": "linear1 | linear2"},
    ),
    "torch's encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 3, 8, activation="gelu", norm_first=True),
        {"": "linear1 | linear2"},
    ),
    "Mistral": (
        transformers_model("MistralForCausalLM", num_key_value_heads=2, **SIZES),
        {
            "model.layers.0.self_attn": Q_K_V_O,
            "model.layers.0.mlp": GATED,
            "": "model.embed_tokens: vocab, lm_head: head",
        },
    ),
    "Mixtral": (
        transformers_model("MixtralForCausalLM", num_key_value_heads=2, **SIZES),
        {"model.layers.0.self_attn": Q_K_V_O, "": "model.embed_tokens: vocab, lm_head: head"},
    ),
    "Qwen2": (
        transformers_model("Qwen2ForCausalLM", num_key_value_heads=2, **SIZES),
        {
            "model.layers.0.self_attn": Q_K_V_O,
            "model.layers.0.mlp": GATED,
            "": "model.embed_tokens: vocab, lm_head: head",
        },
    ),
    "Qwen3": (
        transformers_model("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=4, **SIZES),
        {"model.layers.0.mlp": GATED, "": "model.embed_tokens: vocab, lm_head: head"},
    ),
    "Gemma": (
        transformers_model("GemmaForCausalLM", num_key_value_heads=2, head_dim=4, **SIZES),
        {
            "model.layers.0.self_attn": Q_K_V_O,
            "model.layers.0.mlp": GATED,
            "": "model.embed_tokens: vocab, lm_head: head",
        },
    ),
    "Phi": (
        transformers_model("PhiForCausalLM", **SIZES),
        {
            "model.layers.0.self_attn": "q_proj k_proj v_proj | dense",
            "model.layers.0.mlp": "fc1 | fc2",
            "": "model.embed_tokens: vocab, lm_head: head",
        },
    ),
    "OPT": (
        transformers_model(
            "OPTForCausalLM",
            vocab_size=20,
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=16,
            max_position_embeddings=16,
        ),
        {
            "model.decoder.layers.0.self_attn": Q_K_V_OUT + "; num_heads=2",
            "model.decoder.layers.0": "fc1 | fc2",
            "": "model.decoder.embed_tokens: vocab, lm_head: head",
        },
    ),
    "T5": (
        transformers_model(
            "T5ForConditionalGeneration", vocab_size=20, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4
        ),
        {f"encoder.block.{i}.layer.1.DenseReluDense": "wi | wo" for i in range(2)}
        | {f"decoder.block.{i}.layer.2.DenseReluDense": "wi | wo" for i in range(2)}
        | {"": "shared: vocab, encoder.embed_tokens: vocab, decoder.embed_tokens: vocab, lm_head: head"},
    ),
    "GPT-J": (
        transformers_model(
            "GPTJForCausalLM",
            vocab_size=20,
            n_embd=16,
            n_layer=1,
            n_head=4,
            rotary_dim=4,
            n_inner=24,
            bos_token_id=1,
            eos_token_id=2,
        ),
        {
            "transformer.h.0.attn": Q_K_V_OUT + "; num_attention_heads=2",
            "transformer.h.0.mlp": "fc_in | fc_out",
            "": "transformer.wte: vocab, lm_head: head",
        },
    ),
    "GPT-Neo": (
        transformers_model(
            "GPTNeoForCausalLM",
            vocab_size=20,
            hidden_size=16,
            num_layers=1,
            attention_types=[[["global"], 1]],
            num_heads=4,
            intermediate_size=24,
            bos_token_id=1,
            eos_token_id=2,
        ),
        {
            "transformer.h.0.attn.attention": Q_K_V_OUT + "; num_heads=2",
            "transformer.h.0.mlp": "c_fc | c_proj",
            "": "transformer.wte: vocab, lm_head: head",
        },
    ),
    "CLIP's text model": (
        transformers_model("CLIPTextModel", **SIZES),
        {"encoder.layers.0.self_attn": Q_K_V_OUT, "encoder.layers.0.mlp": "fc1 | fc2"},
    ),
    "ViT": (
        transformers_model("ViTModel", image_size=16, patch_size=8, **SIZES),
        {"layers.0.attention": Q_K_V_O, "layers.0.mlp": "fc1 | fc2"},
    ),
    "Whisper": (
        transformers_model("WhisperModel", **SEQ2SEQ_SIZES),
        {
            f"{name}.layers.0.{attention}": Q_K_V_OUT + "; num_heads=2"
            for name, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
        }
        | {f"{name}.layers.0": "fc1 | fc2" for name in ("encoder", "decoder")},
    ),
    "BART": (
        transformers_model("BartModel", **SEQ2SEQ_SIZES),
        {
            f"{name}.layers.0.{attention}": Q_K_V_OUT
            for name, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
        }
        | {f"{name}.layers.0": "fc1 | fc2" for name in ("encoder", "decoder")},
    ),
    "GPT-2": (
        transformers_model(
            "GPT2LMHeadModel", vocab_size=20, n_embd=16, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        {"": "transformer.wte: vocab, lm_head: head"},
    ),
    "GPT-NeoX": (
        transformers_model("GPTNeoXForCausalLM", **SIZES),
        {"gpt_neox.layers.0.mlp": "dense_h_to_4h | dense_4h_to_h", "": "gpt_neox.embed_in: vocab, lm_head: head"},
    ),
    "Gemma 2": (
        transformers_model("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=4, **SIZES),
        {
            "model.layers.0.self_attn": Q_K_V_O,
            "model.layers.0.mlp": GATED,
            "": "model.embed_tokens: vocab, lm_head: head",
        },
    ),
    "Falcon": (
        transformers_model(
            "FalconForCausalLM", vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=4
        ),
        {"": "transformer.word_embeddings: vocab, lm_head: head"},
    ),
    "torch's Transformer": (
        lambda: nn.Transformer(WIDTH, 2, 1, 1, 8, batch_first=True),
        {f"{name}.layers.0": "linear1 | linear2" for name in ("encoder", "decoder")},
    ),
    "DistilBERT": (
        transformers_model("DistilBertModel", vocab_size=20, dim=16, n_layers=1, n_heads=4, hidden_dim=24),
        {
            "transformer.layer.0.attention": "q_lin k_lin v_lin | out_lin",
            "transformer.layer.0.ffn": "lin1 | lin2",
        },
    ),
}


def split(model: str, layers: str) -> tuple[dict[str, str], dict[str, int]]:
    """Read ``a b | c; heads=2`` of the module ``model``, or ``a: style``, as styles by name and counts of heads."""
    prefix = f"{model}." if model else ""
    layers, _, counts = layers.partition("; ")
    styles: dict[str, str] = {}
    for part in layers.split(", "):
        columns, bar, row = part.partition(" | ")
        if bar:
            styles |= {f"{prefix}{one}": "column" for one in columns.split()} | {f"{prefix}{row}": "row"}
        else:
            name, _, style = part.partition(": ")
            styles[prefix + name] = style
    return styles, {name: int(count) for name, _, count in (one.partition("=") for one in counts.split())}


@pytest.mark.parametrize("name", FOUND)
def test_the_plan_is_found(name: str) -> None:
    build, layers = FOUND[name]
    styles: dict[str, str] = {}
    heads: dict[str, dict[str, int]] = {}
    for model, text in layers.items():
        found, counts = split(model, text)
        styles |= found
        if counts:
            heads[model] = counts
    plan = find_plan(build(), 2)
    assert plan.styles == styles
    assert plan.heads == heads
