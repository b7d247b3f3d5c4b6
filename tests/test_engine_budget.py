"""--memory: what is counted, what is chosen, and what the process then takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import otaro
from otaro.cli import main
from otaro.engine import budget
from otaro.engine.budget import Estimate
from otaro.errors import OtaroError
from otaro.precision import Precision
from otaro.tokenizer import load_tokenizer


def test_memory_picks_the_width_and_says_what_was_counted(
    packed_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "resident", lambda: 300_000_000)
    monkeypatch.setattr(budget, "peak", lambda: 0)
    estimate = Estimate(packed_llama, threads=1)
    with pytest.raises(OtaroError, match="too little"):
        estimate.fit(1, wanted=9, fewest=9, most=9)  # and it has counted
    arguments = ["generate", str(packed_llama), "--prompt", "hello", "--raw", "--max-new-tokens", "2", "--threads", "1"]
    size = f"{estimate.of(Precision.E5M5, 7).total}B"
    assert main([*arguments, "--memory", size]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("E5M5 and 7 tokens take 318 MB: 300 Python and its libraries, ")
    assert said[-1].startswith("E5M5: 2 tokens")
    assert main([*arguments, "--memory", size, "--precision", "E5M4", "--draft", "E5M3"]) == 0
    assert capsys.readouterr().err.startswith("E5M4 and 7 tokens take ")
    for named in (["--precision", "E5M8"], ["--precision", "E5M4", "--prefill", "E5M7"], ["--prefill", "E5M6"]):
        assert main([*arguments, "--memory", size, *named]) == 2
        refusal = capsys.readouterr().err
        assert f"317 MB are too little: {named[-1]} and 7 tokens take" in refusal
        assert "E5M5 is the widest that fits" in refusal
        assert refusal.count("\n") == 1
    assert main([*arguments, "--memory", "1kB"]) == 2
    assert "0.0 MB are too little: E5M3 and 7 tokens take 318 MB: 300 Python" in capsys.readouterr().err
    assert main([*arguments, "--memory", size, "--backend", "transformers"]) == 2
    assert "--memory needs the native engine" in capsys.readouterr().err


def test_memory_that_lacks_shortens_the_text_and_what_is_left_lengthens_it(
    packed_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "resident", lambda: 0)
    monkeypatch.setattr(budget, "peak", lambda: 0)
    estimate = Estimate(packed_llama, threads=1)

    def fit(precision: Precision, context: int, **named: Any) -> tuple[Precision, int]:
        limit = estimate.of(precision, context).total
        found = estimate.fit(limit, **{"wanted": 64, "fewest": 16, "most": 128, **named})
        assert found.total <= limit
        return found.loaded, found.context

    assert fit(Precision.E5M8, 128) == (Precision.E5M8, 128)
    assert fit(Precision.E5M8, 96) == (Precision.E5M8, 96)
    assert fit(Precision.E5M8, 200) == (Precision.E5M8, 128)
    assert fit(Precision.E5M5, 64)[0] == Precision.E5M5
    assert fit(Precision.E5M3, 32) == (Precision.E5M3, 32)
    assert fit(Precision.E5M5, 16, at_least=Precision.E5M5) == (Precision.E5M5, 16)
    assert fit(Precision.E5M8, 64, exactly=Precision.E5M4)[0] == Precision.E5M4
    with pytest.raises(OtaroError, match="are too little: E5M3 and 17 tokens take"):
        fit(Precision.E5M3, 16, fewest=17)
    with pytest.raises(OtaroError, match="are too little: E5M5 and 16 tokens take .*; E5M4 is the widest that fits"):
        fit(Precision.E5M4, 16, exactly=Precision.E5M5)
    monkeypatch.setattr(budget, "peak", lambda: 500_000_000)  # it was taken already
    with pytest.raises(OtaroError, match="take 500 MB"):
        estimate.fit(400_000_000, wanted=64, fewest=16, most=128)


LIMITED = """
import re, sys
from pathlib import Path
from otaro.cli import main
from otaro.engine.budget import peak

arguments = ["generate", sys.argv[1], "--raw", "--prompt", "x" * 3000, "--max-new-tokens", "20", "--threads", "2"]
sys.stderr = Path(sys.argv[2]).open("w+")
assert main([*arguments, "--memory", "1MB"]) == 2
sys.stderr.seek(0)
needed = 1_000_000 * (int(re.search(r"take (\\d+) MB", sys.stderr.read())[1]) + 10)
assert peak() < needed
assert main([*arguments, "--memory", f"{needed}B"]) == 0
print(needed, peak(), "torch._dynamo" in sys.modules, "transformers.modeling_utils" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_stays_within_the_memory_it_was_given(tiny_llama: Path, tmp_path: Path) -> None:
    """Weights of 22 MB at E5M3, and 12 kB of keys and values a token."""
    config = AutoConfig.from_pretrained(tiny_llama)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 512, 3072, 6, 128
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 4, 4, 8192
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for path in tiny_llama.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "packed"), str(tmp_path / "said")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / "said").read_text()
    *_, figures = done.stdout.splitlines()
    limit, taken, *imported = figures.split()
    assert int(limit) - 40_000_000 < int(taken) <= int(limit)  # nor is more counted than is taken
    assert imported == ["False", "False"]  # 200 MB that running natively does without


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_tokenizer_is_the_same_without_the_model_s_classes(
    packed_llama: Path, tmp_path: Path, name: str | None, kind: str
) -> None:
    """Whatever class a tokenizer names, and whatever transformers makes of it for that kind of model."""
    folder = tmp_path / "copy"
    shutil.copytree(packed_llama, folder)
    for file, values in (("tokenizer_config.json", {"tokenizer_class": name}), ("config.json", {"model_type": kind})):
        content = {**json.loads((folder / file).read_text()), **values}
        (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    loaded, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(loaded) is type(expected)
    for text in ("hello  world\n", "<user>\u00e9 12345<end>", ""):
        assert loaded(text)["input_ids"] == expected(text)["input_ids"]
