"""Models of public libraries, shrunk, with a batch that each accepts: the cases of sweep.py.

A case has several variants: sizes of its config, and inputs. Which one a model accepts is found by running it
on the CPU, since neither configs nor signatures say what shapes a forward takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

ROWS, TOKENS, VOCABULARY = 2, 32, 512
_LARGEST = 600e6  # parameters of a model that is still run on the CPU


@dataclass(frozen=True)
class Case:
    library: str
    name: str


@dataclass(frozen=True)
class Variant:
    """Sizes and inputs to try. Without labels the loss is the mean of the first output."""

    sizes: str = ""
    inputs: tuple[str, ...] = ()
    labels: bool = False
    image_tokens: int = 0  # of each sample, in its text


class TooLarge(Exception):
    """Without shrinking its width the model has too many parameters for the CPU."""


def cases() -> list[Case]:
    libraries = {"transformers": _transformers, "timm": _timm, "torchvision": _torchvision}
    found = []
    for library, names in {**libraries, "diffusers": lambda: list(_DIFFUSERS)}.items():
        if importlib.util.find_spec(library) is not None:
            found += [Case(library, name) for name in names()]
    return found


def sizes_of(case: Case) -> tuple[str, ...]:
    return tuple(_SHRUNK) if case.library == "transformers" else ("",)


def build(case: Case, sizes: str) -> torch.nn.Module:
    if case.library == "transformers":
        return _build_transformers(case.name, sizes)
    if case.library == "timm":
        return importlib.import_module("timm").create_model(case.name, pretrained=False)
    if case.library == "torchvision":
        return importlib.import_module("torchvision.models").get_model(case.name, weights=None)
    return getattr(importlib.import_module("diffusers"), case.name)(**_DIFFUSERS[case.name][0])


def variants(case: Case, model: torch.nn.Module, sizes: str) -> Iterator[Variant]:
    if case.library == "transformers":
        yield from _transformers_variants(model, sizes)
    else:
        yield Variant(labels=case.library != "diffusers")


def batch(case: Case, model: torch.nn.Module, variant: Variant) -> dict[str, Any]:
    """The keyword arguments of the model, on the host; `labels` are the loss function's unless its own."""
    torch.manual_seed(0)
    if case.library == "transformers":
        return _Inputs(model, variant).arguments()
    if case.library == "diffusers":
        return {name: make() for name, make in _DIFFUSERS[case.name][1].items()}
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return {"x": torch.randn(ROWS, *size), "labels": torch.randint(0, 2, (ROWS,))}


def loss_of(case: Case, model: torch.nn.Module, batch: dict[str, Any], variant: Variant) -> torch.Tensor:
    if case.library in ("timm", "torchvision"):
        outputs = list(_tensors(model(batch["x"])))
        return torch.nn.functional.cross_entropy(outputs[0], batch["labels"])
    out = model(**batch)
    loss = getattr(out, "loss", None)
    if variant.labels and isinstance(loss, torch.Tensor):
        return loss.mean()
    return next(tensor for tensor in _tensors(out) if tensor.requires_grad).float().mean()


def after_failure(variant: Variant, message: str) -> Variant | None:
    """Models say how many tokens of the text must stand for an image."""
    import re

    counts = re.search(r"tokens: ?\D*?(\d+),? .*?features:? \D*?(\d+)", message)
    if counts is None or variant.image_tokens:
        return None
    return replace(variant, image_tokens=max(1, int(counts[2]) // ROWS))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


# ------------------------------------------------------------------------------------------ transformers

_TASKS = (
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "DEPTH_ESTIMATION",
    "TIME_SERIES_PREDICTION",
    "PRETRAINING",
)


def _transformers() -> list[str]:
    """Model types whose model class no other type has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes: dict[str, str] = {}
    for name in CONFIG_MAPPING_NAMES:
        found = _class_name(name)
        if found is not None and (found not in classes or found.lower().startswith(name)):
            classes[found] = name
    parts = ("_text", "_vision", "_audio", "_encoder", "_decoder", "_model")  # of other models: last
    return sorted(classes.values(), key=lambda name: name.removesuffix("_model").endswith(parts))


def _class_name(name: str) -> str | None:
    from transformers.models.auto import modeling_auto

    for mapping in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS), "MODEL_MAPPING_NAMES"):
        found = getattr(modeling_auto, mapping, {}).get(name)
        if found is not None:
            return found if isinstance(found, str) else found[0]
    return None


def _build_transformers(name: str, sizes: str) -> torch.nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _shrink(CONFIG_MAPPING[name](), _SHRUNK[sizes])
    cls = getattr(transformers, str(_class_name(name)))
    if sizes != "small":
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in cls(config).parameters())
        if parameters > _LARGEST:
            raise TooLarge(f"{parameters:.2g} parameters with {sizes}")
    return cls(config)


_LAYERS = """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth
    num_encoder_layers num_decoder_layers decoder_num_hidden_layers encoder_num_hidden_layers
    num_hidden_layers_encoder memory_attention_num_layers resampler_depth num_adapter_layers
    num_nextn_predict_layers""".split()
_EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_WIDTHS = {
    **dict.fromkeys("hidden_size d_model n_embd embed_dim embedding_size out_hidden_size".split(), 64),
    **dict.fromkeys("projection_dim encoder_hidden_size decoder_hidden_size hidden_dim dim".split(), 64),
    **dict.fromkeys("text_hidden_size word_embed_proj_dim backbone_hidden_size emb_dim".split(), 64),
    **dict.fromkeys("intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner".split(), 128),
    **dict.fromkeys("moe_intermediate_size mlp_dim shared_expert_intermediate_size".split(), 128),
    **dict.fromkeys("num_attention_heads num_heads n_head n_heads encoder_attention_heads".split(), 4),
    **dict.fromkeys("decoder_attention_heads attention_heads decoder_num_attention_heads".split(), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
}
_DEFAULTS = {"pad_token_id": 0, "decoder_start_token_id": 0, "vocab_size": VOCABULARY, "prediction_length": 8}
_SHRUNK: dict[str, frozenset[str]] = {
    "small": frozenset({"depth", "vocabulary", "width"}),
    "full width": frozenset({"depth", "vocabulary"}),
    "full width and vocabulary": frozenset({"depth"}),
}


def _shrink(config: Any, what: frozenset[str], tokens: dict[int, int] | None = None) -> Any:
    """The config with fewer layers, smaller widths and a smaller vocabulary, its parts alike."""
    tokens = {} if tokens is None else tokens
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    parts = {key: value for key, value in values.items() if hasattr(value, "to_dict")}
    layers = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), 0)
    kept = _kept_layers(values, layers)
    new: dict[str, Any] = {}
    for key, value in values.items():
        if key in parts:
            new[key] = _shrink(value, what, tokens)
        elif value is None and key in _DEFAULTS:
            new[key] = _DEFAULTS[key]
        elif isinstance(value, dict) and "rope_type" in value and "width" in what:
            new[key] = {**value, "mrope_section": [2, 3, 3]}  # half of the head size
        elif "width" in what and key == "num_key_value_heads" and value == values.get("num_attention_heads"):
            new[key] = min(value, 4)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            if key in _LAYERS:
                new[key] = min(value, len(kept))
            elif key in _EXPERTS:
                new[key] = min(value, _EXPERTS[key])
            elif "width" in what and key in _WIDTHS:
                new[key] = min(value, _WIDTHS[key])
            elif "vocabulary" in what and "vocab_size" in key:
                new[key] = min(value, VOCABULARY)
            elif "vocabulary" in what and "token" in key and ("id" in key or "index" in key):
                new[key] = _small_id(value, tokens)
        elif isinstance(value, (list, tuple)) and len(value) == layers > 2:
            new[key] = type(value)(value[index] for index in kept)
        elif isinstance(value, list) and "token_id" in key and "vocabulary" in what:
            new[key] = [_small_id(each, tokens) for each in value]
    for key, value in new.items():
        object.__setattr__(config, key, value)
    return config


def _kept_layers(values: dict[str, Any], layers: int) -> list[int]:
    """Of each kind of layer one, and at least two layers."""
    lists = [value for value in values.values() if isinstance(value, (list, tuple)) and len(value) == layers]
    first: dict[str, int] = {}
    for index in range(layers):
        first.setdefault(repr([each[index] for each in lists]), index)
    kept = list(first.values())[:4]
    return sorted(kept if len(kept) > 1 else {0, *kept, min(1, max(layers - 1, 0))})


def _small_id(id: int, tokens: dict[int, int]) -> int:
    if id < VOCABULARY:
        return id
    return tokens.setdefault(id, VOCABULARY - 1 - len(tokens))


def _setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that the config has, or a part of it."""
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict")]
    for name, place in itertools.product(names, (config, *parts)):
        value = getattr(place, name, None)
        if value is not None:
            return value
    for part in parts:
        value = _setting(part, *names)
        if value is not None:
            return value
    return default


_IMAGES = ("image", "patches", "images", "frames", "flat patches")
_AUDIO = ("features", "features by time", "wave", "wave of a channel")


def _transformers_variants(model: torch.nn.Module, sizes: str) -> Iterator[Variant]:
    names = inspect.signature(model.forward).parameters
    text = ("text",) if "input_ids" in names else ()
    grids = "image_grid_thw" in names or "grid_thw" in names
    images = [("patches",), *((kind,) for kind in _IMAGES)] if grids else [(kind,) for kind in _IMAGES]
    images = images if {"pixel_values", "hidden_states", "pixel_values_images"} & set(names) else [()]
    sounds = {"input_features", "input_values", "audio_values"} & set(names)
    audio = [(kind,) for kind in _AUDIO] if sounds else [()]
    decoder = ("decoder",) if "decoder_input_ids" in names else ()
    series = ("series",) if "past_values" in names else ()
    seen = set()
    for labels in (True, False) if {"labels", "return_loss"} & set(names) else (False,):
        wholes = [text + image + sound + series for image, sound in itertools.product(images, audio)]
        for inputs in (*wholes, text, *images, *audio):
            inputs += () if labels else decoder
            if inputs and (inputs, labels) not in seen:
                seen.add((inputs, labels))
                yield Variant(sizes, inputs, labels)


class _Inputs:
    """The keyword arguments of a transformers model, made from its config and its signature."""

    def __init__(self, model: torch.nn.Module, variant: Variant) -> None:
        self.config: Any = model.config
        self.kind = type(model).__name__
        self.names = set(inspect.signature(model.forward).parameters)
        self.variant = variant
        self.length = TOKENS + variant.image_tokens
        self.vocabulary = min(200, _setting(self.config, "vocab_size", default=VOCABULARY) - 1)

    def ids(self, length: int) -> torch.Tensor:
        return torch.randint(4, self.vocabulary, (ROWS, length))

    def arguments(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for kind in self.variant.inputs:
            made |= getattr(self, "make_" + kind.replace(" ", "_"))()
        if "return_loss" in self.names:
            made["return_loss"] = self.variant.labels
        if "bbox" in self.names:
            made["bbox"] = torch.zeros(ROWS, self.length, 4, dtype=torch.long)
        if self.variant.labels:
            made["labels"] = self.labels(made)
        return {name: value for name, value in made.items() if name in self.names}

    def make_text(self) -> dict[str, Any]:
        ids = self.ids(self.length)
        token = _setting(self.config, "image_token_id", "image_token_index", "audio_token_id")
        if token is not None and self.variant.image_tokens:
            ids[:, 1 : 1 + self.variant.image_tokens] = token
        return {"input_ids": ids, "mm_token_type_ids": (ids == token).long() if token is not None else None}

    def make_decoder(self) -> dict[str, Any]:
        return {"decoder_input_ids": self.ids(TOKENS)}

    def make_series(self) -> dict[str, Any]:
        length = _setting(self.config, "context_length", default=64)
        lags = getattr(self.config, "lags_sequence", None)
        channels = _setting(self.config, "num_input_channels", default=None)
        shape = (length,) if channels is None else (length, channels)
        past = (length + (max(lags) if lags else 0), *shape[1:])
        horizon = _setting(self.config, "prediction_length", default=8)
        features = _setting(self.config, "num_time_features", default=0)
        future = (horizon, *shape[1:])
        made = {
            "past_values": torch.randn(ROWS, *past),
            "past_observed_mask": torch.ones(ROWS, *past),
            "past_time_features": torch.randn(ROWS, past[0], features),
            "future_values": torch.randn(ROWS, *future),
            "future_time_features": torch.randn(ROWS, horizon, features),
        }
        return made

    # -- images ---------------------------------------------------------------------------------------

    def size(self) -> tuple[int, int]:
        size = _setting(self.config, "image_size", "input_size", "crop_size", default=64)
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))

    def channels(self) -> int:
        return _setting(self.config, "num_channels", "in_channels", "in_chans", default=3)

    def pixels(self, *more: int) -> torch.Tensor:
        return torch.randn(ROWS, *more, self.channels(), *self.size())

    def make_image(self) -> dict[str, Any]:
        return {
            "pixel_values": self.pixels(),
            "pixel_values_images": self.pixels(),
            "image_sizes": torch.tensor([self.size()] * ROWS),
        }

    def make_images(self) -> dict[str, Any]:
        return {"pixel_values": self.pixels(1), "image_sizes": torch.tensor([self.size()] * ROWS)}

    def make_frames(self) -> dict[str, Any]:
        return {
            "pixel_values": self.pixels(_setting(self.config, "num_frames", "frames_per_clip", default=4))
        }

    def make_patches(self) -> dict[str, Any]:
        """Of images of several sizes: patches one after the other, and each image's grid."""
        merged = _setting(self.config, "spatial_merge_size", default=2)
        side = 4 * merged
        patch = _setting(self.config, "patch_size", default=14)
        patch = patch if isinstance(patch, int) else patch[-1]
        width = self.channels() * _setting(self.config, "temporal_patch_size", default=1) * patch**2
        patches = torch.randn(ROWS * side * side, width)
        grid = torch.tensor([[1, side, side]] * ROWS)
        return {"pixel_values": patches, "hidden_states": patches, "image_grid_thw": grid, "grid_thw": grid}

    def make_flat_patches(self) -> dict[str, Any]:
        patch = _setting(self.config, "patch_size", default=16)
        patch = patch if isinstance(patch, int) else patch[-1]
        shapes = torch.tensor([[8, 8]] * ROWS)
        patches = torch.randn(ROWS, 64, self.channels() * patch**2)
        mask = torch.ones(ROWS, 64, dtype=torch.long)
        return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}

    # -- audio ----------------------------------------------------------------------------------------

    def make_features(self) -> dict[str, Any]:
        mel = _setting(self.config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        frames = 2 * _setting(self.config, "max_source_positions", default=64)
        if "input_features" not in self.names:
            frames = _setting(self.config, "max_length", default=frames)
            return {"input_values": torch.randn(ROWS, frames, mel)}
        return {"input_features": torch.randn(ROWS, mel, frames)}

    def make_features_by_time(self) -> dict[str, Any]:
        mel = _setting(self.config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
        names = {"num_mel_bins", "input_dim", "feature_projection_input_dim"}
        if _setting(self.config, *names) is not None:
            mel = _setting(self.config, "feature_projection_input_dim", "num_mel_bins", "input_dim")
        return {"input_features": torch.randn(ROWS, 128, mel)}

    def make_wave(self) -> dict[str, Any]:
        wave = torch.randn(ROWS, 8000)
        return {"input_values": wave, "input_features": wave, "audio_values": wave}

    def make_wave_of_a_channel(self) -> dict[str, Any]:
        channels = _setting(self.config, "audio_channels", default=1)
        wave = torch.randn(ROWS, channels if channels in (1, 2) else 1, 9600)
        return {"input_values": wave, "input_features": wave, "audio_values": wave}

    # -- labels ---------------------------------------------------------------------------------------

    def labels(self, made: dict[str, Any]) -> Any:
        if "ObjectDetection" in self.kind:
            one = {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) * 0.4 + 0.1}
            return [{key: value.clone() for key, value in one.items()} for _ in range(ROWS)]
        if "SemanticSegmentation" in self.kind:
            return torch.randint(0, 2, (ROWS, *self.size()))
        if "DepthEstimation" in self.kind:
            return torch.rand(ROWS, *self.size())
        if "ForCTC" in self.kind:
            return torch.randint(1, 20, (ROWS, 4))
        if "Classification" in self.kind and "Token" not in self.kind:
            return torch.randint(0, 2, (ROWS,))
        if "decoder_input_ids" in self.names or "input_ids" not in made:
            return self.ids(TOKENS)
        return made["input_ids"].clone()


# --------------------------------------------------------------------------------------- other libraries


def _timm() -> list[str]:
    known = set(importlib.import_module("timm").list_models())
    return [name for name in _TIMM.split() if name in known]


def _torchvision() -> list[str]:
    known = set(importlib.import_module("torchvision.models").list_models())
    return [name for name in _TORCHVISION.split() if name in known]


_TIMM = """
    resnet18 resnet50d resnext50_32x4d wide_resnet50_2 seresnet50 ecaresnet26t resnest14d
    res2net50_26w_4s resnetv2_50 resnet26t resnetrs50 densenet121 dla34 dpn48b selecsls42 skresnet18
    sknet50 vgg11_bn efficientnet_b0 tf_efficientnet_b0 tf_efficientnetv2_b0 mixnet_s mnasnet_small
    mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small fbnetc_100 ghostnet_050 ghostnetv2_100
    lcnet_050 hardcorenas_a rexnet_100 tinynet_e spnasnet_100 regnetx_002 regnety_002 repvgg_a0
    repghostnet_050 repvit_m0_9 nfnet_f0 dm_nfnet_f0 nf_resnet50 inception_v3 inception_v4
    inception_next_tiny xception41 hrnet_w18_small cspresnet50 darknet53 convnext_atto convnextv2_atto
    convmixer_768_32 efficientvit_b0 efficientvit_m0 vit_tiny_patch16_224 vit_small_patch14_dinov2
    deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 beitv2_base_patch16_224
    eva02_tiny_patch14_224 cait_xxs24_224 crossvit_tiny_240 coat_tiny coatnet_0_224 maxvit_tiny_tf_224
    levit_128s swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 pit_ti_224
    pvt_v2_b0 poolformer_s12 poolformerv2_s12 mixer_s32_224 gmlp_s16_224 resmlp_12_224 tnt_s_patch16_224
    tresnet_m twins_pcpvt_small visformer_tiny volo_d1_224 xcit_nano_12_p16_224 mobilevit_xxs
    mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small edgenext_xx_small efficientformer_l1
    efficientformerv2_s0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny hiera_tiny_224 davit_tiny
    sequencer2d_s starnet_s1 tiny_vit_5m_224 mambaout_femto rdnet_tiny vovnet39a
"""
_TORCHVISION = """
    alexnet vgg11 vgg13_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet
    inception_v3 squeezenet1_0 squeezenet1_1 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large
    mnasnet0_5 mnasnet1_0 shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 efficientnet_v2_s
    regnet_x_400mf regnet_y_400mf convnext_tiny vit_b_16 swin_t swin_v2_t maxvit_t
"""


def _normal(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(ROWS, *shape)


def _times() -> torch.Tensor:
    return torch.randint(0, 1000, (ROWS,))


_CHANNELS: dict[str, Any] = {"block_out_channels": (32, 64), "norm_num_groups": 8}
_VAE: dict[str, Any] = {
    **_CHANNELS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
_IDS = {"img_ids": lambda: torch.zeros(64, 3), "txt_ids": lambda: torch.zeros(8, 3)}
_CONDITIONED = {"sample": _normal(4, 32, 32), "timestep": _times, "encoder_hidden_states": _normal(8, 32)}

# Class -> arguments of its constructor, makers of the arguments of its forward.
_DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Callable[[], Any]]]] = {
    "UNet2DModel": (
        {
            **_CHANNELS,
            "sample_size": 32,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": _normal(3, 32, 32), "timestep": _times},
    ),
    "UNet2DConditionModel": (
        {
            **_CHANNELS,
            "sample_size": 32,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        _CONDITIONED,
    ),
    "UNet3DConditionModel": (
        {
            **_CHANNELS,
            "sample_size": 32,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        {**_CONDITIONED, "sample": _normal(4, 4, 32, 32)},
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 64),
            "sample_size": 256,
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 16,
            "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
            "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
            "mid_block_type": "UNetMidBlock1D",
        },
        {"sample": _normal(2, 256), "timestep": _times},
    ),
    "UNetMotionModel": (
        {
            **_CHANNELS,
            "sample_size": 32,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "cross_attention_dim": 32,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
        },
        {**_CONDITIONED, "sample": _normal(4, 4, 32, 32)},
    ),
    "UVit2DModel": (
        {
            "hidden_size": 64,
            "cond_embed_dim": 32,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": 32,
            "vocab_size": 64,
            "codebook_size": 60,
            "in_channels": 64,
            "block_out_channels": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "block_num_heads": 4,
            "intermediate_size": 128,
            "sample_size": 8,
        },
        {
            "input_ids": lambda: torch.randint(0, 60, (ROWS, 8, 8)),
            "encoder_hidden_states": _normal(8, 32),
            "pooled_text_emb": _normal(32),
            "micro_conds": _normal(5),
        },
    ),
    "AutoencoderKL": (_VAE, {"sample": _normal(3, 32, 32)}),
    "AsymmetricAutoencoderKL": (
        {
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (32, 64),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (32, 64),
        },
        {"sample": _normal(3, 32, 32)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (32, 32),
            "decoder_block_out_channels": (32, 32),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": _normal(3, 32, 32)},
    ),
    "VQModel": ({**_VAE, "num_vq_embeddings": 64}, {"sample": _normal(3, 32, 32)}),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2},
        {"sample": _normal(3, 32, 32), "num_frames": lambda: 1},
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "num_layers": 2, "sample_size": 16, "in_channels": 4, "out_channels": 8},
        {
            "hidden_states": _normal(4, 16, 16),
            "timestep": _times,
            "class_labels": lambda: torch.randint(0, 1000, (ROWS,)),
        },
    ),
    "PixArtTransformer2DModel": (
        {
            **_HEADS,
            "num_layers": 2,
            "sample_size": 16,
            "caption_channels": 32,
            "cross_attention_dim": 64,
            "use_additional_conditions": False,
        },
        {
            "hidden_states": _normal(4, 16, 16),
            "timestep": _times,
            "encoder_hidden_states": _normal(8, 32),
            "added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            **_HEADS,
            "num_layers": 2,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
        },
        {
            "hidden_states": _normal(4, 16, 16),
            "encoder_hidden_states": _normal(8, 32),
            "pooled_projections": _normal(32),
            "timestep": _times,
        },
    ),
    "FluxTransformer2DModel": (
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        {
            "hidden_states": _normal(64, 16),
            "encoder_hidden_states": _normal(8, 32),
            "pooled_projections": _normal(32),
            "timestep": lambda: torch.rand(ROWS),
            **_IDS,
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            **_HEADS,
            "sample_size": 16,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pos_embed_max_size": 64,
        },
        {
            "hidden_states": _normal(4, 16, 16),
            "encoder_hidden_states": _normal(8, 32),
            "timestep": lambda: torch.rand(ROWS),
        },
    ),
    "SanaTransformer2DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
            "caption_channels": 32,
            "sample_size": 16,
        },
        {"hidden_states": _normal(4, 16, 16), "encoder_hidden_states": _normal(8, 32), "timestep": _times},
    ),
    "CogVideoXTransformer3DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 32,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 16,
            "sample_height": 16,
            "sample_frames": 9,
            "max_text_seq_length": 8,
        },
        {"hidden_states": _normal(3, 4, 16, 16), "encoder_hidden_states": _normal(8, 32), "timestep": _times},
    ),
    "LTXVideoTransformer3DModel": (
        {
            **_HEADS,
            "in_channels": 16,
            "out_channels": 16,
            "cross_attention_dim": 64,
            "num_layers": 2,
            "caption_channels": 32,
        },
        {
            "hidden_states": _normal(32, 16),
            "encoder_hidden_states": _normal(8, 32),
            "timestep": _times,
            "encoder_attention_mask": lambda: torch.ones(ROWS, 8),
            "num_frames": lambda: 2,
            "height": lambda: 4,
            "width": lambda: 4,
        },
    ),
    "WanTransformer3DModel": (
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 128,
            "num_layers": 2,
        },
        {"hidden_states": _normal(4, 2, 16, 16), "encoder_hidden_states": _normal(8, 32), "timestep": _times},
    ),
    "MochiTransformer3DModel": (
        {
            **_HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "in_channels": 4,
            "text_embed_dim": 32,
            "time_embed_dim": 32,
            "max_sequence_length": 8,
        },
        {
            "hidden_states": _normal(4, 2, 16, 16),
            "encoder_hidden_states": _normal(8, 32),
            "timestep": _times,
            "encoder_attention_mask": lambda: torch.ones(ROWS, 8, dtype=torch.bool),
        },
    ),
    "PriorTransformer": (
        {**_HEADS, "num_layers": 2, "embedding_dim": 32, "num_embeddings": 8},
        {
            "hidden_states": _normal(32),
            "timestep": _times,
            "proj_embedding": _normal(32),
            "encoder_hidden_states": _normal(8, 32),
        },
    ),
    "T5FilmDecoder": (
        {"input_dims": 32, "targets_length": 16, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16},
        {
            "encodings_and_masks": lambda: [(torch.randn(ROWS, 8, 64), torch.ones(ROWS, 8))],
            "decoder_input_tokens": _normal(16, 32),
            "decoder_noise_time": lambda: torch.rand(ROWS),
        },
    ),
}
