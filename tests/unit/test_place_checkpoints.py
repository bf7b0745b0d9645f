# SPDX-License-Identifier: Apache-2.0
"""Weights that go from their files straight to where they are placed."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from placed_models import Net, assert_unchanged, batch_of, difference, net, step_of, tower
from safetensors.torch import save_file
from torch import nn

from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.place.place import place, placement

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_checkpoint_goes_straight_into_place(on_meta: bool, tmp_path: Path) -> None:
    one, file = net(), tmp_path / "model.safetensors"
    one.train()(batch_of(0)[0])
    # Tied names stand in files once, as transformers writes them.
    save_file({key: tensor for key, tensor in one.state_dict().items() if key != "head.weight"}, file)
    content = file.read_bytes()
    with torch.device("meta" if on_meta else "cpu"):
        model = Net().double()
    model.shift.requires_grad = False
    parameters = list(model.parameters())
    place(model, {"": "cpu", "blocks": "disk"}, checkpoint=file, offload_folder=tmp_path / "offload")
    assert difference(model, one) == 0.0
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["shift"]
    assert model.head.weight is model.embed.weight
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step_of(model, 1)
    optimizer.step()
    assert file.read_bytes() == content
    assert difference(model, one) > 0.0


def test_one_call_goes_from_a_folder_of_weights_to_a_placed_model(tmp_path: Path) -> None:
    one = net()
    tensors = {key: tensor for key, tensor in one.state_dict().items() if key != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"checkpoint": tmp_path, "offload_folder": tmp_path / "offload"}
    seen: list[str] = []

    def build() -> Net:
        built = Net()
        seen.extend({str(parameter.device) for parameter in built.parameters()})
        return built.double()

    model = place(build, {"": "cpu", "blocks": "disk"}, **options)
    assert seen == ["meta"]
    assert difference(model, one) == 0.0
    assert {part.device for part in placement(model).parts} == {"cpu", "disk"}
    # Its class will do where that needs no arguments.
    assert difference(place(Net, **options).double(), one) < 1e-6
    with pytest.raises(ConfigurationError, match="a function that creates one"):
        place(build)
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn.Module, not a int"):
        place(lambda: 3, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="weights of this Linear"):
        place(lambda: nn.Linear(2, 2), checkpoint=tmp_path)


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    state = net().state_dict()
    wrong = {key: tensor for key, tensor in state.items() if key not in {"shift", "head.weight", "embed.weight"}}
    wrong |= {"shifts": torch.zeros(6), "lstm.bias_hh_l0": torch.zeros(5)}
    wrong["blocks.1.up.bias"] = torch.zeros(12, dtype=torch.int64)
    save_file(wrong, tmp_path / "wrong.safetensors")
    model = net()
    with pytest.raises(CheckpointError) as caught:
        place(model, {"": "disk"}, checkpoint=tmp_path / "wrong.safetensors", offload_folder=tmp_path / "offload")
    text = str(caught.value)
    for line in (
        "missing: shift (near it: shifts)",
        "missing: embed.weight",
        "unexpected: shifts",
        "lstm.bias_hh_l0: [5] in the file, [24] in the model",
        "blocks.1.up.bias: torch.int64 in the file, torch.float64 in the model",
    ):
        assert line in text
    assert_unchanged(model, state, tmp_path / "offload")


def test_a_checkpoint_that_would_lose_values(tmp_path: Path) -> None:
    """Whole numbers are not converted, and of tied weights no other than the one in the model is dropped."""
    model = net()
    state = copy.deepcopy(model.state_dict())
    untied = state | {"head.weight": state["head.weight"] + 1}
    for wrong, words in (
        (state | {"blocks.0.norm.num_batches_tracked": torch.tensor(300, dtype=torch.int32)}, r"int32 in the file"),
        (untied, r"embed\.weight and head\.weight differ in the file, and are one tensor in the model"),
    ):
        save_file({key: value.clone() for key, value in wrong.items()}, tmp_path / "wrong.safetensors")
        with pytest.raises(CheckpointError, match=words):
            place(model, {"": "cpu"}, checkpoint=tmp_path / "wrong.safetensors")
        assert_unchanged(model, state, tmp_path / "offload")
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "right.safetensors")
    place(model, {"": "cpu"}, checkpoint=tmp_path / "right.safetensors")


def test_a_parameter_that_something_holds_on_to(tmp_path: Path) -> None:
    save_file(tower(3).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = tower(3)
    held = weakref.ref(model[1].weight)
    with pytest.raises(ConfigurationError, match=r"1\.weight cannot be initialized"):
        place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())
    del held
    place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert difference(model, tower(3)) == 0.0


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = tower()
    with pytest.raises(ConfigurationError, match="6 parameters are on the meta device"):
        place(model, {"": "cpu"})


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=3, hidden_size=8, intermediate_size=12, vocab_size=11, num_attention_heads=2,
            num_key_value_heads=1, use_cache=False,
        )
    )  # fmt: skip


def test_a_transformer_from_its_own_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = _llama()
    one.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        model = _llama()
    place(model, "auto", budgets={"cpu": "6KB"}, checkpoint=tmp_path, offload_folder=tmp_path / "offload")
    assert {part.device for part in placement(model).parts} == {"cpu", "disk"}
    tokens = torch.randint(11, (2, 5))
    for model_ in (one, model):
        model_(input_ids=tokens, labels=tokens).loss.backward()
    for (name, left), right in zip(model.named_parameters(), one.named_parameters(), strict=True):
        assert torch.equal(left.grad, right[1].grad), name
    generated = [m.eval().generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (one, model)]
    assert torch.equal(*generated)


def test_buffers_that_no_file_holds(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    save_file(nn.Sequential(Scaled()).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(ConfigurationError, match=r"no values(.*\n)+.*0\.scale(.*\n)+.*model\.0 = Scaled"):
        place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    model[0].scale = torch.full((2,), 3.0)
    place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert model[0].scale.tolist() == [3.0, 3.0]
    assert not model[0].linear.weight.is_meta


def test_8_bit_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 4)).eval()
    save_file(one.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(5, 32)
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = copy.deepcopy(one) if not on_meta else copy.deepcopy(one).to("meta")
        options = {"checkpoint": tmp_path / "model.safetensors"} if on_meta else {}
        place(model, {"": "disk", "0": "cpu"}, int8=True, offload_folder=tmp_path / "offload", **options)
        assert model.state_dict().keys() == one.state_dict().keys()
        report = placement(model)
        part = report.parts[0]
        # The weights' own dtype is what torchao says: the one that the layer calculates in.
        assert [one.dtypes for one in report.parts] == [("int8", "float32")] * 3
        assert str(report).count("int8, float32") == 3
        assert part.num_bytes < sum(p.nbytes for p in one[0].parameters()) / 2.5
        with torch.no_grad():
            output = model(x)
            assert (output - one(x)).abs().max() < 0.02 * one(x).abs().max()
            assert not torch.equal(output, one(x))
        assert torch.equal(model(x), output)
        for untrained in (model, copy.deepcopy(model).train()):
            assert not untrained(x).requires_grad
        with pytest.raises(ConfigurationError, match="8-bit weights, which cannot be trained"):
            model.train()(x)
    assert caplog.records == []
