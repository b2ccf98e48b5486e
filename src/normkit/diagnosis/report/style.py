"""How the page looks: light and dark, on screens of any width, and on paper."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d1f21; --soft: #5c6166; --line: #d9dad6;
  --code: #f0f0ec; --serious: #b3261e; --warning: #8f5a00; --note: #41617f; --fine: #2f6f3e;
  --one: #1f5fa8; --two: #c2570c; --hot: #12477f; --cold: #eef2f6; --below: #c2570c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181a; --card: #1f2225; --ink: #e8e8e6; --soft: #a3a8ad; --line: #3a3e42;
    --code: #2a2e32; --serious: #ff8a80; --warning: #f0b452; --note: #9fc2e6; --fine: #8fd19e;
    --one: #7fb4f0; --two: #f5a25d; --hot: #9cc8ff; --cold: #23282d; --below: #f5a25d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0; line-height: 1.35; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.try { margin-bottom: 0; } .try + pre { margin-top: .2rem; }
.small { font-size: .875rem; }
code, pre, .path {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  font-size: .875em;
}
.path { overflow-wrap: anywhere; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1rem 1.1rem; margin: 0 0 1rem; min-width: 0;
}
.finding { border-left: .35rem solid var(--tone); }
.serious { --tone: var(--serious); } .warning { --tone: var(--warning); }
.note { --tone: var(--note); } .fine { --tone: var(--fine); }
.badge {
  display: inline-block; color: var(--tone); border: 1.5px solid var(--tone); font-weight: 600;
  border-radius: 1rem; padding: 0 .6rem; font-size: .8rem; line-height: 1.5rem; margin-right: .4rem;
}
pre {
  background: var(--code); border-radius: .4rem; padding: .6rem .75rem; margin: .6rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .35rem 1rem;
  margin: .7rem 0 0; font-size: .875rem; }
dl div { min-width: 0; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 1rem; }
.grid .card { margin: 0; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; margin: .6rem auto 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); fill: none; }
.bound { stroke: var(--warning); stroke-dasharray: 5 4; fill: none; }
.one { stroke: var(--one); fill: none; stroke-width: 2; }
.two { stroke: var(--two); fill: none; stroke-width: 2; stroke-dasharray: 7 3; }
.dot-one { fill: var(--one); } .dot-two { fill: var(--card); stroke: var(--two); stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .5rem 0 0; }
.legend i { display: inline-block; width: 1.6rem; border-top: 3px solid var(--one);
  vertical-align: middle; margin-right: .4rem; }
.legend i.b { border-top: 3px dashed var(--two); }
.rows { display: grid; grid-template-columns: minmax(4rem, 42%) 1fr auto; gap: .1rem .6rem;
  align-items: center; font-size: .8125rem; margin-top: .6rem; }
.rows .path { font-size: .75rem; line-height: 1.25; }
.track { background: var(--cold); border-radius: .2rem; height: .7rem; position: relative;
  min-width: 2rem; }
.bar { background: var(--one); border-radius: .2rem; height: 100%; }
.bar.over { background: var(--two); }
.mark { position: absolute; top: -.15rem; bottom: -.15rem; width: 0;
  border-left: 2px dashed var(--warning); }
.value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.hot { fill: var(--hot); } .below { fill: var(--below); } .cold { fill: var(--cold); }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .8rem; }
@media print {
  :root {
    --page: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --code: #f3f3f3;
    --serious: #9c1c14; --warning: #7a4d00; --note: #33506c; --fine: #245a31; --one: #1f5fa8;
    --two: #b04d06; --hot: #12477f; --cold: #eef2f6; --below: #b04d06;
  }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  .card { break-inside: avoid; border-radius: 0; }
  .grid { grid-template-columns: 1fr 1fr; }
  h2 { break-after: avoid; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
