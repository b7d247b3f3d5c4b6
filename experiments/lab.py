"""A fast plain-torch tuning loop for trying ideas: many runs in one process over one compiled model.

The product's loop is `otaro.tune.trainer.OtaroTrainer`. This one exists so that an idea costs seconds on a GPU and a
few lines here, and does not leave options behind in the product when it is dropped. The parts it is made of (simulated
layers, one-launch quantising, LAA) are the product's.

An update goes through one batch in one or more passes; each pass has a width and a loss. Gradients of passes add up.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import common
import torch
from torch import Tensor, nn

from otaro import convert, ops
from otaro.precision import EMBEDDING_FLOOR, NARROWEST, Precision
from otaro.sefp import Format
from otaro.tune.average import place
from otaro.tune.data import IGNORED
from otaro.tune.delay import Apply, DelayedOptimizer
from otaro.tune.distillation import loss_and_gradient
from otaro.tune.path import is_hurt
from otaro.refresh import Refresher
from otaro.tune.tiers import Measured, add_tiers, agreement, settle_model, share_gradients

SETTLED = Format()
ASKED = 1 << 24
"""Added to the targets of questions, so that a captured pass has one input for both: a pass without a teacher learns
them as any others, and one with a teacher from its predictions alone."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of an update: at a width (None: full precision), over a slice of the batch.

    The loss is `labels` × cross entropy + `teacher` × KL divergence from the update's first pass, which is not trained
    by it; the whole is weighted by `weight`.
    """

    width: Precision | None
    weight: float = 1.0
    labels: float = 1.0
    teacher: float = 0.0
    part: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Idea:
    """A tuning run to try. `plan` is told the batch's number (from 0), their count and the widths' latest losses."""

    plan: Callable[[int, int, dict[Precision | None, float]], Sequence[Pass]]
    learning_rate: float = 3e-5
    format: Format = SETTLED
    warm_up: float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    average: float = 0.0
    """The share of the run, at its end, whose weights are averaged."""
    delay: int | None = None
    delay_apply: Apply = "sum"
    normalise: bool = False
    """Give the gradient of every pass the norm of the first one's."""
    one_by_one: bool = False
    """Update after every pass instead of once a batch."""
    tiers: tuple[Precision, ...] = ()
    """The widths with weights of their own, narrowest first (see `otaro.tune.tiers`)."""
    mixed: tuple[tuple[Precision, Precision, float], ...] = ()
    """(from, to, share): the tier `to` also gets this share of the gradient of the tier `from`."""
    tier_rates: tuple[tuple[Precision, float], ...] = ()
    """(tier, multiple of the learning rate), where it is not 1."""
    shares: tuple[tuple[Precision, float], ...] = ()
    """(tier, share of the weight's gradient): what `otaro.tune.tiers.share_gradients` does."""
    by_agreement: bool = False
    """Shares by how well a tier's gradient agrees with the weight's on the first batch, and E5M5 in the plan only where
    it is hurt there; see `Lab.measure`."""
    carried: tuple[tuple[Precision, float], ...] = ()
    """(tier, share): the tier also moves by this share of every step that the weight itself takes."""
    released: bool = False
    """Where the E5M3 tier's cell holds an E5M4 weight back, its gradient goes to the E5M3 tier."""
    resting: bool = False
    """A tier without a pass in an update stays where it is."""
    reused: bool = False
    """A tier without a pass in an update takes the gradient of its last one again."""
    needs_losses: bool = False
    steps: int | None = None
    """Its own number of updates."""
    floor: Precision = EMBEDDING_FLOOR
    """Embeddings and head never go below this width."""
    schedule: str = "cosine"
    final: float = 0.0
    """Where the schedule ends, as a share of the learning rate."""
    at_rest: tuple[Precision | str, ...] = ()
    """Tiers whose rate falls to nothing all the same, and which are not averaged; "floored": the narrowest tiers of
    embeddings and head too, "norms": what has no tiers, since the narrowest width computes with them."""
    sgd: bool = False


def add_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """The options that scripts which tune a model share."""
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file or a Hugging Face folder")
    parser.add_argument("--train", help="WikiText-2's wiki.train.tokens, or token ids as .npy")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--window", type=int, default=2048, help="tokens that are measured together")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--json", help="write the results there, after every run")
    parser.add_argument("--plot", help="draw them there")
    parser.add_argument("--title", help="of the plot")


class Lab:
    """A model that is tuned again and again from where it started."""

    def __init__(self, model: str | nn.Module, device: torch.device, *, compiled: bool = True) -> None:
        torch.set_float32_matmul_precision("high")
        self.device = device
        self.model: Any = common.load_model(model, device) if isinstance(model, str) else model.to(device)
        convert.simulate(self.model, Format())
        self.layers = list(convert.sefp_layers(self.model).values())
        self.floored = [layer for layer in self.layers if layer.floor > NARROWEST]
        self.ordinary = list(self.model.parameters())
        self.original = [parameter.detach().clone() for parameter in self.ordinary]
        self.widths_of_tiers: tuple[Precision, ...] = ()
        self.half = torch.bfloat16 if device.type == "cuda" else None
        self.trained = Refresher(self.model, self.half)
        self.measured = Refresher(self.model)
        self.captured = compiled
        self.graphs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.known: set[tuple[Any, ...]] = set()
        """What was captured before, in this run or an earlier one: it needs no trial any more."""
        self.pool: Any = None
        self.preparing = 0.0
        """Seconds spent on compiling and capturing."""
        self.loss: Any = loss_and_gradient
        self.score: Any = self._score
        if compiled:
            # One graph for each use (trained, measured, with and without values); shapes never vary within one.
            torch._dynamo.config.automatic_dynamic_shapes = False
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile()
            self.loss, self.score = torch.compile(loss_and_gradient), torch.compile(self._score)

    def reset(self, format: Format, tiers: tuple[Precision, ...] = ()) -> None:
        """Begin anew, with these tiers."""
        with torch.no_grad():
            torch._foreach_copy_(self.ordinary, self.original)
        for layer in self.layers:
            layer.__dict__.update(scales={}, settled=False)
        self.use(None, self.trained, format)
        if tiers:
            add_tiers(self.model, tiers)
        if tiers or self.widths_of_tiers:
            # Captured passes and tables know where tiers lay.
            self.graphs.clear()
            self.pool = None
            self.trained, self.measured = Refresher(self.model, self.half), Refresher(self.model)
        self.releasing: Any = None
        self.widths_of_tiers = tiers

    def use(self, width: Precision | None, refresh: Refresher, format: Format, *, again: bool = False) -> None:
        """Compute at a width of a format from now on; `again`: the weights have not changed since."""
        for layer in self.layers:
            layer.precision = width
            layer.format = format
        refresh(again=again)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")

    def hidden(self, ids: Tensor, *, any_shape: bool = False) -> Tensor:
        """The last hidden states of a Llama-like model, layer by layer.

        The model's own forward builds an explicit attention mask while a CUDA graph is captured, and is slower with it.
        `any_shape` is for batches of many shapes, which one compiled graph then serves.
        """
        inner = self.model.model
        hidden = inner.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = inner.rotary_emb(hidden, position_ids=positions)
        for layer in inner.layers:
            if any_shape:
                torch._dynamo.maybe_mark_dynamic(hidden, (0, 1))
                for each in (positions, *rotary):
                    torch._dynamo.maybe_mark_dynamic(each, 1)
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return inner.norm(hidden)

    def _compute(self, ids: Tensor, targets: Tensor, teacher: Tensor | None, step: Pass) -> tuple[Tensor, Tensor]:
        """Add the gradient of a pass to the parameters'; its cross entropy and its predictions."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half is not None, cache_enabled=False):
            logits = self.model.lm_head(self.hidden(ids)).flatten(0, 1)
        wanted = nn.functional.pad(targets[:, 1:], (0, 1), value=IGNORED).flatten()
        given = None if teacher is None else teacher.flatten(0, 1)
        count = (wanted != IGNORED).sum()
        questions = wanted >= ASKED if given is not None else None
        wanted = torch.where(wanted < ASKED, wanted, wanted - ASKED)
        labels, taught = step.weight * step.labels, step.weight * step.teacher
        _, cross_entropy, gradient = self.loss(logits.detach(), wanted, given, labels, taught, count, questions)
        logits.backward(gradient)
        return cross_entropy, logits.detach().view(*ids.shape, -1)

    def _captured(
        self, ids: Tensor, targets: Tensor, teacher: Tensor | None, step: Pass, key: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The pass as a CUDA graph: a small model's many small launches would cost more than their work."""
        self.wait()
        started = time.perf_counter()
        given, wanted = ids.clone(), targets.clone()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        kept = [gradient.clone() for gradient in gradients]
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        kind = (self.widths_of_tiers, *key[:-1])  # but for where the teacher lies
        known = kind in self.known
        if not known:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch._foreach_zero_(gradients)
                self._compute(given, wanted, teacher, step)  # compiles and allocates what capturing must not
            torch.cuda.current_stream().wait_stream(stream)
            expected = [gradient.clone() for gradient in gradients]
        # All graphs share their memory: they run one after the other, and a teacher is captured before its pupils.
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            outputs = self._compute(given, wanted, teacher, step)
        self.pool = graph.pool()
        if not known:
            torch._foreach_zero_(gradients)
            graph.replay()
            norm = torch.nn.utils.get_total_norm(expected)
            torch._foreach_sub_(expected, gradients)
            difference = float(torch.nn.utils.get_total_norm(expected) / norm)
            if not difference < 1e-2:
                raise SystemExit(f"the captured pass differs from the plain one by {difference} of its gradient")
        torch._foreach_copy_(gradients, kept)
        self.known.add(kind)
        self.graphs[key] = (graph, given, wanted, *outputs)
        self.wait()
        self.preparing += time.perf_counter() - started
        return self.graphs[key]

    def passes(
        self,
        ids: Tensor,
        targets: Tensor,
        plan: Sequence[Pass],
        format: Format,
        normalise: bool = False,
        taught: Tensor | None = None,
    ) -> tuple[dict[Any, Tensor], Tensor | None]:
        """Add the update's gradient to the parameters'; the cross entropy of each width, the first predictions."""
        losses: dict[Any, Tensor] = {}
        held: list[Tensor] | None = None
        reference = torch.zeros(())
        for number, step in enumerate(plan):
            self.use(step.width, self.trained, format, again=number > 0)
            part, aims = ids[step.part], targets[step.part]
            teacher = taught[step.part] if step.teacher and taught is not None else None
            if self.captured:
                # A captured pass reads its teacher where the pass before left it.
                place = None if teacher is None else teacher.data_ptr()
                wider = (tier for tier in self.widths_of_tiers if step.width is not None and tier >= step.width)
                key = (step.width is None, next(wider, None), step.labels, step.teacher, step.weight, part.shape, place)
                found = self.graphs.get(key) or self._captured(part, aims, teacher, step, key)
                graph, given, wanted, cross_entropy, logits = found
                given.copy_(part)
                wanted.copy_(aims)
                graph.replay()
                losses[step.width] = cross_entropy.clone()
            else:
                losses[step.width], logits = self._compute(part, aims, teacher, step)
            taught = logits if taught is None else taught
            if normalise:
                gradients = [parameter.grad for parameter in self.model.parameters()]
                norm = torch.nn.utils.get_total_norm(gradients)
                if held is None:
                    reference, held = norm, [gradient.clone() for gradient in gradients]
                else:
                    torch._foreach_mul_(gradients, reference / norm)
                    torch._foreach_add_(held, gradients)
                torch._foreach_zero_(gradients)
        if held is not None:
            torch._foreach_copy_([parameter.grad for parameter in self.model.parameters()], held)
        return losses, taught

    def _tier_gradients(self) -> dict[Precision, dict[int, Tensor]]:
        """The gradients of each tier by the number of the layer they belong to; E5M8 stands for the weight itself."""
        found: dict[Precision, dict[int, Tensor]] = {}
        seen: set[int] = set()
        for number, layer in enumerate(self.layers):
            if id(layer.weight) in seen:
                continue
            seen.add(id(layer.weight))
            for width, tier in (*layer.tiers["weight"], (Precision.E5M8, layer.weight)):
                found.setdefault(width, {})[number] = tier.grad
        return found

    @torch.no_grad()
    def mix(self, mixed: Sequence[tuple[Precision, Precision, float]]) -> None:
        """Pass gradients from tier to tier; every share is of what a tier had from its own passes."""
        gradients = self._tier_gradients()
        changed = {target for _, target, _ in mixed}
        own = {
            width: {n: g.clone() if width in changed else g for n, g in gradients[width].items()}
            for width in {source for source, _, _ in mixed}
        }
        for source, target, share in mixed:
            both = sorted(own[source].keys() & gradients[target].keys())
            torch._foreach_add_([gradients[target][n] for n in both], [own[source][n] for n in both], alpha=share)

    def measure(self, ids: Tensor, targets: Tensor, format: Format) -> Measured:
        """What `OtaroTrainer` measures before its first update, here on one batch."""
        cosines: dict[Precision, float] = {}
        losses: dict[Precision, float] = {}
        for width in (Precision.E5M5, Precision.E5M8, *reversed(self.widths_of_tiers)):
            if width in self.widths_of_tiers:
                self.use(width, self.trained, format)
                losses[width] = float(self._compute(ids, targets, None, Pass(width))[0])
            else:  # a pass of the run to come
                found, _ = self.passes(ids, targets, [Pass(width)], format)
                losses[width] = float(found[width])
            if width == Precision.E5M5:
                self.model.zero_grad(set_to_none=False)
            cosines = {**agreement(self.model), **cosines}
        self.model.zero_grad(set_to_none=False)
        return Measured(cosines, losses)

    @torch.no_grad()
    def reuse(self, passed: set[Any], kept: dict[Precision, list[Tensor]]) -> None:
        """Keep the gradients of tiers that had a pass, and give the others theirs again."""
        gradients = self._tier_gradients()
        for width in self.widths_of_tiers:
            own = list(gradients[width].values())
            if width not in passed:
                if width in kept:
                    torch._foreach_add_(own, kept[width])
            elif width in kept:
                torch._foreach_copy_(kept[width], own)
            else:
                kept[width] = [gradient.clone() for gradient in own]

    @torch.no_grad()
    def carry(self, before: list[Tensor], shares: dict[Precision, float]) -> None:
        """Move the tiers by their shares of the step that the weights have just taken."""
        moved = [layer.weight.detach() for layer in self.layers]
        torch._foreach_sub_(before, moved)
        seen: set[int] = set()
        for width, share in shares.items():
            tiers, steps = [], []
            for layer, step in zip(self.layers, before, strict=True):
                tier = dict(layer.tiers["weight"]).get(width)
                if tier is not None and id(tier) not in seen:
                    seen.add(id(tier))
                    tiers.append(tier)
                    steps.append(step)
            torch._foreach_add_(tiers, steps, alpha=-share)

    @torch.no_grad()
    def release(self, format: Format) -> None:
        """Give the gradients of the E5M4 weights that the E5M3 tier's cells hold back to that tier."""
        held = {
            number: dict(layer.tiers["weight"])
            for number, layer in enumerate(self.layers)
            if len(layer.tiers["weight"]) == 2
        }
        narrow, wide = Precision.E5M3, Precision.E5M4
        weights = [self.layers[number].weight.detach() for number in held]
        if self.device.type != "cuda":
            for weight, of in zip(weights, held.values(), strict=True):
                detached = [(width, of[width].detach()) for width in (narrow, wide)]
                free, bound = (ops.fake_quantize(weight, wide, format, tiers) for tiers in (detached[1:], detached))
                of[narrow].grad.addcmul_((free != bound).to(weight.dtype), of[wide].grad)
            return
        from otaro.ops import gpu

        if self.releasing is None:
            free, bound = ([torch.empty_like(w, dtype=self.half or w.dtype) for w in weights] for _ in range(2))
            tiers = [(width, [of[width].detach() for of in held.values()]) for width in (narrow, wide)]
            self.releasing = (
                gpu.prepare(weights, free, format.group_size, tiers[1:]),
                gpu.prepare(weights, bound, format.group_size, tiers),
                free,
                bound,
            )
        for batch in self.releasing[:2]:
            gpu.run(batch, wide, format, sliced=True)
        for of, free, bound in zip(held.values(), *self.releasing[2:], strict=True):
            apart = (free != bound).to(of[wide].grad.dtype)
            of[narrow].grad.addcmul_(apart, of[wide].grad)

    def _kinds(self) -> dict[int, tuple[Precision | None, str]]:
        """Of every parameter the tier it is, and what comes to rest with it; see `Idea.at_rest`."""
        kinds: dict[int, tuple[Precision | None, str]] = {id(each): (None, "norms") for each in self.model.parameters()}
        for layer in self.layers:
            for name, tiers in layer.tiers.items():
                kinds[id(layer._parameters[name])] = (None, "")
                kinds.update({id(tier): (width, "") for width, tier in tiers})
        for layer in self.floored:
            kinds.update({id(tier): (width, "floored") for tiers in layer.tiers.values() for width, tier in tiers[:1]})
        return kinds

    def tune(
        self, idea: Idea, blocks: Tensor, steps: int, batch: int, seed: int, targets: Tensor | None = None
    ) -> dict[str, Any]:
        """Tune from the start; returns how often each width was passed and what it took, in all and an update.

        `targets` are the labels of the blocks where these are not all to be learned.
        """
        for layer in self.floored:
            layer.floor = idea.floor
        self.reset(idea.format, idea.tiers)
        self.model.train()
        torch.manual_seed(seed)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        while len(order) < steps * batch:
            order = torch.cat([order, torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed + 1))])
        order = order.to(self.device)  # now: a copy in every update would wait for the one before
        parameters = list(self.model.parameters())
        for parameter in parameters:
            # Captured passes add to gradients where they lie.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        inner: torch.optim.Optimizer
        if idea.sgd:
            inner = torch.optim.SGD(parameters, lr=idea.learning_rate)
        else:
            fused = self.device.type == "cuda"
            kinds = self._kinds()
            groups = [
                {
                    "params": [each for each in parameters if kinds[id(each)] == kind],
                    "rate": dict(idea.tier_rates).get(kind[0], 1.0) if kind[0] else 1.0,
                    "tier": kind[0],
                    "rests": kind[0] in idea.at_rest or kind[1] in idea.at_rest,
                }
                for kind in dict.fromkeys(kinds.values())
            ]
            inner = torch.optim.AdamW(groups, lr=idea.learning_rate, betas=idea.betas, weight_decay=0, fused=fused)
        ultra_low = [Precision.E5M4, Precision.E5M3]
        optimizer = inner if idea.delay is None else DelayedOptimizer(inner, ultra_low, idea.delay, idea.delay_apply)
        shares = dict(idea.shares)
        started = settled = time.perf_counter()
        before_tuning: Measured | None = None
        if idea.by_agreement:
            chosen = order[:batch]
            aims = blocks[chosen] if targets is None else targets[chosen]
            before_tuning = self.measure(blocks[chosen], aims, idea.format)
            shares = before_tuning.shares
        averaged: list[Tensor] = []
        moving = [each for group in inner.param_groups if not group.get("rests") for each in group["params"]]
        own_gradients: dict[Precision, list[Tensor]] = {}
        losses: dict[Precision | None, float] = {}
        widths: dict[str, int] = {}
        self.preparing = prepared = 0.0
        first = min(20, steps - 1)
        for number in range(steps):
            if number == first:
                self.wait()
                settled, prepared = time.perf_counter(), self.preparing
            warm = min(1.0, (number + 1) / max(1.0, idea.warm_up * steps))
            faded = 0.5 * (1 + math.cos(math.pi * number / steps)) if idea.schedule == "cosine" else 1.0
            if idea.schedule == "linear":
                faded = 1 - number / steps
            for group in inner.param_groups:
                final = 0.0 if group.get("rests") else idea.final
                group["lr"] = idea.learning_rate * warm * (final + (1 - final) * faded) * group.get("rate", 1.0)
            chosen = order[number * batch : (number + 1) * batch]
            ids = blocks[chosen]
            aims = ids if targets is None else targets[chosen]
            plan = idea.plan(number, steps, losses)
            if before_tuning and not is_hurt(before_tuning.losses, Precision.E5M8, Precision.E5M5):
                plan = [replace(step, width=Precision.E5M8) if step.width == Precision.E5M5 else step for step in plan]
            for step in plan:
                widths[str(step.width)] = widths.get(str(step.width), 0) + 1
            taught = None
            for part in [[step] for step in plan] if idea.one_by_one else [plan]:
                measured, taught = self.passes(ids, aims, part, idea.format, idea.normalise, taught)
                if idea.needs_losses:
                    losses.update({width: float(loss) for width, loss in measured.items()})
                if idea.reused:
                    self.reuse({step.width for step in part}, own_gradients)
                if shares:
                    share_gradients(self.model, shares, self.trained)
                if idea.released and len(plan) > 1:
                    self.release(idea.format)
                if idea.mixed:
                    # Tiers without a pass of their own go with the weight itself.
                    alone = [(source, target, 1.0) for source, target, _ in idea.mixed]
                    self.mix(idea.mixed if len(plan) > 1 else alone)
                if idea.clip:
                    nn.utils.clip_grad_norm_(parameters, idea.clip)
                if isinstance(optimizer, DelayedOptimizer):
                    optimizer.width = part[0].width
                before = [layer.weight.detach().clone() for layer in self.layers] if idea.carried else []
                rest = [
                    (parameter, parameter.grad)
                    for group in inner.param_groups
                    if idea.resting and group["tier"] and group["tier"] not in {step.width for step in part}
                    for parameter in group["params"]
                ]
                for parameter, _ in rest:
                    parameter.grad = None
                optimizer.step()
                for parameter, gradient in rest:
                    parameter.grad = gradient
                if idea.carried:
                    self.carry(before, dict(idea.carried))
                optimizer.zero_grad(set_to_none=False)
            taken = place(number + 1, steps, idea.average)
            with torch.no_grad():
                if taken == 1:
                    averaged = [parameter.clone() for parameter in moving]
                elif taken:
                    torch._foreach_lerp_(averaged, moving, 1 / taken)
        if averaged:
            with torch.no_grad():
                torch._foreach_copy_(moving, averaged)
        self.wait()
        ended = time.perf_counter()
        result: dict[str, Any] = {
            "seconds": ended - started,
            "step_seconds": (ended - settled - (self.preparing - prepared)) / (steps - first),
            "preparing_seconds": self.preparing,
            "passes": widths,
        }
        if before_tuning:
            result["measured_before"] = before_tuning.to_json()
        if idea.tiers:
            self.use(None, self.trained, idea.format)
            result["unsettled_groups"] = settle_model(self.model)
        return result

    @torch.no_grad()
    def perplexity(
        self,
        tokens: Tensor,
        widths: Sequence[Precision | None],
        format: Format,
        window: int = 2048,
        batch: int = 16,
        targets: Tensor | None = None,
    ) -> dict[str, float]:
        """Perplexity at widths, as `common.perplexity`, in float32 (on a GPU TF32, which rounds E5M8).

        `targets` are the tokens, with IGNORED where a prediction does not count.
        """
        self.model.eval()
        windows = tokens[: len(tokens) // window * window].view(-1, window)
        wanted = windows if targets is None else targets[: windows.numel()].view(-1, window)
        count = int((wanted[:, 1:] != IGNORED).sum())
        result = {}
        for width in widths:
            self.use(width, self.measured, format)
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for chunk, aims in zip(windows.split(batch), wanted.split(batch), strict=True):
                total += self.score(self.hidden(chunk), aims).double()
            result["full" if width is None else str(width)] = math.exp(float(total) / count)
        return result
