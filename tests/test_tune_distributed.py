"""Several processes: they choose the same widths and end with the weights of one process with all the data."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import tuning
import tuning_sharded
import yaml
from accelerate.commands import accelerate_cli
from tuning import trainer

import otaro.tune
from otaro.tune.callbacks import LOG_NAME, read_log

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "tuning.md"
CONFIGS = Path(otaro.tune.__file__).parent / "accelerate"
SETTINGS: dict[str, Any] = {"max_steps": 18, "optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}
# What accelerate launch makes of fsdp2.yaml.
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


TIED = {"architecture": "llama-tied"}
EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def check_equal(folder: Path, whole: Path, weights: dict[str, torch.Tensor]) -> None:
    """Gradients are averages of two averages: the same sums in another order, so float32 rounding apart.

    Adam can turn a rounding error in a gradient close to zero into a part of a whole step, on single weights; the
    tolerance is one percent of the way that a weight can go in 18 steps of 1e-3.
    """
    first, second = read_log(folder / LOG_NAME), read_log(whole / LOG_NAME)
    for name in ("step", "width", "held"):
        assert [line.get(name) for line in first] == [line.get(name) for line in second]
    for one, other in zip(first, second, strict=True):
        assert one.get("tiers", one.get("loss")) == pytest.approx(other.get("tiers", other.get("loss")), rel=1e-5)
    found = torch.load(folder / "weights.pt", weights_only=True)
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1.8e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch, sharded, options",
    [
        (2, False, {}),
        # Fewer updates: a rounding error that puts a weight into another cell sends its gradient another way, and after
        # a dozen updates, those that fit counted, that is seen in the fifth digit of the loss.
        (2, False, {"method": "tiers", "max_steps": 6}),
        (1, False, {"method": "tiers", "max_steps": 6, "gradient_accumulation_steps": 2}),
        (1, True, {**TIED, "method": "tiers", "max_steps": 9, "gradient_accumulation_steps": 2, "average": 0.5}),
        (2, False, {"method": "tiers", "max_steps": 9, "average": 0.5, "held_back": 0.34}),
        (2, True, {"method": "tiers", "max_steps": 9, "average": 0.5, "held_back": 0.34}),
        # What an evaluation gathered is given up before the mean is put in place.
        (2, True, {"method": "tiers", "max_steps": 3, "average": 1.0, "eval_strategy": "steps", "eval_steps": 3}),
        (
            *(1, True),
            {"method": "tiers", "max_steps": 3, "gradient_accumulation_steps": 2, "accelerator_config": EACH_BATCH},
        ),
    ],
)
def test_two_processes_equal_one_with_twice_the_batch(
    batch: int, sharded: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**SETTINGS, **options}
    given = json.dumps({**options, "per_device_train_batch_size": batch})
    processes.run_twice(tuning.main, str(tmp_path / "two"), given, "", "", environment=SHARDED if sharded else {})
    whole = trainer(tmp_path / "one", **{**options, "per_device_train_batch_size": 2 * batch})
    whole.train()
    check_equal(tmp_path / "two", tmp_path / "one", whole.model.state_dict())


@pytest.mark.slow
def test_sharded_weights_hold_gradients_back_are_averaged_and_resume(tmp_path: Path) -> None:
    processes.run_twice(tuning_sharded.main, str(tmp_path))
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = tuning_sharded.plain()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Ten steps of 1e-3 at most; the order of the sums differs, as above.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)


def launch_line(config: Path) -> str:
    """The command that a config's own comment tells."""
    return next(line[1:].strip() for line in config.read_text().splitlines() if "accelerate launch" in line)


def accelerate(line: str) -> None:
    """The program of that name, where the configs are, in a process of its own."""
    os.chdir(CONFIGS)
    sys.argv = shlex.split(line)
    accelerate_cli.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp.yaml", "fsdp2.yaml"])
def test_the_launch_lines_of_the_configs(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """As they stand, with the default method; one process, which accelerate wraps as it wraps several."""
    book, out = tmp_path / "book.txt", tmp_path / "tuned"
    book.write_text("All the world's a stage, and all the men and women merely players. " * 9)
    line = launch_line(CONFIGS / name)
    for placeholder, value in {
        "--num_processes 8": "--num_processes 1",
        "MODEL": f"'{tiny_llama}'",
        "OUT": f"'{out}'",
        "--data …": f"--data '{book}' --steps 3 --batch-size 2 --gradient-accumulation 2 --sequence-length 32",
    }.items():
        assert placeholder in line
        line = line.replace(placeholder, value)
    assert processes.run(accelerate, line) == 0
    assert json.loads((out / "tune.json").read_text())["method"] == "tiers"
    assert len((out / "tune.jsonl").read_text().splitlines()) == 3 + 3


def test_the_documents_have_the_launch_line_of_the_config() -> None:
    assert launch_line(CONFIGS / "ddp.yaml") in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name, kind", [("ddp.yaml", "MULTI_GPU"), ("fsdp2.yaml", "FSDP")])
def test_the_shipped_configs_are_accelerates(name: str, kind: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / name))
    assert config.distributed_type == kind
    content = yaml.safe_load((CONFIGS / name).read_text())
    assert content.get("fsdp_config", {}).get("fsdp_version", 2) == 2
