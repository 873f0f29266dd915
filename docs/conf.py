"""Settings of the documentation's site; `bash docs/build.sh` builds it."""

project = "samestep"
author = "The samestep authors"
copyright = author  # noqa: A001 -- the name that Sphinx reads
extensions = ["myst_parser"]
exclude_patterns = ["build.sh"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "samestep"
html_copy_source = False
html_show_sourcelink = False
nitpicky = True
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
