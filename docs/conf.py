import hpfunc

project = "hpfunc"
author = "the hpfunc authors"
copyright = f"2026, {author}"
version = release = hpfunc.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "code"  # a docstring writes `x`, as in Markdown
html_theme = "furo"
html_title = f"hpfunc {version}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # outputs are not for copying

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a dataclass field is described twice
napoleon_use_rtype = False
napoleon_custom_sections = ["Communication", "Source"]
