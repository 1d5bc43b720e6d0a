"""From the order of computation to a full program: where the sends, the receives and the gradient reductions go."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptdp.pipeline.actions import Action, ActionKind

__all__ = ["lower"]


def lower(
    orders: Sequence[Sequence[Action]], *, pipeline_parallel_size: int, num_stages: int, lookahead: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Add communication and reductions to the compute orders of all ranks.

    - A receive is posted ``lookahead`` compute actions ahead of the one that needs it, so that the message travels during
      the computation in between. At most ``lookahead + 1`` receives a rank are posted and not yet used at any time.
    - A send follows its compute action, after the receives that are posted there: posting does not wait, a send may.
    - ``REDUCE`` follows the last backward (or weight gradient) of its stage, after the send that a neighbour waits for.

    Stages that are neighbours on one rank hand over locally: no actions.

    Args:
        orders: Forward, backward and weight actions of each rank, in order.
        pipeline_parallel_size: p; stage s is on rank s mod p.
        num_stages: p * v.
        lookahead: At 1 the schedules of this package stay free of deadlock even where a send blocks until its receive is
            posted (schedules.py asks for more where the stages of the ring are further apart). With 0, or with sends before
            the receives, two ranks of the ring can each send to the other before either has posted.
    """
    return tuple(_lower_rank(order, pipeline_parallel_size, num_stages, lookahead) for order in orders)


def _lower_rank(order: Sequence[Action], p: int, num_stages: int, lookahead: int) -> tuple[Action, ...]:
    receives = [_receive_for(action, p, num_stages) for action in order]
    last_gradient = {action.stage: index for index, action in enumerate(order) if action.kind is not ActionKind.FORWARD}
    program = receives[: lookahead + 1]
    for index, action in enumerate(order):
        program.append(action)
        program += receives[index + lookahead + 1 : index + lookahead + 2]
        program.append(_send_after(action, p, num_stages))
        if last_gradient.get(action.stage) == index:
            program.append(Action(ActionKind.REDUCE, action.stage))
    return tuple(action for action in program if action is not None)


def _receive_for(action: Action, p: int, num_stages: int) -> Action | None:
    """The receive that a compute action waits for."""
    if p == 1:
        return None
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return Action(ActionKind.RECEIVE_FORWARD, action.stage, action.microbatch)
    if action.kind is ActionKind.BACKWARD and action.stage < num_stages - 1:
        return Action(ActionKind.RECEIVE_BACKWARD, action.stage, action.microbatch)
    return None


def _send_after(action: Action, p: int, num_stages: int) -> Action | None:
    """The send of what a compute action produced."""
    if p == 1:
        return None
    if action.kind is ActionKind.FORWARD and action.stage < num_stages - 1:
        return Action(ActionKind.SEND_FORWARD, action.stage, action.microbatch)
    if action.kind is ActionKind.BACKWARD and action.stage > 0:
        return Action(ActionKind.SEND_BACKWARD, action.stage, action.microbatch)
    return None
