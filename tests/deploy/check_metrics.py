#!/usr/bin/env python3
"""Do the dashboard and the rules of deploy/monitoring ask for what a node exports?

    python3 tests/deploy/check_metrics.py metrics KVSERVER KVCTL SESSION KEEPER
    python3 tests/deploy/check_metrics.py promtool KVSERVER KVCTL SESSION KEEPER
    python3 tests/deploy/check_metrics.py --self-test

metrics starts a node, uses it, reads /metrics and checks every expression against it:

    each metric is exported, or recorded by a rule; each label, and each value of a label that is
    asked for, is there; rate() is of counters and counters are in nothing else; quantiles are of
    buckets that have kept `le`; both sides of an operator have the same labels; what legends and
    annotations name is left in the result

then that each metric, misspelled, is an error.  promtool has Prometheus's own tool check the rules,
the expressions of the dashboard, the page, and the alerts on made-up series (rules_test.yml); it is
skipped (exit status 77) where there is no promtool.  SESSION and KEEPER are the programs
example_session and keep_prompt.  Exit status: 1 if there is an error, 2 if the call is wrong.
"""
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import promql

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
MONITORING = TOP / "deploy/monitoring"
RULES_TEST = TOP / "tests/deploy/rules_test.yml"

TARGET_LABELS = {"job", "instance"}  # what Prometheus gives every series of a target
SEVERITIES = {"critical", "warning"}
PANELS_MAX = 25
GRAFANA_VARIABLES = {"__rate_interval": "5m", "__range": "6h"}
GRAFANA_COLUMNS = 24

# Functions of a counter's range, of a gauge's range, and of any vector, with their arguments: v is
# a vector, r a range, s a number.
OF_COUNTERS = {"rate": "r", "increase": "r", "irate": "r"}
OF_GAUGES = {"min_over_time": "r", "max_over_time": "r", "avg_over_time": "r", "last_over_time": "r",
             "quantile_over_time": "sr", "deriv": "r", "delta": "r"}
OF_VECTORS = {"clamp_min": "vs", "clamp_max": "vs", "abs": "v", "absent": "v", "histogram_quantile": "sv"}
RESETTABLE = {"topkv_uptime_seconds"}  # gauges whose falls mean something

# kind: number, vector or range; of: counter, gauge; buckets: of a histogram, cumulative by le
Value = collections.namedtuple("Value", "kind of labels buckets")
Metric = collections.namedtuple("Metric", "type series")  # series: {labels as a frozenset: value}
# An expression of the dashboard or of the rules: names are labels that texts about it use.
Expression = collections.namedtuple("Expression", "where text names")


class Wrong(Exception):
    """What is wrong with an expression."""


# ---- what the node exports -------------------------------------------------------------------------

LINE = re.compile(r'(\w+)(?:\{(.*)\})? ([-+0-9.eInfNa]+)')
LABEL = re.compile(r'(\w+)="([^"\\]*)",?')


def read_page(text):
    """{name: Metric} of a page of metrics; of a histogram, its three names."""
    metrics, types = {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name in types:
                raise Wrong(f"/metrics:{number}: {name} has two types")
            types[name] = kind
        elif line and not line.startswith("#"):
            found = LINE.fullmatch(line)
            if found is None or LABEL.sub("", found[2] or ""):
                raise Wrong(f"/metrics:{number}: not a line of metrics: {line}")
            base = re.sub("_(bucket|sum|count)$", "", found[1])
            kind = types.get(found[1]) or (types.get(base) == "histogram" and "histogram")
            if not kind:
                raise Wrong(f"/metrics:{number}: {found[1]}: no type")
            labels = frozenset(LABEL.findall(found[2] or ""))
            series = metrics.setdefault(found[1], Metric(kind, {})).series
            if labels in series:
                raise Wrong(f"/metrics:{number}: {line}: there twice")
            series[labels] = float(found[3])
    return metrics


def errors_of_page(metrics):
    """Against the conventions of Prometheus, and of histograms."""
    for name, metric in metrics.items():
        if not name.startswith("topkv_"):
            yield f"/metrics: {name}: does not begin with topkv_"
        if metric.type not in ("counter", "gauge", "histogram"):
            yield f"/metrics: {name}: type {metric.type}"
        if (metric.type == "counter") != name.endswith("_total"):
            yield f"/metrics: {name}: a {metric.type}: only the names of counters end in _total"
        if re.search("_(ms|us|kb|mb|percent)(_|$)", name):
            yield f"/metrics: {name}: not in base units"
        if metric.type == "histogram" and name.endswith("_bucket"):
            yield from errors_of_histogram(name[:-len("_bucket")], metrics)


def errors_of_histogram(name, metrics):
    histograms = collections.defaultdict(dict)
    for labels, value in metrics[name + "_bucket"].series.items():
        rest = frozenset(label for label in labels if label[0] != "le")
        histograms[rest][float(dict(labels)["le"])] = value
    for labels, buckets in histograms.items():
        counts = [count for _, count in sorted(buckets.items())]
        total = metrics[name + "_count"].series.get(labels)
        if counts != sorted(counts) or float("inf") not in buckets or counts[-1] != total:
            yield f"/metrics: {name}: {dict(labels)}: buckets {counts}, count {total}"
        if labels not in metrics[name + "_sum"].series:
            yield f"/metrics: {name}: {dict(labels)}: no sum"


# ---- what an expression is -------------------------------------------------------------------------

class Judge:
    """Says what an expression gives, and raises Wrong for one that makes no sense."""

    def __init__(self, metrics):
        self.metrics = metrics
        self.recorded = {}  # name -> Value
        self.used = set()   # recorded names that an expression asks for

    def selector(self, tree):
        if tree.name in self.recorded:
            self.used.add(tree.name)
            value = self.recorded[tree.name]
        elif tree.name == "up":
            value = Value("vector", "gauge", TARGET_LABELS, False)
        elif tree.name in self.metrics:
            metric = self.metrics[tree.name]
            labels = {name for labels in metric.series for name, _ in labels} | TARGET_LABELS
            value = Value("vector", "gauge" if metric.type == "gauge" else "counter", labels,
                          metric.type == "histogram" and tree.name.endswith("_bucket"))
        else:
            raise Wrong(f"{tree.name}: no such metric")
        for label, operator, wanted in tree.matchers:
            self.matcher(tree.name, value, label, operator, wanted)
        return value._replace(kind="range" if tree.span else "vector")

    def matcher(self, name, value, label, operator, wanted):
        if label not in value.labels:
            raise Wrong(f"{name}: no label {label}")
        if label in TARGET_LABELS or "$" in wanted or name not in self.metrics:
            return
        known = {dict(labels).get(label, "") for labels in self.metrics[name].series}
        # Of alternatives, each must be there: a|b with b misspelled finds a, and nobody notices.
        for each in wanted.split("|") if operator in ("=~", "!~") else [wanted]:
            if not any(re.fullmatch(each, there) if "~" in operator else each == there for there in known):
                raise Wrong(f'{name}: no {label}="{each}": there is {", ".join(sorted(known))}')

    def arguments(self, tree, kinds):
        if len(tree.arguments) != len(kinds):
            raise Wrong(f"{tree.name}(): {len(tree.arguments)} arguments, not {len(kinds)}")
        values = [self.value(argument) for argument in tree.arguments]
        for value, kind in zip(values, kinds):
            wanted = {"v": "vector", "r": "range", "s": "number"}[kind]
            if value.kind != wanted:
                raise Wrong(f"{tree.name}(): of a {value.kind}, not a {wanted}")
        return next(value for value in values if value.kind != "number")

    def call(self, tree):
        kinds = {**OF_COUNTERS, **OF_GAUGES, **OF_VECTORS, "resets": "r"}.get(tree.name)
        if kinds is None:
            raise Wrong(f"{tree.name}(): no function that is known here")
        value = self.arguments(tree, kinds)
        if tree.name in OF_COUNTERS and value.of != "counter":
            raise Wrong(f"{tree.name}(): of a gauge, {tree.arguments[-1].name}")
        if tree.name in OF_GAUGES and value.of != "gauge":
            raise Wrong(f"{tree.name}(): of a counter, {tree.arguments[-1].name}")
        if tree.name == "resets" and value.of != "counter" and tree.arguments[0].name not in RESETTABLE:
            raise Wrong(f"resets(): of a gauge, {tree.arguments[0].name}")
        if tree.name in OF_VECTORS:
            self.is_no_counter(value)
        if tree.name == "histogram_quantile":
            if not value.buckets:
                raise Wrong("histogram_quantile(): not of the rates of buckets")
            return Value("vector", "gauge", value.labels - {"le"}, False)
        if tree.name == "absent":  # it has the labels that the selector asks to be equal
            equal = {label for label, operator, _ in tree.arguments[0].matchers if operator == "="}
            return Value("vector", "gauge", equal, False)
        return value._replace(kind="vector", of="gauge")

    @staticmethod
    def is_no_counter(value):
        if value.kind == "range":
            raise Wrong("a range, where a vector is wanted")
        if value.of == "counter":
            raise Wrong("a counter without rate() or increase(): it only grows")

    def aggregate(self, tree):
        value = self.value(tree.argument)
        self.is_no_counter(value)
        for label in tree.labels:
            if label not in value.labels:
                raise Wrong(f"{tree.name} {tree.mode} ({label}): its argument has no such label")
        if tree.name in ("topk", "bottomk"):
            return value
        labels = value.labels - set(tree.labels) if tree.mode == "without" else set(tree.labels)
        if value.buckets and (tree.name != "sum" or "le" not in labels):
            raise Wrong(f"{tree.name}: buckets are added up, by le")
        return value._replace(labels=labels)

    def binary(self, tree):
        left, right = self.value(tree.left), self.value(tree.right)
        for value in (left, right):
            self.is_no_counter(value)
            if value.buckets:
                raise Wrong(f"{tree.operator}: of buckets")
        if left.kind == "number" or right.kind == "number":
            return right if left.kind == "number" else left
        labels = set(tree.labels)
        if tree.matching == "on":
            if missing := labels - (left.labels & right.labels):
                raise Wrong(f"{tree.operator} on ({', '.join(sorted(missing))}): one side has no such label")
        elif tree.matching == "ignoring":
            if left.labels - labels != right.labels - labels:
                raise Wrong(f"{tree.operator} ignoring: other labels differ")
        elif left.labels != right.labels:
            raise Wrong(f"{tree.operator}: {sorted(left.labels)} on the left, {sorted(right.labels)} on the right")
        if tree.operator == "or":
            return left._replace(labels=left.labels | right.labels)
        if tree.matching == "on" and not tree.group and tree.operator not in ("and", "unless"):
            return left._replace(labels=labels)
        return left

    def value(self, tree):
        if isinstance(tree, promql.Number):
            return Value("number", "gauge", set(), False)
        if isinstance(tree, promql.Selector):
            return self.selector(tree)
        if isinstance(tree, promql.Call):
            return self.call(tree)
        if isinstance(tree, promql.Aggregate):
            return self.aggregate(tree)
        if isinstance(tree, promql.Binary):
            return self.binary(tree)
        raise Wrong("a string, where a vector is wanted")

    def result(self, text):
        value = self.value(promql.parse(text))
        self.is_no_counter(value)
        if value.kind != "vector":
            raise Wrong(f"a {value.kind}, where a vector is wanted")
        if value.buckets:
            raise Wrong("buckets without histogram_quantile()")
        return value


def errors_of(expressions, records, metrics):
    """Checks `records`, which later expressions may ask for, and the expressions."""
    judge = Judge(metrics)
    for expression in [*records, *expressions]:
        try:
            value = judge.result(expression.text)
            if missing := set(expression.names) - value.labels:
                raise Wrong(f"{', '.join(sorted(missing))} is named, and no label of the result")
            if expression in records:
                judge.recorded[expression.where] = value
        except (Wrong, promql.Error) as error:
            yield f"{expression.where}: {error}"
    for record in records:
        if record.where in judge.recorded and record.where not in judge.used:
            yield f"{record.where}: is recorded, and nothing asks for it"


# ---- the dashboard ---------------------------------------------------------------------------------

def replaced(text, variables):
    """The expression with Grafana's own variables replaced; others stay, as text of matchers."""
    def value_of(found):
        name = found[1] or found[2]
        if name not in GRAFANA_VARIABLES and name not in variables:
            raise Wrong(f"${name}: no such variable")
        return GRAFANA_VARIABLES.get(name, found[0])
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value_of, text)


def overlaps(a, b):
    return (a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and
            a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"])


def errors_of_panel(panel, title):
    grid = panel["gridPos"]
    if grid["x"] < 0 or grid["x"] + grid["w"] > GRAFANA_COLUMNS:
        yield f"{title}: columns {grid['x']} to {grid['x'] + grid['w']} of {GRAFANA_COLUMNS}"
    if panel["type"] == "row":
        return
    if not panel.get("description"):
        yield f"{title}: no description"
    if not panel["fieldConfig"]["defaults"].get("unit"):
        yield f"{title}: no unit"
    for part in [panel, *panel["targets"]]:
        if part["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{title}: datasource {part['datasource']}: not the variable's"
    ids = [target["refId"] for target in panel["targets"]]
    if len(ids) != len(set(ids)) or not ids:
        yield f"{title}: refId: {ids}"
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["id"] == "byFrameRefID" and override["matcher"]["options"] not in ids:
            yield f"{title}: an override of {override['matcher']['options']}, which is no query"


def read_dashboard(text):
    """(expressions, errors)"""
    dashboard = json.loads(text)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    expressions, errors = [], []
    panels = dashboard["panels"]
    if not {"datasource", "instance"} <= variables:
        errors.append("dashboard: no variable datasource, or none of the node")
    if "__inputs" in dashboard or dashboard["id"] is not None:
        errors.append("dashboard: is of one Grafana: __inputs or id")
    if (n := sum(panel["type"] != "row" for panel in panels)) > PANELS_MAX:
        errors.append(f"dashboard: {n} panels, more than {PANELS_MAX}")
    if len({panel["id"] for panel in panels}) != len(panels):
        errors.append("dashboard: two panels have one id")
    for i, panel in enumerate(panels):
        title = f"dashboard: {panel['title']}"
        errors += errors_of_panel(panel, title)
        errors += [f"{title}: overlaps {other['title']}" for other in panels[:i]
                   if overlaps(panel["gridPos"], other["gridPos"])]
        for target in panel.get("targets", []):
            try:
                names = re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"])
                expressions.append(Expression(f"{title}: {target['refId']}",
                                              replaced(target["expr"], variables), names))
            except Wrong as error:
                errors.append(f"{title}: {error}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            if found is None or variable["definition"] != variable["query"]["query"]:
                errors.append(f"dashboard: variable {variable['name']}: not label_values(SELECTOR, LABEL)")
            else:  # resets(): the series may be a counter
                text = found[1] if found[1].startswith("up{") else f"resets({found[1]}[5m])"
                expressions.append(Expression(f"dashboard: variable {variable['name']}", text, [found[2]]))
    return expressions, errors


# ---- the rules -------------------------------------------------------------------------------------

def read_yaml(text):
    """Reads what rules.yml needs of YAML: maps, lists of maps, plain and double-quoted values on one
    line, and blocks after `|`.  Anything else is Wrong, so that nothing is understood otherwise than
    Prometheus does."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    at = 0

    def indent(line):
        return len(line) - len(line.lstrip(" "))

    def skip():
        nonlocal at
        while at < len(lines) and (not lines[at][1].strip() or lines[at][1].lstrip().startswith("#")):
            at += 1
        return at < len(lines)

    def scalar(number, rest):
        if rest.startswith('"'):
            try:
                return json.loads(rest)
            except json.JSONDecodeError:
                raise Wrong(f"rules.yml:{number}: not one quoted value: {rest}") from None
        if rest[0] in "'[]{}&*!>%@`-?|" or ": " in rest or " #" in rest:
            raise Wrong(f"rules.yml:{number}: quote it: {rest}")
        return rest

    def block(outer):
        nonlocal at
        taken = []
        while at < len(lines) and (not lines[at][1].strip() or indent(lines[at][1]) > outer):
            taken.append(lines[at][1].strip())
            at += 1
        return "\n".join(taken).strip() + "\n"

    def node(least):
        nonlocal at
        if not skip() or indent(lines[at][1]) < least:
            raise Wrong(f"rules.yml:{lines[min(at, len(lines) - 1)][0]}: nothing below the key before")
        depth = indent(lines[at][1])
        is_list = lines[at][1].lstrip().startswith("- ")
        items, entries = [], {}
        while skip() and indent(lines[at][1]) == depth and \
                lines[at][1].lstrip().startswith("- ") == is_list:
            number, line = lines[at]
            if is_list:
                lines[at] = (number, line.replace("- ", "  ", 1))
                items.append(node(depth + 2))
                continue
            found = re.fullmatch(r" *(\w+):(?: +(.*?))?", line)
            if found is None or found[1] in entries:
                raise Wrong(f"rules.yml:{number}: not a key, or one that is there twice: {line.strip()}")
            at += 1
            if found[2] == "|":
                entries[found[1]] = block(depth)
            elif found[2]:
                entries[found[1]] = scalar(number, found[2])
            else:
                entries[found[1]] = node(depth + 1)
        return items if is_list else entries

    tree = node(0)
    if skip():
        raise Wrong(f"rules.yml:{lines[at][0]}: not understood: {lines[at][1]}")
    return tree


def read_rules(text, runbook):
    """(records, alerts as expressions, errors)"""
    sections = set(re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE))
    records, alerts, errors = [], [], []
    for group in read_yaml(text)["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                records.append(Expression(rule["record"], rule["expr"], []))
                continue
            name, notes = rule["alert"], rule.get("annotations", {})
            texts = " ".join(notes.values())
            alerts.append(Expression(name, rule["expr"], re.findall(r"\$labels\.(\w+)", texts)))
            if rule.get("labels", {}).get("severity") not in SEVERITIES:
                errors.append(f"{name}: severity: not one of {', '.join(sorted(SEVERITIES))}")
            if not {"summary", "description"} <= notes.keys():
                errors.append(f"{name}: no summary, or no description")
            if notes.get("runbook") != f"deploy/monitoring/README.md#{name.lower()}":
                errors.append(f"{name}: runbook: {notes.get('runbook')}: not its section of the README")
            if name not in sections:
                errors.append(f"{name}: deploy/monitoring/README.md has no section of this name")
    names = [alert.where for alert in alerts]
    errors += [f"{name}: there twice" for name in set(names) if names.count(name) > 1]
    errors += [f"README.md: {name}: no such alert" for name in sections if
               name.startswith("Topkv") and name not in names]
    return records, alerts, errors


def errors_of_panels(dashboard, runbook):
    """What the README names in italics is a panel, a row or a series of the dashboard."""
    titles = re.findall(r'"title": "([^"]*)"', dashboard)
    series = [re.sub(r"\{\{\w+\}\} *", "", text) for text in re.findall(r'"legendFormat": "([^"]*)"', dashboard)]
    named = re.findall(r"(?<![*\w])\*([^*\s][^*\n]*)\*(?!\*)", runbook)
    return [f"README.md: *{name}*: no panel, row or series" for name in named if name not in titles + series]


def check(metrics, dashboard, rules, runbook):
    """(expressions, errors) of the two files' texts against the metrics of a node."""
    shown, errors = read_dashboard(dashboard)
    records, alerts, more = read_rules(rules, runbook)
    errors += errors_of_panels(dashboard, runbook)
    return [*records, *alerts, *shown], [*errors, *more, *errors_of([*alerts, *shown], records, metrics)]


# ---- a node that is used ---------------------------------------------------------------------------

# What must have counted when the node was used: without it, the page shows nothing of how series look.
COUNTED = {
    "topkv_rows_in_bytes_total": {}, "topkv_rows_out_bytes_total": {}, "topkv_objects_in_bytes_total": {},
    "topkv_objects_out_bytes_total": {}, "topkv_disk_written_bytes_total": {}, "topkv_disk_bytes": {},
    "topkv_sessions": {}, "topkv_saved_object_bytes": {}, "topkv_saved_bytes": {},
    "topkv_op_seconds_count": {"op": "object_get"}, "topkv_op_seconds_bucket": {"op": "put", "le": "+Inf"},
    "topkv_errors_total": {"status": "not_found"}, "topkv_reuse_tokens_total": {"tenant": "0", "what": "matched"},
}
PATIENCE_S = 60


def run(*command, status=0, **more):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            timeout=PATIENCE_S, check=False, **more)
    if result.returncode != status:
        sys.exit(f"{' '.join(map(str, command))}: exit status {result.returncode}:\n{result.stdout}")
    return result.stdout


def use(control, kvctl, session, keeper):
    run(session, control)
    run(kvctl, "--server", control, "--deadline-ms", "30000", "put", "thing", "-", input="x" * 100000)
    run(kvctl, "--server", control, "--deadline-ms", "30000", "get", "thing", "-")
    run(kvctl, "--server", control, "--deadline-ms", "30000", "get", "nothing", status=1)
    for fork in ("4", "4", "2"):  # the second finds all of the first, the third a part
        run(keeper, control, fork)


def counts(metrics):
    """The first of COUNTED that has not counted yet, or None."""
    for name, labels in COUNTED.items():
        if name not in metrics or not metrics[name].series.get(frozenset(labels.items())):
            return name
    return None


def page_of_used_node(kvserver, *programs):
    """The text of /metrics of a node that was used."""
    with tempfile.TemporaryDirectory() as folder, \
            open(pathlib.Path(folder, "log"), "w+", encoding="utf-8") as log, \
            subprocess.Popen([kvserver, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
                              "--memory", "256M", "--disk", "256M", "--threads", "2",
                              "--dir", f"{folder}/node"],
                             stdout=subprocess.PIPE, stderr=log, text=True) as node:
        try:
            ready = node.stdout.readline()
            found = re.match(r"ready control=(\S+) metrics=(\S+) ", ready)
            if found is None:
                log.seek(0)
                sys.exit(f"kvserver did not become ready: {ready}{log.read()}")
            use(found[1], *programs)
            end = time.monotonic() + PATIENCE_S
            while True:
                with urllib.request.urlopen(f"http://{found[2]}/metrics", timeout=PATIENCE_S) as reply:
                    page = reply.read().decode()
                missing = counts(read_page(page))
                if missing is None:
                    return page
                if time.monotonic() > end:
                    sys.exit(f"{missing}: the node was used, and this has not counted")
                time.sleep(0.05)  # it saves, and ends requests, a moment later
        finally:
            node.kill()


# ---- the three ways to call ------------------------------------------------------------------------

def texts():
    return [(MONITORING / name).read_text() for name in ("dashboard.json", "rules.yml", "README.md")]


def check_against(page):
    metrics = read_page(page)
    dashboard, rules, runbook = texts()
    expressions, errors = check(metrics, dashboard, rules, runbook)
    errors += errors_of_page(metrics)
    used = {selector.name for expression in expressions
            for selector in promql.selectors_of(promql.parse(expression.text))} if not errors else set()
    for name in sorted(used & metrics.keys()):  # would it be noticed?
        wrong = [re.sub(rf"\b{name}\b", name + "x", text) for text in (dashboard, rules)]
        if not check(metrics, *wrong, runbook)[1]:
            errors.append(f"{name}: misspelled, and nothing was found")
    print("\n".join([*errors, f"{len(expressions)} expressions of {len(used)} metrics, "
                     f"{len(metrics)} exported, {len(errors)} errors"]))
    sys.exit(1 if errors else 0)


def check_with_promtool(programs):
    promtool = shutil.which(os.environ.get("PROMTOOL") or "promtool")
    if promtool is None:
        print("no promtool: it is in Debian's package prometheus, which also starts a server where it is "
              "installed; without that: apt-get download prometheus; dpkg-deb -x prometheus_*.deb DIR; "
              "PROMTOOL=DIR/usr/bin/promtool")
        sys.exit(77)
    dashboard, rules, runbook = texts()
    shown, _ = read_dashboard(dashboard)
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "rules.yml").write_text(rules)
        (work / "prometheus.yml").write_text((MONITORING / "prometheus.yml").read_text())
        (work / "rules_test.yml").write_text(RULES_TEST.read_text())
        (work / "dashboard.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": [
            {"record": f"shown:{i}", "expr": expression.text} for i, expression in enumerate(shown)]}]}))
        run(promtool, "check", "config", "prometheus.yml", cwd=work)  # and the rules that it names
        run(promtool, "check", "rules", "dashboard.yml", cwd=work)
        print(run(promtool, "test", "rules", "rules_test.yml", cwd=work), end="")
        said = run(promtool, "check", "metrics", input=page_of_used_node(*programs))
        if said:
            sys.exit(f"promtool check metrics: {said}")
        tested = RULES_TEST.read_text()
        _, alerts, _ = read_rules(rules, runbook)
        errors = [f"{alert.where}: rules_test.yml does not have it" for alert in alerts
                  if f'alertname="{alert.where}"' not in tested]
    print("\n".join([*errors, f"{len(shown)} expressions of the dashboard, {len(alerts)} alerts, "
                     f"{len(errors)} errors"]))
    sys.exit(1 if errors else 0)


SELF_TEST_PAGE = """# TYPE topkv_puts_total counter
topkv_puts_total{op="a"} 3
topkv_puts_total{op="b"} 0
# TYPE topkv_used_bytes gauge
topkv_used_bytes 5
# TYPE topkv_op_seconds histogram
topkv_op_seconds_bucket{op="a",le="0.5"} 1
topkv_op_seconds_bucket{op="a",le="+Inf"} 2
topkv_op_seconds_sum{op="a"} 1
topkv_op_seconds_count{op="a"} 2
"""
# Expressions, and the end of what is found; None: nothing.
SELF_TEST = [
    ("topkv_used_bytes > 0", None), ("up == 0 or on (job, instance) topkv_used_bytes + 1", None),
    ('sum by (op) (rate(topkv_puts_total{op=~"a|b"}[5m]))', None),
    ("histogram_quantile(0.9, sum by (le) (rate(topkv_op_seconds_bucket[5m])))", None),
    ("- topkv_used_bytes ^ 2 # a comment", None), ("topkv_used_bytes offset 1h / 1e3", None),
    ("topkv_used_byte > 0", "topkv_used_byte: no such metric"),
    ("topkv_used > 0", "topkv_used: no such metric"),
    ("topkv_op_seconds > 0", "topkv_op_seconds: no such metric"),
    ("topkv_puts_total > 0", "it only grows"), ("sum(topkv_puts_total)", "it only grows"),
    ("rate(topkv_used_bytes[5m])", "rate(): of a gauge, topkv_used_bytes"),
    ("rate(topkv_puts_total)", "rate(): of a vector, not a range"),
    ("topkv_used_bytes[5m]", "a range, where a vector is wanted"),
    ("max_over_time(topkv_puts_total[5m])", "max_over_time(): of a counter, topkv_puts_total"),
    ("resets(topkv_used_bytes[5m])", "resets(): of a gauge, topkv_used_bytes"),
    ('rate(topkv_puts_total{ops="a"}[5m])', "topkv_puts_total: no label ops"),
    ('rate(topkv_puts_total{op="c"}[5m])', 'no op="c": there is a, b'),
    ('rate(topkv_puts_total{op=~"a|c"}[5m])', 'no op="c": there is a, b'),
    ("sum by (node) (topkv_used_bytes)", "its argument has no such label"),
    ("histogram_quantile(0.9, sum by (op) (rate(topkv_op_seconds_bucket[5m])))", "buckets are added up, by le"),
    ("histogram_quantile(0.9, rate(topkv_puts_total[5m]))", "not of the rates of buckets"),
    ("histogram_quantile(0.9, topkv_op_seconds_bucket)", "it only grows"),
    ("sum by (le) (rate(topkv_op_seconds_bucket[5m]))", "buckets without histogram_quantile()"),
    ("rate(topkv_puts_total[5m]) / topkv_used_bytes",
     "['instance', 'job', 'op'] on the left, ['instance', 'job'] on the right"),
    ("topkv_used_bytes / on (op) topkv_used_bytes", "on (op): one side has no such label"),
    ("frobnicate(topkv_used_bytes)", "frobnicate(): no function that is known here"),
    ("sum(topkv_used_bytes", "')' expected, not 'the end'"), ("topkv_used_bytes >", "not 'the end'"),
    ("topkv_used_bytes topkv_used_bytes", "more than an expression: 'topkv_used_bytes'"),
    ("topkv_used_bytes ; 1", "not understood: '; 1'"), ("topkv_used_bytes[5 m]", "not '5'"),
]
SELF_TEST_PAGES = [
    (SELF_TEST_PAGE, []),
    (SELF_TEST_PAGE.replace('+Inf"} 2', '+Inf"} 0'), ["/metrics: topkv_op_seconds: {'op': 'a'}: buckets [1.0, 0.0], count 2.0"]),
    (SELF_TEST_PAGE.replace("used_bytes", "used_total"), ["/metrics: topkv_used_total: a gauge: only the names of counters end in _total"]),
    (SELF_TEST_PAGE.replace("puts_total", "puts"), ["/metrics: topkv_puts: a counter: only the names of counters end in _total"]),
    (SELF_TEST_PAGE.replace("used_bytes", "used_us"), ["/metrics: topkv_used_us: not in base units"]),
]
SELF_TEST_YAML = [
    ('a: 1\nb:\n  - c: "x: y"\n    d: |\n      e\n        f\n\n  # g\n  - c: z\n', {"a": "1", "b": [{"c": "x: y", "d": "e\nf\n"}, {"c": "z"}]}),
    ("a: b: c\n", None), ("a: 'b'\n", None), ("a: [b]\n", None), ("a: >\n  b\n", None), ("a:\nb: 1\n", None),
    ("a: 1\na: 2\n", None), ('a: "b" c\n', None), ("a: 1\n  b: 2\n", None), ("a: b # c\n", None),
]


def yaml_or_none(text):
    try:
        return read_yaml(text)
    except Wrong:
        return None


def self_test():
    metrics = read_page(SELF_TEST_PAGE)
    faults = []
    for text, wanted in SELF_TEST:
        found = [*errors_of([Expression("x", text, [])], [], metrics)]
        if len(found) != (wanted is not None) or (wanted and not found[0].endswith(wanted)):
            faults.append(f"{text}: {found}, not {wanted}")
    for page, wanted in SELF_TEST_PAGES:
        if (found := [*errors_of_page(read_page(page))]) != wanted:
            faults.append(f"{found}, not {wanted}")
    panels = '"title": "Disk traffic and errors", "legendFormat": "{{instance}} failed channels"'
    found = errors_of_panels(panels, "at *Disk traffic*, **bold** and 2 * 3 (*failed channels*, *Disk traffic and errors*)")
    if found != ["README.md: *Disk traffic*: no panel, row or series"]:
        faults.append(f"panels: {found}")
    for text, wanted in SELF_TEST_YAML:
        if (found := yaml_or_none(text)) != wanted:
            faults.append(f"{text!r}: {found}, not {wanted}")
    named = [*errors_of([Expression("x", "sum by (job) (topkv_used_bytes)", ["job", "instance"])], [], metrics)]
    if named != ["x: instance is named, and no label of the result"]:
        faults.append(f"a legend: {named}")
    unused = [*errors_of([], [Expression("a:b", "topkv_used_bytes", [])], metrics)]
    if unused != ["a:b: is recorded, and nothing asks for it"]:
        faults.append(f"a record: {unused}")
    print("\n".join(faults) or "what is planted is found, and nothing else")
    sys.exit(1 if faults else 0)


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
    if len(arguments) != 5 or arguments[0] not in ("metrics", "promtool"):
        print("check_metrics: usage: check_metrics.py metrics|promtool KVSERVER KVCTL SESSION KEEPER | --self-test",
              file=sys.stderr)
        sys.exit(2)
    try:
        if arguments[0] == "metrics":
            check_against(page_of_used_node(*arguments[1:]))
        check_with_promtool(arguments[1:])
    except Wrong as error:
        print(f"check_metrics: {error}")
        sys.exit(1)


main(sys.argv[1:])
