"""Sizes and times that choose between forms, measured on one core of one processor (2.5 GHz).

They change no result but by rounding.
"""

from __future__ import annotations

from math import prod

# -- windows ---------------------------------------------------------------------------------------

# Elements in the copies of all windows of an image, from which they exceed the cache. For large
# images, a convolution with the flipped kernel takes 0.6 to 0.9 of the time of a ConvTranspose.
LEAST_LARGE_COPIES = 2**19
# Channels below which a product takes longer than copying its operands.
LEAST_CHANNELS = 8
# Elements of a weight from which it exceeds the cache, and windows of an image up to which it is
# read more often than it pays. Measured for 8 images of 4 to 49 windows: a ConvTranspose takes 1.5
# to 6 times as long as one product for all images, 1.1 times for a weight of half the size.
LEAST_HEAVY_WEIGHT, MOST_HEAVY_WINDOWS = 2**18, 64
# Elements of a window up to which each gets a node in the gradient of a weight.
MOST_COLUMNS = 64
# Windows of an image from which a product for each of its channels pays.
LEAST_LONG_IMAGE = 128

# ns an element: to copy it, to slice it from all images, also with steps, to move strides of it
# into channels, to multiply and add it, to add up products of images
COPY, SLICE, STRIDED_SLICE, SPLIT, MULTIPLY, ADD = 0.6, 0.9, 3.6, 3.0, 0.025, 1.5
LANES = 16  # columns that a product computes at once


def copies_exceed_cache(shape: tuple[int, ...] | None, counts: tuple[int, ...] | None) -> bool:
    """Return whether a product per kernel element is faster than one over copies of all windows.

    It is for many channels, in the `shape` of the weight, where the copies of `counts` windows per
    image exceed the cache.
    """
    if shape is None or counts is None or shape[1] < LEAST_CHANNELS:
        return False
    return prod(shape[1:]) * prod(counts) >= LEAST_LARGE_COPIES


def weight_exceeds_cache(shape: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Return whether reading a weight for every image takes longer than copying all windows."""
    few, overlapping = prod(counts) <= MOST_HEAVY_WINDOWS, prod(shape[2:]) > 1
    return overlapping and few and prod(shape) >= LEAST_HEAVY_WEIGHT
