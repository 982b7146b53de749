"""Arguments, the choice of implementation and tile, known MLPs, modules, predicted memory, FSDP2."""

import pytest
import torch
import torch.distributed as dist
from mlp_samples import NormalisedGated, PlainGated, assert_same, results, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import oomph
from oomph.errors import ArgumentError
from oomph.nn.mlp import GatedMLP, TiledMLP
from oomph.ops.common import explain
from oomph.ops.mlp import MLPWeights, tiled_mlp

MiB = 1 << 20


def sizes(count, f, device="cuda", dtype=torch.bfloat16, **options):
    """The rows of a tile of a SwiGLU MLP."""
    with FakeTensorMode():
        up, gate, down = (
            torch.empty(*shape, device=device, dtype=dtype) for shape in ((f, 8), (f, 8), (8, f))
        )
        x = torch.empty(count, 8, device=device, dtype=dtype)
        settings = explain(tiled_mlp, MLPWeights(up, down, gate), x, **options).settings
    return settings["tile"]


def test_the_default_tile_on_a_gpu_fits_224_mib_in_whole_equal_blocks():
    assert sizes(131072, 9216) == 4096
    assert sizes(100_000, 9216) == 4224  # 24 tiles, none of them small
    assert sizes(777, 9216) == 777
    assert sizes(131072, 53248) == 2048  # the minimum, for a very wide layer


def test_a_budget_is_never_exceeded():
    row = 3 * 1024 * 4
    for budget in (20000, MiB, 40 * MiB, 96 * MiB, 1024 * MiB):
        for device in ("cuda", "cpu"):
            rows = sizes(1 << 20, 1024, device, torch.float32, memory_budget=budget)
            assert 1 <= rows <= budget // row


def kind(module):
    return str(explain(tiled_mlp, module.double(), tokens(5, 12)).settings["kind"])


def check(module):
    """Values and gradients with tiles are those of the module called as it is."""
    module.double()
    x = tokens(3, 7, 12)
    inputs = [x, *module.parameters()]
    assert_same(results(lambda: tiled_mlp(module, x, tile=4), inputs), results(lambda: module(x), inputs))


def sequential(activation):
    return nn.Sequential(nn.Linear(12, 20), activation, nn.Linear(20, 6))


def transformers_modules():
    from transformers.models.bert.modeling_bert import BertConfig, BertIntermediate
    from transformers.models.clip.modeling_clip import CLIPMLP, CLIPTextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3TextConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP

    small = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2}
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


def test_the_mlps_of_transformers_are_known_where_they_are_plain_and_right_in_any_case():
    pytest.importorskip("transformers")
    for name, (module, expected) in transformers_modules().items():
        assert (name, kind(module)) == (name, expected)
        check(module)


MODULES = {
    "silu": (lambda: sequential(nn.SiLU()), "silu"),
    "gelu": (lambda: sequential(nn.GELU()), "gelu"),
    "gelu, tanh": (lambda: sequential(nn.GELU("tanh")), "gelu_tanh"),
    "relu": (lambda: sequential(nn.ReLU()), "relu"),
    "tanh": (lambda: sequential(nn.Tanh()), "generic"),
    "other names": (PlainGated, "silu gated (SwiGLU)"),
    "the same names": (NormalisedGated, "generic"),
    "active dropout": (lambda: sequential(nn.Sequential(nn.ReLU(), nn.Dropout())), "generic"),
    "inactive dropout": (lambda: sequential(nn.Sequential(nn.ReLU(), nn.Dropout())).eval(), "relu"),
    "a branch": (lambda: WithBranch(), "generic"),
    "without activation": (lambda: Squared(), "generic"),
    "clamped": (lambda: Clamped(), "generic"),
    "a subclass of Linear": (
        lambda: nn.Sequential(InnerLinear(12, 20), nn.ReLU(), nn.Linear(20, 6)),
        "generic",
    ),
}


@pytest.mark.parametrize(("make", "expected"), MODULES.values(), ids=MODULES)
def test_a_module_is_known_by_what_it_computes(make, expected):
    before = torch.get_rng_state()
    module = make()
    torch.set_rng_state(before)
    assert kind(module) == expected
    assert torch.equal(torch.get_rng_state(), before)
    if expected != "generic" or not any(isinstance(each, nn.Dropout) for each in module.modules()):
        check(module)


def test_a_change_of_the_module_is_noticed():
    module = Scaled()
    assert kind(module) == "silu gated (SwiGLU)"
    module.scale = 2.0
    assert kind(module) == "generic"
    check(module)


class WithBranch(PlainGated):
    def forward(self, x):
        if self.training:
            x = x * 2
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Squared(PlainGated):
    def forward(self, x):
        return self.w2(self.w1(x) * self.w3(x))


class InnerLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_hooked_replaced_or_parametrised_is_called():
    hooked = sequential(nn.ReLU())
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 3)
    parametrised = sequential(nn.ReLU())
    nn.utils.parametrizations.weight_norm(parametrised[0])
    for module in (hooked, parametrised):
        assert kind(module) == "generic"
        check(module)
    replaced = sequential(nn.ReLU())
    replaced.forward = lambda x: x * 2 * replaced[0].weight.sum()
    assert kind(replaced) == "generic"
    out = tiled_mlp(replaced, tokens(4, 12), tile=2, parameters=list(replaced.parameters()))
    assert_same([out], [replaced(tokens(4, 12))])
    assert "forward" in vars(replaced)


def test_the_hooks_of_the_module_run_once_around_all_tiles_and_its_forward_is_put_back():
    for module in (PlainGated(), NormalisedGated()):
        module.double()
        seen = []
        module.register_forward_pre_hook(
            lambda m, inputs, seen=seen: seen.append(("before", inputs[0].shape))
        )
        module.register_forward_hook(lambda m, i, output, seen=seen: seen.append(("after", output.shape)))
        tiled_mlp(module, tokens(10, 12), tile=3).sum().backward()
        assert seen == [("before", (10, 12)), ("after", (10, 12))]
        assert "forward" not in vars(module)
    with pytest.raises(RuntimeError):
        tiled_mlp(module, torch.randn(4, 5))
    assert "forward" not in vars(module)


def test_hooks_on_all_modules_are_not_passed_over():
    def doubled(module, _, out):
        return 2 * out if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        assert kind(sequential(nn.ReLU())) == "generic"
        check(sequential(nn.ReLU()))
    finally:
        handle.remove()


class Clamped(PlainGated):
    """The same as PlainGated for tokens of usual size."""

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x).clamp(max=50)) * self.w3(x))


class Scaled(PlainGated):
    scale = 1.0

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x)) * self.scale


def test_the_modules_of_oomph_tile_what_they_hold():
    gated = GatedMLP(12, 20, "gelu", bias=True, tile=4, dtype=torch.float64)
    wrapped = TiledMLP(PlainGated().double(), tile=4)
    x = tokens(10, 12)

    def by_hand(x):
        return gated.down_proj(nn.functional.gelu(gated.gate_proj(x)) * gated.up_proj(x))

    inputs = [x, *gated.parameters()]
    assert_same(results(lambda: gated(x), inputs), results(lambda: by_hand(x), inputs))
    inputs = [x, *wrapped.parameters()]
    assert_same(results(lambda: wrapped(x), inputs), results(lambda: wrapped.module(x), inputs))
    assert "tile=4" in repr(gated)
    assert "tile=4" in repr(wrapped)


D, F = 256, 1024


def beyond_tokens(module_class, tokens, impl):
    """The predicted peak less x, dY, the result and dX, all of them [tokens, D]."""

    def one_pass():
        module = module_class(D, F).to("cuda", torch.bfloat16)
        x = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16)
        tiled_mlp(module, x, tile=512, impl=impl).backward(grad)

    return oomph.predict(one_pass, gpu="h200").peak.allocated - 4 * tokens * D * 2


@pytest.mark.parametrize(
    ("module_class", "impl"), [(PlainGated, "auto"), (PlainGated, "chunked"), (NormalisedGated, "auto")]
)
def test_the_peak_is_flat_in_the_number_of_tokens(module_class, impl):
    once, twice = (beyond_tokens(module_class, tokens, impl) for tokens in (4096, 8192))
    assert once == twice


def test_beyond_its_results_a_known_mlp_takes_three_buffers_and_the_fp32_gradients():
    weights, gradients, buffers = 3 * D * F * 2, 3 * D * F * 4, 3 * 512 * F * 2
    workspaces = 2 * (32 << 20)  # cuBLAS's, of the forward and of the backward thread
    assert beyond_tokens(PlainGated, 4096, "auto") == weights + gradients + buffers + workspaces


RANKS = 2


class Block(nn.Module):
    def __init__(self, mlp, tiled):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mlp = TiledMLP(mlp, tile=3) if tiled else mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def outcome(module, x, tile=None):
    """Loss, gradient of x and gradients of all parameters, whole, after two steps of accumulation."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        out = module(x) if tile is None else tiled_mlp(module, x, tile=tile)
        out.square().mean().backward()
    grads = [each.grad for each in module.parameters()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]
    return [out.square().mean().detach(), x.grad, *whole]


def check_sharded(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        x = torch.randn(10, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        for make in (PlainGated, NormalisedGated, lambda: GatedMLP(12, 20, tile=3)):
            for tile, in_block in ((3, False), (None, True)):
                torch.manual_seed(0)
                plain = make().double()
                expected_module = Block(plain, tiled=False).double() if in_block else plain
                expected = outcome(expected_module, x)
                torch.manual_seed(0)
                module = make().double()
                sharded = fully_shard(Block(module, tiled=True).double() if in_block else module)
                for one, other in zip(outcome(sharded, x, tile), expected, strict=True):
                    torch.testing.assert_close(one, other)
        inner = PlainGated().double()
        fully_shard(inner.w1)
        with pytest.raises(ArgumentError, match="w1 inside the module is sharded on its own"):
            tiled_mlp(inner, x)
    finally:
        dist.destroy_process_group()


def test_sharded_modules_and_blocks_give_the_losses_and_gradients_of_whole_ones(run_ranks):
    run_ranks(check_sharded, RANKS)
