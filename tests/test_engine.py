"""The native engine: products, logits against the torch reference, switching, speculation, and what it refuses."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch
from texts import Text
from transformers import PreTrainedConfig

import otaro
from otaro import ops
from otaro.checkpoint.folder import PackedFolder
from otaro.engine import native
from otaro.engine.architecture import STATED, UnsupportedError, matrix_place, read_shape, stated_config
from otaro.engine.engine import Engine
from otaro.engine.native import Matrix
from otaro.engine.sampling import Sampling
from otaro.engine.session import Step, Work
from otaro.engine.speculation import LONGEST_REST, SHORTEST_REST, Repetition, Rests
from otaro.engine.text import end_tokens, generate
from otaro.errors import FormatError, OtaroError, PrecisionError
from otaro.model_config import load_config
from otaro.ops import cpu
from otaro.packing import Planes
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.text import MOST_HELD, TextStream

WIDTHS = list(Precision)

# Activations are rounded to 8 bits of the largest of 32 or 64 neighbours: at most 1/254 of it each, about 0.5 % of the
# result in all; or to 16 bits (fine). Sums and steps are exact.
PRODUCT_BUDGET = {False: 1e-2, True: 5e-5}
# Through the layers of a model rounding adds up; float16 keys and values add about 1e-3.
FINE_BUDGET = 2e-3
LOGITS_BUDGET = {precision: 4e-2 if precision.mantissa < 7 else FINE_BUDGET for precision in Precision}


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fine", [False, True], ids=["8 bits", "16 bits"])
@pytest.mark.parametrize("precision", WIDTHS, ids=str)
@pytest.mark.parametrize(
    "rows, columns, format",
    [
        (1, 1, Format()),
        (17, 33, Format(group_size=32)),
        (50, 200, Format(group_size=128)),
        (64, 512, Format(group_size=256)),
    ],
    ids=str,
)
def test_products_are_the_same_on_every_instruction_set_and_close(
    rows: int, columns: int, format: Format, precision: Precision, fine: bool
) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=random) * torch.rand(rows, 1, generator=random)
    planes, _ = ops.pack(weight, format)
    matrix = Matrix(planes, weight.shape, format, threads=2)
    values = ops.dequantize(planes, columns, precision, format, torch.float32)
    for batch in (*range(1, 9), 21):
        x = torch.randn(batch, columns, generator=random)
        expected = x.double() @ values.double().T
        results = [
            matrix.multiply(x, precision, fine=fine, threads=threads, isa=isa)
            for isa, threads in itertools.product(cpu.isas(), (1, 2))
        ]
        assert all(torch.equal(result, results[0]) for result in results)
        alone = torch.cat([matrix.multiply(row[None], precision, fine=fine) for row in x])
        assert torch.equal(alone, results[0])
        assert relative_error(results[0], expected) < PRODUCT_BUDGET[fine] or float(expected.norm()) == 0


def test_a_matrix_takes_the_memory_its_bits_need() -> None:
    weight = torch.randn(256, 512)
    planes, _ = ops.pack(weight, Format())
    matrix = Matrix(planes, weight.shape, Format(), threads=1)
    for bit in range(8, 3, -1):
        assert matrix.nbytes <= weight.numel() * (bit + 1 + 8 / 64) / 8
        matrix.drop_bit(bit)
        with pytest.raises(PrecisionError):
            matrix.multiply(torch.zeros(1, 512), Precision.from_mantissa(bit))
    assert matrix.multiply(torch.zeros(1, 512), Precision.E5M3).abs().max() == 0


def test_a_matrix_refuses_bytes_that_are_no_scales() -> None:
    weight = torch.randn(20, 200)
    planes, _ = ops.pack(weight, Format())
    for row, byte in itertools.product((0, 11, 19), (0x80, 0x02, 0x7C, 0xFF)):
        scale = planes.scale.clone()
        scale[row, -1] = byte
        with pytest.raises(FormatError, match="no scale"):
            Matrix(Planes(planes.base, planes.bits, scale), weight.shape, Format(), threads=1)


def test_every_scale_means_in_a_product_what_it_means_elsewhere() -> None:
    scale = torch.tensor([0, *range(0x04, 0x7C), *range(0x84, 0xFC)], dtype=torch.uint8)[:, None]
    weight = torch.full((len(scale), 64), 0.5)
    planes, _ = ops.pack(weight, Format(), scale)
    matrix = Matrix(planes, weight.shape, Format(), threads=1)
    x = torch.zeros(1, 64)
    x[0, 3] = 127.0  # nothing to round
    for precision in WIDTHS:
        values = ops.dequantize(planes, 64, precision, Format(), torch.float32)
        for isa in cpu.isas():
            assert torch.equal(matrix.multiply(x, precision, isa=isa)[0], 127 * values[:, 3])


# ---- models ---------------------------------------------------------------------------------------------------------


def tiny(name: str, **options: Any) -> PreTrainedConfig:
    config = architectures.config(name)
    for key, value in options.items():
        setattr(config, key, value)
    return config


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: tiny("llama", attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: tiny("llama-tied"),
    "llama3-rope": lambda: tiny("llama", rope_parameters=LLAMA3_ROPE),
    "linear-rope": lambda: tiny("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "mistral": lambda: tiny("mistral", sliding_window=5),
    "qwen2": lambda: tiny("qwen2"),
    "qwen3": lambda: tiny("qwen3"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_config_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """As it stands in the file, if that says all there is to know; what windows there are is left to transformers."""
    folder = PackedFolder(architectures.packed_model(MODELS[name](), tmp_path))
    stated, loaded = stated_config(folder.config), load_config(folder.path, folder.config)
    assert (stated is None) == (name == "mistral")
    if stated is not None:
        assert read_shape(folder, stated) == read_shape(folder, loaded)
        for field in ("max_position_embeddings", "tie_word_embeddings", "eos_token_id"):
            assert getattr(stated, field) == getattr(loaded, field)
    for field in (*STATED, "rope_parameters", "layer_types" if name.startswith("qwen") else "head_dim"):
        assert stated_config({**folder.config, field: None}) is None
    assert stated_config({**folder.config, "rope_parameters": {"rope_theta": 1e4}}) is None
    assert stated_config({**folder.config, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4}) is None
    assert stated_config({**folder.config, "model_type": "gemma"}) is None


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_reference_at_every_width(name: str, tmp_path: Path) -> None:
    folder = architectures.packed_model(MODELS[name](), tmp_path)
    engine, model = Engine(folder, threads=2), otaro.load(folder)
    ids = architectures.some_ids()[0].tolist() * 3
    sessions = [
        (Text(engine.weights.model, len(ids), fine=fine, isa=isa), fine)
        for isa, fine in itertools.product(cpu.isas(), (False, True))
    ]
    for precision in WIDTHS:
        model.set_precision(precision)
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([ids])).logits[0]
        widths = engine.weights.widths(precision)
        for session, fine in sessions:
            logits = torch.from_numpy(session.run(ids, 0, widths, threads=2, logits=len(ids)))
            assert relative_error(logits, expected) < (FINE_BUDGET if fine else LOGITS_BUDGET[precision])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.packed_model(MODELS["qwen3"](), tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder, threads=2)


PROMPT = [5, 80, 3, 44, 17, 9, 60]


def run(engine: Engine, precision: str = "E5M8", **options: Any) -> list[int]:
    engine.precision = Precision(precision)
    return list(engine.tokens(PROMPT, max_new_tokens=24, **options))


def test_threads_batches_and_repetition_change_no_bit(folder: Path) -> None:
    ids = PROMPT * 3
    for precision in WIDTHS:
        whole = [Engine(folder, threads=threads).logits(ids, precision) for threads in (1, 2, 4, 4)]
        assert all(numpy.array_equal(logits, whole[0]) for logits in whole)
        one = Engine(folder, threads=2)
        session = Text(one.weights.model, 64)
        widths = one.weights.widths(precision)
        for position, token in enumerate(ids):
            assert numpy.array_equal(session.run([token], position, widths, threads=2)[0], whole[0][position])


def test_every_instruction_set_agrees_within_rounding(folder: Path, engine: Engine) -> None:
    for precision in (Precision.E5M8, Precision.E5M4):
        results = []
        for isa in cpu.isas():
            session = Text(engine.weights.model, 64, isa=isa)
            widths = engine.weights.widths(precision)
            results.append(torch.from_numpy(session.run(PROMPT, 0, widths, threads=1, logits=len(PROMPT))))
        for result in results[1:]:
            assert relative_error(result, results[0]) < LOGITS_BUDGET[precision]


def test_a_switch_between_tokens_equals_a_fresh_run_with_the_same_schedule(folder: Path, engine: Engine) -> None:
    schedule = ["E5M8", "E5M3", "E5M6", "E5M4", "E5M7", "E5M5"] * 4

    def switched(engine: Engine) -> list[int]:
        engine.precision = Precision.E5M8
        tokens = []
        for token, precision in zip(engine.tokens(PROMPT, max_new_tokens=24), schedule, strict=True):
            tokens.append(token)
            engine.precision = Precision(precision)
        return tokens

    first = switched(engine)
    fresh = Engine(folder, threads=1)
    assert first == switched(fresh)
    # The same by hand, through a session.
    session = Text(fresh.weights.model, 64)
    widest = fresh.weights.widths(Precision.E5M8)
    token = int(session.run(PROMPT, 0, widest, threads=1)[0].argmax())
    for position, (expected, precision) in enumerate(zip(first, schedule, strict=True), len(PROMPT)):
        assert token == expected
        widths = fresh.weights.widths(Precision(precision))
        token = int(session.run([token], position, widths, threads=1)[0].argmax())


def test_phases_and_layers_have_widths_of_their_own(engine: Engine) -> None:
    overrides = {"model.layers.0": Precision.E5M3, "lm_head": Precision.E5M8}
    assert list(engine.weights.widths(Precision.E5M6, overrides)) == [6, 3, 6, 8]
    assert list(engine.weights.widths(Precision.E5M6, {"model.layers.*": "E5M4"})) == [6, 4, 4, 6]
    assert list(engine.weights.widths(Precision.E5M3)) == [4, 3, 3, 4]
    assert run(engine, prefill="E5M3") != run(engine) or run(engine, overrides=overrides) != run(engine)
    with pytest.raises(PrecisionError, match="no layer is called"):
        engine.weights.widths(Precision.E5M6, {"model.layer.*": Precision.E5M3})


@pytest.mark.parametrize("draft", ["E5M3", "E5M7"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(repetition_penalty=1.3), Sampling(0.8, top_p=0.9, seed=3), Sampling(3.0, seed=4)],
    ids=["greedy", "penalty", "drawn", "drawn freely"],
)
def test_speculation_gives_exactly_the_same_text(engine: Engine, draft: str, sampling: Sampling) -> None:
    assert run(engine, draft=draft, sampling=sampling) == run(engine, sampling=sampling)
    for limit in range(1, 6):
        engine.precision = Precision.E5M8
        few = {"max_new_tokens": limit, "sampling": sampling}
        assert list(engine.tokens(PROMPT, draft=draft, **few)) == list(engine.tokens(PROMPT, **few))


def test_text_that_repeats_itself_is_guessed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = [4, 8, 15, 16, 23]

    def run_as_if(work: Work, steps: list[Step], **named: Any) -> None:
        """The tokens of a model that says these again and again."""
        step = steps[0]
        original(work, [Step(step.session, step.tokens, step.position, step.widths, rows=0)], **named)
        end = step.position + len(step.tokens)
        says = [cycle[place % len(cycle)] for place in range(end - step.rows + 1, end + 1)]
        guesses = step.tokens[len(step.tokens) - step.rows + 1 :].tolist()
        right = next((i for i, guess in enumerate(guesses) if guess != says[i]), len(guesses))
        step.picked = says[: right + 1] if step.rows else []
        step.session.length = end - step.rows + right + 1 if step.rows else end

    original = Work.run
    monkeypatch.setattr(Work, "run", run_as_if)
    text = run(engine, draft="E5M3")
    assert text == [cycle[(len(PROMPT) + number) % len(cycle)] for number in range(24)]
    counts = engine.speculation
    assert counts.repeated_right == counts.repeated > 8
    assert 22 <= counts.checks + counts.repeated_right + counts.drafted_right <= 23  # the last one may be run alone


def test_guesses_continue_the_last_occurrence_and_grow_while_they_hold() -> None:
    repetition = Repetition()
    assert repetition.guess([1, 2, 3, 4, 5], 9) == []
    assert repetition.guess([1, 2, 3, 4, 5, 1, 2], 9) == [3, 4]
    repetition.learn(2, 2)
    assert repetition.guess([1, 2, 3, 4, 5, 1, 2, 9, 1, 2], 9) == [9, 1, 2, 9, 1]
    assert repetition.guess([1, 2, 3, 4, 5, 1, 2, 9, 1, 2, 3, 4], 3) == [5, 1, 2]  # the longest match decides
    repetition.learn(3, 0)
    assert len(repetition.guess([1, 2, 3, 4, 5, 1, 2, 9, 1, 2, 3, 4], 9)) == 2


def test_drafts_are_what_the_width_would_say_and_stop_when_unsure(engine: Engine) -> None:
    session = Text(engine.weights.model, 64)
    widths = engine.weights.widths(Precision.E5M8)
    session.run(PROMPT[:-1], 0, widths, threads=1)
    settings: dict[str, Any] = {"rows": architectures.VOCABULARY, "threads": 2}
    drafts = session.draft(PROMPT[-1], len(PROMPT) - 1, widths, most=6, margin=0.0, **settings)
    assert len(drafts) == 6
    assert drafts[0] == run(engine)[0]
    assert session.draft(PROMPT[-1], len(PROMPT) - 1, widths, most=6, margin=1e9, **settings) == drafts[:1]
    few = session.draft(PROMPT[-1], len(PROMPT) - 1, widths, most=6, margin=0.0, rows=5, threads=1)
    assert max(few) < 5
    for position, most, message in ((0, 65, "do not fit"), (60, 1, "gap")):
        with pytest.raises((OtaroError, ValueError), match=message):
            session.draft(3, position, widths, most=most, margin=0.0, **settings)


def test_a_shared_prompt_is_not_run_again_and_nothing_changes(engine: Engine) -> None:
    first = run(engine, draft="E5M3")
    longer = [*PROMPT, *first[:9], 7]
    engine.precision = Precision.E5M8
    again = list(engine.tokens(longer, max_new_tokens=8, reuse=True))
    assert again == list(engine.tokens(longer, max_new_tokens=8))


def test_planes_can_be_dropped_and_read_again(folder: Path) -> None:
    engine = Engine(folder, threads=2)
    before, weights = run(engine), engine.memory["weights"]
    engine.drop_to("E5M4")
    assert engine.precision == Precision.E5M4
    assert engine.memory["weights"] < 0.6 * weights
    with pytest.raises(PrecisionError, match="not loaded"):
        engine.precision = Precision.E5M5
    at_four = run(engine, "E5M4")
    engine.raise_to("E5M8")
    assert engine.memory["weights"] == weights
    assert run(engine) == before
    assert run(engine, "E5M4") == at_four


def test_wider_planes_join_while_it_runs(folder: Path, tmp_path: Path) -> None:
    engine = Engine(folder, threads=1, progressive=True)
    assert list(engine.tokens(PROMPT, max_new_tokens=8))
    engine.finish_loading()
    assert engine.width == Precision.E5M8
    assert numpy.array_equal(engine.logits(PROMPT), Engine(folder, threads=1).logits(PROMPT))
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    with (broken / "model-m6.safetensors").open("r+b") as file:
        file.truncate(1000)
    engine = Engine(broken, threads=1, progressive=True)
    with pytest.raises(OtaroError, match="model-m6"):
        engine.finish_loading()
    assert engine.width == Precision.E5M5


def test_planes_may_go_between_two_tokens(engine: Engine, folder: Path) -> None:
    own = Engine(folder, threads=1)
    tokens = own.tokens(PROMPT, max_new_tokens=4)
    next(tokens)
    own.drop_to("E5M3")
    assert len(list(tokens)) == 3


def test_the_floor_of_the_embedding_does_not_pass_for_a_loaded_width(folder: Path) -> None:
    engine = Engine(folder, "E5M3")
    with pytest.raises(PrecisionError, match="E5M4 is not loaded"):
        engine.precision = "E5M4"
    assert len(list(engine.tokens([1, 2, 3], max_new_tokens=3))) == 3


def test_only_the_files_of_a_width_are_read(folder: Path, tmp_path: Path) -> None:
    otaro.cut(folder, tmp_path / "narrow", "E5M4")
    narrow = Engine(tmp_path / "narrow", threads=1)
    assert narrow.precision == Precision.E5M4
    whole = Engine(folder, threads=1)
    assert numpy.array_equal(narrow.logits(PROMPT), whole.logits(PROMPT, "E5M4"))


def test_drafts_that_do_not_hold_rest_longer_and_longer() -> None:
    rests, drafted, waits = Rests(), 0, []
    for _ in range(400):
        if rests.over():
            drafted += 1
            rests.learn(guesses=3, right=0)
            waits.append(0)
        else:
            waits[-1] += 1
    assert drafted < 100
    lengths = [wait for wait in waits[:-1] if wait]
    assert lengths[:4] == [SHORTEST_REST, 2 * SHORTEST_REST, 4 * SHORTEST_REST, LONGEST_REST]
    assert set(lengths[4:]) == {LONGEST_REST}


def test_drafts_that_hold_never_rest() -> None:
    rests = Rests()
    for number in range(100):
        assert rests.over()
        rests.learn(guesses=3, right=3 if number % 3 else 0)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "no tokens"),
        (PROMPT, {"max_new_tokens": 0}, "a whole number from 1"),
        (PROMPT, {"max_new_tokens": 64}, "do not fit the context"),
        ([99], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said(engine: Engine, prompt: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OtaroError, match=message):
        list(engine.tokens(prompt, **{"max_new_tokens": 2, **options}))
    assert run(engine)  # and the engine goes on


def test_other_architectures_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="gemma"):
        Engine(architectures.packed_model(architectures.config("gemma"), tmp_path))
    nearest = tmp_path / "nearest"
    nearest.mkdir()
    with pytest.raises(UnsupportedError, match="nearest"):
        Engine(architectures.packed_model(architectures.config("llama"), nearest, Format("nearest")))


@pytest.mark.parametrize(
    "setting, value",
    [
        ("hidden_size", 64),
        ("num_hidden_layers", 3),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", -2),
        ("head_dim", 24),
        ("vocab_size", 10**9),
        ("intermediate_size", 81),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 1e300),
        ("num_hidden_layers", 10**9),  # as many as could never be listed, as below
        ("head_dim", 2**40),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1e4}),
        ("max_position_embeddings", 0),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_one_clear_error(folder: Path, tmp_path: Path, setting: str, value: Any) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, setting: value}))
    with pytest.raises((OtaroError, UnsupportedError)):
        Engine(broken, threads=1)


@pytest.mark.parametrize("field, value", [("version", float("inf")), ("scheme", "\x1b" * 5000)], ids=["inf", "long"])
def test_what_a_config_says_cannot_spoil_the_message(folder: Path, tmp_path: Path, field: str, value: Any) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"][field] = value
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="config.json") as raised:
        Engine(broken, threads=1)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) <= 1000


def test_settings_nested_without_end_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="not valid JSON"):
        Engine(broken, threads=1)


def test_names_of_layers_are_numbers_in_one_spelling() -> None:
    assert matrix_place("model.layers.10.self_attn.q_proj") == (10, native.MatrixRole.QUERY)
    for number in ("00", "٣", "-1", "9" * 5000):
        assert matrix_place(f"model.layers.{number}.self_attn.q_proj") is None


@pytest.mark.parametrize("width", ["m3", "m5"])
def test_a_file_that_changes_after_it_was_checked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    changing = tmp_path / "changing"
    shutil.copytree(folder, changing)
    check = PackedFolder.check_headers

    def check_then_change(self: PackedFolder, precision: Precision) -> None:
        check(self, precision)
        shutil.copyfile(changing / "model-m4.safetensors", changing / f"model-{width}.safetensors")

    monkeypatch.setattr(PackedFolder, "check_headers", check_then_change)
    with pytest.raises(FormatError, match=f"model-{width}.safetensors holds E5M4, not E5{width.upper()}"):
        Engine(changing, threads=1)


def test_end_tokens_that_are_no_tokens_are_left_out(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(folder, odd)
    (odd / "generation_config.json").write_text('{"eos_token_id": [[3], {"a": 1}, "x", 7]}')
    assert 7 in end_tokens(Engine(odd, threads=1), Bytes())


# ---- text ------------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are the bytes of the text."""

    eos_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_text_comes_in_whole_characters_and_ends_before_a_stop() -> None:
    stream = TextStream(Bytes(), stop=["END", "!!"])
    pieces = [stream.push(byte) for byte in "aé€ E!x".encode()]
    assert pieces == ["a", "", "é", "", "", "€", " ", "", "E", "!x"]
    assert [stream.push(byte) for byte in b"yEND"] == ["y", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""
    unfinished = TextStream(Bytes(), stop=["END"])
    assert [unfinished.push(byte) for byte in b"aEN"] == ["a", "", ""]
    assert unfinished.finish() == "EN"


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    stream = TextStream(Bytes())
    pieces = [stream.push(0xE2) for _ in range(100)]
    assert all(len(piece) <= MOST_HELD for piece in pieces)
    assert sum(map(len, pieces)) > 100 - 2 * MOST_HELD
    assert [stream.push(byte) for byte in b"ab"][-1] == "b"


def test_generated_text_is_streamed_and_counted(engine: Engine) -> None:
    engine.precision = Precision.E5M5
    pieces: list[str] = []
    result = generate(engine, Bytes(), PROMPT, max_new_tokens=9, on_text=pieces.append)
    assert "".join(pieces) == result.text
    assert result.width == Precision.E5M5
    assert 0 < result.tokens <= 9
    with pytest.raises(OtaroError, match="stop string is empty"):
        generate(engine, Bytes(), PROMPT, max_new_tokens=9, stop=[""])


# ---- the C ABI ------------------------------------------------------------------------------------------------------


def test_matrices_must_fit_their_place(engine: Engine) -> None:
    planes, _ = ops.pack(torch.randn(16, 32), Format())
    matrix = Matrix(planes, (16, 32), Format(), threads=1)
    library = native.library()
    handle = engine.weights.model.handle
    for layer, role, error in ((0, 2, 2), (0, 9, 1), (0, -1, 1), (99, 2, 4), (-1, 2, 4), (1, 0, 4)):
        assert library.otaro_model_set_matrix(handle, layer, role, matrix.handle) == error
    assert library.otaro_matrix_set_bit(matrix.handle, 4, planes.bits[0].data_ptr(), 1, None, 1) == 2
    assert library.otaro_matrix_set_bit(matrix.handle, 9, None, 0, None, 1) == 1
    with pytest.raises(RuntimeError):
        Matrix(planes, (10**9, 10**9), Format(), threads=1)
    with pytest.raises(RuntimeError):
        Matrix(planes, (16, 32), Format("truncate"), threads=1)


def test_group_sizes_cannot_be_mixed(engine: Engine) -> None:
    """Matrices that share activations divide them alike: with others the engine would read beyond them."""
    shape = engine.weights.model.shape
    model = native.Model(shape)
    rows, columns = shape.kv_heads * shape.head_dimension, shape.hidden
    narrow, wide = (
        Matrix(ops.pack(torch.randn(rows, columns), format)[0], (rows, columns), format, threads=1)
        for format in (Format(group_size=32), Format(group_size=256))
    )
    model.set_matrix(0, native.MatrixRole.KEY, narrow)
    with pytest.raises(OtaroError, match="groups of 256 and of 32 weights"):
        model.set_matrix(0, native.MatrixRole.VALUE, wide)
    argument = 1
    value = int(native.MatrixRole.VALUE)
    assert native.library().otaro_model_set_matrix(model.handle, 0, value, wide.handle) == argument
    assert native.library().otaro_model_set_matrix(model.handle, 0, value, narrow.handle) == 0


def test_two_engines_in_two_threads_do_not_disturb_each_other(folder: Path) -> None:
    expected = run(Engine(folder, threads=2))
    found: list[list[int]] = []

    def work() -> None:
        engine = Engine(folder, threads=2)
        found.extend(run(engine) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [expected] * 10
