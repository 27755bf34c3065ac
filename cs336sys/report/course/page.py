"""How the write-up's page looks, on a screen of any width and printed."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); font-size: 1.25rem; }
h2 small { display: block; font-weight: normal; font-size: 1rem; opacity: .7; }
h3 { margin-bottom: .2rem; }
nav ol { columns: 18rem; }
pre { background: var(--soft); padding: .4rem .6rem; margin: .4rem 0; white-space: pre-wrap; font-size: .85rem; }
code { font-size: .9em; }
.machine { font-weight: 600; margin-bottom: .2rem; }
.absent { border-left: 3px solid #c60; padding-left: .6rem; }
figure { margin: 1rem 0; }
figcaption { font-size: .85rem; opacity: .8; }
figure ul { font-size: .75rem; opacity: .8; margin: .3rem 0; padding-left: 1.1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .5rem; border-bottom: 1px solid var(--line); overflow-wrap: normal; vertical-align: top; }
th { vertical-align: bottom; } .n { text-align: right; white-space: nowrap; } .t { text-align: left; min-width: 3rem; }
img { max-width: 100%; height: auto; background: white; }
@media print {
  body { max-width: none; font-size: 10pt; } nav { display: none; }
  .wide { overflow: visible; } table { font-size: 6.5pt; } .n { white-space: normal; } .t { min-width: 0; }
  tr, img, pre { break-inside: avoid; } h2, h3, .machine { break-after: avoid; }
}
"""
