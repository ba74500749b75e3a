"""The site: `sphinx-build -W --keep-going docs build/site`, from the root of the repository."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))
sys.path.insert(0, str(ROOT / "benchmarks"))  # pages fetch published models by `published`
# pages are executed by kernels of Jupyter, which inherit this
READ = (ROOT / "src", DOCS / "_ext", ROOT / "benchmarks")
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, READ))

from jupyter_client.manager import KernelManager
from published import UnavailableError, unpack_here

import onnxgrad

KernelManager.transport_encryption.default_value = "auto"  # kernels warn of TCP without it

project, author, copyright = "onnxgrad", "the authors of onnxgrad", "the authors of onnxgrad"
version = release = onnxgrad.__version__
extensions = [
    "api_pages",
    "cli_options",
    "myst_nb",
    "page_checks",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_ext", "tutorials", "auto_*/**.ipynb"]
nitpicky = True  # a link to a name that is on no page is a warning, hence an error
nitpick_ignore_regex = [("py:(?!obj).*", ".*")]  # types, which may be of other packages
default_role = "backticks"


def repository_of(package: str) -> str:
    """Return the address of the repository that the metadata of a package state, or ""."""
    try:
        stated = metadata(package).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    pairs = (line.split(", ", 1) for line in stated)
    return next((url for name, url in pairs if name in ("Repository", "Source")), "")


repository = repository_of("onnxgrad")
myst_substitutions = {
    "source": f"[The repository]({repository}) has all sources"
    if repository
    else "All sources, tests and pages are in the folder of the repository"
}

# -- theme -------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "onnxgrad"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": "onnxgrad"},
    "show_prev_next": False,
    "show_toc_level": 2,  # methods, too
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [{"name": "Repository", "url": repository, "icon": "fa-solid fa-code-branch"}]
    if repository
    else [],
}
html_show_sourcelink = False
EXTRA = ROOT / "build" / "extra"  # whole pages that the code of a page writes: `page_setup.publish`
(EXTRA / "live").mkdir(parents=True, exist_ok=True)
html_extra_path = [str(EXTRA)]

# -- API ---------------------------------------------------------------------------------------

autosummary_generate = False
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
ALIASES = "LossLike", "MetricLike", "RateLike", "ClassWeights"  # explained on the page api/train
autodoc_type_aliases = {name: name for name in ALIASES}
autodoc_member_order = "bysource"
# scikit-learn writes these into estimators, with links into its own pages
autodoc_default_options = {
    "exclude-members": "set_fit_request, set_partial_fit_request, set_score_request"
}
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # or attributes would be there twice
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"  # they do not fit beside the page

# -- pages in Markdown, whose code cells are executed ------------------------------------------

myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist", "substitution"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds a cell
nb_merge_streams = True

# -- galleries ---------------------------------------------------------------------------------

# A script runs in its folder. So that what it writes is not among the sources, copies are run,
# beside links to what they read.
SCRIPTS = ROOT / "build" / "scripts"
FOLDERS = [
    folder
    for folder in ("examples", "docs/tutorials")
    if any((ROOT / folder / name).exists() for name in ("GALLERY_HEADER.rst", "README.rst"))
]
shutil.rmtree(SCRIPTS, ignore_errors=True)
for folder in FOLDERS:
    # README.md is for readers of the repository, README.rst for those of the gallery
    shutil.copytree(ROOT / folder, SCRIPTS / folder, ignore=shutil.ignore_patterns("*.md"))
for folder in ("benchmarks", "data"):
    (SCRIPTS / folder).symlink_to(ROOT / folder)
with suppress(UnavailableError):  # then the scripts download it, as they do for their readers
    unpack_here("paddle-lines", SCRIPTS / "docs" / "tutorials")


SECTIONS = "first_steps networks extending derivatives onnxcustom".split()
sphinx_gallery_conf = {
    "examples_dirs": [str(SCRIPTS / folder) for folder in FOLDERS],
    "gallery_dirs": [f"auto_{Path(folder).name}" for folder in FOLDERS],
    "filename_pattern": r"\.py$",  # all are run
    "abort_on_example_error": True,
    "subsection_order": [*(f"../build/scripts/examples/{name}" for name in SECTIONS), "*"],
    "within_subsection_order": "FileNameSortKey",
    "nested_sections": False,  # one index, which has all sections
    "reset_modules": ("matplotlib",),
    "parallel": 2,
    "show_signature": False,
    "remove_config_comments": True,
    "write_computation_times": False,
    "log_level": {"backreference_missing": "debug"},
    "download_all_examples": False,
}
