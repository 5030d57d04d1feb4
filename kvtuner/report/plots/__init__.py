"""Drawings of results, which pages show as SVG, and pictures of a search as PNG bytes, for cards. Knows no pages.

Private to `kvtuner.report`, but for `search_plots.PICTURES`, whose names are those of a run folder's pictures. The
modules of pictures import matplotlib at their top, so reports import them only where they draw. A drawing
(`drawing`) is marks with their places; a page writes them with its own colours, for wide and for narrow screens.
"""
