"""Which modules are computed without their forward, and that the others never are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlp_samples import NormalisedGated, PlainGated, assert_same, results, tokens
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.mlp import GatedMLP, TiledMLP
from oomph.ops.common import explain
from oomph.ops.mlp import tiled_mlp


def kind(module: nn.Module) -> str:
    return str(explain(tiled_mlp, module.double(), tokens(5, 12)).settings["kind"])


def check(module: nn.Module) -> None:
    """Values and gradients with tiles are those of the module called as it is."""
    module.double()
    x = tokens(3, 7, 12)
    inputs = [x, *module.parameters()]
    assert_same(results(lambda: tiled_mlp(module, x, tile=4), inputs), results(lambda: module(x), inputs))


def sequential(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), activation, nn.Linear(20, 6))


def transformers_modules() -> dict[str, tuple[nn.Module, str]]:
    from transformers.models.bert.modeling_bert import BertConfig, BertIntermediate
    from transformers.models.clip.modeling_clip import CLIPMLP, CLIPTextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3TextConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP

    small: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
    return {
        "llama": (LlamaMLP(LlamaConfig(**small, mlp_bias=True)), "silu gated (SwiGLU)"),
        "qwen3": (Qwen3MLP(Qwen3Config(**small)), "silu gated (SwiGLU)"),
        "gemma3": (Gemma3MLP(Gemma3TextConfig(**small)), "gelu_tanh gated (GEGLU)"),
        "gpt2": (GPT2MLP(20, GPT2Config(n_embd=12, n_head=2)).eval(), "gelu_tanh"),
        "clip": (CLIPMLP(CLIPTextConfig(**small, hidden_act="gelu")), "gelu"),
        "clip, quick gelu": (CLIPMLP(CLIPTextConfig(**small)), "generic"),
        "phi3, gate and up in one": (Phi3MLP(Phi3Config(**small, pad_token_id=0)), "generic"),
        "bert, no second matrix": (BertIntermediate(BertConfig(**small)), "generic"),
    }


def test_the_mlps_of_transformers_are_known_where_they_are_plain_and_right_in_any_case() -> None:
    pytest.importorskip("transformers")
    for name, (module, expected) in transformers_modules().items():
        assert (name, kind(module)) == (name, expected)
        check(module)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.Tanh(), "generic"),
    ],
)
def test_a_sequential_of_two_linears_is_known_by_its_activation(activation: nn.Module, expected: str) -> None:
    assert kind(sequential(activation)) == expected
    check(sequential(activation))


def test_a_module_with_two_places_in_a_sequential_is_run_in_both() -> None:
    activation = nn.ReLU()
    both = nn.Sequential(nn.Linear(12, 20), activation, nn.Linear(20, 6), activation)
    assert kind(both) == "generic"
    check(both)


def test_attribute_names_do_not_matter_and_do_not_mislead() -> None:
    assert kind(PlainGated()) == "silu gated (SwiGLU)"
    check(PlainGated())
    assert kind(NormalisedGated()) == "generic"
    check(NormalisedGated())


class WithBranch(PlainGated):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 2
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Squared(PlainGated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * self.w3(x))


class InnerLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_whatever_is_not_proved_is_called() -> None:
    hooked = sequential(nn.ReLU())
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 3)
    subclass = nn.Sequential(InnerLinear(12, 20), nn.ReLU(), nn.Linear(20, 6))
    replaced = sequential(nn.ReLU())
    replaced.forward = lambda x: x * 2 * replaced[0].weight.sum()  # type: ignore[method-assign]
    parametrised = sequential(nn.ReLU())
    nn.utils.parametrizations.weight_norm(parametrised[0])
    for module in (hooked, subclass, parametrised, WithBranch(), Squared()):
        assert kind(module) == "generic"
        check(module)
    assert kind(replaced) == "generic"
    out = tiled_mlp(replaced, tokens(4, 12), tile=2, parameters=list(replaced.parameters()))
    assert_same([out], [replaced(tokens(4, 12))])
    assert "forward" in vars(replaced)


def test_active_dropout_is_called_and_inactive_dropout_is_nothing() -> None:
    module = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 6))
    assert kind(module) == "generic"
    assert explain(tiled_mlp, module, tokens(5, 12)).reason.endswith("dropout 2 is active")
    assert kind(module.eval()) == "relu"
    check(module)


def test_the_hooks_of_the_module_run_once_around_all_tiles_and_its_forward_is_put_back() -> None:
    for module in (PlainGated(), NormalisedGated()):
        module.double()
        seen: list[tuple[str, torch.Size]] = []
        module.register_forward_pre_hook(
            lambda m, inputs, seen=seen: seen.append(("before", inputs[0].shape))
        )
        module.register_forward_hook(lambda m, i, output, seen=seen: seen.append(("after", output.shape)))
        tiled_mlp(module, tokens(10, 12), tile=3).sum().backward()
        assert seen == [("before", (10, 12)), ("after", (10, 12))]
        assert "forward" not in vars(module)


def test_a_forward_that_fails_is_put_back_too() -> None:
    module = NormalisedGated()
    with pytest.raises(RuntimeError):
        tiled_mlp(module, torch.randn(4, 5))
    assert "forward" not in vars(module)


def test_hooks_on_all_modules_are_not_passed_over() -> None:
    def doubled(module: nn.Module, _: Any, out: Tensor) -> Tensor | None:
        return 2 * out if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        assert kind(sequential(nn.ReLU())) == "generic"
        check(sequential(nn.ReLU()))
    finally:
        handle.remove()


def test_the_modules_of_oomph_refuse_bad_options_when_they_are_made() -> None:
    for make in (
        lambda **options: TiledMLP(PlainGated(), **options),
        lambda **options: GatedMLP(4, 8, **options),
    ):
        with pytest.raises(ArgumentError, match="impl='cuda' is not valid; choose from 'auto'"):
            make(impl="cuda")
        with pytest.raises(ArgumentError, match="tile=0 is not valid"):
            make(tile=0)
        with pytest.raises(ArgumentError, match="size '-1' is not valid"):
            make(memory_budget=-1)


def test_the_modules_of_oomph_tile_what_they_hold() -> None:
    gated = GatedMLP(12, 20, "gelu", bias=True, tile=4, dtype=torch.float64)
    wrapped = TiledMLP(PlainGated().double(), tile=4)
    x = tokens(10, 12)

    def by_hand(x: Tensor) -> Tensor:
        return gated.down_proj(nn.functional.gelu(gated.gate_proj(x)) * gated.up_proj(x))

    inputs = [x, *gated.parameters()]
    assert_same(results(lambda: gated(x), inputs), results(lambda: by_hand(x), inputs))
    inputs = [x, *wrapped.parameters()]
    assert_same(results(lambda: wrapped(x), inputs), results(lambda: wrapped.module(x), inputs))
    assert "tile=4" in repr(gated)
    assert "tile=4" in repr(wrapped)
