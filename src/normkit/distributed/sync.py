"""Let the norms of a model take their statistics over the batches of several processes."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit.core.messages import counted
from normkit.core.processes import Processes
from normkit.errors import NothingToDo, OptionError
from normkit.layers.synchronised import Synchronised

Model = TypeVar("Model", bound=nn.Module)


def sync(model: Model, group: Any = None, *, within: int | None = None) -> Model:
    """Let every norm that pools over samples share its statistics with other processes.

    In training, outputs, gradients and running statistics are then those of one process with the
    joined batch, whatever each of them has of it: batches may be unequal, and empty for some. All
    processes of the group have to run the same norms in the same order; ``nk.check_distributed``
    finds out before a run. Eval mode shares nothing.

    ``group`` is a process group of torch.distributed, None for all processes, or False to end the
    sharing. ``within`` shares among so many neighbouring processes only, such as those of one
    machine. Call it on every process, after init_process_group and before
    DistributedDataParallel; again, after a model has been loaded from a file as a whole.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nk.BN(8))
    >>> nk.sync(model, False)[1].processes is None
    True
    """
    layers = [m for m in model.modules() if isinstance(m, Synchronised) and m.can_synchronise()]
    left = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    left = [m for m in left if not isinstance(m, nn.SyncBatchNorm)]
    if group is False:
        if within is not None:
            raise OptionError("sync expects within= with statistics that are shared, got False.")
        processes = None
    else:
        processes = _processes(group, within)
    if not layers:
        if left:
            hint = 'Try nk.convert(model, "bn") first.'
        elif any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            hint = (
                "Those of nn.SyncBatchNorm share theirs already, as torch does it: leave them so, "
                'or try nk.convert(model, "bn") first for sync to choose who shares.'
            )
        else:
            hint = "All of them are of each sample."
        raise NothingToDo(f"The model has no norm of normkit with statistics of a batch. {hint}")
    if left and processes is not None:
        warnings.warn(
            f"{counted(len(left), 'batch norm')} of torch.nn share no statistics, such as "
            f"{type(left[0]).__name__}({left[0].num_features}). Try "
            'nk.convert(model, "bn") before sync.',
            stacklevel=2,
        )
    for layer in layers:
        layer.synchronise(processes)
    return model


def _processes(group: Any, within: int | None) -> Processes:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise OptionError(
            "sync expects processes that know of each other, but there is no process group. Try "
            "torch.distributed.init_process_group() before it, in a script started by torchrun."
        )
    if within is not None:
        if group is not None:
            raise OptionError("sync expects group= or within=, got both.")
        group = _neighbours(within)
    if group is None:
        group = distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise OptionError("sync got a process group that this process is no member of.")
        raise OptionError(
            f"sync expects a process group of torch.distributed, None for all processes, or "
            f"False, got {group!r}. Try nk.sync(model, within=4) for neighbours."
        )
    return Processes.of(group)


_made: dict[tuple[str, int], Any] = {}


def _neighbours(size: int) -> Any:
    """The group of so many processes in a row that this one is in."""
    world = distributed.get_world_size()
    whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not whole or world % size:
        raise OptionError(
            f"sync expects within= to divide the {world} processes, got {size!r}. Try one of "
            f"{', '.join(str(k) for k in range(1, world + 1) if world % k == 0)}."
        )
    assert distributed.group.WORLD is not None
    # asked for again, as for a second model, it is the same group: each costs connections
    key = distributed.group.WORLD.group_name, size
    known = _made.get(key)
    if known is None or known not in distributed.distributed_c10d._world.pg_map:
        known = _made[key] = distributed.new_subgroups(size)[0]
    return known
