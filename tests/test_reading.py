"""Weight files are read once, from end to end, and what was altered is refused wherever it is read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import otaro
from otaro.checkpoint import PackedFolder
from otaro.engine.architecture import UnsupportedError
from otaro.engine.engine import Engine
from otaro.errors import FormatError
from otaro.export import export_gguf
from otaro.packing import Planes, plane_key
from otaro.precision import NARROWEST, Precision
from otaro.safetensors_file import SafetensorsFile

FILES = [f"model-m{precision.mantissa}.safetensors" for precision in sorted(Precision)]


@pytest.fixture(scope="module")
def folder(packed_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed folder of 4 MB, so large that headers and settings do not count."""
    path = tmp_path_factory.mktemp("reading")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(path / "plain")
    otaro.pack(path / "plain", path / "packed")
    for tokenizer in packed_llama.glob("tokenizer*"):
        shutil.copyfile(tokenizer, path / "packed" / tokenizer.name)
    return path / "packed"


def load_in_background(folder: Path) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    engine.finish_loading()
    assert engine.precision == Precision.E5M8


def drop_and_raise(folder: Path) -> None:
    engine = Engine(folder, "E5M3", threads=1)
    for width in sorted(Precision):
        engine.raise_to(width)


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "engine": lambda folder, out: Engine(folder, threads=1),
    "background": lambda folder, out: load_in_background(folder),
    "raise": lambda folder, out: drop_and_raise(folder),
    "load": lambda folder, out: otaro.load(folder),
    "load in bfloat16": lambda folder, out: otaro.load(folder, dtype=torch.bfloat16),
    "transformers": lambda folder, out: AutoModelForCausalLM.from_pretrained(folder),
    "cut": lambda folder, out: otaro.cut(folder, out, "E5M8"),
    "export": lambda folder, out: export_gguf(folder, out, "E5M8"),
    "verify": lambda folder, out: otaro.verify(folder),
}


def bytes_read() -> int:
    """What this process has read by system calls, from wherever."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what is read")
@pytest.mark.parametrize("name", READERS)
def test_every_byte_is_read_once(name: str, folder: Path, packed_llama: Path, tmp_path: Path) -> None:
    READERS[name](packed_llama, tmp_path / "warm")  # what is imported late is read too
    before = bytes_read()
    READERS[name](folder, tmp_path / "out")
    count = bytes_read() - before
    assert count <= 1.05 * sum((folder / file).stat().st_size for file in FILES)


def flip(path: Path, position: int, chance: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << chance.randrange(8)]))


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_refused(name: str, packed_llama: Path, tmp_path: Path) -> None:
    chance = random.Random(name)
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder)
    for number, file in enumerate(FILES):
        with SafetensorsFile(folder / file) as whole:
            start, end = whole.data_start, (folder / file).stat().st_size
        position = (start, end - 1, chance.randrange(start, end))[number % 3]
        flip(folder / file, position, chance)
        with pytest.raises(FormatError, match=f"{file} was altered: its checksum does not match; fetch it again"):
            READERS[name](folder, tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {"packed"}
        shutil.copyfile(packed_llama / file, folder / file)
    READERS[name](folder, tmp_path / "out")


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_in_a_header_is_refused(file: str, packed_llama: Path, tmp_path: Path) -> None:
    chance = random.Random(file)
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder)
    content = (folder / file).read_bytes()
    with SafetensorsFile(folder / file) as whole:
        text = [place for place in range(8, whole.data_start) if not content[place : place + 1].isspace()]
    for position in chance.sample(text, 20):
        flip(folder / file, position, chance)
        with pytest.raises(FormatError, match=r"model-m\d.safetensors"):
            otaro.verify(folder)
        with pytest.raises((FormatError, UnsupportedError)):  # a tensor by another name may be another model's
            Engine(folder, threads=1)
        shutil.copyfile(packed_llama / file, folder / file)


def test_what_came_before_an_altered_file_goes_on(packed_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder)
    flip(folder / FILES[3], (folder / FILES[3]).stat().st_size - 1, random.Random(0))
    loading, raising = Engine(folder, threads=1, progressive=True), Engine(folder, "E5M4", threads=1)
    with pytest.raises(FormatError, match=f"{FILES[3]} was altered"):
        loading.finish_loading()
    with pytest.raises(FormatError, match=f"{FILES[3]} was altered"):
        raising.raise_to("E5M8")
    whole = Engine(packed_llama, "E5M5", threads=1)
    assert loading.width == Precision.E5M5
    assert loading.memory["weights"] == raising.memory["weights"] == whole.memory["weights"]
    assert (loading.logits([1, 2, 3]) == whole.logits([1, 2, 3])).all()
    assert raising.precision == Precision.E5M4


def test_tensors_come_with_all_their_planes(packed_llama: Path) -> None:
    packed = PackedFolder(packed_llama)
    apart = {key: tensor for width in Precision for key, tensor in packed.planes(width)}
    together = {}
    for entry, content in packed.tensors(Precision.E5M8):
        assert isinstance(content, Planes) == (entry.floor is not None)
        named = content.named() if isinstance(content, Planes) else {}
        together |= {plane_key(entry.name, plane): tensor for plane, tensor in named.items()} or {entry.name: content}
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[key], apart[key]) for key in apart)
    assert [entry for entry, _ in packed.tensors(NARROWEST)] == packed.entries
