#include "report/style.h"

namespace dovetail::report {

const char* const kStyle = R"css(
:root { color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --text: #1b2129; --soft: #56606c; --edge: #dde1e6; --grid: #e8ebef; --band: #e7edf8;
  --on: #ffffff; --c0: #2459b8; --c1: #b4470a; --c2: #0b7468; --c3: #8a3ab9; --c4: #806300; --c5: #5b6470; }
@media (prefers-color-scheme: dark) { :root {
  --page: #101418; --card: #191f26; --text: #e8ebef; --soft: #a6b0bc; --edge: #2d353f; --grid: #28303a; --band: #233149;
  --on: #10141a; --c0: #8ab4ff; --c1: #ffab70; --c2: #5fd3bc; --c3: #d5a6ff; --c4: #e8c94f; --c5: #aeb8c4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.5; overflow-wrap: break-word;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; font-size: 16px; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 6px; }
h3 { font-size: 0.95rem; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 75ch; }
.subtitle, footer, .says, figcaption { color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 20px 0; }
dl div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px; }
dt { color: var(--soft); font-size: 0.82rem; }
dd { margin: 2px 0 0; font-size: 1.2rem; font-weight: 600; line-height: 1.25; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 20px 22px;
  margin: 0 0 20px; }
.notes { border-left: 4px solid var(--c1); }
.notes ul, .missing ul { margin: 0; padding-left: 1.2em; }
.missing li { margin-bottom: 6px; }
figure { margin: 0; min-width: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 20px 28px; }
.charts figure { max-width: 640px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit; }
.swatch { width: 28px; height: 16px; flex: none; display: inline-block; }
.swatch[viewBox="0 0 16 16"] { width: 16px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0; padding: 0;
  font-size: 0.85rem; }
.legend li { display: flex; align-items: center; gap: 6px; }
text { fill: var(--text); font-size: 12px; }
.tick, .axis { fill: var(--soft); font-variant-numeric: tabular-nums; }
.axis { font-size: 12.5px; }
.name { font-size: 13px; }
.note { fill: var(--text); font-size: 11.5px; paint-order: stroke; stroke: var(--card); stroke-width: 4px;
  stroke-linejoin: round; }
.inside { fill: var(--on); font-size: 11px; pointer-events: none; }
.grid { stroke: var(--grid); stroke-width: 1; }
.base { stroke: var(--soft); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 2 4; }
.band { fill: var(--band); }
.sign { stroke: var(--card); stroke-width: 1.2; }
.dashed { stroke-dasharray: 7 4; }
.scroll { overflow-x: auto; margin-top: 16px; }
.scroll:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { text-align: left; color: var(--soft); padding-bottom: 4px; }
th, td { padding: 5px 12px 5px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { white-space: normal; vertical-align: bottom; color: var(--soft); font-weight: 600;
  border-bottom-color: var(--edge); }
tbody th { font-weight: 400; }
footer { font-size: 0.85rem; }
polyline { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
line[class^="line"] { stroke-width: 2.4; }
.line0 { stroke: var(--c0); } .fill0 { fill: var(--c0); } .line1 { stroke: var(--c1); } .fill1 { fill: var(--c1); }
.line2 { stroke: var(--c2); } .fill2 { fill: var(--c2); } .line3 { stroke: var(--c3); } .fill3 { fill: var(--c3); }
.line4 { stroke: var(--c4); } .fill4 { fill: var(--c4); } .line5 { stroke: var(--c5); } .fill5 { fill: var(--c5); }
@media (max-width: 560px) { main { padding: 20px 12px 32px; } section { padding: 16px 14px; }
  h1 { font-size: 1.4rem; }
  dl { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; } dl div { padding: 10px 12px; }
  dd { font-size: 1.1rem; } text { font-size: 13.5px; } .axis, .name { font-size: 14px; } .note { font-size: 13px; } }
@media print { body { background: #fff; } section { break-inside: avoid; } }
)css";

}  // namespace dovetail::report
