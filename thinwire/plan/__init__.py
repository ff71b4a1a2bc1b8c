"""Plans a training job before it runs: step time, bytes and memory of every method on a given cluster, by a cost model
that a probe of the real network calibrates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "Activations",
    "Blocks",
    "Calibration",
    "Cluster",
    "Link",
    "Matrices",
    "Method",
    "OuterSchedule",
    "Plan",
    "PlanError",
    "Prediction",
    "Processor",
    "Schedule",
    "Speed",
    "StepPrediction",
    "Transformer",
    "Workload",
    "break_even_rate",
    "load_calibration",
    "methods_for",
    "named_model",
    "plain_model",
    "plan",
    "predict",
    "probe",
    "save_calibration",
]

# `thinwire plan --help` needs none of this room's heavy imports.
if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration, load_calibration, save_calibration
    from thinwire.plan.cluster import Cluster, Link, Processor, Speed
    from thinwire.plan.methods import Method, OuterSchedule, Schedule, methods_for
    from thinwire.plan.models import named_model
    from thinwire.plan.prediction import Prediction, StepPrediction, predict
    from thinwire.plan.probing import probe
    from thinwire.plan.recommendation import Plan, break_even_rate, plan
    from thinwire.plan.units import PlanError
    from thinwire.plan.workload import Activations, Blocks, Matrices, Transformer, Workload, plain_model
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "calibration": ("Calibration", "load_calibration", "save_calibration"),
            "cluster": ("Cluster", "Link", "Processor", "Speed"),
            "methods": ("Method", "OuterSchedule", "Schedule", "methods_for"),
            "prediction": ("Prediction", "StepPrediction", "predict"),
            "probing": ("probe",),
            "recommendation": ("Plan", "break_even_rate", "plan"),
            "models": ("named_model",),
            "units": ("PlanError",),
            "workload": ("Activations", "Blocks", "Matrices", "Transformer", "Workload", "plain_model"),
        },
    )
