"""Pictures, tables, texts and reports of models and trainings."""

from onnxgrad.plot.figure import (
    plot_history as plot_history,
    plot_onnxs as plot_onnxs,
)
from onnxgrad.plot.html import (
    Picture as Picture,
    show_picture as show_picture,
    to_html as to_html,
)
from onnxgrad.plot.layer_table import (
    LayerRow as LayerRow,
    Summary as Summary,
    summary as summary,
)
from onnxgrad.plot.svg import (
    to_svg as to_svg,
)
from onnxgrad.plot.text import (
    onnx_simple_text_plot as onnx_simple_text_plot,
    onnx_text_plot_io as onnx_text_plot_io,
    to_dot as to_dot,
)
from onnxgrad.report.card import (
    write_card as write_card,
)
from onnxgrad.report.page import (
    write_report as write_report,
)
