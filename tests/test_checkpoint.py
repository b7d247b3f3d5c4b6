"""The packed folder: a width is a prefix of files, and whatever is wrong with one is said before a weight is used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model, some_ids
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import otaro
from otaro import packing, sefp
from otaro.checkpoint import PackedFolder
from otaro.cli import main
from otaro.engine.engine import Engine
from otaro.errors import FormatError, OtaroError, PrecisionError, SourceError, WeightError
from otaro.ops import reference
from otaro.precision import WIDEST, Precision
from otaro.sefp import Format
from otaro.sources.scales import save_scales


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    random_model("qwen2", torch.bfloat16).save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool.jinja").write_text("{{ messages }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "model"
    otaro.pack(plain, folder)
    return folder


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copied"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_hold_exactly_the_planes_of_the_weights(plain: Path, packed: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(packed.glob("model-m*.safetensors")):
        stored |= load_file(path)
    for name, weight in weights.items():
        if "norm" in name or "bias" in name:
            assert torch.equal(stored.pop(name), weight)
            continue
        planes = packing.pack(sefp.encode(weight))
        module = name.removesuffix(".weight")
        assert torch.equal(stored.pop(f"{module}.sefp_base"), planes.base)
        assert torch.equal(stored.pop(f"{module}.sefp_scale"), planes.scale)
        for bit, plane in enumerate(planes.bits, 4):
            assert torch.equal(stored.pop(f"{module}.sefp_bit{bit}"), plane)
    assert not stored


def test_the_first_file_holds_what_embeddings_need_at_their_floor(packed: Path) -> None:
    with safe_open(packed / "model-m3.safetensors", "pt") as file:
        bits = {name for name in file.keys() if "sefp_bit" in name}  # noqa: SIM118
    assert bits == {"model.embed_tokens.sefp_bit4", "lm_head.sefp_bit4"}


@pytest.mark.parametrize("format", [Format(), Format("truncate"), Format("nearest", 32)], ids=str)
def test_cutting_gives_the_bytes_of_packing_to_that_width(plain: Path, tmp_path: Path, format: Format) -> None:
    otaro.pack(plain, tmp_path / "whole", format=format)
    for precision in Precision:
        otaro.cut(tmp_path / "whole", tmp_path / f"cut-{precision}", precision)
        otaro.pack(plain, tmp_path / f"pack-{precision}", format=format, precision=precision)
        assert contents(tmp_path / f"cut-{precision}") == contents(tmp_path / f"pack-{precision}")
        info = otaro.verify(tmp_path / f"cut-{precision}")
        assert info.precisions == [width for width in Precision if width <= precision]


def test_packing_is_reproducible(plain: Path, packed: Path, tmp_path: Path) -> None:
    otaro.pack(plain, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(packed)


def test_sharded_files_hold_the_same_model(plain: Path, packed: Path, tmp_path: Path) -> None:
    info = otaro.pack(plain, tmp_path / "sharded", max_shard_size=8_000)
    assert "model-m3-00001-of-00005.safetensors" in info.files
    assert json.loads((tmp_path / "sharded/model-m3.safetensors.index.json").read_text())["weight_map"]
    assert otaro.verify(tmp_path / "sharded").packed_parameters == otaro.inspect(packed).packed_parameters
    for precision in ("E5M8", "E5M3"):
        ours, theirs = otaro.load(tmp_path / "sharded", precision), otaro.load(packed, precision)
        with torch.no_grad():
            assert torch.equal(ours(some_ids()).logits, theirs(some_ids()).logits)
    otaro.cut(tmp_path / "sharded", tmp_path / "cut", "E5M4")
    otaro.pack(plain, tmp_path / "direct", precision="E5M4", max_shard_size=8_000)
    assert contents(tmp_path / "cut") == contents(tmp_path / "direct")
    next((tmp_path / "cut").glob("model-m3-00002*")).unlink()
    with pytest.raises(FormatError, match=r"model-m3-00002-of-00005\.safetensors is missing"):
        otaro.load(tmp_path / "cut")


def test_a_width_opens_its_own_files_only(packed: Path) -> None:
    code = f"""
        import sys
        opened = set()
        sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
        import otaro
        otaro.load({str(packed)!r}, "E5M4")
        print(sorted(p.rsplit("/", 1)[1] for p in opened if p.startswith({str(packed)!r}) and "model-m" in p))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['model-m3.safetensors', 'model-m4.safetensors']"


def test_deleting_files_from_the_right_leaves_a_valid_model(copied: Path) -> None:
    whole = otaro.load(copied, "E5M5")
    for bit in (6, 7, 8):
        (copied / f"model-m{bit}.safetensors").unlink()
    assert otaro.verify(copied).precisions == [Precision.E5M5, Precision.E5M4, Precision.E5M3]
    left = otaro.load(copied)
    assert left.precision is Precision.E5M5
    with torch.no_grad():
        assert torch.equal(left(some_ids()).logits, whole(some_ids()).logits)
    with pytest.raises(
        FormatError, match=r"model-m6.safetensors is missing: this folder holds E5M5, E5M4, E5M3; fetch"
    ):
        otaro.load(copied, "E5M8")


def test_info_counts_what_is_there(plain: Path, packed: Path) -> None:
    info = otaro.inspect(packed)
    weights = load_file(plain / "model.safetensors")
    assert info.parameters == sum(weight.numel() for weight in weights.values())
    sizes = {path.name: path.stat().st_size for path in packed.glob("*.safetensors")}
    assert info.files == sizes
    assert info.size(Precision.E5M4) == sizes["model-m3.safetensors"] + sizes["model-m4.safetensors"]
    assert info.architecture == "Qwen2ForCausalLM"
    assert info.source == "model"
    assert json.loads(json.dumps(info.to_json()))["precisions"]["E5M3"]["bytes"] == info.size(Precision.E5M3)
    # 48 and 80 columns are padded to 64 and 128.
    padded = sum(packing.padded_columns(w.shape[1], Format()) * w.shape[0] for w in weights.values() if w.dim() == 2)
    assert info.bits_per_weight(WIDEST) == pytest.approx((9 + 8 / 64) * padded / info.packed_parameters, rel=1e-3)


# ---- what is wrong with a folder is said in one sentence, before any weight is used ----------------------------------


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def renamed(path: Path) -> None:
    shutil.copyfile(path.with_name("model-m5.safetensors"), path)


def change_header(key: str, value: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(load_file(path), path, metadata | {key: value})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "model-m4.safetensors is missing"),
        (truncated, "model-m4.safetensors is truncated"),
        (altered, "model-m4.safetensors was altered"),
        (renamed, "holds E5M5, not E5M4"),
        (change_header("sefp_pack", "1" * 64), "comes from another pack"),
        (change_header("sefp_version", "7"), "format version 7, .*: upgrade otaro"),
        (change_header("sefp_layout", "{}"), "does not describe a format"),
        (change_header("sefp_width", "E5M3"), "holds E5M3, not E5M4"),
        (change_header("extra", "text"), "was altered"),
        (lambda path: path.write_bytes(b""), "is truncated"),
        (lambda path: path.write_bytes(b"\xff" * 64), "is corrupt"),
    ],
)
def test_a_bad_file_is_named(copied: Path, change: Callable[[Path], None], message: str) -> None:
    change(copied / "model-m4.safetensors")
    for action in (
        lambda: otaro.verify(copied),
        lambda: otaro.load(copied, "E5M5"),
        lambda: otaro.load(copied, "E5M4"),
    ):
        with pytest.raises(FormatError, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)
    if change is not Path.unlink:
        assert otaro.load(copied, "E5M3").precision is Precision.E5M3  # its own file is as it was
    with pytest.raises(OtaroError):
        otaro.cut(copied, copied.with_name("out"), "E5M4")
    assert not copied.with_name("out").exists()


def test_a_file_of_another_pack_is_noticed(packed: Path, copied: Path, tmp_path: Path) -> None:
    model = random_model("qwen2", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 0.01
    model.save_pretrained(tmp_path / "plain")
    otaro.pack(tmp_path / "plain", tmp_path / "other")
    shutil.copyfile(tmp_path / "other/model-m5.safetensors", copied / "model-m5.safetensors")
    with pytest.raises(FormatError, match=r"model-m5\.safetensors comes from another pack"):
        otaro.load(copied)
    assert otaro.load(copied, "E5M4").precision is Precision.E5M4


def change_config(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads(path.read_text())
        config["quantization_config"] |= fields
        path.write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "no config.json"),
        (lambda path: path.write_text("{"), "not valid JSON"),
        (lambda path: path.write_text("[]"), "not a JSON object"),
        (lambda path: path.write_text("{}"), "is not a packed model: run `otaro pack"),
        (change_config(version=99), "format version 99, .*: upgrade otaro"),
        (change_config(version=None), "no format version"),
        (change_config(scheme="other"), "does not describe a format"),
        (change_config(group_size=32), "another format than config.json says"),
        (change_config(widths=["E5M9"]), "does not list the widths"),
        (change_config(widths=[]), "does not list the widths"),
        (change_config(group_size=64.0), "does not describe a format"),
    ],
)
def test_a_bad_config_is_named(copied: Path, change: Callable[[Path], None], message: str) -> None:
    change(copied / "config.json")
    for action in (otaro.inspect, otaro.verify, otaro.load):
        with pytest.raises(OtaroError, match=message):
            action(copied)


def test_folders_that_are_not_packed_models(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not exist"):
        otaro.inspect(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"no config\.json"):
        otaro.load(tmp_path)
    with pytest.raises(FormatError, match="is not a packed model"):
        otaro.load(plain)
    for missing in ("/no/such/folder", "./nofolder", "nofolder"):
        with pytest.raises(FormatError, match="does not exist"):
            otaro.load(missing)


def test_an_architecture_that_transformers_does_not_know(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "llama99"}))
    with pytest.raises(FormatError, match="config.json of .* cannot be used"):
        otaro.load(copied)


def test_an_index_that_names_no_files(plain: Path, tmp_path: Path) -> None:
    otaro.pack(plain, tmp_path / "sharded", max_shard_size=8_000)
    index = tmp_path / "sharded/model-m3.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {}}', "names no weight files"),
        ("{}", "is not an index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside the folder"),
    ):
        index.write_text(text)
        with pytest.raises(FormatError, match=message):
            otaro.inspect(tmp_path / "sharded")


def test_precisions_that_cannot_be_had(packed: Path, tmp_path: Path) -> None:
    otaro.cut(packed, tmp_path / "cut", "E5M4")
    with pytest.raises(PrecisionError, match="does not hold precision E5M6: it holds E5M4, E5M3"):
        otaro.load(tmp_path / "cut", "E5M6")
    with pytest.raises(PrecisionError, match="does not hold precision E5M6"):
        otaro.cut(tmp_path / "cut", tmp_path / "more", "E5M6")
    with pytest.raises(PrecisionError, match="unknown precision"):
        otaro.load(packed, "E5M2")


# ---- nothing half-written --------------------------------------------------------------------------------------------


def test_an_existing_folder_is_left_alone(plain: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    for action in (lambda: otaro.pack(plain, tmp_path / "out"), lambda: otaro.cut(packed, tmp_path / "out", "E5M3")):
        with pytest.raises(OtaroError, match="exists already"):
            action()
    assert contents(tmp_path / "out") == {"mine": b"mine"}
    with pytest.raises(OtaroError, match="there is no folder"):
        otaro.pack(plain, tmp_path / "no/such/place")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_the_packing(tmp_path: Path, bad: float) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 7] = bad
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(WeightError, match=r"tensor model.layers.1.mlp.down_proj.weight holds (nan|inf) at \[3, 7\]"):
        otaro.pack(tmp_path / "plain", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_a_clamped_exponent_is_counted(tmp_path: Path) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] = 1e-6
        model.model.layers[0].mlp.up_proj.weight[1, 5] = 1e6
        model.model.layers[0].mlp.up_proj.weight[2] = 0
    model.save_pretrained(tmp_path / "plain")
    assert otaro.pack(tmp_path / "plain", tmp_path / "out").clamped_groups == 2


def test_no_room_is_said_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OtaroError, match=r"only 0\.0 MB are free"):
        otaro.pack(plain, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    try:
        code = main(["pack", str(plain), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    said = capfd.readouterr().err
    assert "out cannot be written: File too large; free some space or choose another folder" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", [signal.SIGINT, signal.SIGKILL])
def test_stopping_midway_leaves_no_folder_of_that_name(tmp_path: Path, moment: signal.Signals) -> None:
    folder = tmp_path / "plain"
    random_model("llama").save_pretrained(folder)
    code = f"""
        import signal, sys, time
        from otaro import checkpoint, ops
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
        pack = ops.pack
        def slow(*args):
            print("packing", flush=True)
            time.sleep(0.5)
            return pack(*args)
        ops.pack = slow
        from otaro.cli import main
        sys.argv = ["otaro", "pack", {str(folder)!r}, {str(tmp_path / "out")!r}]
        sys.exit(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    time.sleep(0.1)
    process.send_signal(moment)
    _, errors = process.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    if moment is signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_memory_stays_small_whatever_the_model_size(tmp_path: Path) -> None:
    """Packs over 500 MB in tensors of 8 MB: far less than the model may stay in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    columns, layers = 1024, 16
    config = LlamaConfig(
        hidden_size=columns,
        intermediate_size=4 * columns,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=1000,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    (tmp_path / "big").mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "big")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)
        for name, shape in shapes.items()
        if name != "lm_head.weight"
    }
    save_file(tensors, tmp_path / "big/model.safetensors", {"format": "pt"})
    total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    del tensors
    assert total > 5e8
    code = f"""
        import re, torch, otaro
        from otaro import checkpoint, hf, sources
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
        otaro.quantize(torch.randn(64, 64), "E5M3")
        before = peak()
        otaro.pack({str(tmp_path / "big")!r}, {str(tmp_path / "out")!r})
        print(before, peak())
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    before, peak = map(int, run.stdout.split())
    # What importing torch and transformers takes is not the packing's; 500 MB are allowed for both together.
    assert peak - before < 4 * largest + 100e6
    shutil.rmtree(tmp_path / "big")


def test_headers_are_read_by_the_usual_library(packed: Path) -> None:
    folder = PackedFolder(packed)
    for ours in folder.check_headers(WIDEST):
        with safe_open(ours.path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118
                assert file.get_tensor(name).numel()
    assert os.access(packed / "config.json", os.R_OK)


@pytest.mark.parametrize("version, remedy", [(0, "pack the model again"), (1, "pack the model again"), (3, "upgrade")])
def test_other_versions_are_refused(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, remedy: str
) -> None:
    with monkeypatch.context() as patched:
        for place in ("otaro.checkpoint", "otaro.checkpoint.writer", "otaro.checkpoint.folder"):
            patched.setattr(f"{place}.VERSION", version)
        otaro.pack(plain, tmp_path / "other")
    for read in (otaro.inspect, otaro.verify, otaro.load):
        with pytest.raises(FormatError, match=f"version {version}.*{remedy}"):
            read(tmp_path / "other")


@pytest.mark.parametrize("byte", [0x80, 0x03, 0x7C, 0xFF])
def test_a_byte_that_is_no_scale_is_refused(plain: Path, tmp_path: Path, byte: int) -> None:
    def spoil(weight: torch.Tensor, format: Format, scale: torch.Tensor | None = None) -> Any:
        planes, counts = reference.pack(weight, format, scale)
        planes.scale.view(-1)[0] = byte
        return planes, counts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("otaro.ops.pack", spoil)
        otaro.pack(plain, tmp_path / "spoilt")
    for read in (otaro.load, Engine):
        with pytest.raises(FormatError, match="no scale"):
            read(tmp_path / "spoilt")


def test_scales_that_come_with_weights_are_packed(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(plain, folder)
    weights = load_file(plain / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    found = sefp.group_scales(weights[name], Format())
    given = torch.where(found & 127 < 0x70, found + 1, found)  # one size larger
    save_scales(folder, {name: given}, weights, Format())

    def packed(out: str, format: Format = Format()) -> torch.Tensor:
        otaro.pack(folder, tmp_path / out, format=format)
        return load_file(tmp_path / out / "model-m3.safetensors")["model.layers.0.mlp.up_proj.sefp_scale"]

    assert not torch.equal(found, given)
    assert torch.equal(packed("with"), given)
    # One entry: the library writes several in an order that differs from run to run.
    with safe_open(folder / "sefp_scales.safetensors", "pt") as file:
        assert len(file.metadata()) == 1
    assert torch.equal(packed("other", Format(group_size=32)), sefp.group_scales(weights[name], Format(group_size=32)))
    save_file({**weights, name: weights[name] + 0.001}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(packed("changed"), sefp.group_scales(weights[name] + 0.001, Format()))
    (folder / "sefp_scales.safetensors").write_bytes(b"spoilt")
    with pytest.raises(SourceError, match="sefp_scales.safetensors"):
        packed("spoilt")
