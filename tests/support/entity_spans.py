"""Entities of sentences, by the rules of CoNLL."""


def entity_spans(tags):
    """Return the entities of a sentence as (first, last, kind), by the rules of CoNLL."""
    found = []
    for i, tag in enumerate(tags):
        if tag == "O":
            continue
        inside = tag[0] == "I" and found and found[-1][1] == i - 1 and found[-1][2] == tag[2:]
        if inside:
            found[-1] = (found[-1][0], i, tag[2:])
        else:
            found.append((i, i, tag[2:]))
    return {*found}
