"""Measurements of a cluster by a probe, as a JSON file: the one input of a plan that is not typed by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thinwire.plan.cluster import COLLECTIVES, Collective, Link, Processor, Speed
from thinwire.plan.units import PlanError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class CollectiveFit(_Section):
    """Seconds = `intercept` + sent bytes / `bytes_per_second`, as measured at these `input_bytes` in `seconds`.

    `error`: the median of |fit / measured - 1| over the sizes.
    """

    intercept: float = Field(ge=0)
    bytes_per_second: float = Field(gt=0)
    error: float = Field(ge=0)
    input_bytes: list[int]
    seconds: list[float]


class LinkFit(_Section):
    """The link among `ranks` ranks; `message`: seconds a message among many that wait for nothing."""

    ranks: int = Field(ge=2)
    message: float = Field(ge=0)
    collectives: dict[Collective, CollectiveFit]

    @model_validator(mode="after")
    def _all_collectives(self) -> LinkFit:
        if missing := [name for name in COLLECTIVES if name not in self.collectives]:
            raise ValueError(f"{', '.join(missing)} missing")
        return self


class DiskRates(_Section):
    """Bytes a second of a node's disk, past the page cache, its ranks at once; `both`: read and written by turns."""

    read: float = Field(gt=0)
    write: float = Field(gt=0)
    both: float = Field(gt=0)


class Calibration(_Section):
    """One probe. `between`: the link of a node to others, measured by one rank a node; `inside`: among the ranks of one
    node; None where there is none. `disk`: None where no folder was given."""

    format: Literal[1] = 1
    backend: str
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    between: LinkFit | None
    inside: LinkFit | None
    processor: Processor
    disk: DiskRates | None = None

    def link(self, which: Literal["between", "inside"]) -> Link | None:
        """The link for a Cluster, or None where it was not there to be measured."""
        fit: LinkFit | None = getattr(self, which)
        if fit is None:
            return None
        measured = {}
        for name, one in fit.collectives.items():
            # What a round costs: the intercept without further messages, shared among the rounds of the collective.
            a_second_a_round = Link.of(one.bytes_per_second, 1.0, 0.0).seconds(name, fit.ranks, 0)
            further = Link.of(one.bytes_per_second, 0.0, fit.message).seconds(name, fit.ranks, 0)
            latency = max(0.0, one.intercept - further) / a_second_a_round
            measured[name] = Speed(latency, one.bytes_per_second)
        return Link(measured["all_reduce"], fit.message, measured)

    def ranks_a_core(self, cores_per_node: float | None) -> float:
        """Ranks that shared a processor while it was measured, at least 1: on so many cores a node."""
        return 1.0 if cores_per_node is None else max(1.0, self.ranks_per_node / cores_per_node)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a file that `thinwire probe` wrote. Raises PlanError for one that cannot be read or is something else."""
    try:
        return Calibration.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise PlanError(f"the calibration {path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in error.errors())
        raise PlanError(f"{path} is no calibration of thinwire probe: {problems}") from None


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write the file. It appears whole or not at all."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(calibration.model_dump_json(indent=1) + "\n", encoding="utf-8")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def in_words(calibration: Calibration, path: Path) -> str:
    """What `thinwire probe` says of the file that it wrote."""
    lines = [f"{path}: {calibration.nodes} nodes of {calibration.ranks_per_node}, backend {calibration.backend}"]
    for name, link in (("between nodes", calibration.between), ("inside nodes", calibration.inside)):
        for collective, fit in link.collectives.items() if link is not None else ():
            lines.append(
                f"{name}, {collective}: {8 * fit.bytes_per_second / 1e9:.3g} Gb/s, {1e6 * fit.intercept:.0f} us, "
                f"fits to {100 * fit.error:.0f}%"
            )
    rates = calibration.processor
    lines.append(
        f"encode {rates.encode / 1e9:.2f}, decode {rates.decode / 1e9:.2f}, average {rates.average / 1e9:.2f}, AdamW "
        f"{rates.adam / 1e9:.2f} billion elements a second; {100 * rates.overlap:.0f}% of a transfer goes on beside "
        "computation"
    )
    if (disk := calibration.disk) is not None:
        read, write, both = disk.read / 1e9, disk.write / 1e9, disk.both / 1e9
        lines.append(f"disk of a node: reads {read:.2f}, writes {write:.2f}, both by turns {both:.2f} GB/s")
    return "\n".join(lines)
