"""The step with two blocks of each list of identical ones, whose events are scaled to all of them.

Blocks of one kind allocate and compute the same. So fixes are estimated on a model with two of them, which is
traced in a fraction of the time: the first one's parameters, gradients, optimizer state and what it saves for
backward are counted for all blocks but the last, and the difference in time for every block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from oomph.nn.blocks import blocks
from oomph.records import Allocation, FixUse, Prediction, Proposal
from oomph.workload import Changed, Workload

# The step's seconds, the host's, the GPU's in forward, backward and optimizer, and of the copies in each.
Costs = tuple[float, ...]

UNKNOWN_SECONDS = 1.0  # of every step, where no kernel of it was seen: sets are compared by memory alone
_KEPT = 2
_FEWEST = 5  # with fewer blocks, little time would be saved
_OF_ALL = (("batch",), ("parameters",), ("forward",), ("",))  # what a proposal says where all changes
_STAY = ("parameter", "buffer", "gradient", "optimizer state", "weight average")


@dataclass(frozen=True)
class Reduction:
    """What is left out of a model."""

    lists: tuple[tuple[str, ...], ...]  # the names of the blocks of each list
    parameters: float  # elements of the whole model's parameters, over those of the reduced one
    tensors: float  # the number of parameters of the whole model, over that of the reduced one

    def workload(self, workload: Workload) -> Workload:
        return replace(workload, model=Changed(workload.model, self._reduce))

    def reduce_trained(self, model: nn.Module, optimizer: Any) -> None:
        """A model that has its optimizer, if it has one."""
        self._reduce(model)
        left = set(map(id, model.parameters()))
        for group in getattr(optimizer, "param_groups", ()):
            group["params"] = [each for each in group["params"] if id(each) in left]

    def _reduce(self, model: nn.Module) -> None:
        for names in self.lists:
            members: Any = model.get_submodule(names[0].rpartition(".")[0])
            del members[_KEPT:]

    def use(self, proposal: Proposal) -> FixUse:
        """The fix, in the blocks that are left."""
        options = {
            key: [name for name in value if not self._is_left_out(name)] if isinstance(value, list) else value
            for key, value in proposal.options.items()
        }
        if proposal.fix in ("activation_checkpointing", "activation_offloading"):
            options["blocks"] = self._left(proposal.where)
        return FixUse(proposal.fix, options)

    def _is_left_out(self, name: Any) -> bool:
        return any(
            isinstance(name, str) and _is_inside(name, block)
            for names in self.lists
            for block in names[_KEPT:]
        )

    def allocations(self, prediction: Prediction) -> tuple[Allocation, ...]:
        """Those of the reduced model's prediction, with the bytes of the whole model's."""
        freed = self._gradients_freed_in_backward(prediction)
        scales: dict[str, int] = {}

        def scaled(made: Allocation) -> Allocation:
            if made.stage == "optimizer step" and not freed:
                return made._replace(bytes=round(made.bytes * self.parameters))
            if made.id in freed or (not made.saved and made.kind not in _STAY):
                return made
            scale = scales.get(made.module)
            if scale is None:
                inside = (len(names) - 1 for names in self.lists if _is_inside(made.module, names[0]))
                scale = scales[made.module] = next(inside, 1)
            return made if scale == 1 else made._replace(bytes=made.bytes * scale)

        return tuple(map(scaled, prediction.allocations))

    def _gradients_freed_in_backward(self, prediction: Prediction) -> set[int]:
        """Gradients of a first block that are made when those of the second are gone: the optimizer steps in
        backward, and no two blocks have their gradients at the same time."""
        found: set[int] = set()
        alive: dict[int, str] = {}
        for event in prediction.events:
            if event.action == "mark" or prediction.allocations[event.id].kind != "gradient":
                continue
            if event.action == "free":
                alive.pop(event.id, None)
                continue
            module = alive[event.id] = prediction.allocations[event.id].module
            for first, second, *_ in self.lists:
                if _is_inside(module, first) and not any(_is_inside(each, second) for each in alive.values()):
                    found.add(event.id)
        return found

    def host_bytes(self, proposal: Proposal, reduced: int) -> int:
        if proposal.where == ("optimizer",):
            return round(reduced * self.parameters)
        return round(reduced * self._times(proposal))

    def _left(self, where: Sequence[str]) -> list[str]:
        return [name for name in where if not self._is_left_out(name)]

    def _times(self, proposal: Proposal) -> float:
        """The modules that a fix changes, over those of the reduced model that it changes."""
        left = len(self._left(proposal.where))
        if proposal.fix == "activation_offloading":
            left -= 1  # the last block's stay
        return len(proposal.where) / max(1, left)

    def costs(self, proposal: Proposal, fixed: Costs, reduced: Costs, whole: Costs) -> Costs:
        """Of the whole model's step with a fix, from the reduced one's with and without it."""
        where, times = proposal.where, self._times(proposal)

        # The host's time for an optimizer grows with the number of parameters, the GPU's with their elements.
        of_optimizer = (self.parameters, self.tensors, *(self.parameters for _ in whole[2:]))

        def scaled(with_fix: float, without: float, of_whole: float, grows: float) -> float:
            if times > 1:
                return of_whole + (with_fix - without) * times
            if where == ("optimizer",):
                return of_whole + (with_fix - without) * grows
            if where in _OF_ALL and without:
                return of_whole * with_fix / without
            return of_whole + with_fix - without

        return tuple(map(scaled, fixed, reduced, whole, of_optimizer))


def _is_inside(module: str, block: str) -> bool:
    return f"{module}.".startswith(f"{block}.")


def costs(prediction: Prediction, link: float) -> Costs:
    """`link`: bytes per second between host and GPU."""
    work = prediction.work
    copies = (max(phase.to_host, phase.to_device) / link for phase in work.phases)
    busy = (phase.seconds for phase in work.phases)
    return (prediction.step_seconds or UNKNOWN_SECONDS, work.host_seconds, *busy, *copies)


def step_seconds(costs: Costs) -> float:
    """No less than the host takes, and than the GPU takes in each part of the step, or the copies."""
    step, host, *phases = costs
    return max(step, host, sum(map(max, phases[:3], phases[3:])))


def joint_costs(fixed: Costs, reduced: Costs, whole: Costs, alone: Sequence[tuple[Costs, Costs]]) -> Costs:
    """Of the whole model's step with several fixes.

    `alone`: the costs of each, in the reduced and in the whole model. What they take together beyond the sum
    of what each takes grows as the costs without fixes.
    """
    found = []
    for index, (together, before, of_whole) in enumerate(zip(fixed, reduced, whole, strict=True)):
        beyond_sum = together - before - sum(small[index] - before for small, _ in alone)
        each = sum(large[index] - of_whole for _, large in alone)
        found.append(of_whole + each + beyond_sum * (of_whole / before if before else 1.0))
    return tuple(found)


def reduction(model: nn.Module) -> Reduction | None:
    """None where the model has no list of many identical blocks."""
    lists: list[tuple[str, ...]] = []
    for group in blocks(model):
        names = tuple(name for name, _ in group)
        members = model.get_submodule(names[0].rpartition(".")[0])
        if not isinstance(members, nn.ModuleList | nn.Sequential) or len(members) != len(group):
            continue
        shapes = {(type(block), tuple(p.shape for p in block.parameters())) for _, block in group}
        if len(shapes) == 1 and len(group) >= _FEWEST:
            lists.append(names)
    removed = {name for names in lists for name in names[_KEPT:]}
    left = {
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)  # blocks may share some
        if removed.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))
    }
    if not lists or not left:
        return None
    elements, left_elements = (sum(p.numel() for p in each) for each in (model.parameters(), left))
    return Reduction(tuple(lists), elements / left_elements, len(list(model.parameters())) / len(left))
