"""Random executable orders of computations, for property tests."""

from hypothesis import strategies as st

from lightning_ptdp.schedule import Action, ActionKind, Schedule
from lightning_ptdp.world.axes import StagePlacement

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


@st.composite
def compute_orders(draw: st.DrawFn, max_ranks: int = 4, max_microbatches: int = 5) -> Schedule:
    """Draw the computations of a training step, in any order that respects their dependencies."""
    p, m = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    placement: StagePlacement = draw(st.sampled_from(["loop", "v"]))
    v = 2 if placement == "v" else draw(st.integers(1, 3))
    random = draw(st.randoms(use_true_random=False))
    empty = Schedule("random", p, v, m, ((),) * p, placement)
    kinds = (F, B, W) if draw(st.booleans()) else (F, B)
    # A preference for some kinds yields orders such as all forwards first, which a uniform choice
    # would never find.
    weights = {kind: random.choice([1, 1, 5, 50]) for kind in kinds}
    able = [Action(F, 0, i) for i in range(m)]
    done: set[Action] = set()
    programs: list[list[Action]] = [[] for _ in range(p)]
    while able:
        action = random.choices(able, [weights[action.kind] for action in able])[0]
        able.remove(action)
        done.add(action)
        programs[empty.rank_of(action.stage)].append(action)
        able += [
            new
            for new in _followers(action, p * v)
            if new.kind in kinds and needs(new, p * v) <= done
        ]
    return Schedule("random", p, v, m, tuple(map(tuple, programs)), placement)


def _followers(action: Action, num_stages: int) -> list[Action]:
    """Return the actions that ``action`` may have enabled."""
    stage, i = action.stage, action.microbatch
    if action.kind is F:
        return [Action(B, stage, i) if stage + 1 == num_stages else Action(F, stage + 1, i)]
    if action.kind is B:
        return [Action(W, stage, i), *([Action(B, stage - 1, i)] if stage else [])]
    return []


def needs(action: Action, num_stages: int) -> set[Action]:
    """Return the computations, on any rank, that must precede ``action``."""
    stage, i = action.stage, action.microbatch
    if action.kind is F:
        return {Action(F, stage - 1, i)} if stage else set()
    if action.kind is B:
        return {Action(F, stage, i)} | (
            {Action(B, stage + 1, i)} if stage + 1 < num_stages else set()
        )
    return {Action(B, stage, i)}
