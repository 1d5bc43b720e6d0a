"""Places in which gradients or parameters are sharded."""

from tests.letters import SP, C, D, M, P, S, T, V

PLACES = {
    "d2": (2, {}),
    "d2 m3": (2, {M: 3}),
    "d4 m2": (4, {M: 2}),
    "d4 in two levels": (4, {D: 2, M: 2}),
    "d2p2v2": (4, {P: 2, V: 2, M: 4}),
    "d2p2v2 zb_v": (4, {P: 2, V: 2, M: 4, S: "zb_v"}),
    "t2d2 sp": (4, {T: 2, SP: True, M: 2}),
    "c2": (2, {C: 2, M: 2}),
    "c2d2": (4, {C: 2, M: 2}),
}
