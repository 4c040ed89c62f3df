# SPDX-License-Identifier: Apache-2.0
"""The page of an evaluation as a Jinja2 template. Rendered with autoescape on: everything a model wrote is text."""

STYLE = """
svg .whisker { stroke: var(--ink); stroke-width: 1.5; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 10px; margin-top: 10px; }
.right { color: var(--good); font-weight: 600; } .wrong { color: var(--bad); font-weight: 600; }
.kind { border: 1px solid var(--rule); border-radius: 10px; padding: 0 8px; font-size: 12.5px; white-space: nowrap; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--model); padding: 6px 10px; }
.said { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; border-left: 4px solid var(--model-edge); }
.example { border-top: 1px solid var(--rule); padding: 8px 0; } .example:first-of-type { border-top: 0; }
.example summary { overflow-wrap: anywhere; cursor: pointer; }
td { overflow-wrap: anywhere; }
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
<p class="soft">{% for line in facts %}{{ line }}{{ "" if loop.last else " · " }}{% endfor %}</p>
"""

_NUMBERS = """
{% if tiles %}
<div class="tiles">
{% for t in tiles %}
<div class="tile">
<div class="label">{{ t.label }}</div>
<div class="value num">{{ t.value }}</div>
<div class="small soft num">{{ t.note }}</div>
</div>
{% endfor %}
</div>
{% endif %}
{% if charts %}
<div class="pair">
{% for c in charts %}
<div class="card"><h3>{{ c.label }}</h3>{{ c.svg }}<p class="small soft">{{ c.note }}</p></div>
{% endfor %}
</div>
{% endif %}
{% for t in tables %}
<h2>{{ t.label }}</h2>
<div class="card scroll"><table>
<tr>{% for name in t.columns %}<th{{ "" if loop.first else ' class="n"'|safe }}>{{ name }}</th>{% endfor %}</tr>
{% for row in t.rows %}
<tr>{% for cell in row %}<td{{ "" if loop.first else ' class="n num"'|safe }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
"""

_COMPARISON = """
{% if comparison %}
<h2>{{ comparison.names[0] }} → {{ comparison.names[1] }}</h2>
<div class="card">
<p><b>{{ comparison.verdict }}</b></p>
<p class="small soft num">{{ comparison.tasks }} tasks in common: {{ comparison.unchanged_right }} right in both,
{{ comparison.unchanged_wrong }} wrong in both; {{ comparison.left_out }} tasks left out. Exact sign test on the tasks
that changed (McNemar's where each was played once).</p>
{% for label, changes in (("fixed", comparison.fixed), ("broken", comparison.broken)) %}
{% if changes %}
<details{{ " open" if changes | length < 12 }}><summary>{{ changes | length }} {{ label }}</summary>
<div class="scroll"><table>
<tr><th>task</th><th>question</th><th class="n">before</th><th class="n">after</th></tr>
{% for c in changes[:shown_changes] %}
<tr><td>{{ c.task }}</td><td>{{ c.question }}</td>
<td class="n num">{{ "%.3g" | format(c.before) }}</td><td class="n num">{{ "%.3g" | format(c.after) }}</td></tr>
{% endfor %}
</table></div>
{% if changes | length > shown_changes %}
<p class="small soft">The first {{ shown_changes }}; comparison.json has all.</p>
{% endif %}
</details>
{% else %}
<p>None {{ label }}.</p>
{% endif %}
{% endfor %}
</div>
{% endif %}
"""

_EXAMPLES = """
{% for section in sections %}
<h2>{{ section.label }}</h2>
<p class="soft">{{ section.note }}</p>
<div class="card">
{% for e in section.examples %}
<details class="example">
<summary>
{% if e.error %}<span class="wrong">failed</span>
{% elif e.right %}<span class="right">right</span>
{% else %}<span class="kind">{{ e.kind or "not scored" }}</span>{% endif %}
{{ e.question }}
{% if e.rule %}<div class="small soft">{{ e.rule }}</div>{% endif %}
</summary>
<p class="small soft num">task {{ e.task }}, sample {{ e.member }} · answer read: {{ e.prediction }} ·
expected: {{ e.gold }} · {{ e.tokens }} tokens, {{ e.turns }} turns, {{ e.tool_calls }} tool calls, ended: {{ e.stop }}
{% for name, value in e.rewards.items() %} · {{ name }} {{ "%.3g" | format(value) }}{% endfor %}</p>
{% if e.error %}<p class="error">{{ e.error }}</p>{% endif %}
<div class="said">{{ e.text }}</div>
</details>
{% endfor %}
</div>
{% endfor %}
</main>
</body>
</html>
"""

PAGE = _HEAD + _NUMBERS + _COMPARISON + _EXAMPLES
