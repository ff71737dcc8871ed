"""The style sheet of the page; the colours of figures are variables of it (`svg.py`)."""

from .drawing import COLOURS, GRID, INK, MUTED, PAPER

# In the order of `drawing.COLOURS`, light enough for dark paper.
DARK_COLOURS = ("#7aa7ff", "#ff9466", "#5fcb82", "#c79af2", "#e2b34f", "#55c8dd")


def _variables(ink, muted, grid, paper, desk, held, partly, false, series):
    named = {"ink": ink, "muted": muted, "grid": grid, "paper": paper, "desk": desk}
    named |= {"held": held, "partly": partly, "false": false}
    named |= {f"series-{number}": colour for number, colour in enumerate(series, 1)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


LIGHT = _variables(INK, MUTED, GRID, PAPER, "#f5f6f8", "#15703a", "#8a5a00", "#b3261e", COLOURS)
DARK = _variables("#e7e9ec", "#a2abb5", "#353c45", "#1c2127", "#13161a", "#6fd394", "#f0bd5e", "#ff8f85", DARK_COLOURS)

STYLE = (
    f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--desk); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main, header, footer { max-width: 78rem; margin: 0 auto; padding: 0 15px; overflow-wrap: break-word; }
header { padding-top: 3rem; }
h1 { font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; margin: 0 0 1rem; letter-spacing: -.02em; }
h2 { font-size: clamp(1.35rem, 4vw, 1.75rem); line-height: 1.25; margin: 0 0 .75rem; letter-spacing: -.01em; }
h2 .number { color: var(--muted); font-weight: 400; margin-right: .6rem; }
h3 { font-size: .8rem; letter-spacing: .07em; text-transform: uppercase; color: var(--muted); margin: 2rem 0 .6rem; }
p, ol, ul { max-width: 44rem; margin: 0 0 .9rem; }
ol, ul { padding-left: 1.4rem; }
a { color: var(--series-1); text-underline-offset: .15em; }
sub, sup { line-height: 0; font-size: .75em; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.contents { list-style: none; padding: 0; max-width: none; margin: 1.5rem 0 0; display: grid; gap: .25rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.contents a { display: flex; gap: .7rem; align-items: baseline; padding: .4rem 0; text-decoration: none;
  color: var(--ink); border-bottom: 1px solid var(--grid); }
.contents a:hover { color: var(--series-1); }
.contents .number { color: var(--muted); min-width: 1.3rem; font-variant-numeric: tabular-nums; }
.contents .marks { margin-left: auto; white-space: nowrap; letter-spacing: .15em; }
.legend { color: var(--muted); font-size: .9rem; margin-top: .8rem; }
section { margin: 3.5rem 0; padding-top: 2.5rem; border-top: 1px solid var(--grid); }
.claim { font-size: 1.15rem; line-height: 1.5; border-left: 3px solid var(--series-1); padding-left: 1rem; }
.figures { display: grid; gap: 15px; margin: 1.5rem -15px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 22.5rem), 1fr)); }
@media (min-width: 48rem) { .figures { margin: 1.5rem 0; } }
figure { margin: 0; background: var(--paper); padding: 15px 15px 12px; border: 1px solid var(--grid);
  border-width: 1px 0; }
@media (min-width: 48rem) { figure { border-width: 1px; border-radius: 10px; } }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
svg * { stroke-linejoin: round; }
figcaption, .caption { color: var(--muted); font-size: .9rem; line-height: 1.45; }
figcaption { margin-top: .6rem; }
.tables { display: flex; flex-wrap: wrap; gap: 0 2rem; }
.tables > div { max-width: 100%; min-width: 0; }
.table { overflow-x: auto; margin: 0 0 1.5rem; background: var(--paper); border: 1px solid var(--grid);
  border-radius: 10px; padding: .75rem 15px; width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-size: clamp(.8rem, 2vw, .9rem); font-variant-numeric: tabular-nums; }
.caption { margin: 1.5rem 0 .5rem; }
th, td { padding: .3rem 0 .3rem clamp(.8rem, 2vw, 1.4rem); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; white-space: normal; vertical-align: bottom; border-bottom: 1px solid var(--muted); }
tbody tr + tr td { border-top: 1px solid var(--grid); }
.findings { list-style: none; padding: 0; max-width: 60rem; margin: 0; }
.findings li { display: grid; gap: .1rem 1rem; grid-template-columns: 6.2rem 1fr; padding: .65rem 0; }
.findings li + li { border-top: 1px solid var(--grid); }
.findings .numbers { grid-column: 2; color: var(--muted); }
.findings strong { font-weight: 600; }
@media (max-width: 30rem) { .findings li { grid-template-columns: 1fr; } .findings .numbers { grid-column: 1; } }
.badge { justify-self: start; align-self: start; font-size: .8rem; font-weight: 600; padding: .1rem .55rem;
  border: 1px solid; border-radius: 1rem; white-space: nowrap; line-height: 1.5; }
.held { color: var(--held); } .partly { color: var(--partly); } .false { color: var(--false); }
pre { margin: 0 0 .9rem; padding: .7rem 15px; background: var(--paper); border: 1px solid var(--grid);
  border-radius: 10px; max-width: 44rem; white-space: pre-wrap; }
footer { border-top: 1px solid var(--grid); padding-top: 1.5rem; padding-bottom: 3rem; color: var(--muted);
  font-size: .9rem; }
.formula, .legend .entry { white-space: nowrap; }
@media (min-width: 48rem) { .why p code { white-space: nowrap; } }
@media (min-width: 70rem) {
  section { display: grid; grid-template-columns: minmax(0, 44rem) minmax(0, 1fr); column-gap: 3rem;
    grid-template-areas: "head head" "why verdict" "measured measured" "repeat repeat"; }
  .head { grid-area: head; } .why { grid-area: why; } .measured { grid-area: measured; min-width: 0; }
  .verdict { grid-area: verdict; } .repeat { grid-area: repeat; }
  .findings li { grid-template-columns: 1fr; } .findings .numbers { grid-column: 1; }
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dd { margin: 0; }
@media print { section { break-inside: auto; } figure, .table { break-inside: avoid; } }
"""
)
