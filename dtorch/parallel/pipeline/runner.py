"""``Pipeline``: stages on their meshes, run in the order of a schedule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import nn

from dtorch.deferred import DeferredWeights
from dtorch.graph import Graph
from dtorch.parallel.pipeline.batches import MicroBatches, joined
from dtorch.parallel.pipeline.boundary import Boundary
from dtorch.parallel.pipeline.order import issue_order
from dtorch.parallel.pipeline.schedules import ScheduleName, make_orders, training_order
from dtorch.parallel.pipeline.steps import Orders, Step
from dtorch.parallel.reduction import reduce_once_without_pieces
from dtorch.random import branches, get_state, next_seed, set_state
from dtorch.tensors import Tensor
from dtorch_runtime.errors import MeshError, SettingError
from dtorch_runtime.ir.mesh import DeviceMesh


class Pipeline:
    """Stages of a model, each on a mesh of its own, through which micro-batches go in the order of a schedule.

    A stage is called with what the stage before returned, brought to its mesh: one tensor, or a tuple as several
    arguments. Its parameters are on its mesh already: made there under ``device_mesh_guard``, or by ``parallelize``.

    Args:
        stages: in the order of the model. With several times as many stages as meshes, stage s is on mesh
            ``s % len(meshes)``.
        meshes: ``mesh.unbind("pp")``. They may have other axes; rows are sharded on one named ``dp``.
        num_micro_batches: into how many runs of rows a batch is cut.
        loss: takes the output of the last stage, and the target where ``step()`` is given one; gives a number.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` (several stages a mesh), ``"zero_bubble"``, or a list of
            ``Step`` for each mesh.
        reduction: what ``loss`` does with the rows: with ``"mean"`` the micro-batches are averaged by their rows, with
            ``"sum"`` added.

    Raises:
        SettingError: numbers that do not fit, no such schedule, or steps that do not make up a training step.
        MeshError: a mesh that is none, or a parameter of a stage that is not on the stage's mesh.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | nn.ModuleList,
        meshes: Sequence[DeviceMesh],
        *,
        num_micro_batches: int,
        loss: Callable[..., torch.Tensor] | None = None,
        schedule: ScheduleName | Orders = "1f1b",
        reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        self.stages = list(stages)
        self.meshes = list(meshes)
        _check_stages(self.stages, self.meshes)
        if reduction not in ("mean", "sum"):
            raise SettingError(f"reduction= is 'mean' or 'sum', as that of the loss, got {reduction!r}")
        if loss is not None and not callable(loss):
            raise SettingError(
                f"loss= takes a function, e.g. torch.nn.functional.cross_entropy, got {loss!r}"
            )
        self.num_micro_batches = num_micro_batches
        self.loss = loss
        self.reduction = reduction
        num_ranks = len(self.meshes)
        num_chunks = len(self.stages) // num_ranks
        #: In which ``step()`` issues; checked.
        self.order: list[Step] = training_order(schedule, num_ranks, num_micro_batches, num_chunks)

    def mesh_of(self, stage: int) -> DeviceMesh:
        """The mesh of a stage."""
        return self.meshes[stage % len(self.meshes)]

    def step(
        self,
        *inputs: torch.Tensor,
        target: torch.Tensor | Sequence[torch.Tensor] | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """One training step, without the optimizer: the loss of the batch; gradients are added to ``grad``.

        Args:
            inputs: of the first stage. They, and the target, have the batch as dim 0. Tensors of the client are sent
                piece by piece.
            target: what ``loss`` takes after the output; several as a sequence.
            losses: is given the loss of each micro-batch.

        Raises:
            SettingError: the Pipeline has no loss, no gradients are recorded, or tensors that cannot be cut into
                micro-batches. What a stage or the loss raises goes through; gradients of micro-batches that were
                done before stay, as in any loop that accumulates them.
            CaptureError: a captured step draws random numbers, which a replay would draw in another order.
        """
        if self.loss is None:
            raise SettingError("step() needs a loss; write Pipeline(..., loss=torch.nn.functional.mse_loss)")
        if not torch.is_grad_enabled():
            raise SettingError(
                "step() computes gradients, and they are off; leave torch.no_grad(), or infer()"
            )
        rows = MicroBatches(inputs, self.num_micro_batches, self.mesh_of(0))
        last = self.mesh_of(len(self.stages) - 1)
        targets = None
        if target is not None:
            given = [target] if isinstance(target, torch.Tensor) else list(target)
            targets = MicroBatches(given, self.num_micro_batches, last)
            if targets.num_rows != rows.num_rows:
                raise SettingError(
                    f"the inputs have {rows.num_rows} rows and the target {targets.num_rows}; both are the same batch"
                )
        with _numbers(self.num_micro_batches) as numbers:
            run = _Run(self, rows, targets, self.order, numbers)
            parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
            # Of one micro-batch each gradient is reduced as soon as it is there, beside the rest of the backward pass.
            with nullcontext() if self.num_micro_batches == 1 else reduce_once_without_pieces(parameters):
                for step in self.order:
                    run.do(step)
        if losses is not None:
            losses[:] = [run.losses[index] for index in range(self.num_micro_batches)]
        return run.total()

    def infer(self, *inputs: torch.Tensor, num_micro_batches: int | None = None) -> Any:
        """The output of the last stage for the whole batch, on its mesh; no gradients.

        Args:
            inputs: as for ``step``.
            num_micro_batches: another number than for training.

        Raises:
            SettingError: tensors that cannot be cut into micro-batches.
        """
        num = self.num_micro_batches if num_micro_batches is None else num_micro_batches
        num_ranks = len(self.meshes)
        order = issue_order(make_orders("forward_only", num_ranks, num, len(self.stages) // num_ranks))
        rows = MicroBatches(inputs, num, self.mesh_of(0))
        with torch.no_grad(), _numbers(num) as numbers:
            run = _Run(self, rows, None, order, numbers)
            for step in order:
                run.do(step)
            return joined([run.outputs.pop(index) for index in range(num)])


class _Run:
    """One pass of all micro-batches: what is on its way, and what waits for its backward."""

    def __init__(
        self,
        pipeline: Pipeline,
        rows: MicroBatches,
        targets: MicroBatches | None,
        order: Sequence[Step],
        numbers: _Numbers,
    ) -> None:
        self._pipeline = pipeline
        self._rows = rows
        self._targets = targets
        self._numbers = numbers
        self._trains = any(step.kind != "forward" for step in order)
        self._later = {
            (step.stage, step.micro_batch): DeferredWeights()
            for step in order
            if step.kind == "backward_weight"
        }
        #: Behind a stage, by (stage, micro-batch): for the forward of the next one, then for its own backward.
        self._boundaries: dict[tuple[int, int], Boundary] = {}
        self._roots: dict[int, torch.Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}

    def do(self, step: Step) -> None:
        """Issue one step."""
        stage, micro_batch = step.stage, step.micro_batch
        with Graph.default_graph().device_mesh_guard(self._pipeline.mesh_of(stage)):
            if step.kind == "forward":
                with self._numbers.of(micro_batch):
                    self._forward(stage, micro_batch)
            elif step.kind == "backward_weight":
                self._later.pop((stage, micro_batch)).run()
            elif step.kind == "backward_input":
                with self._later[stage, micro_batch].backward():
                    self._backward(stage, micro_batch)
            else:
                self._backward(stage, micro_batch)

    def _forward(self, stage: int, micro_batch: int) -> None:
        pipeline, key = self._pipeline, (stage, micro_batch)
        if stage == 0:
            inputs: tuple[Any, ...] = self._rows.on_mesh(micro_batch)
        else:
            before = self._boundaries[stage - 1, micro_batch]
            inputs, before.inputs = before.inputs, ()
        if key in self._later:
            with self._later[key].forward():
                output = pipeline.stages[stage](*inputs)
        else:
            output = pipeline.stages[stage](*inputs)
        if stage + 1 < len(pipeline.stages):
            self._boundaries[key] = Boundary(output, pipeline.mesh_of(stage + 1))
        elif self._trains:
            self._loss(output, micro_batch)
        else:
            self.outputs[micro_batch] = output

    def _loss(self, output: Any, micro_batch: int) -> None:
        targets = () if self._targets is None else self._targets.on_mesh(micro_batch)
        assert self._pipeline.loss is not None, "step() has looked"
        loss: Any = self._pipeline.loss(output, *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            given = type(loss).__name__
            if isinstance(loss, torch.Tensor):
                follows = "" if loss.requires_grad else ", that depends on none"
                given = f"a tensor of shape {list(loss.shape)}{follows}"
            raise SettingError(
                f"the loss of a pipeline is one number that follows from the output of the last stage, and depends "
                f"on parameters; got {given}; write e.g. loss=torch.nn.functional.cross_entropy"
            )
        self.losses[micro_batch] = cast(Tensor, loss.detach())
        self._roots[micro_batch] = loss * self._weight(micro_batch)

    def _weight(self, micro_batch: int) -> float:
        if self._pipeline.reduction == "sum":
            return 1.0
        return self._rows.rows_of(micro_batch) / self._rows.num_rows

    def _backward(self, stage: int, micro_batch: int) -> None:
        if stage + 1 < len(self._pipeline.stages):
            self._boundaries.pop((stage, micro_batch)).backward()
        else:
            torch.autograd.backward(self._roots.pop(micro_batch))

    def total(self) -> Tensor:
        """The loss of the batch."""
        terms: list[Any] = [loss * self._weight(index) for index, loss in sorted(self.losses.items())]
        return cast(Tensor, functools.reduce(operator.add, terms))


class _Numbers:
    """Random numbers of a pass: each micro-batch has a sequence of its own, which goes with it from stage to stage.

    So they are the same under every schedule, however many stages and meshes there are.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self._states = branches(num_micro_batches)

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Inside, random ops take the next numbers of a micro-batch."""
        outer = get_state()
        set_state(*self._states[micro_batch])
        try:
            yield
        finally:
            self._states[micro_batch] = get_state()
            set_state(*outer)

    @property
    def were_drawn(self) -> bool:
        """Whether any random op ran."""
        return any(count for _, count in self._states)


@contextmanager
def _numbers(num_micro_batches: int) -> Iterator[_Numbers]:
    numbers = _Numbers(num_micro_batches)
    yield numbers
    if not numbers.were_drawn:
        return
    next_seed()  # the next pass has others
    recording = Graph.default_graph().watching
    if recording is not None:
        recording.refuse(
            "draws random numbers in a pipeline, which each micro-batch takes from a sequence of its own, and a replay "
            "would not. Capture what has no dropout, or call the pipeline outside of it"
        )


def _check_stages(stages: Sequence[object], meshes: Sequence[object]) -> None:
    if not meshes or not all(isinstance(mesh, DeviceMesh) for mesh in meshes):
        raise MeshError(
            f"meshes= takes a list with the mesh of each stage, got {meshes!r}; write mesh.unbind('pp')"
        )
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise SettingError(
            f"stages= takes torch.nn.Modules, in the order of the model, got {[type(s).__name__ for s in stages]}"
        )
    if len(stages) % len(meshes):
        raise SettingError(
            f"{len(stages)} stages do not lie evenly on {len(meshes)} meshes; write as many stages as meshes, or a "
            f"multiple of them for schedule='interleaved'"
        )
    for number, stage in enumerate(stages):
        mesh = meshes[number % len(meshes)]
        for name, parameter in cast(nn.Module, stage).named_parameters():
            found = parameter.device_mesh if isinstance(parameter, Tensor) else parameter.device
            if found != mesh:
                raise MeshError(
                    f"{name} of stage {number} is on {found!r}, and the stage on {mesh!r}; write "
                    f"dtorch.parallelize(stage, mesh), or make the stage under device_mesh_guard(mesh)"
                )
