"""Plans a training job before it runs: step time, bytes and memory of every method on a given cluster, by a cost model
that a probe of the real network calibrates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports
from thinwire.plan.cluster import Cluster, Link, Processor, Speed
from thinwire.plan.methods import Method, OuterSchedule, Schedule, methods_for
from thinwire.plan.models import named_model
from thinwire.plan.prediction import Prediction, StepPrediction, predict
from thinwire.plan.recommendation import Plan, break_even_rate, plan
from thinwire.plan.units import PlanError
from thinwire.plan.workload import Activations, Blocks, Matrices, Transformer, Workload, plain_model

# A plan needs neither torch nor pydantic, which these import.
if TYPE_CHECKING:
    from thinwire.plan.calibration import Calibration, load_calibration, save_calibration
    from thinwire.plan.probing import probe
else:
    __getattr__, __dir__ = lazy_exports(__name__)

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
