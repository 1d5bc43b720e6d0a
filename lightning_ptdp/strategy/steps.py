"""Steps of the strategy, run by the engine with Lightning's hooks in their usual order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.base.nested import Nested
from lightning_ptdp.checkpoint.files import sha256
from lightning_ptdp.checkpoint.save_agreement import gather
from lightning_ptdp.engine.optimization import Closure
from lightning_ptdp.forward.frozen_forward import Within
from lightning_ptdp.forward.surroundings import Context
from lightning_ptdp.pipeline.program_observers import Observers
from lightning_ptdp.pipeline.watchdog import OTHER_REPLICAS
from lightning_ptdp.shims.lightning import Precision, fits, replace_after_closure
from lightning_ptdp.strategy.checkpoint_hooks import CheckpointHooks
from lightning_ptdp.strategy.checks.model import CUT_MARK
from lightning_ptdp.strategy.precision import loss_scale

_MOVES = ("transfer_batch_to_device", "on_after_batch_transfer")


class StepHooks(CheckpointHooks):
    """Layer of the strategy: training and evaluation steps, gradients and their norm."""

    def batch_to_device(
        self, batch: Nested, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Nested:
        """Move a batch to the device; record facts that can be read on the host without a wait."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        owners = (module, getattr(module.trainer, "datamodule", None))
        if not any(self._names.is_overridden(hook, owner) for hook in _MOVES for owner in owners):
            self._surroundings.moved(batch, moved)
        return moved

    def training_step(self, *args: Nested, **kwargs: Nested) -> Nested:
        """Run the forward of one batch, and under a schedule also its backward."""
        self.trim_heap()
        values = (*args, *kwargs.values())
        has_peers = self.mesh.layout.world_size > 1
        self._agree("step", dist.group.WORLD if has_peers else None, values[0], training=True)
        with self._during("step"):
            context = partial(
                self.one_step, "training_step", self.precision_plugin.train_step_context
            )
            scale = loss_scale(self.precision_plugin, self.root_device)
            return self.engine.training_step(
                context, values, clears=self._clears_gradients(), loss_scale=scale
            )

    def _clears_gradients(self) -> bool:
        """Return True if Lightning clears the gradients between this batch's forward and backward.

        It does so for the first batch of an accumulation, unless the user overrides
        ``optimizer_zero_grad``."""
        trainer = self.lightning_module.trainer
        names = self._names
        first = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
        return first and not names.is_overridden("optimizer_zero_grad", self.lightning_module)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer, *args: object, **kwargs: object
    ) -> Tensor:
        """Leave the batch's gradients, summed over the replicas, in ``.grad``."""
        plugin = self.precision_plugin
        module = self.lightning_module
        if not module.automatic_optimization:
            closure_loss = plugin.pre_backward(closure_loss, module)
            with self._during("step"), self.engine.optimization.manual_backward():
                plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            return plugin.post_backward(closure_loss, module)
        self.engine.gradients.guard(keeps=True)
        if self.config.runs_backward:
            closure_loss = plugin.pre_backward(closure_loss, module)
            with self._during("step"), self.run.watchdog.counting(OTHER_REPLICAS):
                self.engine.gradients.set_grad()
        else:
            closure_loss = plugin.pre_backward(
                self.engine.optimization.scaled(closure_loss), module
            )
            overlaps = not self._names.is_overridden("backward", module)
            with self._during("step"), contextlib.ExitStack() as stack:
                stack.enter_context(self.engine.gradients.reduce(overlaps=overlaps))
                plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
                with self.run.watchdog.counting(OTHER_REPLICAS):
                    stack.pop_all().close()
        # Called after the sums over the replicas, so that on_after_backward sees the optimizer's
        # gradients.
        with self.engine.gradients.for_hooks():
            output = plugin.post_backward(closure_loss, module)
        with self._during("checking the gradients of step"):
            self.engine.optimization.check(
                optimizer, scaled=getattr(self.precision_plugin, "scaler", None) is not None
            )
        return output

    def optimizer_step(
        self, optimizer: Optimizer, closure: Closure, *args: object, **kwargs: object
    ) -> object:
        """Step the optimizer."""
        # A sharded optimizer gathers the parameters after its step.
        with self._during("optimizer step"):
            output = super().optimizer_step(
                optimizer, self.engine.optimization.evaluations(optimizer, closure), *args, **kwargs
            )
            self.engine.gradients.start_parameter_gather()
        return output

    def block_backward_sync(self) -> Context:
        """Return a context that keeps gradients local during accumulation."""
        return self.engine.gradients.accumulating()

    def on_validation_start(self) -> None:
        """Let all replicas evaluate the same model."""
        with self._during("broadcast of buffers before validation at step"):
            self.engine.broadcast_buffers()

    def validation_step(self, *args: Nested, **kwargs: Nested) -> Nested:
        """Run the user's ``validation_step`` on every stage."""
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, (*args, *kwargs.values())
        )

    def test_step(self, *args: Nested, **kwargs: Nested) -> Nested:
        """Run the user's ``test_step`` on every stage."""
        return self._evaluate(
            "test_step", self.precision_plugin.test_step_context, (*args, *kwargs.values())
        )

    def predict_step(self, *args: Nested, **kwargs: Nested) -> Nested:
        """Run the user's ``predict_step`` on every stage.

        Every rank of a replica returns the whole prediction."""
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, (*args, *kwargs.values())
        )

    def frozen_step(self, hook: str, batch: Nested, batch_idx: int, within: Within) -> Nested:
        """Run a step of the module without gradients between training steps.

        ``frozen_forward`` calls it. Every rank of a replica returns the output for the whole batch.

        Args:
            hook: Name of the step.
            batch: The batch.
            batch_idx: Its number.
            within: Returns the context of the forward.
        """
        # the context may exchange parameters that an overlapped gather is still writing
        self.engine.gradients.parameters_needed()
        with within():
            return self._evaluate(
                hook, self.precision_plugin.predict_step_context, (batch, batch_idx)
            )

    def decode(
        self,
        call: Callable[[int], Tensor],
        choose: Callable[[Tensor], Tensor],
        *,
        rows: int,
        key: Hashable,
        dtype: torch.dtype = torch.int64,
    ) -> Tensor:
        """Run one forward of the model outside the steps, for next tokens or for scores.

        ``generate`` and ``score`` call it. Returns a vector of ``rows`` values on all ranks.

        Args:
            call: Runs the model as a pipeline stage; on the last stage it returns the logits (b,
                V), or scores.
            choose: Returns the result for the whole output of ``call``.
            rows: Number of values in the result, for tokens b.
            key: Forwards with the same key have hidden states of the same shape.
            dtype: Type of the result.
        """
        with self._during("generating text at step"):
            return self.engine.decode(
                self.precision_plugin.predict_step_context,
                call,
                choose,
                rows=rows,
                key=key,
                dtype=dtype,
            )

    def check_decoded(self, rows: object) -> None:
        """Check that ranks that decode together decode the same rows; collective over them.

        Raises:
            MisconfigurationException: They do not.
        """
        option = self.config.option_that_joins(self.layout, training=False)
        group = self.mesh.world if option else self.mesh.group("model")
        if group.size == 1:
            return
        digests = gather(sha256(repr(rows).encode()), group.handle)
        if len(set(digests)) > 1:
            reason = f"with {option} the replicas" if option else "the ranks of a replica"
            raise self.refusal(
                f"ranks generate from different prompts or options, but {reason} run every forward together. "
                "Give all ranks the same ones"
            )

    def decodes(self) -> bool:
        """Return True if ``decode`` can be called now, while the Trainer runs.

        Raises:
            MisconfigurationException: The Trainer does not run, and the model is cut, so that it
                cannot run on its own.
        """
        module = self.lightning_module
        if module.trainer.state.status == "running":
            return True
        if CUT_MARK in vars(module):
            raise self.refusal(
                f"the model is cut ({vars(module)[CUT_MARK]}) and generates text only while "
                "the Trainer runs. Call generate in a hook such as on_validation_epoch_end or "
                "on_predict_start, or use ptdp generate with a checkpoint"
            )
        return False

    def _evaluate(
        self, hook: str, context: Callable[[], Context], args: Sequence[Nested]
    ) -> Nested:
        self.trim_heap()
        # Replicas may have different numbers of batches. Only the ranks of one replica agree,
        # because the other ranks of a fit would wait for them.
        interrupts = self.layout.num_replicas == 1 or not fits(self.lightning_module.trainer)
        group = self.mesh.group("model").handle
        self._agree(hook, group, args[0], training=False, interrupts=interrupts)
        with self._during(hook):
            return self.engine.evaluation_step(hook, partial(self.one_step, hook, context), args)

    def _agree(
        self,
        action: str,
        group: dist.ProcessGroup | None,
        batch: Nested,
        *,
        training: bool,
        interrupts: bool = True,
    ) -> None:
        """Compare facts about the batch and requests to stop over ``group``.

        Raises:
            KeyboardInterrupt: A rank of the group was asked to end.
        """
        agreement = self.engine.agreement
        with self._during(action):
            numbers = agreement.collect(batch, training=training)
            early = self.run.validation_clock.is_early() if training else None
            if early is not None and numbers is not None:
                flag = torch.tensor([early]).to(numbers, non_blocking=True)
                numbers = torch.cat([flag, numbers])
            with self.run.watchdog.counting("the start of a step elsewhere"):
                ends, maxima = self.run.stop_request.agree(
                    group, self.root_device, interrupts=interrupts, numbers=numbers
                )
        if ends:
            # raised outside: nothing has failed, and all ranks can still save
            raise KeyboardInterrupt
        if early is not None and maxima:
            is_late = self.root_device.type == "cuda"
            self.run.validation_clock.decide(bool(maxima[0]), late=is_late)
            maxima = maxima[1:]
        agreement.take(maxima, training=training)
        if training and group is not None and agreement.awaits_counts:
            # Only replicas whose number has changed wait here.
            with self._during("comparing the batches of step"):
                agreement.compare_counts(self.run.stop_request.newest(group))

    def _during(self, action: str) -> Context:
        """Return a context that shows this rank's action to ranks that wait for it."""
        return self.run.watchdog.during(f"{action} {self.lightning_module.trainer.global_step}")

    def clear_waits(self) -> None:
        """Forget this rank's waits."""
        self.run.watchdog.waited.clear()

    def gather_waits(self, between_s: float) -> list[tuple[float, dict[str, float]]]:
        """Return the time of each rank between its steps, and its waits in them; collective."""
        with self.waiting_in("comparing the waits of all ranks"):
            return gather((between_s, dict(self.run.watchdog.waited)))

    @property
    def observers(self) -> Observers | None:
        """Return the observers of the pipeline's actions; None before ``setup``."""
        return self._engine.observers if self._engine is not None else None

    @property
    def precision_plugin(self) -> Precision:
        """Return Lightning's plugin, with clipping by the norm over all ranks."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            plugin.clip_grad_by_norm = partial(self._clip_by_norm, plugin)
            replace_after_closure(plugin, self._show_gradients)
        self._precision_plugin = plugin

    def _show_gradients(self, hooks: Callable[..., None], *args: object) -> None:
        with self.engine.gradients.for_hooks():
            hooks(*args)
        self.engine.gradients.defer()

    def compute_gradient_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient, each parameter counted once.

        Collective over the world."""
        with self._during("gradient norm of step"):
            return self.engine.gradients.step.norm()

    def _clip_by_norm(self, plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
        stepped = {p: p.grad for p in plugin.main_params(optimizer) if p.grad is not None}
        step = self.engine.gradients.step
        with self._during("gradient norm of step"):
            self.gradient_norm = step.norm(stepped)
        step.clip(stepped.values(), clip_val, norm=self.gradient_norm)
