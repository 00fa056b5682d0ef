"""Reads PromQL expressions, as far as dashboards and rules use the language.

parse(text) returns a tree of the tuples below, or raises Error, which says where the text is not
understood.  Subqueries and @ are not understood.
"""
import collections
import re

Number = collections.namedtuple("Number", "value")
String = collections.namedtuple("String", "value")
# matchers: (label, operator, value); span: of the range in brackets, or None.
Selector = collections.namedtuple("Selector", "name matchers span")
Call = collections.namedtuple("Call", "name arguments")
# mode: by, without, or None; parameter: of quantile, topk and the like, or None.
Aggregate = collections.namedtuple("Aggregate", "name mode labels parameter argument")
# matching: on, ignoring, or None; group: group_left, group_right, or None.
Binary = collections.namedtuple("Binary", "operator left right matching labels group")

AGGREGATES = {"sum", "min", "max", "avg", "count", "stddev", "group"}
AGGREGATES_WITH_PARAMETER = {"topk", "bottomk", "quantile", "count_values"}
LEVELS = [{"or"}, {"and", "unless"}, {"==", "!=", "<=", "<", ">=", ">"}, {"+", "-"}, {"*", "/", "%"}]
DURATION = r"(?:[0-9]+(?:ms|[smhdwy]))+"
TOKEN = re.compile(rf"""\s*(?:(?P<comment>\#[^\n]*)
    |(?P<duration>{DURATION}\b)
    |(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<word>[A-Za-z_:][A-Za-z0-9_:]*)
    |(?P<sign>==|!=|=~|!~|<=|>=|[-+*/%^=<>(){{}}\[\],]))""", re.VERBOSE)


class Error(Exception):
    """The text is not an expression, or is one that is not understood here."""


def tokens_of(text):
    tokens = []
    at = 0
    while text[at:].strip():
        found = TOKEN.match(text, at)
        if found is None:
            raise Error(f"not understood: {text[at:].strip()[:30]!r}")
        if found.lastgroup != "comment":
            tokens.append((found.lastgroup, found[found.lastgroup]))
        at = found.end()
    return tokens


class Parser:
    def __init__(self, text):
        self.tokens = tokens_of(text)
        self.at = 0

    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end")

    def take(self):
        token = self.peek()
        self.at += 1
        return token

    def accept(self, *values):
        if self.peek()[0] in ("word", "sign") and self.peek()[1] in values:
            return self.take()[1]
        return None

    def expect(self, value):
        if not self.accept(value):
            raise Error(f"{value!r} expected, not {self.peek()[1]!r}")

    def kind(self, kind):
        if self.peek()[0] != kind:
            raise Error(f"a {kind} expected, not {self.peek()[1]!r}")
        return self.take()[1]

    def labels(self):
        self.expect("(")
        names = []
        while not self.accept(")"):
            names.append(self.kind("word"))
            if not self.accept(","):
                self.expect(")")
                break
        return names

    def binary(self, level=0):
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while operator := self.accept(*LEVELS[level]):
            self.accept("bool")
            matching, labels, group = self.accept("on", "ignoring"), [], None
            if matching:
                labels = self.labels()
                group = self.accept("group_left", "group_right")
                if group and self.peek()[1] == "(":
                    self.labels()
            left = Binary(operator, left, self.binary(level + 1), matching, labels, group)
        return left

    def unary(self):
        if self.accept("-"):
            return Binary("-", Number(0.0), self.unary(), None, [], None)
        self.accept("+")
        base = self.primary()
        if self.accept("^"):
            return Binary("^", base, self.unary(), None, [], None)
        return base

    def primary(self):
        kind, value = self.take()
        if kind == "number":
            return Number(float(value))
        if kind == "string":
            return String(value[1:-1])
        if (kind, value) == ("sign", "("):
            inner = self.binary()
            self.expect(")")
            return inner
        if (kind, value) == ("sign", "{"):
            self.at -= 1
            return self.selector("")
        if kind != "word":
            raise Error(f"an expression expected, not {value!r}")
        if value in AGGREGATES | AGGREGATES_WITH_PARAMETER:
            return self.aggregate(value)
        if self.accept("("):
            return Call(value, self.arguments())
        return self.selector(value)

    def arguments(self):
        arguments = []
        while not self.accept(")"):
            arguments.append(self.binary())
            if not self.accept(","):
                self.expect(")")
                break
        return arguments

    def aggregate(self, name):
        mode = self.accept("by", "without")
        labels = self.labels() if mode else []
        self.expect("(")
        arguments = self.arguments()
        if not mode:
            mode = self.accept("by", "without")
            labels = self.labels() if mode else []
        wanted = 2 if name in AGGREGATES_WITH_PARAMETER else 1
        if len(arguments) != wanted:
            raise Error(f"{name}: {len(arguments)} arguments, not {wanted}")
        return Aggregate(name, mode, labels, arguments[0] if wanted == 2 else None, arguments[-1])

    def selector(self, name):
        matchers = []
        if self.accept("{"):
            while not self.accept("}"):
                label = self.kind("word")
                operator = self.accept("=", "!=", "=~", "!~")
                if not operator:
                    raise Error(f"label {label}: =, !=, =~ or !~ expected, not {self.peek()[1]!r}")
                matchers.append((label, operator, self.kind("string")[1:-1]))
                if not self.accept(","):
                    self.expect("}")
                    break
        span = None
        if self.accept("["):
            span = self.kind("duration")
            self.expect("]")
        if self.accept("offset"):
            self.accept("-")
            self.kind("duration")
        return Selector(name, matchers, span)


def parse(text):
    """Returns the tree of an expression; raises Error."""
    parser = Parser(text)
    tree = parser.binary()
    if parser.peek()[0] != "end":
        raise Error(f"more than an expression: {parser.peek()[1]!r}")
    return tree


def selectors_of(tree):
    """Yields all selectors in a tree."""
    if isinstance(tree, Selector):
        yield tree
    elif isinstance(tree, (Call, Aggregate, Binary)):
        for part in tree:
            for each in part if isinstance(part, list) else [part]:
                yield from selectors_of(each)
