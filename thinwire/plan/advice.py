"""What a user writes to take a method: one line of Python."""

from __future__ import annotations

from thinwire.plan.cluster import Cluster
from thinwire.plan.methods import DILOCO, POWERSGD, SHARDED_ADAM, Method
from thinwire.plan.outer_schedule import OuterSchedule
from thinwire.plan.schedule import Schedule

__all__ = ["code_for", "title_of"]

_DDP = "model = DistributedDataParallel(model)"


def title_of(method: Method) -> str:
    """What a sentence calls it."""
    if method.algorithm == POWERSGD:
        return f"PowerSGD of rank {method.rank}"
    named = {
        "ddp-fp32": "DDP in fp32",
        "ddp-bf16": "DDP with its bf16 hook",
        SHARDED_ADAM: "AdamW on shards",
        DILOCO: "DiLoCo",
    }
    title = method.entry.name if method.entry is not None else named[method.algorithm]
    if method.stage:
        title += f" at ZeRO stage {method.stage}"
    return f"{title}, by node" if method.hierarchical else title


def code_for(method: Method, cluster: Cluster, schedule: Schedule, *, steps_given: bool = False) -> str:
    """The line. `steps_given`: the schedule's steps are the run's own, so that the step of the freeze is known."""
    if method.algorithm == "ddp-fp32":
        return _DDP
    if method.algorithm == "ddp-bf16":
        return f"{_DDP}; model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    if method.algorithm == POWERSGD:
        state = f"PowerSGDState(None, {method.rank}, start_powerSGD_iter={schedule.powersgd_start})"
        return f"{_DDP}; model.register_comm_hook(powerSGD_hook.{state}, powerSGD_hook.powerSGD_hook)"
    if method.algorithm == SHARDED_ADAM:
        if method.stage == 3:
            return 'thinwire.initialize(model=model, config={..., "zero_optimization": {"stage": 3}})'
        return f"thinwire.ShardedOptimizer(model.parameters(), torch.optim.AdamW, stage={method.stage}, lr=lr)"
    if method.algorithm == DILOCO:
        given, usual = schedule.outer, OuterSchedule()
        options = ["lr=lr", f"every={given.every}"]
        options += [
            f"{name}={getattr(given, name)!r}"
            for name in ("fragments", "overlap", "codec")
            if getattr(given, name) != getattr(usual, name)
        ]
        flat = ['nodes="flat"'] if cluster.has_hierarchy and not method.hierarchical else []
        return f"thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, {', '.join(options + flat)})"
    assert method.entry is not None
    options = ["lr=lr"]
    if method.stage:
        options.append(f"stage={method.stage}")
    if method.entry.freeze_option is not None and (steps_given or method.entry.local_steps):
        options.append(f"{method.entry.freeze_option}={schedule.freeze_step}")
    if method.entry.freeze_option is not None and not method.stage and schedule.warmup_wire != "fp32":
        options.append(f'warmup_wire="{schedule.warmup_wire}"')
    if cluster.has_hierarchy and not method.stage and not method.hierarchical:
        options.append('nodes="flat"')
    return f"thinwire.{method.entry.name}(model.parameters(), {', '.join(options)})"
