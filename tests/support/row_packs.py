"""The rows of the table in packs: which rows go together, where they run, and what is checked."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.cases import Row, row_feed, row_model
from tests.support.packs import Pack, Part
from tests.support.table import ROWS

SIZE = 32
WITHOUT_FLOAT64 = set(  # operators of whose kernels onnxruntime has none in float64
    """Acos Acosh Asin Asinh Atan Atanh AveragePool Celu Col2Im Conv ConvTranspose Cosh
    DequantizeLinear Det DynamicQuantizeLinear Elu Erf GRU Gelu GlobalAveragePool HardSigmoid
    HardSwish InstanceNormalization LRN LSTM LeakyRelu LpPool MaxUnpool Mean
    MeanVarianceNormalization Mish OneHot PRelu RNN Resize RotaryEmbedding Selu Shrink Sinh Softplus
    Softsign Tan ThresholdedRelu""".split()
)
# rows that onnx.reference does not compute, or not as onnxruntime does, or not in float64
ONLY_FLOAT32 = re.compile(
    r"""OneHot$|DequantizeLinear\ (int32|axis\ (1|2|-1|-3))$|LpPool\ .*(,\ ceil|,\ all)$
    |AveragePool\ (line,\ (ceil,\ pads|last\ window\ starts\ beyond),\ 1|plane,\ valid,\ ceil,\ .)$
    |GlobalLpPool|MaxRoiPool|MaxUnpool(,\ output_shape\ larger|\ of\ windows\ overlapping)$
    |ConvTranspose\ plane,\ (same\ lower|output_shape.*)$
    |Resize\ .*(align_corners\ up|\ of\ TensorFlow|stay\ as\ long|negative\ axes)$
    |GridSample\ (bilinear|bicubic)$|SequenceInsert\ into\ nothing$
    |[RG][NR][NU]\ (numbers|of\ two.*)$""",
    re.VERBOSE,
)
# rows of which onnx.reference computes the model, but not the gradient
NOT_FOR_REFERENCE = re.compile("GRU|LSTM|RNN|LayerNormalization (statistics|only)")
# rows whose lowering computes in float64, but no kernel: `check_gradient` compares both ways
SINGLE = re.compile(
    r"LinearAttention|(RNN|GRU linear|LSTM with peepholes|LSTM coupled|LSTM numbers)$"
)
BODIES = re.compile(r"Sequence|Optional|Loop|Scan|\bIf\b")


def operators_of(text: str) -> set[str]:
    """Return the operators in the text of a body."""
    return set(re.findall(r"(\w+)(?:<[^>]*>)?\(", text))


@dataclass(frozen=True)
class Kind:
    """What the rows of a pack have in common."""

    opset: int
    runtime: str
    family: str  # of rows that are only with their like
    shapes: bool  # whether what is stated of shapes is checked
    members: bool  # whether a leading axis of members is checked


def kind_of(row: Row) -> Kind:
    """Return the kind of packs that a row belongs to."""
    operators = operators_of(row.body)
    runtime = (
        "float32"
        if ONLY_FLOAT32.match(row.id) or SINGLE.match(row.id)
        else "mixed"
        if NOT_FOR_REFERENCE.match(row.id)
        else "reference"
        if operators & WITHOUT_FLOAT64
        else "float64"
    )
    # kernels of onnxruntime give nothing other shapes
    filled = not any(0 in shape for shape in row.shapes.values())
    stacked = not any(BODIES.search(name) for name in operators)
    family = re.match(r"\w+", row.id).group() if runtime == "mixed" else ""
    return Kind(row.opset, runtime, family, row.runs and filled, row.runs and stacked)


@dataclass(frozen=True)
class RowPack:
    """Rows of one kind, and how much is known of the shapes of each."""

    kind: Kind
    rows: tuple[Row, ...]
    known: tuple[str, ...]

    @property
    def id(self) -> str:
        """The operators that the rows are about, once each."""
        return " ".join(dict.fromkeys(re.match(r"\w+", row.id).group() for row in self.rows))

    def parts(self) -> list[Part]:
        return [
            Part(row.id, row_model(row, known), row_feed(row), tuple(row.shapes))
            for row, known in zip(self.rows, self.known, strict=True)
        ]


def row_packs(
    known: Callable[[int, Row], str], rows: Sequence[Row] = ROWS, size: int = SIZE
) -> list[RowPack]:
    """Return packs of rows of the same kind, in the order of the table."""
    kinds: dict[Kind, list[tuple[Row, str]]] = defaultdict(list)
    for i, row in enumerate(rows):
        kinds[kind_of(row)].append((row, known(i, row)))
    return [
        RowPack(kind, *zip(*pairs[start : start + size], strict=True))
        for kind, pairs in kinds.items()
        for start in range(0, len(pairs), size)
    ]


def pack_parameters(packs: Sequence[RowPack]) -> list:
    """Return packs as parameters of a test: onnxruntime 1.31 lacks some kernels of opset 23 on."""
    return [
        pytest.param(pack, id=pack.id, marks=[pytest.mark.newest] * (pack.kind.opset >= 23))
        for pack in packs
    ]


def lengths_or_symbols(i: int, row: Row) -> str:
    """Let the shapes of every second row be symbolic."""
    return ("lengths", "symbols")[i % 2]


def first_rows() -> list[Row]:
    """Return one row of each operator, on which all is checked if onnxruntime stacks members."""
    firsts: dict[str, Row] = {}
    for row in ROWS:
        if kind_of(row).shapes:
            firsts.setdefault(re.match(r"\w+", row.id).group(), row)
    return list(firsts.values())


def check_pack(kind: Kind) -> Callable[[Sequence[Part]], Iterator[str]]:
    """Return the function that yields what is wrong of parts: gradients, shapes, and members."""

    def check(parts: Sequence[Part]) -> Iterator[str]:
        pack = Pack(parts, kind.runtime)
        yield from pack.check_gradients()
        yield from pack.operators_without_gradient()
        if kind.shapes:
            pack.check_shapes(pack.primal)
        if kind.members:
            pack.check_members(pack.prepared)

    return check
