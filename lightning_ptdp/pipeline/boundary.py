"""Entry and exit of one run of a stage, and the choice of the tensors that cross."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_ptdp.pipeline.containers import BlockPlace, Layer
from lightning_ptdp.pipeline.crossing import (
    At,
    Crossing,
    Form,
    Path,
    StageError,
    StageExit,
    TensorForm,
    describe,
    rebuild,
    substitute,
    tensors_in,
)
from lightning_ptdp.pipeline.first_stage_values import FirstStageValue, Origin, plain, replacement
from lightning_ptdp.pipeline.stage_run import StageRun, computed_between
from lightning_ptdp.shims.torch import is_transformed
from lightning_ptdp.shims.transformers import captured_outputs

Arguments = tuple[tuple[object, ...], dict[str, object]]


@dataclass(eq=False)
class Boundary:
    """State that the placeholders and hooks of a rank share while a stage runs.

    Attributes:
        places: Position of each stage among the containers.
        collects: Whether everything that blocks return crosses to all later stages.
        run: The run of a stage; None between runs.
    """

    places: Sequence[BlockPlace]
    collects: bool = False
    run: StageRun | None = None
    _usual: dict[TensorForm, Form] = field(default_factory=dict)

    def begin(self, stage: int, received: Crossing | None, *, training: bool) -> None:
        """Start a run of ``stage``."""
        aliases = None if received is None else received.writable()
        self.run = StageRun(stage, self.places[stage], training, aliases)

    def end(self) -> None:
        """End the run and release its state."""
        self.running.end()
        self.run = None

    @property
    def running(self) -> StageRun:
        """Return the current run, which must exist."""
        assert self.run is not None
        return self.run

    # ---- in front of the blocks ------------------------------------------------------------------

    def mark(self, tensor: Tensor) -> Tensor:
        """Mark the output of a stub of a module before the blocks, if a stage runs."""
        return tensor if self.run is None else FirstStageValue.mark(tensor, self.run.lost)

    def mark_true(
        self, stages: frozenset[int], _module: nn.Module, _args: object, output: Tensor
    ) -> Tensor:
        """Mark the output of a module before the blocks, if one of its ``stages`` runs."""
        if self.run is not None and self.run.stage in stages:
            return FirstStageValue.mark(output, self.run.true)
        return output

    # ---- blocks ----------------------------------------------------------------------------------

    def earlier_output(self, layer: Layer) -> object:
        """Return the output of ``layer``, a block of an earlier stage.

        Of all blocks except the last one, only collected values have crossed.
        """
        run = self.running
        assert run.received is not None
        is_received = layer.container == run.place.received
        is_entrance = layer.name == run.place.entrance
        if layer.is_last or is_entrance:
            for kind, values in captured_outputs().items():
                values[:] = run.captured.get(layer.container, {}).get(kind, [])
        run.lost.blocks_reached = run.lost.blocks_reached or is_received
        run.unsent.blocks_reached = run.unsent.blocks_reached or is_entrance
        output = run.outputs.get(layer.name)
        if output is None and is_received:
            output = run.received_output
            output = (
                output
                if is_entrance
                else substitute(output, lambda _path, tensor: run.unknown(tensor))
            )
        elif output is None:
            form = run.past[layer.container]
            device = next((tensor.device for tensor in run.received.tensors), None)
            zeros = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                for tensor in form.tensors
            ]
            output = _marked(rebuild(form.output, zeros, run.unknown), run.lost)
        if is_entrance and run.place.inside:
            run.output = output
        return _marked(output, run.true) if is_entrance and not run.place.inside else output

    def seen_by_hooks(self, block: str) -> Iterator[tuple[str, int, object]]:
        """Yield the hook calls of ``block`` and its submodules on their own stage.

        Each item is the module's name, the hook's position and the output that the hook received.
        """
        hook_calls = () if self.run is None else self.run.seen
        yield from (
            (name, position, output)
            for name, position, output in hook_calls
            if f"{name}.".startswith(f"{block}.")
        )

    def returned(self, module: nn.Module, _args: object, output: object) -> object:
        """Return the value to pass on after a local block has returned ``output``.

        Raises:
            StageExit: The stage ends here, at the end of a container.
        """
        run = self.run
        if run is None:
            return output
        layer = run.layer
        assert layer is not None
        run.output = output
        if run.training and module.training:
            run.check_arguments(layer.name)
        if self.collects:
            run.outputs[layer.name] = output
        if not layer.is_followed:
            return output
        tensors = [tensor for _, tensor in tensors_in(output)]
        if any(layer.name == place.entrance for place in self.places):
            raise StageExit(self._crossing(layer.name, tensors, {}, collected=run.collected))
        if captured_outputs():
            run.captured[layer.container] = {
                kind: list(values) for kind, values in captured_outputs().items()
            }
        crossing = self._crossing(layer.name, tensors, {})
        run.past = (*run.past, Form(tensors=crossing.form.tensors, output=crossing.form.output))
        return _marked(output, run.true)

    def see(self, name: str, position: int, output: object) -> None:
        """Record that hook ``position`` of local module ``name`` received ``output``."""
        if self.run is not None:
            self.run.seen.append([name, position, output])

    def arguments(
        self,
        layers: Mapping[int, Sequence[Layer]],
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Arguments:
        """Return the arguments for a local block in place of ``args`` and ``kwargs``.

        ``layers`` are its layers on each local stage.

        Raises:
            StageError: An argument has a value that this stage cannot know.
        """
        run = self.run
        if run is None:  # a recomputation in the backward
            return substitute(args, _recalled), substitute(kwargs, _recalled)
        layer = run.begin_layer(layers)
        if layer.container != run.container:
            run.begin_container(layer.container)
        if run.reached and not kwargs and len(args) == 1 and args[0] is run.output:
            run.note_arguments(())  # nothing else reads them
            return args, kwargs  # the usual case: skip the checks
        run.follow_backward_hooks((args, kwargs))
        returned_ids = run.returned_ids()

        def change(path: Path, tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in returned_ids else run.argument(layer.name, path, tensor)

        args = substitute(args, change)
        kwargs = substitute(kwargs, change)
        if not run.reached:
            run.reached = True
            run.check_entrance(layer.name, (args, kwargs))
        if run.training and module.training:
            run.note_arguments((args, kwargs))
        return args, kwargs

    def leave(
        self, layer: Layer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Crossing:
        """Return the crossing that leaves the stage at the call of ``layer``.

        ``layer`` is the first block of the next stage.

        Raises:
            StageError: An argument is neither a block's output nor a value from before the blocks.
        """
        name = layer.name
        run = self.running
        if layer.container != run.container or (run.begun and not run.reached):
            raise StageError(
                f"block '{name}' was called before any block of the first pipeline stage. To keep "
                "another model, such as a teacher, on every stage, use "
                "ParallelPlan(everywhere=('teacher',))"
                if run.received is None
                else f"block '{name}' was called before the preceding blocks, which are on "
                f"pipeline stage {run.stage}"
            )
        if any(is_transformed(tensor) for _, tensor in tensors_in(run.output)):
            raise StageError(
                "the model is called inside a transform (torch.func.grad, jvp or vmap, or "
                f"forward-mode differentiation), which cannot continue at block '{name}' on the "
                "next pipeline stage. Use pipeline_parallel_size=1"
            )
        run.follow_backward_hooks((args, kwargs))
        collected = run.collected
        extras = dict(run.known_extras())
        if (
            not (collected or extras or kwargs or run.past or len(args) != 1)
            and args[0] is run.output
            and type(run.output) is Tensor
        ):
            return Crossing((run.output,), self._usual_form(run, run.output))
        returned_ids = run.returned_ids()
        if not returned_ids and run.layer is not None:
            # Tensors in other containers, such as a NamedTuple, are not found.
            describe(run.output, lambda _tensor: None, run.layer.name)
        hidden_states: dict[Path, Tensor] = {}
        for path, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if id(tensor) in returned_ids:
                hidden_states[path] = tensor
            elif run.is_extra(name, path, tensor):
                extras[path] = tensor
            else:
                run.check_unchanged(tensor)
        if not hidden_states:
            raise computed_between(name)
        extras = {path: tensor for path, tensor in extras.items() if path not in hidden_states}
        hidden_ids = {id(tensor) for tensor in hidden_states.values()}
        output = [tensor for _, tensor in tensors_in(run.output) if id(tensor) in hidden_ids]
        return self._crossing(name, output, extras, collected=collected)

    def _crossing(
        self,
        name: str,
        output: Iterable[Tensor],
        extras: Mapping[Path, Tensor],
        *,
        collected: object = None,
    ) -> Crossing:
        run = self.running
        tensors_by_id = {id(tensor): tensor for tensor in (*output, *extras.values())}
        argument_ids = frozenset(tensors_by_id)
        tensors_by_id.update((id(tensor), tensor) for _, tensor in tensors_in(collected))
        index = {key: i for i, key in enumerate(tensors_by_id)}
        tensors = tuple(plain(tensor) for tensor in tensors_by_id.values())
        hidden_id = next((id(tensor) for _, tensor in tensors_in(run.output)), None)
        form = Form(
            tensors=tuple(
                TensorForm.of(
                    tensor, differentiable=run.needs_gradient(tensor), replicated=key == hidden_id
                )
                for key, tensor in zip(tensors_by_id, tensors, strict=True)
            ),
            output=describe(
                run.output,
                lambda tensor: index[id(tensor)] if id(tensor) in argument_ids else None,
                name,
            ),
            extras=tuple((path, index[id(tensor)]) for path, tensor in extras.items()),
            collected=describe(collected, lambda tensor: index[id(tensor)], name),
            past=run.past,
        )
        return Crossing(tensors, form)

    def _usual_form(self, run: StageRun, tensor: Tensor) -> Form:
        """Return the form of one plain tensor.

        The form is created once per shape, because the next ranks wait for it.
        """
        tensor_form = TensorForm.of(
            tensor, differentiable=run.needs_gradient(tensor), replicated=True
        )
        if tensor_form not in self._usual:
            self._usual[tensor_form] = Form(tensors=(tensor_form,), output=At(0))
        return self._usual[tensor_form]


def _marked(output: object, origin: Origin) -> object:
    return substitute(output, lambda _path, tensor: FirstStageValue.mark(tensor, origin))


def _recalled(_path: Path, tensor: Tensor) -> Tensor:
    """Return the tensor that a recomputed block received in place of ``tensor``."""
    recorded = replacement(tensor)
    return plain(tensor) if recorded is None else recorded
