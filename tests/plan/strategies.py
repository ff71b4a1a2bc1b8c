"""Random clusters, workloads and methods, and the everyday ones that tests change one thing of."""

from hypothesis import strategies as st

from thinwire.plan import Cluster, Link, Method, Processor, Schedule, Workload, methods_for, named_model, plain_model
from thinwire.plan.models import MODELS

GIGABIT = 1e9 / 8

seconds = st.floats(0, 2)
rates = st.floats(1e6, 1e11)
links = st.builds(Link.of, rates, st.floats(0, 1e-3), st.floats(0, 1e-4))
processors = st.builds(Processor.of_memory, st.floats(1e9, 5e12), st.floats(0, 1))
clusters = st.builds(Cluster, st.integers(1, 300), st.integers(1, 16), links, links, processors)
models = st.one_of(st.sampled_from(MODELS).map(named_model), st.integers(1, 10**11).map(plain_model))
workloads = st.builds(
    Workload, models, seconds, seconds, st.integers(1, 8), st.none() | seconds, st.sampled_from(("fp32", "bf16"))
)
schedules = st.builds(
    Schedule,
    st.integers(1, 10**6),
    st.floats(0, 1),
    st.sampled_from(("fp32", "bf16")),
    var_update_scaler=st.integers(1, 64),
    local_step_scaler=st.integers(1, 10**5),
    local_step_clipper=st.integers(1, 32),
    bucket_bytes=st.integers(1 << 16, 1 << 28),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Workload, Cluster, Method, Schedule]:
    cluster = draw(clusters)
    return draw(workloads), cluster, draw(st.sampled_from(methods_for(cluster))), draw(schedules)


def ethernet(nodes: int = 4, ranks_per_node: int = 1, gbps: float = 1.0, overlap: float = 1.0) -> Cluster:
    """A cluster on Ethernet, of nodes whose ranks are joined by 100 Gb/s."""
    between, inside = Link.of(gbps * GIGABIT, 50e-6, 5e-6), Link.of(100 * GIGABIT, 10e-6, 1e-6)
    return Cluster(nodes, ranks_per_node, between, inside, Processor.of_memory(30e9, overlap))


def bert(size: str = "base", dtype: str = "fp32") -> Workload:
    return Workload(named_model(f"bert-{size}"), 0.2, 0.4, dtype=dtype)  # type: ignore[arg-type]
