"""Readers of data, fitted to the inputs of a model and to its classes."""

from __future__ import annotations

from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import check_class_count, first_names
from onnxgrad.data.readers import Reader
from onnxgrad.errors import argument
from onnxgrad.training.fields import Fields


def fitted(reader: Reader, fields: Fields) -> Reader:
    """Return a reader for the shapes and dtypes of inputs; these learn the names of its classes.

    Raises:
        DataError: it has other classes than the model, or numbers them in another order.
    """
    _check_classes(reader, fields)
    own = {name: fields.fields[name] for name in fields.features}
    fitting = reader.for_inputs({name: field.shape for name, field in own.items()})
    return fitting.for_dtypes({name: field.dtype for name, field in own.items()})


def _check_classes(reader: Reader, fields: Fields) -> None:
    names = fields.names
    own, known = list(reader.class_names), list(map(str, names.classes))
    labels, count = getattr(reader, "labels", None), _count_classes(fields)
    if labels is not None and count is not None and len(labels):
        check_class_count(own, labels, count)
    if own and known and own != known:
        raise DataError(
            f"labels are numbered as the classes {first_names(own)}, and the model has "
            f"{first_names(known)}: pass {argument('classes', known[:12])} to the reader"
        )
    names.classes = names.classes or own
    fields.numbered = bool(own)


def _count_classes(fields: Fields) -> int | None:
    """Return how many classes the only label has, if that is known."""
    field = fields.fields[fields.labels[0]] if len(fields.labels) == 1 else None
    return field.classes if field is not None and isinstance(field.classes, int) else None
