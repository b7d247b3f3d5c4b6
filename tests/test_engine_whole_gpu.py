"""A whole step in one launch, on a GPU: the logits of single launches, and no bit of them from other rows."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from experiments.table2 import models
from otaro.engine.cuda.launches import unusable
from otaro.engine.cuda.rows import DeviceSession
from otaro.engine.cuda.whole import WHOLE_VARIABLE
from otaro.engine.cuda.work import DeviceWork
from otaro.engine.session import Step
from otaro.precision import Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(unusable() is not None, reason="needs an NVIDIA GPU from Hopper on")]
CONTEXTS = (0, 5, 127, 128, 300, 700)
BUDGET = 0.02


def sessions(model: Any, contexts: tuple[int, ...]) -> list[DeviceSession]:
    made = []
    for number, context in enumerate(contexts):
        session = DeviceSession(model, context + 8)
        session.reserve(context + 8)
        session.cache.normal_(generator=torch.Generator(device=session.cache.device).manual_seed(number))
        session.ran(context)
        made.append(session)
    return made


def logits(work: DeviceWork, texts: list[DeviceSession], contexts: tuple[int, ...], widths: bytes) -> Any:
    token = numpy.array([7], dtype=numpy.int32)
    steps = [Step(text, token, context, widths, 1) for text, context in zip(texts, contexts, strict=True)]
    work.run(steps)
    return numpy.concatenate([step.logits for step in steps])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-3-8b", "smollm2-135m"])
def test_whole_steps_agree_with_single_launches(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = models.model(name, models.packed(device), dtype, device, layers=3)
    for precision in (Precision.E5M3, Precision.E5M4, Precision.E5M8):
        widths = models.widths_of(model, precision)
        for contexts in ((300,), CONTEXTS, CONTEXTS * 2):
            found = logits(DeviceWork(model), sessions(model, contexts), contexts, widths)
            again = logits(DeviceWork(model), sessions(model, contexts), contexts, widths)
            with monkeypatch.context() as patch:
                patch.setenv(WHOLE_VARIABLE, "0")
                wanted = logits(DeviceWork(model), sessions(model, contexts), contexts, widths)
            assert numpy.isfinite(found).all()
            assert abs(found - wanted).max() < BUDGET * abs(wanted).max(), (precision, len(contexts))
            assert (found == again).all()
        work = DeviceWork(model)
        together = logits(work, sessions(model, CONTEXTS), CONTEXTS, widths)
        for number, context in enumerate(CONTEXTS):
            text = sessions(model, CONTEXTS)[number : number + 1]
            assert (logits(work, text, (context,), widths)[0] == together[number]).all()
