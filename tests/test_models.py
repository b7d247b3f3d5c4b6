"""Every supported architecture: packs, loads, switches, generates, saves, and computes what its weights say."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import NAMES, SMALL, VOCABULARY, random_model, some_ids
from transformers import AutoModelForCausalLM

import otaro
from otaro import convert
from otaro.errors import OtaroError, PrecisionError
from otaro.hf import OtaroConfig
from otaro.model_config import context_length
from otaro.nn import FakeSefpLinear
from otaro.precision import Precision
from otaro.sefp import Format


@pytest.fixture(scope="module", params=NAMES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A random model, its Hugging Face folder and its packed folder."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param)
    model.save_pretrained(folder / "plain")
    otaro.pack(folder / "plain", folder / "packed")
    return model, folder / "plain", folder / "packed"


@torch.no_grad()
def with_quantized_weights(model: Any, precision: Precision, floor: Precision = Precision.E5M4) -> torch.Tensor:
    """Logits of a plain copy of the model whose weights are replaced by hand, one parameter at a time."""
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("eager") if "moe" in model.config.model_type else None
    head = {id(plain.get_input_embeddings().weight), id(plain.get_output_embeddings().weight)}
    for name, parameter in plain.named_parameters():
        kept = ("norm", "bias", "router", "gate.weight", "ln_")
        if any(part in name for part in kept) or parameter.dim() < 2:
            continue
        width = max(precision, floor) if id(parameter) in head or ".wpe." in name else precision
        if (model.config.model_type == "gpt_oss" and "experts" in name) or ".c_" in name:
            parameter.copy_(otaro.quantize(parameter.transpose(-1, -2).contiguous(), width).transpose(-1, -2))
        else:
            parameter.copy_(otaro.quantize(parameter, width))
    return plain(some_ids()).logits


@torch.no_grad()
def test_logits_at_every_width_are_those_of_the_quantized_weights(packed: tuple[Any, Path, Path]) -> None:
    model, _, folder = packed
    loaded = otaro.load(folder)
    seen = []
    for precision in Precision:
        loaded.set_precision(precision)
        logits = loaded(some_ids()).logits
        # The same arithmetic on the same values; the order of sums in a fused expert loop may differ.
        torch.testing.assert_close(logits, with_quantized_weights(model, precision), rtol=1e-5, atol=1e-5)
        seen.append(logits)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    full = model(some_ids()).logits
    errors = [float((logits - full).square().mean()) for logits in seen]
    assert errors[0] < errors[3] < errors[5]


@torch.no_grad()
def test_loaded_by_transformers_it_is_the_same_model(packed: tuple[Any, Path, Path]) -> None:
    _, _, folder = packed
    ours, theirs = otaro.load(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == ours.config.architectures[0]
    for precision in ("E5M8", "E5M3"):
        ours.set_precision(precision)
        theirs.set_precision(precision)
        assert torch.equal(ours(some_ids()).logits, theirs(some_ids()).logits)


@torch.no_grad()
def test_saving_and_loading_gives_the_same_bytes_and_logits(packed: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, _, folder = packed
    for precision in ("E5M8", "E5M4"):
        loaded = otaro.load(folder, precision)
        loaded.save_pretrained(tmp_path / precision)
        again = otaro.load(tmp_path / precision)
        assert again.precisions == loaded.precisions
        assert torch.equal(again(some_ids()).logits, loaded(some_ids()).logits)
        otaro.verify(tmp_path / precision)
        for name in otaro.inspect(tmp_path / precision).files:
            assert (tmp_path / precision / name).read_bytes() == (folder / name).read_bytes()


@torch.no_grad()
def test_quantising_while_loading_is_packing(packed: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, plain, folder = packed
    quick = AutoModelForCausalLM.from_pretrained(plain, quantization_config=OtaroConfig())
    assert torch.equal(quick(some_ids()).logits, otaro.load(folder)(some_ids()).logits)
    quick.save_pretrained(tmp_path / "saved")
    for name in otaro.inspect(folder).files:
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()


def test_it_generates_at_every_width(packed: tuple[Any, Path, Path]) -> None:
    loaded = otaro.load(packed[2])
    for precision in loaded.precisions:
        with loaded.at_precision(precision):
            ids = loaded.generate(some_ids(), max_new_tokens=5, do_sample=False)
        assert ids.shape == (2, 16)
        assert int(ids.max()) < VOCABULARY


def test_simulated_layers_compute_what_packed_ones_do_and_train(packed: tuple[Any, Path, Path]) -> None:
    _, plain, folder = packed
    loaded, tuned = otaro.load(folder), AutoModelForCausalLM.from_pretrained(plain)
    names = set(tuned.state_dict())
    convert.simulate(tuned, Format())
    assert set(tuned.state_dict()) == names
    full = tuned(some_ids()).logits
    for precision in (Precision.E5M6, Precision.E5M3):
        loaded.set_precision(precision)
        convert.set_precision(tuned, precision)
        with torch.no_grad():
            torch.testing.assert_close(tuned(some_ids()).logits, loaded(some_ids()).logits, rtol=1e-5, atol=1e-5)
    tuned(some_ids(), labels=some_ids()).loss.backward()
    for name, parameter in tuned.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name
    for layer in convert.sefp_layers(tuned).values():
        layer.precision = None
    assert torch.equal(tuned(some_ids()).logits, full)


@pytest.mark.parametrize("scheme", ["truncate", "nearest"])
@torch.no_grad()
def test_the_other_schemes_run_and_match_their_simulation(scheme: str, tmp_path: Path) -> None:
    random_model("llama-tied", torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    format = Format(scheme, 32)
    otaro.pack(tmp_path / "plain", tmp_path / "packed", format=format)
    loaded = otaro.load(tmp_path / "packed", dtype=torch.bfloat16)
    convert.simulate(model, format)
    for precision in Precision:
        loaded.set_precision(precision)
        convert.set_precision(model, precision)
        assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)
    narrow = otaro.load(tmp_path / "packed", "E5M3", dtype=torch.bfloat16)
    assert torch.equal(narrow(some_ids()).logits, loaded(some_ids()).logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_model("llama-tied").save_pretrained(folder / "plain")
    otaro.pack(folder / "plain", folder / "packed")
    return folder / "packed"


@torch.no_grad()
def test_switching_neither_copies_nor_reads(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "folder")
    model = otaro.load(folder)
    wide = model(some_ids()).logits
    pointers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    shutil.rmtree(folder)
    model.set_precision("E5M3")
    narrow = model(some_ids()).logits
    model.set_precision("E5M8")
    assert torch.equal(model(some_ids()).logits, wide)
    assert not torch.equal(narrow, wide)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == pointers


def test_the_tied_head_shares_the_planes_but_not_the_precision(llama: Path) -> None:
    model = otaro.load(llama)
    table, head = model.model.embed_tokens, model.lm_head
    assert head.planes.base.data_ptr() == table.planes.base.data_ptr()
    assert not [name for name in model.state_dict() if name.startswith("lm_head")]
    model.set_precision("E5M5", {"lm_head": "E5M8"})
    assert (table.precision, head.precision) == (Precision.E5M5, Precision.E5M8)
    assert not torch.equal(table.weight, head.weight)
    copied = copy.deepcopy(model)
    assert copied.lm_head.planes.base.data_ptr() == copied.model.embed_tokens.planes.base.data_ptr()
    assert copied.lm_head.planes.base.data_ptr() != head.planes.base.data_ptr()


@torch.no_grad()
def test_overrides_by_layer_and_for_a_block_of_code(llama: Path) -> None:
    model = otaro.load(llama)
    before = model(some_ids()).logits
    with model.at_precision("E5M3", {"model.layers.0.*": "E5M7", "model.layers.0.mlp.*": "E5M6"}):
        assert model.precision is Precision.E5M3
        assert model.model.layers[0].self_attn.q_proj.precision is Precision.E5M7
        assert model.model.layers[0].mlp.up_proj.precision is Precision.E5M6
        assert model.model.layers[1].mlp.up_proj.precision is Precision.E5M3
        embedding = model.model.embed_tokens
        assert (embedding.precision, embedding.width) == (Precision.E5M3, Precision.E5M4)  # its floor
        assert not torch.equal(model(some_ids()).logits, before)
    assert model.precision is Precision.E5M8
    assert torch.equal(model(some_ids()).logits, before)
    with pytest.raises(ZeroDivisionError), model.at_precision("E5M3"):
        raise ZeroDivisionError
    assert torch.equal(model(some_ids()).logits, before)


def test_a_precision_that_is_not_there_changes_nothing(llama: Path) -> None:
    model = otaro.load(llama, "E5M5")
    assert model.precisions == [Precision.E5M5, Precision.E5M4, Precision.E5M3]
    model.set_precision("E5M4")
    with pytest.raises(PrecisionError, match="E5M8 is not loaded: this model holds E5M5, E5M4, E5M3"):
        model.set_precision("E5M8")
    with pytest.raises(PrecisionError, match="unknown precision"):
        model.set_precision("E4M3")
    with pytest.raises(PrecisionError, match="no layer matches 'transformer"):
        model.set_precision("E5M3", {"transformer.*": "E5M4"})
    with pytest.raises(PrecisionError, match="E5M7 is not loaded"):
        model.set_precision("E5M3", {"lm_head": "E5M7"})
    assert model.precision is Precision.E5M4
    assert {layer.precision for layer in convert.sefp_layers(model).values()} == {Precision.E5M4}


def test_saving_refuses_what_it_cannot_do(llama: Path, tmp_path: Path) -> None:
    model = otaro.load(llama)
    with pytest.raises(OtaroError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    with pytest.raises(OtaroError, match="holds a model already"):
        model.save_pretrained(llama)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_saving_beside_a_tokenizer_and_in_the_original_type(tmp_path: Path) -> None:
    random_model("llama-tied", torch.bfloat16).save_pretrained(tmp_path / "plain")
    otaro.pack(tmp_path / "plain", tmp_path / "packed")
    model = otaro.load(tmp_path / "packed", dtype=torch.float32)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/tokenizer.json").write_text("{}")
    model.save_pretrained(tmp_path / "saved", is_main_process=True)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        *(path.name for path in (tmp_path / "packed").iterdir()),
        "tokenizer.json",
    }
    for name in otaro.inspect(tmp_path / "packed").files:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"


def test_using_a_packed_model_keeps_no_decoded_weights(llama: Path) -> None:
    model = otaro.load(llama)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model(some_ids()).logits.grad_fn is None


def test_experts_that_are_used_as_a_whole_stay_as_they_are(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size_mlp=80, num_local_experts=4, head_dim=12, interleave_moe_layer_step=1
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "plain")
    otaro.pack(tmp_path / "plain", tmp_path / "packed")
    loaded = otaro.load(tmp_path / "packed", "E5M4")
    with torch.no_grad():
        assert loaded(some_ids()).logits.shape == (2, 11, VOCABULARY)
    assert torch.equal(
        loaded.model.layers[0].feed_forward.experts.down_proj, model.model.layers[0].feed_forward.experts.down_proj
    )


def test_a_simulated_layer_made_by_hand() -> None:
    layer = FakeSefpLinear(64, 3)
    x = torch.randn(2, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    layer.precision = Precision.E5M3
    expected = torch.nn.functional.linear(x, otaro.quantize(layer.weight, "E5M3"), layer.bias)
    assert torch.equal(layer(x), expected)


def test_a_model_whose_every_parameter_is_packed_runs(tmp_path: Path) -> None:
    """Its norms have no weights, and transformers asks the first parameter for type and device."""
    torch.manual_seed(0)
    transformers.OlmoForCausalLM(transformers.OlmoConfig(**SMALL)).save_pretrained(tmp_path / "plain")
    otaro.pack(tmp_path / "plain", tmp_path / "packed")
    model = otaro.load(tmp_path / "packed", "E5M4", dtype=torch.bfloat16)
    assert not list(model.parameters())
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert model.generate(some_ids(), max_new_tokens=2, do_sample=False).shape == (2, 13)


def test_embeddings_that_a_model_scales_in_place() -> None:
    sizes = {"n_embd": 64, "dff": 80, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes))
    convert.simulate(model, Format())
    convert.set_precision(model, Precision.E5M4)
    model(some_ids(), labels=some_ids()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Shared(torch.nn.Module):
    """Weights that are shared by layers, none of them a head."""

    def __init__(self) -> None:
        super().__init__()
        self.all_tied_weights_keys = {"second.weight": "first.weight", "last.weight": "middle.weight"}
        self.first, self.second = torch.nn.Embedding(7, 64), torch.nn.Embedding(7, 64)
        self.middle, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.second.weight, self.last.weight = self.first.weight, self.middle.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(ids) + self.second(ids)))


@torch.no_grad()
def test_tied_weights_that_are_no_head() -> None:
    torch.manual_seed(0)
    simulated, ids = Shared(), torch.arange(7)
    packed = copy.deepcopy(simulated)
    convert.simulate(simulated, Format())
    convert.pack(packed, Format())
    for precision in Precision:
        for model in (simulated, packed):
            convert.set_precision(model, precision)
        widths = [max(precision, Precision.E5M4)] * 2 + [precision] * 2
        assert [layer.width for layer in convert.sefp_layers(packed).values()] == widths
        torch.testing.assert_close(simulated(ids), packed(ids))


@pytest.mark.parametrize(
    "config, expected",
    [
        (transformers.LlamaConfig(max_position_embeddings=96), 96),
        (transformers.MptConfig(max_seq_len=256), 256),
        (transformers.GPT2Config(n_positions=64), 64),
        (transformers.XLNetConfig(), 2048),
        (transformers.MambaConfig(), 2048),
    ],
)
def test_how_long_a_context_may_be(config: Any, expected: int) -> None:
    assert context_length(SimpleNamespace(config=config)) == expected


@torch.no_grad()
def test_a_precision_given_while_packing_in_memory(llama: Path) -> None:
    plain = llama.with_name("plain")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=OtaroConfig(precision="E5M5"))
    assert model.precision is Precision.E5M5
    assert torch.equal(model(some_ids()).logits, otaro.load(llama, "E5M5")(some_ids()).logits)


@torch.no_grad()
def test_half_precision_models_compute_in_half_precision(tmp_path: Path) -> None:
    random_model("gemma3", torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    otaro.pack(tmp_path / "plain", tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert loaded(some_ids()).logits.dtype == torch.bfloat16
    assert otaro.load(tmp_path / "packed")(some_ids()).logits.dtype == torch.float32
    convert.simulate(model, Format())
    convert.set_precision(model, Precision.E5M8)
    assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)
    loaded.to(torch.float32)
    assert loaded(some_ids()).logits.dtype == torch.float32


@torch.no_grad()
def test_gradients_reach_the_input_of_packed_layers(llama: Path) -> None:
    layer = otaro.load(llama).model.layers[0].mlp.up_proj
    with torch.enable_grad():
        x = torch.randn(2, 48, requires_grad=True)
        layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


def test_compiled_it_stays_whole_and_the_same(llama: Path) -> None:
    layer = otaro.load(llama).model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(3, 48)
    with torch.no_grad():
        for precision in Precision:
            layer.precision = precision
            assert torch.equal(compiled(x), layer(x))


def test_without_otaro_the_folder_is_not_mistaken_for_a_model(llama: Path) -> None:
    """No tensor in the files may carry the name of a weight that transformers would load as it is."""
    model = transformers.AutoModelForCausalLM.from_config(random_model("llama-tied").config)
    expected = {name for name, _ in convert.find_targets(model).items()}
    from otaro.safetensors_file import SafetensorsFile

    for path in llama.glob("*.safetensors"):
        with SafetensorsFile(path) as file:
            assert not expected & set(file.tensors)
