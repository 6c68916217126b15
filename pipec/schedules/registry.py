"""The schedules whose order depends on the numbers of ranks and microbatches alone, by name."""

from collections.abc import Callable, Mapping

from pipec.ir import Schedule
from pipec.schedules.dualpipe_v import dualpipe_v
from pipec.schedules.gpipe import gpipe
from pipec.schedules.interleaved import interleaved_1f1b
from pipec.schedules.looped_bfs import looped_bfs
from pipec.schedules.one_f_one_b import one_f_one_b
from pipec.schedules.v_half_min import v_half, v_min
from pipec.schedules.zb_h1 import zb_h1
from pipec.schedules.zb_h2 import zb_h2
from pipec.schedules.zb_v import zb_v

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""Functions of the number of ranks and of microbatches. Programs may add their own."""

LOOPED_SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved-1f1b": interleaved_1f1b,
    "looped-bfs": looped_bfs,
}
"""Schedules that also depend on the number of stages per rank: ``looped-bfs-v3`` has three."""
