"""A game's ``draw`` as JavaScript: its syntax tree, node by node, on the functions of numpy.js."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np

from gpu_vecenv.declare import drawing
from gpu_vecenv.declare.env import HOW_TO_DRAW, Env
from gpu_vecenv.errors import EnvDefinitionError

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "power",
    ast.MatMult: "matmul",
    ast.LShift: "left_shift",
    ast.RShift: "right_shift",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
BUILTINS = (
    "abs all any bool dict enumerate float int len list map max min range reversed round sorted sum tuple zip".split()
)
NUMPY = (
    "absolute all any arange arccos arcsin arctan arctan2 argmax argmin argsort argwhere array asarray ceil clip "
    "concatenate cos diff exp flatnonzero floor full hypot linspace log max maximum mean min minimum ndindex nonzero "
    "ones ravel sign sin split sqrt stack sum tan tanh where zeros bool_ float32 float64 int32 int64 ndarray"
).split()
MATH = "acos asin atan atan2 ceil cos exp fabs floor hypot log sin sqrt tan tanh".split()
DRAWING = ("Circle", "Line", "Polygon", "Drawing", "discs", "blend", "square_bounds")
# Python object -> its name in numpy.js. Objects are kept: an id is theirs for as long as they exist.
COUNTERPARTS: list[tuple[Any, str]] = [
    *((getattr(builtins, name), f"py.{name}") for name in BUILTINS),
    *((getattr(np, name), f"numpy.{name}") for name in NUMPY),
    *((getattr(math, name), f"math.{name}") for name in MATH),
    *((getattr(drawing, name), f"py.{name}") for name in DRAWING),
    (set, "py.set_of"),
    (itertools.pairwise, "py.pairwise"),
]
BY_ID = {id(value): name for value, name in COUNTERPARTS}
RESERVED = frozenset(
    "arguments await break case catch class const continue debugger default delete do else enum eval export extends "
    "false finally for function if implements import in instanceof interface let new null package private protected "
    "public return static super switch this throw true try typeof var void while with yield py numpy math self".split()
)
MISSING = object()


def draw_source(game: Env) -> str:
    """JavaScript that defines ``draw(state)``: what the game's ``draw`` returns for the same state, by numpy.js.

    ``state`` is an object, name of a field -> array of numpy.js; the result has the attributes of ``Drawing``, its
    shapes those of ``Circle``, ``Line`` and ``Polygon`` with their kind. What ``draw`` calls, methods of the game and
    functions of modules, is translated too; attributes of the game are constants, but for randomised parameters.

    Raises:
        EnvDefinitionError: The game has no ``draw``, its source cannot be found, or it uses what has no counterpart;
            with file and line.
    """
    kind = type(game)
    draw = inspect.getattr_static(kind, "draw", None)
    if not isinstance(draw, FunctionType) or draw is Env.__dict__.get("draw"):
        raise EnvDefinitionError(f"{kind.__name__} has no method draw, which a page needs; {HOW_TO_DRAW}")
    translation = _Translation(game)
    name = translation.function(draw, is_method=True)
    randomized = {entry[0] for entry in game.randomize}
    values = [f"  get {key}() {{ return py.float(drawn.{key}); }}" for key in sorted(translation.read & randomized)]
    values += [
        f"  {key}: {translation.literal(getattr(game, key), key)}" for key in sorted(translation.read - randomized)
    ]
    lines = ["const draw = (() => {", "let drawn; // the state", "const self = {", ",\n".join(values), "};"]
    end = ["return (state) => {", "  drawn = state;", f"  return {name}(state);", "};", "})();"]
    return "\n".join([*lines, *translation.definitions, *end]) + "\n"


class _Translation:
    """The functions and constants of one game that its ``draw`` reaches."""

    def __init__(self, game: Env) -> None:
        self.game = game
        self.definitions: list[str] = []
        self.read: set[str] = set()  # attributes of the game
        self._names: dict[int, str] = {}  # id of a translated object -> its name
        self._kept: list[Any] = []
        self._used: set[str] = set()

    def function(self, function: FunctionType, *, is_method: bool = False) -> str:
        """The name of a function's translation."""
        if id(function) not in self._names:
            name = self._name(function, function.__name__)
            self.definitions.append(_Function(self, function, name, is_method).source)
        return self._names[id(function)]

    def constant(self, value: Any, name: str) -> str:
        """The name of a constant that holds a value."""
        if isinstance(value, bool | int | float | str | None):
            return self.literal(value, name)
        if id(value) not in self._names:
            content = self.literal(value, name)
            self.definitions.append(f"const {self._name(value, name)} = {content};")
        return self._names[id(value)]

    def _name(self, value: Any, name: str) -> str:
        wanted = unique = "$" + re.sub(r"\W", "_", name)
        number = 1
        while unique in self._used:
            number += 1
            unique = f"{wanted}{number}"
        self._used.add(unique)
        self._names[id(value)] = unique
        self._kept.append(value)
        return unique

    def literal(self, value: Any, name: str) -> str:
        """A value in JavaScript."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return json.dumps(value)
        if isinstance(value, int):
            return str(value)
        if isinstance(value, float):
            special = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            return repr(value) if math.isfinite(value) else special
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            kind = {"b": "b", "f": "f"}.get(value.dtype.kind, "i")
            return f"asarray({json.dumps(value.tolist())}, {json.dumps(kind)})"
        if isinstance(value, Mapping):
            entries = (f"[{self.literal(k, name)}, {self.literal(v, name)}]" for k, v in value.items())
            return f"py.dict([{', '.join(entries)}])"
        if isinstance(value, tuple | list | range):
            items = ", ".join(self.literal(item, name) for item in value)
            return f"py.tuple_of({items})" if isinstance(value, tuple) else f"[{items}]"
        if isinstance(value, set | frozenset):
            return f"new Set([{', '.join(self.literal(item, name) for item in sorted(value))}])"
        raise EnvDefinitionError(
            f"{type(self.game).__name__}: draw reads {name}, a {type(value).__name__}, which has no counterpart in a "
            "page; expected numbers, strings, arrays, tuples, lists, dicts or functions in Python"
        )


class _Function:
    """One function in JavaScript, in ``source``."""

    def __init__(self, translation: _Translation, function: FunctionType, name: str, is_method: bool) -> None:
        self.translation, self.where = translation, function.__code__
        try:
            lines, self.first_line = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, SyntaxError, IndexError) as error:
            raise EnvDefinitionError(
                f"{function.__qualname__}: its source cannot be read, which the page's draw is made of: {error}"
            ) from error
        if not isinstance(tree, ast.FunctionDef):
            raise EnvDefinitionError(
                f"{self.where.co_filename}:{self.first_line}: {function.__qualname__} is no plain function (def); "
                "draw cannot call it in a page"
            )
        self.outside = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
        given = [*tree.args.posonlyargs, *tree.args.args]
        self.instance = given.pop(0).arg if is_method and given else None
        self.scopes: list[set[str]] = []
        signature = inspect.signature(function).parameters
        defaults = {
            argument.arg: translation.constant(default, argument.arg)
            for argument in (*given, *tree.args.kwonlyargs)
            if (default := signature[argument.arg].default) is not inspect.Parameter.empty
        }
        self.source = "\n".join(self.function(tree, name, given, defaults))

    def function(
        self, tree: ast.FunctionDef, name: str, given: list[ast.arg], defaults: Mapping[str, str]
    ) -> list[str]:
        """The lines of a function of the name, whose arguments by position are given."""
        if tree.args.vararg or tree.args.kwarg:
            self.refuse(tree, "*args and **kwargs")
        names = [argument.arg for argument in (*given, *tree.args.kwonlyargs)]
        assigned = _assigned(tree)
        self.scopes.append({*names, *assigned})
        parameters = [self.local(one) + (f" = {defaults[one]}" if one in defaults else "") for one in names]
        own = sorted(assigned.difference(names))
        let = [f"  let {', '.join(map(self.local, own))};"] if own else []
        star = "*" if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(tree)) else ""
        body = self.block(tree.body)
        self.scopes.pop()
        return [f"function{star} {name}({', '.join(parameters)}) {{", *let, *body, "}"]

    def refuse(self, node: ast.AST, what: str | None = None) -> NoReturn:
        """EnvDefinitionError that names the file, the line and what has no counterpart."""
        line = self.first_line + getattr(node, "lineno", 1) - 1
        text = what or ast.unparse(node).splitlines()[0]
        raise EnvDefinitionError(
            f"{self.where.co_filename}:{line}: {self.where.co_name} uses {text}, which has no counterpart in a page; "
            "docs/web.md lists what draw may use"
        )

    # Statements

    def block(self, statements: Sequence[ast.stmt]) -> list[str]:
        """The lines of several statements."""
        return ["  " + line for statement in statements for line in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[str]:
        """The lines of one statement."""
        match node:
            case ast.Return(value):
                return [f"return {self(value) if value else 'null'};"]
            case ast.Expr(ast.Constant()) | ast.Pass() | ast.Assert() | ast.AnnAssign(value=None):
                return []  # documentation, and what is no part of a picture
            case ast.Expr(ast.Yield(value)):
                return [f"yield {self(value) if value else 'null'};"]
            case ast.Expr(ast.YieldFrom(value)):
                return [f"yield* py.iterate({self(value)});"]
            case ast.Expr(value):
                return [f"{self(value)};"]
            case ast.Assign(targets, value):
                if len(targets) == 1:
                    return [self.assignment(targets[0], self(value))]
                first = f"value{node.lineno}_"
                return [f"const {first} = {self(value)};", *(self.assignment(target, first) for target in targets)]
            case ast.AnnAssign(target, _, value) if value is not None:
                return [self.assignment(target, self(value))]
            case ast.AugAssign(target, ast.Add(), value):
                return [self.assignment(target, f"py.add_in_place({self(target)}, {self(value)})")]
            case ast.AugAssign(target, operator, value):
                return [self.assignment(target, self.operation(node, operator, self(target), self(value)))]
            case ast.If(test, body, orelse):
                otherwise = ["} else {", *self.block(orelse)] if orelse else []
                return [f"if (py.truth({self(test)})) {{", *self.block(body), *otherwise, "}"]
            case ast.For(target, iterable, body, []):
                head = f"for (const item{node.lineno}_ of py.iterate({self(iterable)})) {{"
                return [head, "  " + self.assignment(target, f"item{node.lineno}_"), *self.block(body), "}"]
            case ast.While(test, body, []):
                return [f"while (py.truth({self(test)})) {{", *self.block(body), "}"]
            case ast.FunctionDef(name, arguments, _, []) if not (arguments.defaults or arguments.kw_defaults):
                first, *rest = self.function(node, "", [*arguments.posonlyargs, *arguments.args], {})
                return [f"{self.local(name)} = {first}", *rest[:-1], "};"]
            case ast.Break():
                return ["break;"]
            case ast.Continue():
                return ["continue;"]
        self.refuse(node)

    def assignment(self, target: ast.expr, value: str) -> str:
        """A statement that assigns to names, to several of them, or to an element."""
        if isinstance(target, ast.Subscript):
            return f"py.set({self(target.value)}, {self.index(target.slice)}, {value});"
        pattern = self.pattern(target)
        return f"[{pattern}] = [{value}];" if pattern.startswith("[") else f"{pattern} = {value};"

    def pattern(self, target: ast.expr) -> str:
        """The left side of an assignment."""
        match target:
            case ast.Name(name):
                return self.local(name)
            case ast.Tuple(elements) | ast.List(elements):
                return f"[{', '.join(map(self.pattern, elements))}]"
            case ast.Starred(value):
                return f"...{self.pattern(value)}"
        self.refuse(target)

    # Expressions

    def __call__(self, node: ast.expr) -> str:
        """One expression."""
        value = self.static(node)
        if value is not MISSING:
            return self.known(node, value)
        match node:
            case ast.Constant(value):
                return self.translation.literal(value, "a constant")
            case ast.Name(name):
                return self.local(name)
            case ast.Attribute(value, name):
                return f"py.attribute({self(value)}, {json.dumps(name)})"
            case ast.Tuple(elements):
                return f"py.tuple_of({', '.join(map(self.element, elements))})"
            case ast.List(elements):
                return f"[{', '.join(map(self.element, elements))}]"
            case ast.Set(elements):
                return f"new Set([{', '.join(map(self.element, elements))}])"
            case ast.Dict(keys, values):
                if any(key is None for key in keys):
                    self.refuse(node)
                entries = (f"[{self(k)}, {self(v)}]" for k, v in zip(keys, values, strict=True) if k is not None)
                return f"py.dict([{', '.join(entries)}])"
            case ast.BinOp(left, operator, right):
                return self.operation(node, operator, self(left), self(right))
            case ast.UnaryOp(ast.USub(), operand):
                return f"py.negative({self(operand)})"
            case ast.UnaryOp(ast.UAdd(), operand):
                return self(operand)
            case ast.UnaryOp(ast.Not(), operand):
                return f"py.not({self(operand)})"
            case ast.UnaryOp(ast.Invert(), operand):
                return f"py.invert({self(operand)})"
            case ast.BoolOp(operator, values):
                name = "and" if isinstance(operator, ast.And) else "or"
                return functools.reduce(lambda so_far, value: f"py.{name}({so_far}, () => {value})", map(self, values))
            case ast.Compare(left, operators, comparators):
                sides = [self(left), *map(self, comparators)]
                pairs = [self.comparison(op, sides[k], sides[k + 1]) for k, op in enumerate(operators)]
                return functools.reduce(lambda so_far, value: f"py.and({so_far}, () => {value})", pairs)
            case ast.IfExp(test, body, orelse):
                return f"(py.truth({self(test)}) ? {self(body)} : {self(orelse)})"
            case ast.Subscript(value, index):
                return f"py.get({self(value)}, {self.index(index)})"
            case ast.Call():
                return self.call(node)
            case ast.ListComp(element, generators):
                return f"[...{self.comprehension(generators, lambda: self(element))}]"
            case ast.GeneratorExp(element, generators):
                return self.comprehension(generators, lambda: self(element))
            case ast.SetComp(element, generators):
                return f"new Set({self.comprehension(generators, lambda: self(element))})"
            case ast.DictComp(key, value, generators):
                return f"py.dict({self.comprehension(generators, lambda: f'[{self(key)}, {self(value)}]')})"
            case ast.NamedExpr(ast.Name(name), value):
                return f"({self.local(name)} = {self(value)})"
            case ast.Lambda(arguments, body):
                names = [argument.arg for argument in arguments.args]
                self.scopes.append(set(names))
                source = f"(({', '.join(map(self.local, names))}) => {self(body)})"
                self.scopes.pop()
                return source
        self.refuse(node)

    def element(self, node: ast.expr) -> str:
        """An element of a display, or an argument."""
        return f"...py.iterate({self(node.value)})" if isinstance(node, ast.Starred) else self(node)

    def index(self, node: ast.expr) -> str:
        """What stands in brackets."""
        match node:
            case ast.Slice(lower, upper, step):
                return f"py.slice({', '.join(self(part) if part else 'null' for part in (lower, upper, step))})"
            case ast.Tuple(elements):
                return f"py.tuple_of({', '.join(map(self.index, elements))})"
        return self(node)

    def operation(self, node: ast.AST, operator: ast.operator, left: str, right: str) -> str:
        """A binary operation."""
        if type(operator) not in OPERATORS:
            self.refuse(node)
        return f"py.{OPERATORS[type(operator)]}({left}, {right})"

    def comparison(self, operator: ast.cmpop, left: str, right: str) -> str:
        """A comparison of two values."""
        if isinstance(operator, ast.In | ast.NotIn):
            found = f"py.contains({right}, {left})"
            return found if isinstance(operator, ast.In) else f"!{found}"
        if isinstance(operator, ast.Is | ast.IsNot):
            return f"({left} {'===' if isinstance(operator, ast.Is) else '!=='} {right})"
        return f"py.{OPERATORS[type(operator)]}({left}, {right})"

    def comprehension(self, generators: Sequence[ast.comprehension], element: Callable[[], str]) -> str:
        """An iterator over the elements of a comprehension."""
        lines, closing = list[str](), 0
        for depth, generator in enumerate(generators):
            source = self(generator.iter)
            self.scopes.append(_names(generator.target))
            item = f"item{len(self.scopes)}_{depth}_"
            lines.append(f"for (const {item} of py.iterate({source})) {{")
            lines.append(f"const [{self.pattern(generator.target)}] = [{item}];")
            lines += [f"if (py.not({self(test)})) continue;" for test in generator.ifs]
            closing += 1
        lines.append(f"yield {element()};" + " }" * closing)
        del self.scopes[-closing:]
        return f"(function* () {{ {' '.join(lines)} }})()"

    def call(self, node: ast.Call) -> str:
        """A call of a function or a method."""
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func  # list[int]() is list()
        callee = self.static(called)
        if called is not node.func and not isinstance(callee, type):
            callee = MISSING
        match node.func:
            case ast.Attribute(ast.Call(ast.Name("super"), [], []), attribute) if self.instance:
                inherited = getattr(super(self.outside["__class__"], type(self.translation.game)), attribute)
                callee = inherited.__get__(self.translation.game)
        if isinstance(node.func, ast.Attribute) and self.is_data(self.static(node.func.value)):
            callee = MISSING  # a method of a constant
        if callee is not MISSING:
            if isinstance(callee, functools._lru_cache_wrapper):
                callee = callee.__wrapped__
            is_method = inspect.ismethod(callee) and callee.__self__ is self.translation.game
            function = callee.__func__ if inspect.ismethod(callee) else callee
            arguments = ", ".join(self.arguments(node, callee))
            if name := BY_ID.get(id(function)):
                return f"{name}({arguments})"
            if isinstance(function, FunctionType):
                return f"{self.translation.function(function, is_method=is_method)}({arguments})"
            self.refuse(node.func)
        if node.keywords and not all(keyword.arg == "axis" for keyword in node.keywords):
            self.refuse(node)
        values = [*map(self.element, node.args), *(self(keyword.value) for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            method = [self(node.func.value), json.dumps(node.func.attr)]
            return f"py.call({', '.join([*method, *values])})"
        return f"{self(node.func)}({', '.join(values)})"

    def is_data(self, value: Any) -> bool:
        """Whether a known value is neither the game nor a module, class or function."""
        return value is not MISSING and not isinstance(value, ModuleType) and not callable(value)

    def arguments(self, node: ast.Call, callee: Any) -> list[str]:
        """The arguments by position; undefined for those that are not given."""
        keywords = [keyword for keyword in node.keywords if not (callee is zip and keyword.arg == "strict")]
        if not keywords:
            return [self.element(argument) for argument in node.args]
        if any(keyword.arg is None for keyword in keywords):
            self.refuse(node)
        values = {str(keyword.arg): self(keyword.value) for keyword in keywords}
        try:
            signature = inspect.signature(callee)
            if any(isinstance(argument, ast.Starred) for argument in node.args):
                positional, names = self.before_keywords(node, signature.parameters, values)
            else:
                signature.bind(*node.args, **values)
                positional = [self(argument) for argument in node.args]
                names = list(signature.parameters)[len(positional) :]
        except (TypeError, ValueError):
            self.refuse(node)
        last = max(names.index(name) for name in values)
        return positional + [values.get(name, "undefined") for name in names[: last + 1]]

    def before_keywords(
        self, node: ast.Call, parameters: Mapping[str, inspect.Parameter], keywords: Iterable[str]
    ) -> tuple[list[str], list[str]]:
        """The arguments by position, with starred ones among them, and the names of the parameters after them.

        How many values a starred one has is not known here: it has those of all parameters before the keywords, as
        none of these has a default.
        """
        names = list(parameters)
        first = min(map(names.index, keywords))
        if any(parameters[name].default is not inspect.Parameter.empty for name in names[:first]):
            self.refuse(node)
        return [self.element(argument) for argument in node.args], names[first:]

    # Names

    def local(self, name: str) -> str:
        """A local variable's name in JavaScript."""
        return f"{name}_" if name in RESERVED or name.endswith("_") else name

    def static(self, node: ast.expr) -> Any:
        """The value of an expression that no call changes: a global name, or an attribute of one or of the game."""
        if isinstance(node, ast.Name):
            is_local = any(node.id in scope for scope in self.scopes) or node.id == self.instance
            return self.outside.get(node.id, MISSING) if not is_local else MISSING
        if not isinstance(node, ast.Attribute):
            return MISSING
        if isinstance(node.value, ast.Name) and node.value.id == self.instance:
            return getattr(self.translation.game, node.attr, MISSING)
        value = self.static(node.value)
        return getattr(value, node.attr, MISSING) if value is not MISSING else MISSING

    def known(self, node: ast.expr, value: Any) -> str:
        """An expression whose value ``static`` gives."""
        game = self.translation.game
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self.instance:
            own = inspect.getattr_static(type(game), node.attr, None)
            if isinstance(own, property) and game.randomize and isinstance(own.fget, FunctionType):
                return f"{self.translation.function(own.fget, is_method=True)}()"  # it may follow from what varies
            if not callable(value):
                self.translation.read.add(node.attr)
                return f"self.{node.attr}"
        if name := BY_ID.get(id(value)):
            return name
        if isinstance(value, FunctionType):
            return self.translation.function(value)
        if isinstance(value, ModuleType) or callable(value):
            self.refuse(node)
        return self.translation.constant(value, ast.unparse(node))


def _assigned(tree: ast.FunctionDef) -> set[str]:
    """Names that a function assigns to, without those of its comprehensions, lambdas and inner functions."""
    found = set[str]()
    for node in _own_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _own_nodes(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's scope; of comprehensions what they iterate over and test."""
    rest = list[ast.AST](tree.body)
    while rest:
        node = rest.pop()
        yield node
        if isinstance(node, ast.comprehension):
            rest += [node.iter, *node.ifs]
        elif not isinstance(node, ast.Lambda | ast.FunctionDef):
            rest += ast.iter_child_nodes(node)


def _names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
