"""The notation of rules, the intervals of factors, and registering rules of one's own."""

import uuid

import pytest
import torch

import dtorch.sharding.check as check
from dtorch.errors import ShardingError
from dtorch.ir.layout import PENDING, WHOLE, Split
from dtorch.sharding.factors import Alternatives, carry, cut, locate
from dtorch.sharding.notation import apply, parse
from dtorch.sharding.rules import mappings_of, register_sharding_rule, when_registered

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


def mapping(text, *tensors, outputs, **options):
    return apply(parse(text), tensors, outputs, **options)


def first(op, *args, outputs, **kwargs):
    found, source = mappings_of(op, args, kwargs, outputs)
    return found[0]


@pytest.fixture
def own_op():
    """A custom op `x, y -> x + y` of a fresh name."""
    name = f"dtorch_test::op_{uuid.uuid4().hex[:8]}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x.softmax(-1) + (0 if y is None else y)

    return getattr(torch.ops.dtorch_test, name.partition("::")[2])


# --- reading -------------------------------------------------------------------------------------------------------


def test_linear_reads_as_written():
    found = mapping("... i, o i, o? -> ... o", meta(2, 3, 8), meta(6, 8), meta(6), outputs=[meta(2, 3, 6)])
    assert found.inputs[0][-1] == ("i",) and found.inputs[2] == (("o",),)
    assert found.sizes == {"...1": 2, "...0": 3, "i": 8, "o": 6}


def test_an_absent_optional_operand_shifts_the_positions_behind_it():
    found = mapping("a, a?, a -> a", meta(3), None, meta(3), outputs=[meta(3)], linear=((0, 2), (1,)), additive=(2,))
    assert len(found.inputs) == 2 and found.linear == (frozenset({0, 1}),) and found.additive == {1}


def test_groups_are_solved_from_other_operands():
    found = mapping("(h d) e, h -> h d e", meta(12, 5), meta(3), outputs=[meta(3, 4, 5)])
    assert found.sizes == {"h": 3, "d": 4, "e": 5} and found.inputs[0][0] == ("h", "d")


def test_broadcast_dims_of_size_one_are_not_cut():
    found = mapping("..., ... -> ...", meta(4, 1), meta(3), outputs=[meta(4, 3)])
    assert found.inputs == ((("...1",), ()), (("...0",),))


def test_dims_of_size_one_have_no_factor():
    assert mapping("a 1, a -> a", meta(1, 1), meta(1), outputs=[meta(1)]).inputs == (((), ()), ((),))


@pytest.mark.parametrize(
    "text, why",
    [
        ("a b", "exactly one `->`"),
        ("a -> b -> c", "exactly one `->`"),
        ("(a b -> a", "not closed"),
        ("a) -> a", "without `\\(`"),
        ("((a b)) -> a", "a group within a group"),
        ("... a ... -> a", "may stand once"),
        ("a+b -> a", "cannot read"),
        ("a -> a?", "cannot be optional"),
        ("a? b -> a", "cannot read"),
    ],
)
def test_a_notation_that_cannot_be_read_says_why(text, why):
    with pytest.raises(ShardingError, match=why) as error:
        parse(text)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "text, inputs, output, why",
    [
        ("a, a -> a", [meta(3), meta(4)], meta(3), "a is both 3 and 4"),
        ("a b -> a", [meta(3)], meta(3), "has 1 dims"),
        ("a, b -> a", [meta(3)], meta(3), "absent but not marked"),
        ("a -> a", [meta(3), meta(3)], meta(3), "number of tensors"),
        ("(a b) -> a b", [meta(7)], meta(2, 3), "is 6, not 7"),
        ("(a b), a -> b", [meta(7), meta(2)], meta(3), "is 6, not 7"),
        ("(a b) -> 1", [meta(6)], meta(1), "cannot be told apart"),
    ],
)
def test_shapes_that_do_not_fit_are_named_with_the_notation(text, inputs, output, why):
    with pytest.raises(ShardingError, match=why) as error:
        mapping(text, *inputs, outputs=[output])
    assert text in str(error.value) and str(tuple(inputs[0].shape)) in str(error.value)


# --- cutting -------------------------------------------------------------------------------------------------------


def test_cutting_a_contracted_factor_leaves_sums_and_adds_the_bias_once():
    found = first(aten.linear.default, meta(2, 8), meta(6, 8), meta(6), outputs=[meta(2, 6)])
    assert cut(found, "i") == ((Split(1), Split(1), PENDING), (PENDING,))
    assert cut(found, "o") == ((WHOLE, Split(0), Split(0)), (Split(1),))
    assert carry(found, found.linear[0]) == ((PENDING, WHOLE, PENDING), (PENDING,))


def test_a_fused_projection_is_cut_inside_each_part():
    found = first(aten.view.default, meta(2, 3 * 4 * 8), [2, 3, 4, 8], outputs=[meta(2, 3, 4, 8)])
    heads = found.outputs[0][2][0]
    assert cut(found, heads) == ((Split(1, 3, 8),), (Split(2),))
    assert cut(found, heads, 1, 2) == ((Split(1, 3, 16),), (Split(2, 1, 2),))


@pytest.mark.parametrize(
    "split, count, where",
    [
        (Split(0, 1, 64), 2, ("h", 1, 1)),
        (Split(0, 1, 192), 3, ("h", 1, 3)),
        (Split(0), 3, ("h", 1, 1)),  # 192 elements are 3 heads
        (Split(0), 2, None),  # 288 are four and a half
        (Split(0, 9), 2, ("d", 1, 1)),
        (Split(0, 18), 2, ("d", 2, 1)),
        (Split(0, 3, 64), 3, ("h", 3, 1)),
    ],
)
def test_an_incoming_cut_is_found_among_the_factors(split, count, where):
    assert locate((("h", "d"),), {"h": 9, "d": 64}, split, count) == where


def test_what_is_left_by_earlier_axes_decides_whether_a_cut_is_on_whole_units():
    dims, sizes = (("h", "d"),), {"h": 8, "d": 6}
    assert locate(dims, sizes, Split(0), 4, parts=24) == ("h", 1, 1)
    assert locate(dims, sizes, Split(0), 4, parts=12) is None


def test_locate_is_the_inverse_of_cut():
    found = first(aten.view.default, meta(2, 96), [2, 3, 4, 8], outputs=[meta(2, 3, 4, 8)])
    for factor in found.cuttable():
        for outer, unit in check.intervals(found.sizes[factor]):
            inputs, _ = cut(found, factor, outer, unit)
            if found.sizes[factor] // (outer * unit) > 1:
                assert locate(found.inputs[0], found.sizes, inputs[0], 2) == (factor, outer, unit)


# --- rules ---------------------------------------------------------------------------------------------------------


def test_queries_may_be_cut_finer_than_kv_heads():
    q, k = meta(2, 9, 5, 4), meta(2, 3, 5, 4)
    found, source = mappings_of(
        aten.scaled_dot_product_attention.default, (q, k, k), {"enable_gqa": True}, [meta(2, 9, 5, 4)]
    )
    assert source == "own" and len(found) == 2
    assert found[0].inputs[0][1] == ("h", "g") and found[0].inputs[1][1] == ("h",)
    inputs, outputs = cut(found[1], "heads")
    assert inputs == (Split(1), WHOLE, WHOLE) and outputs == (Split(1),)


@pytest.mark.parametrize(
    "source, target, cuts",
    [
        ((576,), (9, 64), {(Split(0, 1, 64), Split(0)), (Split(0, 9), Split(1))}),
        ((2, 10), (20,), {(Split(0), Split(0, 1, 10)), (Split(1), Split(0, 2))}),
        ((4, 9), (12, 3), {(Split(0), Split(0, 1, 3)), (Split(1, 1, 3), Split(0, 4)), (Split(1, 3), Split(1))}),
        ((6, 4), (4, 6), {(Split(0, 1, 3), Split(0, 1, 2))}),
        ((3, 1, 5), (3, 5, 1), {(Split(0), Split(0)), (Split(2), Split(1))}),
    ],
)
def test_views_keep_the_cuts_that_both_shapes_have(source, target, cuts):
    found = first(aten.view.default, meta(*source), list(target), outputs=[meta(*target)])
    assert {(cut(found, f)[0][0], cut(found, f)[1][0]) for f in found.cuttable()} == cuts


def test_nonlinear_ops_do_not_pass_partial_sums():
    x = meta(4, 5)
    for op, args in (
        (aten.relu.default, (x,)),
        (aten.add.Scalar, (x, 1.0)),
        (aten.add.Tensor, (x, 1.0)),
        (aten.div.Tensor_mode, (x, 2.0)),
        (aten.masked_fill.Scalar, (x, meta(5, dtype=torch.bool), 1.0)),
        (aten.softmax.int, (x, 0)),
        (aten.amax.default, (x,)),
        (aten.pow.Tensor_Scalar, (x, 2)),
    ):
        kwargs = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
        found, _ = mappings_of(op, args, kwargs, [op(*args, **kwargs)])
        assert found[0].linear == (), op


def test_casts_pass_partial_sums_only_to_wider_types():
    x = meta(4, dtype=torch.bfloat16)
    assert first(aten.to.dtype, x, torch.float32, outputs=[meta(4)]).linear
    assert not first(aten.to.dtype, meta(4), torch.bfloat16, outputs=[x]).linear
    assert not first(aten.to.dtype, x, torch.float16, outputs=[meta(4, dtype=torch.float16)]).linear
    assert not first(aten.to.dtype, meta(4, dtype=torch.int64), torch.float32, outputs=[meta(4)]).linear


def test_random_ops_are_whole():
    x = meta(4, 5)
    calls = ((aten.bernoulli.default, (x,)), (aten.dropout.default, (x, 0.5, True)), (aten.rand_like.default, (x,)))
    for op, args in calls:
        found, source = mappings_of(op, args, {}, [x])
        assert source == "own" and found[0].cuttable() == (), op


def test_tensor_keywords_in_any_order_keep_the_order_of_the_node():
    x, value = meta(4, 6), meta(3, 6)
    index = meta(3, dtype=torch.int64)
    found, _ = mappings_of(aten.index_add.default, (x,), {"source": value, "index": index, "dim": 0}, [x])
    assert found[0].inputs[1] == (("i",), ("d1",)) and found[0].inputs[2] == (("i",),)
    assert found[0].linear == (frozenset({0, 1}),)


def test_an_op_known_to_torch_only_comes_from_its_tables():
    x, y = meta(4, 3, 5), meta(4, 3, 5)
    found, source = mappings_of(aten.linalg_cross.default, (x, y), {"dim": 1}, [x])
    assert source == "torch" and isinstance(found, Alternatives)
    assert ((Split(2), Split(2)), (Split(2),)) in found.strategies
    assert ((Split(1), Split(1)), (Split(1),)) not in found.strategies


def test_an_unknown_op_is_whole(own_op):
    found, source = mappings_of(own_op.default, (meta(4, 5),), {}, [meta(4, 5)])
    assert source == "replicate" and found[0].cuttable() == ()


# --- rules of one's own ----------------------------------------------------------------------------------------------


def test_a_rule_by_name_packet_or_overload_is_used(own_op):
    x = meta(4, 5)
    for key in (str(own_op).replace(".", "::", 1), str(own_op.default), own_op, own_op.default):
        register_sharding_rule(key, "a !b, a b? -> a b")
        found, source = mappings_of(own_op.default, (x, x), {}, [x])
        assert source == "user" and found[0].cuttable() == ("a",)
        found, source = mappings_of(own_op.default, (x,), {}, [x])
        assert source == "user" and len(found[0].inputs) == 1


def test_caches_hear_of_a_new_rule(own_op):
    heard = []
    when_registered(lambda: heard.append(True))
    register_sharding_rule(own_op, "a b, a b? -> a b")
    assert heard


def test_a_rule_that_does_not_fit_names_the_op_and_the_shapes(own_op):
    register_sharding_rule(own_op, "a -> a")
    with pytest.raises(ShardingError, match=r"dtorch_test::op_.*'a -> a'.*\(4, 5\)"):
        mappings_of(own_op.default, (meta(4, 5),), {}, [meta(4, 5)])


@pytest.mark.parametrize(
    "options, why",
    [
        ({"linear": [(0, 3)]}, "beyond 2"),
        ({"blocked": ["z"]}, "no factor 'z'"),
        ({"reduce": {"z": "sum"}}, "no factor 'z'"),
        ({"reduce": "mean"}, "not one of"),
    ],
)
def test_options_are_checked_when_registering(own_op, options, why):
    with pytest.raises(ShardingError, match=why):
        register_sharding_rule(own_op, "a b, a b? -> a b", **options)


@pytest.mark.parametrize("op", ["relu", 3, aten])
def test_what_is_no_op_is_refused(op):
    with pytest.raises(ShardingError, match="namespace::name"):
        register_sharding_rule(op, "a -> a")


def test_the_checker_passes_right_rules_and_fails_wrong_ones(own_op):
    x = torch.randn(5, 6, dtype=torch.float64)
    register_sharding_rule(own_op, "a !b, a b? -> a b")
    assert check.check_rule(own_op.default, (x, x)) == ("user", check.check_rule(own_op.default, (x, x))[1])
    register_sharding_rule(own_op, "a b, a b? -> a b")  # softmax along b must not be cut
    with pytest.raises(check.RuleError, match="cut .*'b'"):
        check.check_rule(own_op.default, (x, x))
    register_sharding_rule(own_op, "a !b, a b? -> a b", linear=[(0, 1)])  # nor is it linear
    with pytest.raises(check.RuleError, match=r"\(P,\)"):
        check.check_rule(own_op.default, (x, x))
