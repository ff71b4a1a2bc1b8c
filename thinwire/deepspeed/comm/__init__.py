"""deepspeed.comm: torch.distributed's calls, and those that also serve ranks which met without it, over MPI or as
threads."""

from __future__ import annotations

from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    all_gather,
    all_gather_object,
    all_to_all,
    all_to_all_single,
    batch_isend_irecv,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    irecv,
    is_available,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from thinwire.deepspeed.comm.meeting import init_distributed
from thinwire.deepspeed.comm.ranks import (
    all_gather_into_tensor,
    all_reduce,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    is_initialized,
)

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

# Other names that DeepSpeed has for them.
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce
