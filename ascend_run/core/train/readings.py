"""Metrics of a logged step besides the loss: speed, memory, expert load, plugin metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from ascend_run.core.hooks import Hooks
from ascend_run.core.model.gpt import GPT
from ascend_run.core.model.router import Router
from ascend_run.ops.experts.expert_load import ExpertLoad
from ascend_run.plugin_api import contracts as c

from .step import StepResult, TrainStep


class Readings:
    """Collect the metrics of the steps between two log lines. Must be called on every rank."""

    def __init__(self, context: c.RunContext, step: TrainStep, hooks: Hooks) -> None:
        self.context, self.step = context, step
        self.hooks = hooks
        self.plugin_metrics = hooks.merge_named("ascend_metrics", context=context)
        modules = [module for chunk in step.bundle.chunks for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, MoELayer)]
        self.loads = [
            ExpertLoad(cast("nn.Module", x.router), cast("int", x.layer_number) - 1) for x in layers
        ]
        self.routers = [module for module in modules if isinstance(module, Router)]
        self.models = [module for module in modules if isinstance(module, GPT)]
        step.retries.counts += (
            *((load, name) for load in self.loads for name in ("tokens_X", "dropped")),
            *((router, "aux_losses") for router in self.routers),
            *((model, "mtp_losses") for model in self.models),
        )
        self.start()

    def start(self) -> None:
        """Start the timer of the next log line."""
        self.started, self.tokens, self.steps = time.perf_counter(), 0, 0

    def add(self, result: StepResult) -> None:
        self.tokens += result.totals.num_tokens
        self.steps += 1

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time of the body from the speed in the next log line."""
        started = time.perf_counter()
        yield
        self.started += time.perf_counter() - started

    def collect(self, result: StepResult) -> Mapping[str, object]:
        """Return the metrics of one log line and restart the timer."""
        self.context.device.synchronize()
        elapsed = time.perf_counter() - self.started
        now, peak = self.context.device.memory_bytes()
        readings: dict[str, object] = {
            "step": self.context.step,
            "loss": result.loss,
            "lr": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": self.tokens / elapsed,
            "step_seconds": elapsed / max(1, self.steps),
            "memory_bytes": now,
            "memory_peak_bytes": peak,
            "consumed_samples": self.context.consumed_samples,
        }
        if self.context.config.train.precision == "fp16":
            readings["loss_scale"] = self.step.loss_scale
        if result.skipped:
            readings["skipped"] = True
        readings.update(result.totals.metrics)
        for role, one in result.others.items():
            readings |= {f"{role} loss": one.loss, f"{role} grad_norm": one.grad_norm}
        readings.update(self._expert_readings())
        readings.update(self._mtp_readings())
        for group, (plugin, metrics) in self.plugin_metrics.items():
            with self.hooks.naming("ascend_metrics", plugin):
                for name, value in metrics(self.context).items():
                    readings[f"{group}/{name}"] = value
        self.start()
        return readings

    def _expert_readings(self) -> dict[str, object]:
        """Return each expert's share of the tokens since the last line, over layers and ranks."""
        config = self.step.bundle.transformer_config
        if (num_experts := config.num_moe_experts) is None:
            return {}
        layers = config.num_layers + (config.mtp_num_layers or 0)
        groups, device = self.context.groups, self.context.device.torch_device
        # Tokens per layer and expert, dropped selections, sum of the aux losses of all routers and
        # micro-batches, their number. A pipeline stage may have no router.
        summary = torch.zeros(layers * num_experts + 3, dtype=torch.float64, device=device)
        tokens_LX = summary[:-3].view(layers, num_experts)
        for load in self.loads:
            if (tokens := load.take()) is not None:
                tokens_LX[load.layer] += tokens
            summary[-3] += load.take_dropped()
        for router in self.routers:
            summary[-2:] += router.take_aux_losses()
        for group in (groups.tp_dp_cp, groups.pp):
            dist.all_reduce(summary, group=group)
        dropped, aux_loss, num_losses = summary[-3:].tolist()
        readings: dict[str, object] = {}
        if total := float(tokens_LX.sum()):
            readings["expert_load"] = (tokens_LX.sum(dim=0) / total).tolist()
            by_layer = (tokens_LX / tokens_LX.sum(dim=1, keepdim=True)).tolist()
            readings["expert_load_by_layer"] = [
                [round(share, 5) for share in load if share == share]  # NaN without experts
                for load in by_layer
            ]
            if config.moe_expert_capacity_factor is not None:
                readings["dropped_share"] = dropped / total
        if num_losses:
            # Each rank holds the aux loss of its part of the sequence only.
            readings["aux_loss"] = aux_loss / num_losses * groups.tp_cp.size()
        return readings

    def _mtp_readings(self) -> dict[str, object]:
        """Return the mean loss of each depth of multi-token prediction since the last line."""
        depths = self.step.bundle.transformer_config.mtp_num_layers
        if not depths:
            return {}
        groups, device = self.context.groups, self.context.device.torch_device
        # Sum and number of tokens of each depth, on the last pipeline stage.
        total = torch.zeros(depths, 2, dtype=torch.float64, device=device)
        for model in self.models:
            if (losses := model.take_mtp_losses()) is not None:
                total += losses
        for group in (groups.dp_cp, groups.pp):
            dist.all_reduce(total, group=group)
        return {
            f"mtp_{depth} loss": loss / max(count, 1.0)
            for depth, (loss, count) in enumerate(total.tolist(), 1)
        }
