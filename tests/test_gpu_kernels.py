"""The Triton kernel against the torch codec, bit for bit, in Triton's interpreter: no GPU is needed.

The interpreter flushes bfloat16's subnormals and does not round to it as hardware does, so that type is compared on a
real GPU only, by bench/gpu_kernels.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import itertools
import torch
from hard_weights import FORMATS, bits, hard_weight
from otaro import sefp
from otaro.ops import gpu
from otaro.precision import Precision

# The interpreter takes long for each program, whatever its size: so weights are one program each, and there are few
# launches. Every scheme meets every width; the sizes of groups, types and shapes take turns with them.
gpu.BLOCK_WEIGHTS = 16384
compared = 0
turns = itertools.cycle(itertools.product((torch.float32, torch.float16), sefp.GROUP_SIZES, ((5, 70), (256,))))
for precision, scheme, _ in itertools.product(Precision, sefp.SCHEMES, range(3)):
    dtype, group_size, lengths = next(turns)
    format = sefp.Format(scheme, group_size)
    weights = [hard_weight(columns, dtype) for columns in lengths]
    results = [torch.full_like(weight, float("nan")) for weight in weights]
    batch = gpu.prepare(weights, results, group_size)
    assert batch.flat == (lengths == (256,))
    gpu.run(batch, precision, format)
    for weight, result in zip(weights, results):
        expected = sefp.decode(sefp.encode(weight, precision, format), dtype)
        assert torch.equal(bits(result), bits(expected)), (format, dtype, precision)
        compared += 1
weight = hard_weight(130, torch.float32).reshape(3, 7, 130)
narrow = torch.empty_like(weight, dtype=torch.float16)
gpu.run(gpu.prepare([weight], [narrow], 64), Precision.E5M4, sefp.Format())
assert torch.equal(narrow, sefp.decode(sefp.encode(weight, Precision.E5M4), torch.float16))
for format, columns in itertools.product(FORMATS, (70, 256)):
    if format.scheme == "nested":
        weight = hard_weight(columns, torch.float32)
        generator = torch.Generator().manual_seed(1)
        scale = weight.abs().amax(-1, keepdim=True).clamp(max=1e30)
        narrow, wide = (weight + 0.2 * scale * torch.randn(weight.shape, generator=generator) for _ in range(2))
        both = [(Precision.E5M3, narrow), (Precision.E5M4, wide)]
        for tiers, precisions in ((both, (3, 4, 5, 8)), (both[1:], (4, 8))):
            for precision in map(Precision.from_mantissa, precisions):
                result = gpu.quantize(weight, precision, format, tiers)
                expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, tiers))
                assert torch.equal(bits(result), bits(expected)), (format, precision)
                compared += 1
        second = torch.empty_like(weight)
        tiers = [(width, [tier, tier.flip(0)]) for width, tier in both]
        batch = gpu.prepare([weight, weight.flip(0)], [result, second], format.group_size, tiers)
        gpu.run(batch, Precision.E5M8, format)
        for precision in (Precision.E5M3, Precision.E5M4, Precision.E5M8):
            result.fill_(float("nan"))
            second.fill_(float("nan"))
            gpu.run(batch, precision, format, again=True)
            expected = sefp.decode(sefp.encode_unchecked(weight, precision, format, both))
            for found in (result, second.flip(0)):
                assert torch.equal(bits(found), bits(expected)), (format, precision)
                compared += 1
nearest = sefp.Format("nearest")
weight = hard_weight(70, torch.float32)
result = torch.empty_like(weight)
batch = gpu.prepare([weight], [result], 64)
for precision in Precision:
    gpu.run(batch, precision, nearest, sliced=True)
    expected = sefp.decode(sefp.truncate(sefp.encode(weight, Precision.E5M8, nearest), precision))
    assert torch.equal(bits(result), bits(expected)), precision
    compared += 1
print(compared)
"""


FILLED = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from otaro import convert
from otaro.ops import gpu
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.refresh import Refresher
from otaro.tune.tiers import add_tiers

gpu.BLOCK_WEIGHTS = 4096  # 64 groups: larger weights take two blocks
low = [Precision.E5M3, Precision.E5M4]
sizes = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
convert.simulate(model, Format())
add_tiers(model, low)
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.3 * (0.01 + parameter.std()) * torch.randn(parameter.shape, generator=generator))
    model.model.layers[0].mlp.up_proj.weight[:3] = 0
Refresher._fills = lambda self, layer: True
refresher = Refresher(model)
ids = torch.randint(0, model.config.vocab_size, (4, 6), generator=generator)
for width in (Precision.E5M8, *low):
    convert.set_precision(model, width)
    refresher(again=width < Precision.E5M8)
    filled = model(input_ids=ids).logits
    refresher.clear()
    plain = model(input_ids=ids).logits
    torch.testing.assert_close(filled, plain)
    filled.square().mean().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
"""


# Of whole groups at known addresses a thread loads and stores by vectors, and no group is divided among warps.
COMPILED = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from otaro.ops import gpu
from otaro.sefp import CANDIDATES, ERROR_WIDTH, GROUP_SIZES

kernel = gpu._quantize_kernel
names = kernel.arg_names
tables = ("sources", "results", "narrow_tiers", "wide_tiers", "first_groups")
kinds = {"scales": "*u8", "mantissa": "i32", "bias": "fp32", **dict.fromkeys(tables, "*i64")}
kinds |= dict.fromkeys(("all_columns", "all_groups", "block_tensor", "block_start"), "*i32")
signature = {name: kinds.get(name, "constexpr") for name in names}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in kinds.items() if kind[0] == "*"}
settings = {"scheme": 2, "sliced": False, "candidates": CANDIDATES, "error_mantissa": ERROR_WIDTH.mantissa}
settings |= {"flat": True, "source_type": tl.float32, "result_type": tl.bfloat16}
for size in GROUP_SIZES:
    for narrow, wide, known in ((0, 0, False), (3, 4, False), (3, 4, True)):
        given = {"narrow": narrow, "wide": wide, "known": known, "group_size": size, **settings}
        given["groups_per_block"] = gpu.BLOCK_WEIGHTS // size
        constants = {(names.index(name),): value for name, value in given.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": gpu.WARPS})
        program = made.asm["ptx"]
        assert "ld.global.v4" in program and "st.global.v4" in program, size
        assert program.count("bar.sync") <= 2, size  # a barrier for each sum would be seven
print("compiled")
"""


def run(program: str, **environment: str) -> str:
    """What a program prints in a process of its own: the interpreter is chosen when Triton is imported."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(program: str) -> str:
    return run(program, TRITON_INTERPRET="1")


def test_every_format_in_the_interpreter() -> None:
    assert int(interpreted(PROGRAM)) == 9 * 6 + 9 * 3 + 4 * 2 * (6 + 6) + 6


def test_values_filled_in_one_launch() -> None:
    """They are those that layers make for themselves, and their gradients go to weights and tiers."""
    interpreted(FILLED)


def test_compiled_threads_have_whole_vectors_of_one_group(tmp_path: Path) -> None:
    assert run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)).strip() == "compiled"
