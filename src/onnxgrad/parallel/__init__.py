"""Several processes that train one model: how they exchange numbers, and graphs that ask for it."""

from onnxgrad.parallel.collectives import MESSAGES, all_reduce, broadcast, exchanges
from onnxgrad.parallel.part import Part
from onnxgrad.parallel.pieces import Exchange, Piece, cut
from onnxgrad.parallel.process_groups import Alone, DataParallel, Group, group_of, join

__all__ = [
    "MESSAGES",
    "Alone",
    "DataParallel",
    "Exchange",
    "Group",
    "Part",
    "Piece",
    "all_reduce",
    "broadcast",
    "cut",
    "exchanges",
    "group_of",
    "join",
]
