"""Tuning where passes are captured as CUDA graphs: `pytest -m gpu tests/test_tune_gpu.py` with an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tuning import trainer

from otaro.tune import graphs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # gpt2's layers quantise for themselves
@pytest.mark.parametrize("method", ["tiers", "uniform"])
def test_captured_passes_compute_what_launches_do(
    method: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    capture = graphs.Graphs._capture

    def counted(self: graphs.Graphs, *given: Any) -> graphs.Captured:
        captured.append(given)
        return capture(self, *given)

    monkeypatch.setattr(graphs.Graphs, "_capture", counted)
    options: dict[str, Any] = {"method": method, "use_cpu": False, "optim": "adamw_torch", "learning_rate": 1e-3}
    states = []
    for enabled in (False, True):
        run = trainer(tmp_path / str(enabled), architecture=architecture, **options)
        assert run.graphs.enabled
        if not enabled:
            run.graphs = graphs.Graphs(run.model, enabled=False)
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        run.train()
        states.append({name: value.clone() for name, value in run.model.state_dict().items()})
        assert bool(captured) is enabled
    for name, value in states[0].items():
        difference = (value - states[1][name]).abs().max() / value.abs().max().clamp(min=1e-6)
        assert difference < 0.02, name
