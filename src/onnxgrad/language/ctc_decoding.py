"""`ctc_decode`: decodes scores of time steps, of a model trained with CTC, into labels."""

from __future__ import annotations

import numpy as np

from onnxgrad.checks import check_count


def ctc_decode(
    log_p: np.ndarray, blank: int = 0, beam: int | None = None
) -> tuple[list[int], float]:
    """Return the most likely label sequence l: argmax of p(l), the sum of all its alignments.

    Without a beam, the most likely alignment gives the labels: repeated classes are merged and
    blanks removed (best path decoding, Graves et al. 2006). A beam adds up the alignments of each
    prefix, and keeps the best prefixes from step to step (Hannun et al. 2014, arXiv:1408.2873,
    algorithm 1, without a language model).

    Args:
        log_p: logarithms of probabilities, (T, C).
        blank: the class that is the blank.
        beam: number of prefixes that are kept; None: the most likely alignment.

    Returns:
        The labels and a confidence. With a beam, this is p(l), summed over the alignments in the
        beam; without, the mean over labels of the probability at the first step of each label, or 0
        if there is no label.

    Raises:
        ValueError: a beam below 1.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> log_p = np.log([[0.6, 0.4], [0.6, 0.4]])  # of a blank, and of the class 1
        >>> og.language.ctc_decode(log_p)  # the alignment of two blanks has 0.36
        ([], 0.0)
        >>> labels, p = og.language.ctc_decode(log_p, beam=4)  # the other three add up
        >>> labels, round(p, 2)
        ([1], 0.64)
    """
    if beam is None:
        best = log_p.argmax(axis=1)
        kept = (best != blank) & (best != np.append(-1, best)[:-1])
        sure = np.exp(log_p.max(axis=1)[kept]).mean() if kept.any() else 0.0
        return best[kept].tolist(), float(sure)
    check_count("beam", beam)
    prefixes: list[tuple[int, ...]] = [()]
    ends = np.array([[0.0], [-np.inf]])
    for step in np.asarray(log_p, np.float64):
        prefixes, ends = _extend_prefixes(prefixes, ends, step, blank, beam)
    total = np.logaddexp(*ends)
    return [*prefixes[int(total.argmax())]], float(np.exp(total.max()))


def _extend_prefixes(
    prefixes: list[tuple[int, ...]], ends: np.ndarray, step: np.ndarray, blank: int, beam: int
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return the best prefixes after one more time step, and log p of ending in blank or label.

    Args:
        prefixes: the best prefixes before this step.
        ends: log p of each prefix by alignments that end with a blank, and by alignments that end
            with a label, (2, prefixes).
        step: log p of the classes at this step, (C,).
        blank: as in `ctc_decode`.
        beam: as in `ctc_decode`.
    """
    total, n = np.logaddexp(*ends), len(prefixes)
    last = [prefix[-1] if prefix else blank for prefix in prefixes]
    stays = np.stack([total + step[blank], ends[1] + step[last]])
    grown = total[:, None] + step
    grown[np.arange(n), last] = ends[0] + step[last]  # equal labels need a blank in between
    grown[:, blank] = -np.inf
    at = {prefix: i for i, prefix in enumerate(prefixes)}
    for j, prefix in enumerate(prefixes):
        if prefix and (i := at.get(prefix[:-1])) is not None:  # a shorter prefix grows into it
            stays[1, j] = np.logaddexp(stays[1, j], grown[i, prefix[-1]])
            grown[i, prefix[-1]] = -np.inf
    scores = np.append(np.logaddexp(*stays), grown)
    chosen = np.argpartition(-scores, min(beam, len(scores) - 1))[:beam]
    chosen = chosen[scores[chosen] > -np.inf]
    old, new = chosen[chosen < n], chosen[chosen >= n]
    grew = [divmod(int(k) - n, len(step)) for k in new]
    ended = np.stack([np.full(len(new), -np.inf), scores[new]])
    kept = [prefixes[k] for k in old] + [(*prefixes[i], label) for i, label in grew]
    return kept, np.append(stays[:, old], ended, axis=1)
