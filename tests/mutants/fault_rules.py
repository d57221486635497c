"""The rules: faults that ledgers, block tables, key chains and batchers are known to have had."""

import ast
import re
from collections.abc import Callable, Iterator

from faults import Edit, Edits, Rule, Source, nodes

_FREES = {"release", "close", "discard", "free_retired", "_free", "abandon", "end", "retire"}
_HOLDS = {"share", "hold", "pin"}
_KEYS = {"seal", "publish"}
_UNKEYS = {"unseal", "remove", "forget"}
_ONCE = {"release", "share", "append", "extend", "put"}
_EDGES: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SIGNS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-"}
_OF_A_LIFE = re.compile(r"\b(attempt|incarnation)\b")
_MIXED = (ast.Add, ast.Sub, ast.Mod, ast.Mult, ast.FloorDiv)


def _name_of(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _calls(function: ast.FunctionDef) -> Iterator[tuple[str, ast.Expr]]:
    """Statements that are nothing but a call, with the name of what they call."""
    for node in nodes(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = _name_of(node.value.func)
            if name is not None:
                yield name, node


def _skip(wanted: Callable[[str], bool]) -> Edits:
    def edits(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
        for name, node in _calls(function):
            if wanted(name):
                yield Edit(node, "pass")

    return edits


def _twice(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for name, node in _calls(function):
        if name in _ONCE:
            text = source.of(node)
            yield Edit(node, f"{text}\n{' ' * node.col_offset}{text}")


def _skip_step(operator: type[ast.operator]) -> Edits:
    def edits(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
        for node in nodes(function):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, operator):
                yield Edit(node, "pass")

    return edits


def _wrong_sign(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.AugAssign) and type(node.op) in _SIGNS:
            sign = "-" if isinstance(node.op, ast.Add) else "+"
            # Lists know no "-=".
            if not isinstance(node.value, ast.List | ast.BinOp):
                yield Edit(node, f"{source.of(node.target)} {sign}= {source.of(node.value)}")


def _skip_assignment(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
        ):
            yield Edit(node, "pass")


def _skip_del(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Delete):
            yield Edit(node, "pass")


def _guards(function: ast.FunctionDef) -> Iterator[ast.If]:
    for node in nodes(function):
        if isinstance(node, ast.If):
            yield node


def _ignore_guard(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    for node in _guards(function):
        if not any(isinstance(each, ast.Raise) for each in node.body):
            yield Edit(node.test, "False")


def _always(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    for node in _guards(function):
        if not isinstance(node.body[0], ast.Raise):
            yield Edit(node.test, "True")


def _ignore_refusal(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    for node in _guards(function):
        if any(isinstance(each, ast.Raise) for each in node.body):
            yield Edit(node.test, "False")


def _floor_for_ceil(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and isinstance(node.operand, ast.BinOp)
            and isinstance(node.operand.op, ast.FloorDiv)
            and isinstance(node.operand.left, ast.UnaryOp)
        ):
            left = source.of(node.operand.left.operand)
            yield Edit(node, f"({left} // {source.of(node.operand.right)})")


def _edge(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _EDGES:
            left, right = source.of(node.left), source.of(node.comparators[0])
            yield Edit(node, f"({left} {_EDGES[type(node.ops[0])]} {right})")


def _off_by_one(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Add | ast.Sub)
            and isinstance(node.right, ast.Constant)
            and node.right.value == 1
        ):
            yield Edit(node, f"({source.of(node.left)})")


def _half_of_an_expression(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, _MIXED):
            continue
        left_is_one = isinstance(node.right, ast.Constant) and node.right.value == 1
        if not left_is_one:
            yield Edit(node, f"({source.of(node.left)})")
        if isinstance(node.op, ast.Add) and not isinstance(node.right, ast.Constant):
            yield Edit(node, f"({source.of(node.right)})")


def _drop_condition(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.BoolOp):
            for dropped in node.values:
                word = " and " if isinstance(node.op, ast.And) else " or "
                left = word.join(source.of(each) for each in node.values if each is not dropped)
                yield Edit(node, f"({left})")


def _one_way(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.IfExp):
            yield Edit(node, f"({source.of(node.body)})")
            yield Edit(node, f"({source.of(node.orelse)})")


def _other_extreme(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    other = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
    for node in nodes(function):
        if isinstance(node, ast.Call) and _name_of(node.func) in other:
            name = _name_of(node.func)
            assert name is not None
            start = source.of(node.func).removesuffix(name)
            yield Edit(node.func, start + other[name])


def _other_order(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Call) and _name_of(node.func) == "reversed":
            yield Edit(node, f"list({source.of(node.args[0])})")


def _other_end(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Subscript):
            if source.of(node.slice) == "-1":
                yield Edit(node.slice, "0")
            elif source.of(node.slice) == "0":
                yield Edit(node.slice, "-1")
        elif isinstance(node, ast.Call) and _name_of(node.func) == "popleft":
            yield Edit(node, source.of(node).replace("popleft", "pop"))


def _loose_slice(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Slice):
            lower = source.of(node.lower) if node.lower is not None else ""
            upper = source.of(node.upper) if node.upper is not None else ""
            if lower:
                yield Edit(node, f":{upper}")
            if upper:
                yield Edit(node, f"{lower}:")


def _other_flag(function: ast.FunctionDef, _source: Source) -> Iterator[Edit]:
    found = nodes(function)
    # What `zip` is to assert.
    asserted = [n.value for n in found if isinstance(n, ast.keyword) and n.arg == "strict"]
    for node in found:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool) and node not in asserted:
            yield Edit(node, str(not node.value))


def _swap_pair(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            pair = node.value.elts
            if len(pair) == 2 and source.of(pair[0]) != source.of(pair[1]):
                yield Edit(node.value, f"({source.of(pair[1])}, {source.of(pair[0])})")


def _ignore_salt(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Call) and _name_of(node.func) == "root" and node.args:
            yield Edit(node, f"{source.of(node.func)}()")
        elif isinstance(node, ast.Name) and node.id == "tenant_salt":
            yield Edit(node, "None")


def _stale_key(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Assign) and source.of(node.targets[0]) == "parent":
            # The chain does not move on.
            yield Edit(node.targets[0], "_stale")
        elif isinstance(node, ast.Call) and source.of(node.func) in {"extend_chain", "sha256"}:
            yield Edit(node.args[0], f"bytes(len({source.of(node.args[0])}))")


def _wrong_sibling(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and source.of(node).split(".")[-1] in {"sibling", "siblings"}
            and isinstance(node, ast.Name)
        ):
            yield Edit(node, f"({source.of(node)} * 0)")


def _drop_command(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            commands = node.value.elts
            for dropped in commands:
                left = ", ".join(source.of(each) for each in commands if each is not dropped)
                yield Edit(node.value, f"[{left}]")


def _any_life(function: ast.FunctionDef, source: Source) -> Iterator[Edit]:
    for node in nodes(function):
        if isinstance(node, ast.Compare) and re.search(
            r"\b(attempt|incarnation)\b", source.of(node)
        ):
            yield Edit(node, str(isinstance(node.ops[0], ast.Eq)))


# Who holds a block, and under which key it can be found.
_LEDGER = (
    r"^(block_pool|prefix_index|kv_manager|block_table|block_identity|chain_memo|accounting"
    r"|sequence|attachments|partial_index|prefix_wait|pins?|(block_)?retention|window\w*|attention_window)\."
)
# Starts, ends, forks and copies: where a batch changes what is held.
_MOVES = (
    r"^step_commit\.\w+\.(_seal|_publish|_fail_rows|_fork)$"
    r"|^step_planner\.\w+\.(copy_tails|_num_copies)$"
    r"|^running_batch\.\w+\.(free_retired|is_in_flight|_free|retire|preempt|mark_forked|unfork)$"
    r"|^batcher\.\w+\.(end|add|preempt|abandon|_start)$|^admission\.\w+\._fits$"
)
# Who serves which request in which life, and what its consumer has got.
_CLUSTER = (
    r"^(consumer|controller|delivered|directory|fleet|open_request|outbox|placement\w*|poll_log"
    r"|replica\w*|restarts|stream_intake)\."
)
_HELD = f"{_LEDGER}|{_MOVES}|{_CLUSTER}"
# All but the counts that eviction estimates with, and what only saves time where nothing changes.
_STATE = r"^(?!eviction|policy)\w+\.(?!.*(__init__|_settle|plan_steady)$)"
_ANY = r"^(?!eviction)"
_DRAWS = r"^(step_planner|step_commit|sequence)\."

RULES = (
    Rule("forget-to-free", "blocks are not given back", _ANY, _skip(_FREES.__contains__)),
    Rule("wrong-holder", "a block is used and not held", _ANY, _skip(_HOLDS.__contains__)),
    Rule("skip-seal", "a computed block gets no key", _ANY, _skip(_KEYS.__contains__)),
    Rule("keep-key", "a lost block can still be matched", _ANY, _skip(_UNKEYS.__contains__)),
    Rule(
        "skip-call",
        "a step of the bookkeeping is left out",
        _STATE,
        _skip(lambda name: name not in _FREES | _HOLDS | _KEYS | _UNKEYS),
    ),
    Rule("twice", "done twice: a double free, a double hold", _ANY, _twice),
    Rule("no-decrement", "a count is not lowered", _ANY, _skip_step(ast.Sub)),
    Rule("no-increment", "a count or a list is not raised", _ANY, _skip_step(ast.Add)),
    Rule("wrong-sign", "a count goes the wrong way", _ANY, _wrong_sign),
    Rule("stale-state", "a field keeps its old value", _STATE, _skip_assignment),
    Rule("stale-entry", "an entry is not deleted", _ANY, _skip_del),
    Rule("ignored-case", "a special case is not told apart", _HELD, _ignore_guard),
    Rule("always", "a special case is taken for the rule", _HELD, _always),
    Rule("no-refusal", "a misuse is not refused", _ANY, _ignore_refusal),
    Rule("floor-for-ceil", "a partly filled block is forgotten", _ANY, _floor_for_ceil),
    Rule("edge", "wrong side of an edge: < for <=", _HELD, _edge),
    Rule("off-by-one", "one more or one less", _ANY, _off_by_one),
    Rule("half", "one part of a sum or of an index is missing", _HELD, _half_of_an_expression),
    Rule("fewer-conditions", "a condition is missing", _HELD, _drop_condition),
    Rule("one-way", "one of two cases for both", _HELD, _one_way),
    Rule("other-extreme", "min for max", _ANY, _other_extreme),
    Rule("other-order", "head first for tail first", _ANY, _other_order),
    Rule("other-end", "the first for the last", _ANY, _other_end),
    Rule("loose-slice", "a range without its start or its end", _ANY, _loose_slice),
    Rule("other-flag", "True for False", _STATE, _other_flag),
    Rule("swapped", "two values in the wrong order", _ANY, _swap_pair),
    Rule("no-salt", "tenants share their blocks", _ANY, _ignore_salt),
    Rule("stale-key", "a key that its parent does not enter", _ANY, _stale_key),
    Rule("lost-command", "one of several messages is not sent", _CLUSTER, _drop_command),
    Rule("any-life", "another attempt or incarnation is taken for this one", _ANY, _any_life),
    Rule("wrong-sibling", "every sibling draws as the first", _DRAWS, _wrong_sibling),
)
