"""Tensor subclasses are as large as their inner tensors, and where those are."""

import ctypes
import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from small_programs import in_trace
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import oomph

pytestmark = pytest.mark.usefixtures("in_process")
WIDTH, LAYERS, ROWS, STEPS = 256, 3, 32, 3
PER_LAYER = WIDTH * WIDTH  # elements


def model(device="cuda"):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def step_of(model, optimizer):
    def step():
        model(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def left(prediction):
    """Bytes per kind that a step leaves behind."""
    live = {}
    for event in prediction.events:
        if event.action == "alloc":
            live[event.id] = prediction.allocations[event.id]
        elif event.action == "free":
            del live[event.id]
    totals = Counter()
    for allocation in live.values():
        totals[allocation.kind] += allocation.bytes
    return totals


# -- DTensor and FSDP2 ----------------------------------------------------------------------------------


def start_group(ranks):
    if dist.is_initialized():  # of another test
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def fsdp2(ranks, device="cuda", fused=False, **options):
    start_group(ranks)
    sharded = model(device)
    for layer in sharded:
        fully_shard(layer, **options)
    fully_shard(sharded, **options)
    if device == "meta":
        sharded.to_empty(device="cuda")
        for layer in sharded:
            layer.reset_parameters()
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=fused)
    return step_of(sharded, optimizer)


def predicted_fsdp2(*args, **kwargs):
    return oomph.predict(functools.partial(fsdp2, *args, **kwargs), gpu="h200")


def test_truncated_normals_of_sharded_parameters_are_drawn_once():
    """torch 2.13 draws again while a value is out of bounds."""

    def program():
        start_group(2)
        layer = fully_shard(nn.Linear(64, 64, device="cuda"))
        nn.init.trunc_normal_(layer.weight, std=0.06, a=-0.18, b=0.18)
        return lambda: layer(torch.ones(8, 64, device="cuda")).sum().backward()

    assert oomph.predict(program).assumptions == ()


@functools.cache
def eight_ranks():
    return predicted_fsdp2(8, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@functools.cache
def two_ranks():
    return predicted_fsdp2(2, device="meta", fused=True, reshard_after_forward=False)


def test_a_rank_holds_its_share_of_parameters_and_state():
    for prediction, ranks, steps in ((eight_ranks(), 8, 0), (two_ranks(), 2, LAYERS)):
        share = LAYERS * PER_LAYER * 4 // ranks
        kept = left(prediction)
        assert kept["parameter"] == share
        assert kept["optimizer state"] == 2 * share + 4 * steps  # fused: step counts are on the GPU, too
        gradients = [each.bytes for each in prediction.allocations if each.kind == "gradient"]
        assert gradients.count(share // LAYERS) == STEPS * LAYERS


def test_ranks_gather_in_bf16_and_reduce_in_float32():
    made = Counter((each.dtype, each.shape) for each in eight_ranks().allocations if each.step == STEPS)
    # A layer is gathered twice, but the last one, which the backward pass begins with, once.
    assert made["bfloat16", (PER_LAYER,)] >= 2 * LAYERS - 1
    assert made["float32", (PER_LAYER,)] == LAYERS  # what a reduce-scatter takes
    assert made["float32", (PER_LAYER // 8,)] == LAYERS  # what it gives to a rank


def test_parameters_that_are_not_resharded_stay_until_the_backward_pass():
    def most_alive(prediction):
        """Whole parameters alive at one time."""
        parameters = [each for each in prediction.allocations if each.kind == "parameter" and each.bytes]
        whole = {each.id for each in parameters if each.shape == (PER_LAYER,)}
        alive = most = 0
        for event in prediction.events:
            alive += (event.id in whole) * {"alloc": 1, "free": -1, "mark": 0}[event.action]
            most = max(most, alive)
        return most

    assert most_alive(two_ranks()) == LAYERS
    assert most_alive(eight_ranks()) < LAYERS


def test_offloaded_shards_leave_only_workspaces_on_the_gpu():
    prediction = predicted_fsdp2(2, device="cpu", offload_policy=CPUOffloadPolicy())
    assert {kind for kind, size in left(prediction).items() if size} == {"workspace"}


def test_tensor_parallel_layers_hold_their_part():
    def tensor_parallel():
        start_group(2)
        mesh = dist.init_device_mesh("cuda", (2,))
        pair = model()[:2]
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return step_of(pair, torch.optim.AdamW(pair.parameters()))

    kept = left(oomph.predict(tensor_parallel, gpu="h200"))
    assert kept["parameter"] == 2 * PER_LAYER * 4 // 2
    assert kept["optimizer state"] == 2 * kept["parameter"]


# -- subclasses of the program's own --------------------------------------------------------------------

BLOCK = 256


class Quantized(torch.Tensor):
    """Eight bits per element and a float32 scale per block, as 8-bit optimizers keep their state."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["codes"], inner["scales"])

    def dequantize(self):
        return (self.codes.float().view(-1, BLOCK) * self.scales[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            target, source = args
            target.scales.copy_(source.reshape(-1, BLOCK).abs().amax(-1))
            target.codes.copy_((source.reshape(-1, BLOCK) / target.scales[:, None]).view(source.shape))
            return target
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.zeros_like.default):
            kwargs.pop("dtype", None)
            return cls(func(args[0].codes, **kwargs), func(args[0].scales, **kwargs))
        return func(*tree_map_only(Quantized, Quantized.dequantize, args), **kwargs)


def quantized(elements, device):
    codes = torch.zeros(elements, dtype=torch.int8, device=device).view(-1, WIDTH)
    return Quantized(codes, torch.zeros(elements // BLOCK, device=device))


class Adam8bit(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(
                    quantized(parameter.numel(), "cpu"), device=parameter.device
                )
                state["square"] = quantized(parameter.numel(), "cpu").to(parameter.device)
            average = state["average"].dequantize().lerp_(parameter.grad, 0.1)
            square = state["square"].dequantize().lerp_(parameter.grad.square(), 0.001)
            state["average"].copy_(average)
            state["square"].copy_(square)
            parameter.addcdiv_(average, square.sqrt_().add_(1e-8), value=-1e-3)
            assert state["square"].device == parameter.device
            assert state["square"].is_cuda


BYTES_PER_STATE = PER_LAYER + PER_LAYER // BLOCK * 4


def test_the_state_of_an_8_bit_optimizer_is_its_codes_and_scales():
    def train():
        plain = model()
        return step_of(plain, Adam8bit(plain.parameters()))

    prediction = oomph.predict(train, gpu="h200")
    kept = left(prediction)
    assert kept["parameter"] == LAYERS * PER_LAYER * 4
    assert kept["optimizer state"] == 2 * LAYERS * BYTES_PER_STATE
    assert not [note for note in prediction.notes if "general estimate" in note.text]


def test_quantized_weights_move_with_their_module_and_are_used_by_its_ops():
    def train():
        tuned = model("cpu")
        tuned[0].weight = nn.Parameter(quantized(PER_LAYER, "cpu"), requires_grad=False)
        tuned.cuda()
        assert tuned[0].weight.device.type == "cuda"
        trained = [each for each in tuned.parameters() if each.requires_grad]
        return step_of(tuned, torch.optim.SGD(trained))

    prediction = oomph.predict(train, gpu="h200")
    assert left(prediction)["parameter"] == (LAYERS - 1) * PER_LAYER * 4 + BYTES_PER_STATE
    dequantized = [each for each in prediction.allocations if each.op == "aten.mul.Tensor"]
    assert {each.bytes for each in dequantized} >= {PER_LAYER * 4}


def test_a_compiled_optimizer_step_stores_no_intermediate_results():
    class Compiled(Adam8bit):
        step = torch.no_grad()(lambda self, closure=None: torch.compile(super().step)())

    def train(kind):
        plain = model()
        return step_of(plain, kind(plain.parameters()))

    eager, compiled = (
        oomph.predict(functools.partial(train, kind), gpu="h200") for kind in (Adam8bit, Compiled)
    )
    assert left(compiled) == left(eager)
    assert "optimizer step" in {stage for stage, _ in eager.by_stage()}
    assert "optimizer step" not in {stage for stage, _ in compiled.by_stage()}


class Packed(nn.Parameter):
    """Quantizes its data when it is moved to the GPU, as bitsandbytes' parameters do."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)

    def cuda(self, *args, **kwargs):
        codes, self.scales = torch.ops.oomph_test.quantize(self.data.to("cuda"))
        self.data = codes
        return self


def register_quantize():
    """An op of a library whose kernel for CUDA allocates in Python and launches through ctypes."""
    torch.library.define("oomph_test::quantize", "(Tensor x) -> (Tensor, Tensor)")

    @torch.library.register_fake("oomph_test::quantize")
    def _(x):
        return torch.empty_like(x, dtype=torch.uint8), x.new_empty(x.numel() // BLOCK, dtype=torch.float32)

    @torch.library.register_kernel("oomph_test::quantize", "cuda")
    def _(x):
        library = ctypes.cdll.LoadLibrary("libquantize_cuda130.so")
        library.quantize.restype = ctypes.c_int32
        workspace = torch.empty(12345, dtype=torch.uint8, device=x.device)
        codes = torch.empty_like(x, dtype=torch.uint8)
        scales = torch.empty(x.numel() // BLOCK, device=x.device)
        assert library.quantize(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), workspace.data_ptr()) == 0
        return codes, scales


def test_a_parameter_class_may_quantize_itself_with_a_kernel_of_its_library():
    def train():
        register_quantize()
        tuned = model("cpu")
        tuned[0].weight = Packed(tuned[0].weight.data)
        tuned.cuda()
        weight = tuned[0].weight
        assert isinstance(weight, Packed)
        assert weight.is_cuda
        assert weight.dtype == torch.uint8
        tuned[0].forward = lambda x: (
            x @ (weight.float() * weight.scales.repeat_interleave(BLOCK).view_as(weight))
        )
        trained = [each for each in tuned.parameters() if each.requires_grad]
        return step_of(tuned, torch.optim.SGD(trained))

    prediction = oomph.predict(train, gpu="h200")
    assert (12345,) in {each.shape for each in prediction.allocations}
    assert left(prediction)["parameter"] == (LAYERS - 1) * PER_LAYER * 4 + PER_LAYER
    assert not [note for note in prediction.notes if "general estimate" in note.text]


# -- nested tensors and transforms ----------------------------------------------------------------------


def test_jagged_tensors_hold_their_tokens_without_padding():
    lengths = (100, 37, 250, 64)

    def train():
        qkv, out = nn.Linear(WIDTH, 3 * WIDTH).cuda().bfloat16(), nn.Linear(WIDTH, WIDTH).cuda().bfloat16()
        optimizer = torch.optim.SGD([*qkv.parameters(), *out.parameters()])

        def step():
            rows = [torch.randn(length, WIDTH, dtype=torch.bfloat16) for length in lengths]
            tokens = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
            assert tokens.is_cuda
            parts = [part.unflatten(-1, [4, WIDTH // 4]).transpose(1, 2) for part in qkv(tokens).chunk(3, -1)]
            attention = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)
            out(attention).values().float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    prediction = oomph.predict(train, gpu="h200")
    made = Counter(each.shape for each in prediction.allocations if each.step == STEPS)
    assert made[sum(lengths), 3 * WIDTH]  # q, k and v of all tokens
    assert made[4, sum(lengths)] or made[sum(lengths), 4]  # one sum for each row of scores, no scores
    assert prediction.peak.step is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch itself
def test_transforms_of_torch_func_run_on_the_gpu():
    def train():
        net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).cuda()
        template = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).cuda().to("meta")
        optimizer = torch.optim.SGD(net.parameters())

        def energy(x):
            parameters = dict(net.named_parameters())
            return torch.func.functional_call(template, parameters, (x,)).squeeze(-1)

        def step():
            points = torch.randn(ROWS, 2, device="cuda")
            curvature = torch.func.hessian(energy)(points[0])
            assert points.new_zeros(3, device="meta").shape == (3,)
            curvatures = torch.func.vmap(torch.func.hessian(energy))(points)
            slopes = torch.func.vmap(torch.func.grad(energy))(points)
            (slopes.square().mean() + curvature.diagonal().sum() + curvatures.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    prediction = oomph.predict(train, gpu="h200")
    assert left(prediction)["parameter"] == 4 * (2 * WIDTH + WIDTH + WIDTH + 1)
    assert (ROWS, WIDTH) in {each.shape[-2:] for each in prediction.allocations if each.step == STEPS}


@pytest.mark.filterwarnings("ignore")  # of torch itself
@in_trace()
def test_tensors_made_inside_of_a_transform_are_where_its_tensors_are():
    def count(x):
        assert x.device.type == "cuda"
        places = torch.arange(WIDTH, device=x.device)
        classes = torch.nn.functional.one_hot(x.argmax(0), WIDTH)
        assert places.device == classes.device == x.device
        return (x[places] * classes).sum()

    points = torch.randn(ROWS, WIDTH, device="cuda")
    assert torch.func.vmap(torch.func.grad(count))(points).device == points.device
    assert torch.func.vmap(count)(points.cpu().to("cuda")).is_cuda


def test_tensors_of_a_class_without_dispatch_are_moved_to_the_gpu():
    """As torchvision's images are, and the noise of BigGAN, which keeps its class by assigning `data`."""

    class Noise(torch.Tensor):
        def to(self, *args):
            moved = Noise(self)
            moved.data = super().to(*args)
            return moved

    def program():
        model = nn.Linear(WIDTH, WIDTH).cuda()
        image = torch.randn(ROWS, WIDTH).as_subclass(Noise).cuda()
        noise = Noise(torch.randn(ROWS, WIDTH)).to("cuda")
        on_gpu = Noise(noise)
        assert Noise(ROWS, WIDTH).shape == noise.shape
        assert isinstance(Noise([1.0, 2.0]), Noise)
        for each in (image, noise, on_gpu):
            assert isinstance(each, Noise)
            assert each.is_cuda
            model(each.normal_()).sum().backward()

    prediction = oomph.predict(program)
    made = [each for each in prediction.allocations if each.shape == (ROWS, WIDTH) and "copy" in each.op]
    assert len(made) == 2


def test_the_attributes_of_a_tensor_are_replaced_as_a_whole():
    """As those of MONAI's MetaTensor are."""

    class Tagged(torch.Tensor):
        pass

    def program():
        model = nn.Linear(WIDTH, WIDTH).cuda()
        first, second = (torch.randn(ROWS, WIDTH, device="cuda").as_subclass(Tagged) for _ in range(2))
        first.tag, second.tag = "first", "second"
        second.__dict__ = vars(first).copy()
        assert second.tag == "first"
        second.__dict__ = {"name": "third"}
        assert vars(second)["name"] == "third"
        assert not hasattr(second, "tag")
        model(second).sum().backward()

    assert any("addmm" in each.op for each in oomph.predict(program).allocations)


def test_a_parameter_is_swapped_for_a_quantized_one():
    """As quantized layers do when they are built; their `to` takes a dtype alone."""

    class Frozen(Quantized):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.Tensor.to:
                assert "copy" not in kwargs
                return args[0].dequantize().to(*args[1:], **kwargs)
            return super().__torch_function__(func, types, args, kwargs)

    def program():
        layer, head = nn.Linear(WIDTH, WIDTH, bias=False).cuda(), nn.Linear(WIDTH, 1).cuda()
        weight = Frozen(*vars(quantized(PER_LAYER, "cuda")).values())
        torch.utils.swap_tensors(layer.weight, nn.Parameter(weight, requires_grad=False))
        assert isinstance(layer.weight, Frozen)

        def step():
            x = torch.randn(ROWS, WIDTH, device="cuda")
            head(nn.functional.linear(x, layer.weight.to(torch.float32))).sum().backward()

        return step

    assert left(oomph.predict(program))["parameter"] < 2 * PER_LAYER + 4 * WIDTH
