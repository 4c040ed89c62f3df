# SPDX-License-Identifier: Apache-2.0
"""The page of ``report.html`` as a Jinja2 template. Rendered with autoescape on: everything a model wrote is text."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf7; --card: #fff; --ink: #1d2129; --soft: #646b78; --rule: #e2e0da;
  --c0: #1f6fd1; --c1: #c2560a; --c2: #17805b; --c3: #7a48c4; --c4: #b3265e; --c5: #6b6b1f;
  --model: #e8f1fd; --model-edge: #1f6fd1; --env: #fdf0e2; --env-edge: #c2560a;
  --scaffold: #f0efec; --scaffold-edge: #8a8f99; --good: #17805b; --bad: #b3265e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14161a; --card: #1c1f25; --ink: #e6e8ec; --soft: #9aa2b1; --rule: #30353e;
    --c0: #6aa9f5; --c1: #f09a55; --c2: #4cc79a; --c3: #b591ee; --c4: #f0719f; --c5: #c8c462;
    --model: #18293f; --model-edge: #6aa9f5; --env: #35261a; --env-edge: #f09a55;
    --scaffold: #25282e; --scaffold-edge: #8a92a0; --good: #4cc79a; --bad: #f0719f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 80px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 13px; margin: 0 0 6px; font-weight: 600; }
p { margin: 4px 0 10px; }
summary { cursor: pointer; }
.soft { color: var(--soft); } .small { font-size: 13px; } .num { font-variant-numeric: tabular-nums; }
.up { color: var(--good); } .down, .error { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin-top: 18px; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 600; line-height: 1.25; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 10px; margin-top: 10px; }

svg.chart { width: 100%; height: auto; display: block; overflow: visible; }
.wide { overflow-x: auto; } .wide svg.chart { min-width: 640px; }
svg text { fill: var(--soft); font-size: 12px; }
svg .label, svg .name { fill: var(--ink); } svg .name { font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .phase { stroke: var(--soft); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .dot { stroke: var(--card); } svg .hover { fill-opacity: 0; } svg .hover:hover { fill-opacity: 1; }
.line.c0 { stroke: var(--c0); }
.line.c1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.line.c2 { stroke: var(--c2); stroke-dasharray: 2 3; }
.line.c3 { stroke: var(--c3); stroke-dasharray: 10 3 2 3; }
.line.c4 { stroke: var(--c4); stroke-dasharray: 4 4; }
.line.c5 { stroke: var(--c5); stroke-dasharray: 14 4; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); }
.c3 { fill: var(--c3); } .c4 { fill: var(--c4); } .c5 { fill: var(--c5); }

.numbers { margin-top: 14px; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
td, th { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--soft); }
td.n, th.n { text-align: right; }

.group { margin-top: 10px; } .group > summary { font-weight: 600; overflow-wrap: anywhere; }
.episode { border-top: 1px solid var(--rule); margin-top: 10px; padding-top: 8px; }
.chips span { display: inline-block; border: 1px solid var(--rule); border-radius: 10px; }
.chips span { padding: 0 8px; margin: 0 4px 4px 0; font-size: 12.5px; }
.turn { margin: 10px 0 2px; font-size: 12.5px; color: var(--soft); }
.span { display: grid; grid-template-columns: 158px 1fr; margin: 2px 0; }
.who { font-size: 12px; padding: 3px 8px; color: var(--soft); } .who b { color: var(--ink); }
.body { white-space: pre-wrap; overflow-wrap: anywhere; padding: 2px 8px; border-left: 4px solid; }
.body { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; }
.model .body { background: var(--model); border-color: var(--model-edge); }
.env .body { background: var(--env); border-left: 5px double var(--env-edge); }
.template .body { background: var(--scaffold); border-left-style: dotted; border-color: var(--scaffold-edge); }
.template .body { color: var(--soft); font-style: italic; }
.tok:hover { outline: 1px solid var(--model-edge); }
.tok.maybe { text-decoration: underline dotted; } .tok.rare { text-decoration: underline wavy var(--bad); }
.strip { display: block; margin-top: 3px; line-height: 9px; }
.strip i { display: inline-block; width: 7px; height: 9px; margin-right: 1px; background: var(--model-edge); }
.strip i.maybe { height: 6px; } .strip i.rare { height: 3px; background: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; } .legend .span { grid-template-columns: auto; }
@media (max-width: 640px) { .span { grid-template-columns: 1fr; } .who { padding: 2px 0 0; } }
"""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% if facts %}
<p class="soft">
{% for name, value in facts %}{{ name }} {{ value }}{{ "" if loop.last else " · " }}{% endfor %}
</p>
{% endif %}
"""

_NUMBERS = """
{% if tiles %}
<div class="tiles">
{% for t in tiles %}
<div class="tile">
<div class="label">{{ t.label }}</div>
<div class="value num">{{ t.value }}</div>
{% if t.before is not none %}
<div class="small soft num">before: {{ t.before }} <span class="{{ t.direction }}">({{ t.change }})</span></div>
{% endif %}
</div>
{% endfor %}
</div>
{% endif %}
{% if main %}
<h2>Learning curve</h2>
<div class="card wide">{{ main }}</div>
{% endif %}
<div class="charts">
{% for c in charts %}
<div class="card"><h3 title="{{ c.help }}">{{ c.label }}</h3>{{ c.svg }}</div>
{% endfor %}
</div>
{% if table %}
<details class="numbers"><summary>All numbers</summary>
<div class="scroll"><table>
<tr><th>metric</th>
{% for name in ("first", "last", "lowest", "highest", "rows") %}<th class="n">{{ name }}</th>{% endfor %}
<th>what it is</th></tr>
{% for r in table %}
<tr><td>{{ r.name }}</td>
{% for v in r.numbers %}<td class="n num">{{ v }}</td>{% endfor %}
<td class="soft">{{ r.help }}</td></tr>
{% endfor %}
</table></div>
</details>
{% endif %}
"""

# Inside .body white space is shown, so the span macro leaves none of its own.
_SPAN = """
{% macro token(tag, base, p) %}
<{{ tag }} class="{{ base }} {{ p.kind }}" title="{{ p.title }}">{{ p.text }}</{{ tag }}>
{%- endmacro %}
{% macro span(s) %}
<div class="span {{ s.author }}">
<div class="who"><b>{{ s.author }}</b>{% if s.role %} · {{ s.role }}{% endif %}</div>
<div class="body">
{%- if s.pieces %}{% for p in s.pieces %}{{ token("span", "tok", p) }}{% endfor %}
{%- else %}{{ s.text }}{% endif %}
{%- if s.strip %}<span class="strip">
{%- for p in s.strip %}{{ token("i", "", p) }}{% endfor %}</span>{% endif -%}
</div>
</div>
{% endmacro %}
"""

_EPISODES = """
{% if groups %}
<h2>Sample episodes</h2>
<p class="soft">{{ shown }} Every token has an author; only the model's are trained on.</p>
<div class="card legend">
<div class="span model"><div class="body">model: solid edge, trained on</div></div>
<div class="span env"><div class="body">environment (question, tool result): double edge</div></div>
<div class="span template"><div class="body">template (scaffolding): dotted edge</div></div>
<div class="small soft">
{% if by_token %}
<span class="tok maybe">dotted underline</span>: the model gave the token a probability below 0.5 ·
<span class="tok rare">wavy</span>: below 0.1 · hover for its log-probability
{% else %}
<span class="strip"><i></i><i class="maybe"></i><i class="rare"></i></span>
one mark per token: probability at least 0.5, below 0.5, below 0.1 · hover for its log-probability
{% endif %}
</div>
</div>
{% for g in groups %}
<details class="card group"{{ " open" if loop.first }}>
<summary>{{ g.question }}</summary>
<p class="soft small num">task {{ g.id }} · draw {{ g.draw }} · expected answer {{ g.answer }} ·
rewards of the group: {{ g.rewards }}</p>
{% for e in g.episodes %}
<details class="episode"{{ " open" if loop.first }}>
<summary>Episode {{ e.member }} <span class="soft small num">· {{ e.headline }}</span></summary>
{% if e.error %}
<p class="error">excluded: {{ e.error }}</p>
{% endif %}
{% for t in e.trajectories %}
{% if e.trajectories | length > 1 %}
<p class="small"><b>view {{ loop.index }}</b> ({{ t.agent }})</p>
{% endif %}
<div class="chips num">
<span>reward {{ t.reward }}</span>
<span>advantage {{ t.advantage }}</span>
<span>ended: {{ t.stop }}</span>
<span>{{ t.trained }} of {{ t.tokens }} tokens trained</span>
{% for p in t.parts %}<span>{{ p.name }} {{ p.value }} × {{ p.weight }}</span>
{% endfor %}
</div>
{% for turn in t.turns %}
<div class="turn">turn {{ loop.index }} · {{ turn.note }}</div>
{% for s in turn.spans %}{{ span(s) }}{% endfor %}
{% endfor %}
{% endfor %}
</details>
{% endfor %}
</details>
{% endfor %}
{% endif %}
</main>
</body>
</html>
"""

PAGE = _SPAN + _HEAD + _NUMBERS + _EPISODES
