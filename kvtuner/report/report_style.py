"""How the report page looks: light and dark, wide and narrow. Knows nothing of its content."""

from __future__ import annotations

from typing import Final

from kvtuner.report.markup import Markup

PAGE_STYLE: Final = Markup(
    """
:root {
  color-scheme: light dark;
  --ink: #1f2328; --soft: #59636e; --line: #d5dae0; --back: #fff; --mark: #fff4d6;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a3abb5; --line: #3a414a; --back: #16191d; --mark: #3b3319; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem;
  background: var(--back); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .5rem 0; max-width: 48rem; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; margin: .75rem 0; }
table {
  border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; overflow-wrap: normal;
}
th, td { padding: .3rem .7rem .3rem .3rem; text-align: left; white-space: nowrap; }
td { border-top: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; vertical-align: top; }
tr.winner td { background: var(--mark); font-weight: 600; }
figure {
  margin: 1rem 0; padding: .5rem; width: fit-content; max-width: 100%;
  background: #fff; border: 1px solid var(--line); border-radius: 6px;
}
img { display: block; max-width: 100%; height: auto; }
summary { cursor: pointer; color: var(--soft); }
"""
)
